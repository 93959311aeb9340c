"""A call in a graph, as rules see it: its name, its arguments by name, its tensor operands and their types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from tpcompile.layout import TensorType


@dataclass(frozen=True)
class Op:
    """A call in the graph with the types of its tensor operands, in the order of its arguments, and of its outputs.

    Calls of one operation with equal `form`s have equal arguments, but for the names of their operands and of sizes.
    """

    name: str
    node: fx.Node
    operands: tuple[fx.Node, ...]
    ins: tuple[TensorType, ...]
    outs: tuple[TensorType, ...]
    form: tuple[Any, ...] = ()

    def rank(self, operand: int) -> int:
        return len(self.ins[operand].shape)

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its schema's name, positional or not."""
        return argument(self.node, name, default)

    def dims(self, name: str) -> list[int]:
        """An argument that lists dimensions of the first operand, counted from the front."""
        value = self.argument(name)
        listed = [value] if isinstance(value, int) else list(value if value is not None else range(self.rank(0)))
        return [dim % max(self.rank(0), 1) for dim in listed]


def op_name(node: fx.Node) -> str:
    """`aten.linear.default` for a call of an operator, the function's name for others."""
    target = node.target
    if isinstance(target, str):
        return target
    found = _named.get(id(target))
    if found is None or found[0] is not target:
        name = str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
        found = _named[id(target)] = (target, name)
    return found[1]


_named: dict[int, tuple[Any, str]] = {}
"""Targets with their names, by what is cheaper than the hash of an operator; who stands here lives on, and keeps his number."""


def attends(name: str) -> bool:
    """Whether an operation of this name is a softmax or a fused attention."""
    return "softmax" in name or "attention" in name


def aten_names(words: str) -> frozenset[str]:
    """Names of aten operations, written without their namespace."""
    return frozenset(f"aten.{word}" for word in words.split())


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """The value of the schema's argument `name` in a call, or its default."""
    assert isinstance(node.target, torch._ops.OpOverload), node
    position, usual = _declared(node.target).get(name, (None, None))
    if position is None:
        return default
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default if usual is NONE else usual)


NONE = object()
"""Stands for the default of an argument that has none."""


@lru_cache(maxsize=4096)
def _declared(target: Any) -> Mapping[str, tuple[int, Any]]:
    """Position and default of an operator's arguments, by name: asking the schema makes new objects each time."""
    arguments = enumerate(target._schema.arguments)
    return {one.name: (place, one.default_value if one.has_default_value() else NONE) for place, one in arguments}


def view_op(node: fx.Node, types: Mapping[str, Any]) -> Op:
    """The operation of a call node."""
    operands: list[fx.Node] = []
    form: list[Any] = []
    _read(node.args, types, operands, form)
    for name, value in node.kwargs.items():
        form.append(name)
        _read((value,), types, operands, form)
    out = types[node.name]
    outs = (out,) if isinstance(out, TensorType) else tuple(out)
    return Op(op_name(node), node, tuple(operands), tuple([types[o.name] for o in operands]), outs, tuple(form))


def _read(values: Iterable[Any], types: Mapping[str, Any], operands: list[fx.Node], form: list[Any]) -> None:
    """Add the tensors that a call reads, in the order of its arguments, each as often as it stands there; and all that it is given."""
    for value in values:
        kind = type(value)
        if kind is fx.Node:
            if _is_tensor(types.get(value.name)):
                form.append(("%", operands.index(value) if value in operands else len(operands)))
                operands.append(value)
            else:
                form.append("%")
        elif kind is int or value is None:
            form.append(value)
        elif isinstance(value, (tuple, list)):
            form.append("[")
            _read(value, types, operands, form)
            form.append("]")
        elif isinstance(value, dict):
            form.extend(("{", *value))
            _read(value.values(), types, operands, form)
            form.append("}")
        else:
            form.append((kind, value))


def _is_tensor(kind: object) -> bool:
    if type(kind) is TensorType:
        return True
    return isinstance(kind, tuple) and bool(kind) and all(isinstance(part, TensorType) for part in kind)
