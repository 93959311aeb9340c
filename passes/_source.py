"""Nodes of an fx graph as Python statements."""

from __future__ import annotations

import builtins
import keyword
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tpcompile import collectives
from tpcompile.collectives.groups import LATER
from tpcompile.errors import TpcompileError
from tpcompile.functions import kept
from tpcompile.ir import Source, Type
from tpcompile.layout import Layout, TensorType, whole
from tpcompile.passes._applied import apply_text
from tpcompile.rules import argument

WIDTH = 120
RESERVED = frozenset({"aten", "collectives", "device", "math", "nn", "operator", "self", "torch", "tp", *keyword.kwlist, *dir(builtins)})
"""Names that a local variable of an emitted function does not take."""

_INFIX = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//", operator.mod: "%",
    operator.pow: "**", operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
}  # fmt: skip

_DTYPES = {
    torch.bfloat16: "bf16", torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128", torch.float16: "f16",
    torch.float32: "f32", torch.float64: "f64", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8",
}  # fmt: skip


@dataclass(frozen=True)
class Written:
    """An argument of a node that is Python text already."""

    text: str


class Scope:
    """The variable names of one function."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self.names: dict[fx.Node, str] = {}
        self._taken = {*RESERVED, *reserved}

    def name(self, node: fx.Node, wanted: str, *, keep: bool = False) -> str:
        """Give a node a variable: `wanted`, or `wanted_1`, `wanted_2`, … where it is taken."""
        name, count = wanted, 0
        while name in self._taken and not keep:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        self.names[node] = name
        return name


def stem(node: fx.Node) -> str:
    """A node's name without numbers, so that equal layers have equal names; a bare operation's is `split`, not `split_default`."""
    name = re.sub(r"_\d+(?=_|$)", "", node.name)
    if isinstance(node.target, torch._ops.OpOverload):
        return name.removesuffix(f"_{node.target._overloadname.lower()}")
    return name.removesuffix("_default")  # of a linear layer that is joined with others, and has been an operation


def literal(value: Any, names: Mapping[fx.Node, str]) -> str:
    """An argument of a node, as Python; devices are the module's own."""
    match value:
        case fx.Node():
            return names[value]
        case Written():
            return value.text
        case torch.device():
            return "device"
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case slice():
            return f"slice({literal(value.start, names)}, {literal(value.stop, names)}, {literal(value.step, names)})"
        case tuple():
            inside = ", ".join(literal(item, names) for item in value)
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        case list():
            return "[" + ", ".join(literal(item, names) for item in value) + "]"
        case dict():
            return "{" + ", ".join(f"{literal(k, names)}: {literal(v, names)}" for k, v in value.items()) + "}"
        case EllipsisType():
            return "..."
        case None | bool() | int() | float() | complex() | str() | torch.dtype() | torch.layout() | torch.memory_format():
            return repr(value)
        case _:
            raise TpcompileError(f"a {type(value).__name__} cannot be written as Python source", at=repr(value))


def has_device(node: fx.Node) -> bool:
    """Whether a node names a device."""
    way = kept(node.target)
    found: list[Any] = pytree.tree_leaves((way.args, way.kwargs)) if way else []
    found = [leaf for leaf in found if isinstance(leaf, torch.device)]
    fx.node.map_aggregate((node.args, node.kwargs), lambda leaf: found.append(leaf) if isinstance(leaf, torch.device) else None)
    return bool(found)


def site_of(node: fx.Node) -> int | None:
    """The number of the site where random numbers are drawn: what differs between layers that are equal otherwise."""
    if getattr(node.target, "namespace", "") != "tpcompile":
        return None
    site = argument(node, "site")
    return None if site is None else int(site)


def expression(node: fx.Node, names: Mapping[fx.Node, str], site: str = "", functions: Mapping[Any, str] | None = None) -> str:
    """What a node computes. `site` is how that of random numbers is written, `functions` are the names of those that are imported."""
    if functions and node.target in functions:
        return apply_text(node, functions[node.target], lambda value: literal(value, names))
    args = [literal(arg, names) for arg in node.args]
    kwargs = {key: literal(value, names) for key, value in node.kwargs.items()}
    if node.op == "call_method":
        return f"{args[0]}.{node.target}{_arguments(args[1:], kwargs)}"
    if node.op != "call_function":
        raise TpcompileError(f"a node of kind {node.op} cannot be written as Python source", at=node.format_node() or node.name)
    if isinstance(node.target, torch._ops.OpOverload):
        if getattr(collectives, node.target._opname, None) is node.target:
            return _ours(node, args, kwargs, site)
        return _operator(node.target) + _arguments(args, kwargs)
    if node.target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    if node.target in _INFIX and len(args) == 2:
        left, right = (f"({arg})" if arg.startswith("-") else arg for arg in args)
        return f"{left} {_INFIX[node.target]} {right}"
    return _function(node) + _arguments(args, kwargs)


