"""What a step of training, clipping and the optimizer's step after it hand to the process groups: by stage, axis and direction.

Bytes are payloads: the size of the tensor that one rank gives to a call (`tpcompile.collectives.table`). Formulas are in the sizes of a
micro-batch (b rows, s positions, …), the number m of micro-batches of a replica, the number L of layers of the stage where all of them
do the same, and tp, dp and pp, the ranks along an axis. A receive is counted where it is sent. Gradients over dp and pp have the sizes of
tensor rank 0's pieces, which are the largest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import sympy
from torch import fx

from tpcompile.collectives import RING
from tpcompile.cost import evaluate
from tpcompile.driver import Compilation
from tpcompile.inspect.fold import split_layer
from tpcompile.ir import Local, Stage
from tpcompile.layout import Size, symbol
from tpcompile.messages import Sent, collective_of, has_gradient
from tpcompile.timeline import Posted, Step

MICROBATCHES, LAYERS = symbol("m"), symbol("L")
AXES = ("tp", "pp", "dp", "all")
DIRECTIONS = ("forward", "backward", "step", "clipping", "update")


@dataclass(frozen=True)
class Calls:
    """All calls of one kind that a rank of a stage makes in a step: expressions in the sizes, m and L."""

    axis: str
    direction: str
    call: str
    count: Size
    bytes: Size  # given to all of them together
    sent: Size  # by the rank, where the group runs a ring


@dataclass(frozen=True)
class _Kind:
    axis: str
    direction: str
    call: str
    ranks: Size  # of the group
    repeated: bool  # once for every micro-batch


def by_stages(compilation: Compilation) -> list[tuple[Calls, tuple[int, ...], list[int]]]:
    """The calls of all stages, by axis: with their count, the bytes given to them and sent in a ring, and the stages that make them."""
    rows: dict[tuple[Calls, tuple[int, ...]], list[int]] = {}
    for stage in compilation.stages:
        sizes = known(compilation, stage)
        for row in calls(compilation, stage):
            values = tuple(value(size, sizes) for size in (row.count, row.bytes, row.sent))
            rows.setdefault((row, values), []).append(stage.index)
    ordered = sorted(rows.items(), key=lambda item: (AXES.index(item[0][0].axis), item[1]))
    return [(row, values, stages) for (row, values), stages in ordered]


def calls(compilation: Compilation, stage: Stage) -> tuple[Calls, ...]:
    """The calls that a stage's ranks make for it; those for all of their stages count for the first of these."""
    step, layers = compilation.step, layers_of(compilation.local, stage)
    none: dict[str, Size] = dict.fromkeys(["", *held(compilation.local, stage)], 0)
    counts = defaultdict[_Kind, dict[str, Size]](none.copy)
    totals = defaultdict[_Kind, dict[str, Size]](none.copy)
    for sent in _all(step, stage):
        kind = _Kind(sent.axis, sent.direction, sent.call, _ranks(sent), sent.microbatch is not None)
        layer = layer if sent.axis == "tp" and (layer := layers.get(sent.value, "")) in none else ""
        counts[kind][layer] += 1
        totals[kind][layer] += sent.bytes
    rows = dict[tuple[str, str, str], Calls]()
    for kind in counts:
        times: Size = sympy.Rational(1, step.microbatches) * MICROBATCHES if kind.repeated else 1
        count, total = times * _sum(counts[kind]), times * _sum(totals[kind])
        name = kind.axis, kind.direction, kind.call
        before = rows.get(name, Calls(*name, 0, 0, 0))
        sent_total = before.sent + total * RING[kind.call](kind.ranks)
        rows[name] = Calls(*name, before.count + count, before.bytes + total, sent_total)
    return tuple(sorted(rows.values(), key=lambda row: (AXES.index(row.axis), DIRECTIONS.index(row.direction), row.call)))


def _all(step: Step, stage: Stage) -> Iterator[Sent]:
    place = step.place_of(stage.index)
    first = step.stages_at(place)[0].index == stage.index
    for event in step.timeline(place):
        for sent in event.transfers if isinstance(event, Posted) else (event,) if isinstance(event, Sent) else ():
            if sent.call != "recv" and (sent.stage == stage.index or (sent.stage is None and first)):
                yield sent
    yield from (*step.clipped(), *step.updated(place)) if first else ()


def _ranks(sent: Sent) -> Size:
    """The number of ranks that take part, in formulas."""
    if sent.axis == "all":
        everyone: Size = symbol("dp") * symbol("pp") * symbol("tp")
        return everyone
    return len(sent.places) if sent.call == "all_reduce" and sent.axis == "pp" else symbol(sent.axis)


def _sum(parts: Mapping[str, Size]) -> Size:
    """The sum over layers and what is outside of them (""): a multiple of L, if all layers are alike and there are several."""
    inside = [size for layer, size in parts.items() if layer]
    alike = len(inside) > 1 and all(size == inside[0] for size in inside)
    total: Size = LAYERS * inside[0] + parts[""] if alike else sum(parts.values())
    return total


def layers_of(local: Local, stage: Stage) -> dict[str, str]:
    """The layer of every value: of what prepares a value for its users, or has no line of its own, theirs; "" outside of layers."""
    found: dict[str, str] = {}

    def own(node: fx.Node) -> str | None:
        source = local.program.sources.get(local.origins.get(node.name, node.name))
        return split_layer(source.path, local.program.layers)[0] if source else None

    for node in reversed(stage.graph.nodes):
        collective = collective_of(node) if node.op == "call_function" else None
        users = {found[user.name] for user in node.users if user.name in found}
        known = own(node)
        late = collective is not None and bool(collective.backward) and not collective.forward
        found[node.name] = next(iter(users)) if len(users) == 1 and (late or known is None) else known or ""
    return found


def held(local: Local, stage: Stage) -> list[str]:
    """The layers whose work a stage does, in order."""
    layers, learned = layers_of(local, stage), has_gradient(local, stage)
    working = [node.name for node in stage.graph.nodes if node.op == "call_function" and node.name in learned]
    return [layer for layer in dict.fromkeys(layers[name] for name in working) if layer]


def known(compilation: Compilation, stage: Stage) -> dict[sympy.Symbol, int]:
    """The value of every symbol of the formulas: sizes as in the example batch."""
    mesh = compilation.mesh
    axes = {symbol(axis): mesh.axis(axis) for axis in ("dp", "pp", "tp")}
    layers = len(held(compilation.local, stage))
    return {**compilation.sizes, **axes, MICROBATCHES: compilation.options.microbatches, LAYERS: layers}


def value(size: Size, sizes: Mapping[sympy.Symbol, int]) -> int:
    return evaluate(size, sizes)


def formula(size: Size) -> str:
    """2·b·m·⌈s/tp⌉"""
    return re.sub(r"ceiling\(([^()]*)\)", r"⌈\1⌉", str(size).replace("**", "^").replace("*", "·"))
