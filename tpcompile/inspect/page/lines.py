"""A graph after a pass as lines that a page can draw: what is made, from which values, in which layout, and what it sends.

Names stay apart from the text around them, so that a page can mark every use of a value, and lines of equal layers can be stored once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import fx

from tpcompile.collectives.table import RANKS
from tpcompile.cost import evaluate
from tpcompile.driver import Compilation
from tpcompile.inspect.calls import formula
from tpcompile.ir import Local, Program, Sharded, Source, Stage, Type, results
from tpcompile.layout import Layout, Size, TensorType
from tpcompile.messages import Sent, collective_of, stage_messages
from tpcompile.rules import op_name
from tpcompile.text import DTYPES, all_types, type_text

Layouts = Mapping[str, Layout | tuple[Layout, ...]]


@dataclass(frozen=True)
class Name:
    """A value's name inside a text."""

    name: str


Token = str | Name


@dataclass(frozen=True)
class Call:
    """One call of a process group: its bytes are what one rank gives to it in one micro-batch, as a formula and at the example's sizes."""

    direction: str
    call: str
    formula: str
    bytes: int


@dataclass(frozen=True)
class Line:
    """A value, what it is made from, and where it comes from."""

    kind: str  # parameter, buffer, constant, input, operation, collective, return, text
    name: str = ""
    op: str = ""
    tokens: tuple[Token, ...] = ()
    type: str = ""
    state: str = ""  # whole, cut, partial; "" for what has no layout
    source: Source | None = None
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class _Look:
    """What is known of a graph's values."""

    program: Program
    types: Mapping[str, Type]
    layouts: Layouts
    origins: Mapping[str, str]
    marks: Mapping[str, str]
    sent: Mapping[str, tuple[Call, ...]]


def program_lines(program: Program) -> list[Line]:
    """The lines of a program without layouts."""
    return list(_lines(program.graph, program.updates, _Look(program, program.types, {}, {}, {}, {})))


def sharded_lines(sharded: Sharded) -> list[Line]:
    """The lines of a program with layouts."""
    program, marks = sharded.program, dict.fromkeys(sharded.entering, f"grad +{sharded.axis}")
    return list(_lines(program.graph, program.updates, _Look(program, program.types, sharded.layouts, {}, marks, {})))


def local_lines(local: Local, compilation: Compilation) -> list[Line]:
    """The lines of a tensor rank's graph, with what its collectives send."""
    program, names = local.program, [node.name for node in local.graph.nodes]
    whole = Stage(0, local.graph, (), (), (), program.parameters, program.buffers, tuple(program.constants), program.updates)
    said = stage_messages(local, whole, names)
    sent = _calls((*said.forward, *said.backward), compilation)
    look = _Look(program, all_types(local), local.layouts, local.origins, {}, sent)
    return list(_lines(local.graph, program.updates, look))


def stage_lines(stage: Stage, compilation: Compilation) -> list[Line]:
    """The lines of a stage, with what its collectives send."""
    local, said = compilation.local, compilation.step.messages[stage.index]
    sent = _calls((*said.forward, *said.backward), compilation)
    look = _Look(local.program, all_types(replace(local, graph=stage.graph)), local.layouts, local.origins, {}, sent)
    return list(_lines(stage.graph, stage.updates, look))


def _lines(graph: fx.Graph, updates: Iterable[str], look: _Look) -> Iterator[Line]:
    renewed = tuple(updates)
    for node in graph.nodes:
        match node.op:
            case "placeholder":
                yield replace(_value(node, look), kind=_placed(node.name, look.program))
            case "output":
                returned, new = results(graph, renewed)
                yield Line("return", op="return", tokens=tuple(_joined([Name(value.name)] for value in returned)))
                for name, value in new.items():
                    yield Line("return", op=f"{name} =", tokens=(Name(value.name),))
            case _:
                kind = "collective" if _communicates(node) else "operation"
                tokens = tuple(_merged(_joined(_arguments(node))))
                yield replace(_value(node, look), kind=kind, op=op_name(node).removesuffix(".default"), tokens=tokens)


def _value(node: fx.Node, look: _Look) -> Line:
    """A node's name, type, layout and origin."""
    layout, name = look.layouts.get(node.name), node.name
    kind = look.types.get(name)
    if isinstance(kind, TensorType) and isinstance(layout, Layout):
        shown = f"{DTYPES.get(kind.dtype, str(kind.dtype))}{_spelled(layout)}"
    else:
        shown = type_text(kind, layout)
    shown += f" {look.marks[name]}" if name in look.marks else ""
    source = look.program.sources.get(look.origins.get(name, name))
    return Line("operation", name, type=shown, state=state(layout), source=source, calls=look.sent.get(name, ()))


@cache
def _spelled(layout: Layout) -> str:
    return str(layout)


def state(layout: Layout | tuple[Layout, ...] | None) -> str:
    """How a value lies on the tensor ranks, in one word; of several values, the word for the first that is not whole."""
    match layout:
        case None:
            return ""
        case Layout():
            return "partial" if layout.partial or layout.highest else "cut" if layout.is_cut else "whole"
    return next((word for part in layout if (word := state(part)) != "whole"), "whole")


def _placed(name: str, program: Program) -> str:
    """What a placeholder stands for."""
    if name in program.parameters:
        return "parameter"
    if name in program.buffers:
        return "buffer"
    return "constant" if name in program.constants else "input"


def _communicates(node: fx.Node) -> bool:
    """Whether an operator hands anything to a process group, in a micro-batch or once a step."""
    own = collective_of(node)
    return own is not None and bool(own.forward or own.backward or op_name(node) == "tpcompile.enter_later.default")


def _arguments(node: fx.Node) -> Iterator[list[Token]]:
    """A call's arguments. The number of the place where random numbers are drawn counts as a name: equal layers differ in it."""
    parameters = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    site = next((place for place, parameter in enumerate(parameters) if parameter.name == "site"), None)
    for place, value in enumerate(node.args):
        yield [Name(str(value))] if place == site else [*_argument(value)]
    for key, value in node.kwargs.items():
        yield [f"{key}=", *_argument(value)]


def _argument(value: object) -> Iterator[Token]:
    match value:
        case fx.Node():
            yield Name(value.name)
        case list() | tuple():
            yield "["
            yield from _joined([*_argument(item)] for item in value)
            yield "]"
        case torch.dtype():
            yield DTYPES.get(value, str(value))
        case str():
            yield f'"{value}"'
        case _:
            yield str(value)


def _joined(parts: Iterable[Iterable[Token]]) -> Iterator[Token]:
    for place, part in enumerate(parts):
        if place:
            yield ", "
        yield from part


def _merged(tokens: Iterable[Token]) -> Iterator[Token]:
    """Neighbouring texts as one."""
    text = ""
    for token in tokens:
        if isinstance(token, str):
            text += token
            continue
        if text:
            yield text
        yield token
        text = ""
    if text:
        yield text


def _calls(sent: Iterable[Sent], compilation: Compilation) -> dict[str, tuple[Call, ...]]:
    """What every value's operator hands to its process group."""
    sizes = {**compilation.sizes, RANKS: compilation.mesh.tp}
    known: dict[Size, tuple[str, int]] = {}
    found: dict[str, list[Call]] = {}
    for one in sent:
        if one.bytes not in known:
            known[one.bytes] = formula(one.bytes), evaluate(one.bytes, sizes)
        found.setdefault(one.value, []).append(Call(one.direction, one.call.replace("_", "-"), *known[one.bytes]))
    return {name: tuple(calls) for name, calls in found.items()}