def _ours(node: fx.Node, args: list[str], kwargs: dict[str, str], site: str) -> str:
    """A call of one of our operators: its axis is an attribute of the module, and so may be its site."""
    schema = node.target._schema  # type: ignore[union-attr]
    for position, name in enumerate(declared.name for declared in schema.arguments):
        value = node.args[position] if position < len(args) else node.kwargs.get(name)
        axis = f"self.{value}{LATER if node.target._opname == 'enter_later' else ''}"  # type: ignore[union-attr]
        written = axis if name == "axis" else site if name == "site" else ""
        if written and position < len(args):
            args[position] = written
        elif written:
            kwargs[name] = written
    return f"collectives.{node.target._opname}{_arguments(args, kwargs)}"  # type: ignore[union-attr]


def _operator(target: torch._ops.OpOverload) -> str:
    packet = f"aten.{target._opname}" if target.namespace == "aten" else f"torch.ops.{target.namespace}.{target._opname}"
    overload = target._overloadname
    return f'getattr({packet}, "{overload}")' if keyword.iskeyword(overload) else f"{packet}.{overload}"


def _function(node: fx.Node) -> str:
    module, name = getattr(node.target, "__module__", ""), getattr(node.target, "__name__", "")
    if module in ("_operator", "operator"):
        return f"operator.{name}"
    if module in ("math", "builtins"):
        return f"math.{name}" if module == "math" else name
    if getattr(torch, name, None) is node.target:
        return f"torch.{name}"
    raise TpcompileError(f"{node.target} cannot be written as Python source", at=node.format_node() or node.name)


def _arguments(args: Sequence[str], kwargs: Mapping[str, str]) -> str:
    plain = [f"{key}={value}" for key, value in kwargs.items() if not keyword.iskeyword(key)]
    odd = [f'"{key}": {value}' for key, value in kwargs.items() if keyword.iskeyword(key)]
    return "(" + ", ".join([*args, *plain, *(["**{" + ", ".join(odd) + "}"] if odd else [])]) + ")"


def type_text(type: Type | None, layout: Layout | tuple[Layout, ...] | None = None) -> str:
    """A type in a comment: f32[b, s, 64], or f32[b, s, 4@tp·16] where the layout is known."""
    if isinstance(type, TensorType):
        known = layout if isinstance(layout, Layout) else whole(*type.shape)
        return f"{_DTYPES.get(type.dtype, str(type.dtype))}{known}"
    if isinstance(type, tuple):
        layouts = layout if isinstance(layout, tuple) else (None,) * len(type)
        return ", ".join(type_text(*both) for both in zip(type, layouts, strict=True))
    return ""


def argument_comment(arguments: Sequence[tuple[str, str]]) -> str:
    """The types of a function's arguments: # x f32[b, s, 64], mask bool[s, s]."""
    known = [f"{name} {text}" for name, text in arguments if text]
    return f"# {', '.join(known)}" if known else ""


def statement(target: str, value: str, dead: Sequence[str], comment: str) -> str:
    """`target = value; del dead  # comment`; in several lines where that is too long."""
    line, gone = f"{target} = {value}", f"del {', '.join(dead)}" if dead else ""
    comment = f"  # {comment}" if comment else ""
    if len(line) > WIDTH and value.endswith(")"):
        head, _, rest = line.partition("(")
        line = f"{head}(\n    {rest[:-1]}\n)"
    elif gone and len(line + gone + comment) > WIDTH:
        return f"{line}{comment}\n{gone}"
    return f"{line}; {gone}{comment}" if gone else line + comment


def origin(source: Source | None) -> str:
    """The user's line that a node came from."""
    return f"# {source.file.rsplit('/', 1)[-1]}:{source.line}  {source.code.strip()}".rstrip() if source else ""


def function(name: str, graph: fx.Graph, doc: str) -> str:
    """A graph of tensors as a function of its placeholders, on the device of the first."""
    scope, lines = Scope(), [f'    """{doc}"""']
    given = graph.find_nodes(op="placeholder")
    for node in given:
        scope.name(node, node.name, keep=True)
    if any(has_device(node) for node in graph.nodes):
        lines.append(f"    device = {scope.names[given[0]]}.device" if given else '    device = "cpu"')
    for node in graph.nodes:
        if node.op == "call_function":
            value = expression(node, scope.names)
            lines.append(f"    {scope.name(node, node.name)} = {value}")
    lines.append(f"    return {literal(graph.output_node().args[0], scope.names)}")
    return "\n".join([f"def {name}({', '.join(scope.names[node] for node in given)}):", *lines])
