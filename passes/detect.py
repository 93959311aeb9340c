"""detect: walk backward from every contraction with a weight, and find what would be cut with it."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from torch import fx

from tpcompile.factors import LayoutError, join, reshape
from tpcompile.ir import Cone, Kind, Program
from tpcompile.layout import Dim, Factor, Layout, Open, TensorType, whole_dim
from tpcompile.operation import attends
from tpcompile.passes._aside import aside, follow
from tpcompile.passes._finer import finer
from tpcompile.passes._heads import ALWAYS, heads, of_vocabularies, score_ends
from tpcompile.passes._sums_within import sums_after
from tpcompile.passes._weights import contracts, seeds, weight_values
from tpcompile.rules import LIMITS, RESHAPES, Bound, Op, backward, bind_rule, forward, has_rule, no_rule, op_name, view_op

STILL = RESHAPES | {
    "aten.transpose.int", "aten.permute.default", "aten.contiguous.default", "aten.clone.default", "aten.t.default", "aten.numpy_T.default",
    "tpcompile.dropout.default", "tpcompile.dropout_at.default", "aten.to.dtype", "getitem", "aten.split_with_sizes.default",
}  # fmt: skip
"""Operations that only move elements: with nothing else between them, two linears are a chain and no MLP."""


def detect(program: Program) -> tuple[Cone, ...]:
    """Find, for every linear, the region that it would end as the row-cut one; and for every table and loss, what its rows or scores end.
    For linears that are columns of none, the region that a sum of values ends.

    before  %h = linear(%x, up), %a = gelu(%h), %y = linear(%a, down)
    after   mlp: row %y, column %h; %h, %a : [b, s, 256@?0], up [256@?0, 64], down [64, 256@?0]
    """
    walked = _Walked(program)
    weights, apart = walked.weights, aside(program.graph, program.updates)
    cones: list[Cone] = []
    for node in program.graph.nodes:
        for op, letter, bound in seeds(program, node, weights):
            walk: _Walk | None = _Walk(walked)
            while walk is not None:
                cone = walk.run(op, letter, bound)
                cones.append(replace(cone, layouts={**cone.layouts, **follow(program, apart, cone.layouts)}) if apart else cone)
                walk = _Walk(walked, seed=walk.finer) if walk.finer else None
        for op, letter, bound in ends(program, node):
            cones.append(replace(_Walk(walked, scores=True).run(op, letter, bound), kind="vocabulary"))
    last, found = heads(program, weights), list[Cone]()
    for op, letter, bound in score_ends(program, last):
        cone = _Walk(walked, scores=True).run(op, letter, bound)
        found.append(replace(cone, kind="vocabulary"))
    cones += of_vocabularies(program, found, last, cones)
    products = {cone.seed for cone in cones if cone.kind != "vocabulary"}
    alone = products.difference(*(cone.columns for cone in cones))
    for op, letter, bound in sums_after(program, alone, products):
        walk = _Walk(walked)
        cone = walk.run(op, letter, bound)
        if walk.within and not alone.isdisjoint(cone.columns):
            cones.append(replace(cone, kind="sum"))
    return tuple(cones)


def ends(program: Program, node: fx.Node) -> Iterable[tuple[Op, str, Bound]]:
    """The operation with the dimension that it needs whole, unless a cut ends in it: a table's rows, a loss's classes."""
    if node.op != "call_function" or op_name(node) not in ALWAYS:
        return
    op = view_op(node, program.types)
    try:
        bound, ordinary = bind_rule(op, end=True), bind_rule(op)
    except LayoutError:
        return
    if any(trained(program, operand) for operand in op.operands[1:]):
        return
    for letter in sorted(ordinary.never - bound.never):
        if isinstance(bound.sizes[letter], int) and bound.sizes[letter] != 1:
            yield op, letter, bound


def trained(program: Program, node: fx.Node) -> bool:
    """Whether a value depends on a parameter."""
    todo, seen = [node], set[fx.Node]()
    while todo:
        if (value := todo.pop()) not in seen:
            seen.add(value)
            todo += value.all_input_nodes
    return any(value.name in program.parameters for value in seen)


CUT = Open(0)
"""What all walks carry: cuts of different walks are never put together."""


class _Walked:
    """What the walks through a program share: its order, and how walks went on from single values."""

    def __init__(self, program: Program) -> None:
        self.program, self.weights = program, weight_values(program)
        self.order = {node: position for position, node in enumerate(program.graph.nodes)}
        self.ends: dict[tuple[object, ...], _End] = {}


class _End:
    """What a walk found from one value on, when there was no other left: every walk that comes there finds the same.

    So the walks of all layers share what they find above them: a cut of the residual stream is followed up once, not once for each layer.
    """

    def __init__(self, walk: _Walk, start: Sequence[int]) -> None:
        self.walk, self.start, self.stop = walk, start, tuple(map(len, walk.notes()))
        self.parts: list[list[Any]] = []

    def give(self, walk: _Walk) -> None:
        """Add to a walk's notes. Raises LayoutError where it needs a placeholder in two layouts."""
        if not self.parts:
            notes = (note.items() if isinstance(note, dict) else note for note in self.walk.notes())
            self.parts = [list(islice(note, *ends)) for note, *ends in zip(notes, self.start, self.stop, strict=True)]
        for note, part in zip(walk.notes(), self.parts, strict=True):
            note.update(part) if isinstance(note, dict) else note.extend(part)
        for node, layout in self.parts[-1]:
            walk.hold(node, layout)
        walk.finer = self.walk.finer


@dataclass
class _Walk:
    """One walk, in reverse order of the graph, so that all uses of a value are known before the value is asked."""

    walked: _Walked
    scores: bool = False  # whether it may follow a cut through what works along it
    seed: Dim = ()  # how the contracted dimension is cut; (): it is one factor
    finer: Dim | None = None  # how else it might be, after a stop
    needs: dict[fx.Node, Layout] = field(default_factory=dict)
    held: dict[fx.Node, Layout] = field(default_factory=dict)  # the layouts of placeholders, where it ends
    asked: list[tuple[fx.Node, Layout]] = field(default_factory=list)  # each time that it needs one
    items: dict[fx.Node, dict[int, Layout]] = field(default_factory=dict)
    queue: list[tuple[int, fx.Node]] = field(default_factory=list)
    layouts: dict[str, Layout | tuple[Layout, ...]] = field(default_factory=dict)
    products: dict[str, list[fx.Node]] = field(default_factory=dict)  # what contracts with a cut weight, and what else it takes pieces of
    within: list[str] = field(default_factory=list)  # products of values
    crossed: dict[str, str] = field(default_factory=dict)  # value → operation
    stops: list[tuple[str, str]] = field(default_factory=list)
    limits: list[tuple[str, str]] = field(default_factory=list)  # stops at what could be cut elsewhere

    @property
    def program(self) -> Program:
        return self.walked.program

    def run(self, op: Op, letter: str, bound: Bound) -> Cone:
        self.seed = self.seed or ((Factor(bound.sizes[letter], CUT),),)
        apart = (_seed_layout(tokens, kind, letter, self.seed) for tokens, kind in zip(bound.ins, op.ins, strict=True))
        shapes = (self.program.types[operand.name].shape for operand in op.operands)  # type: ignore[union-attr]
        wants = tuple(reshape(layout, shape) for layout, shape in zip(apart, shapes, strict=True))
        try:
            for operand, layout in zip(op.operands, wants, strict=True):
                self.need(operand, layout)
            self.follow()
        except LayoutError as error:
            self.stops.append((op.node.name, str(error)))
            self.products.clear()
        for node in sorted(self.held, key=self.walked.order.__getitem__, reverse=True):
            if node.name in self.program.parameters:
                self.layouts[node.name] = self.held[node]
        return self.cone(op, wants)

    def follow(self) -> None:
        """Visit what is needed, until nothing is left or the rest is known."""
        marks: list[tuple[tuple[object, ...], tuple[int, ...]]] = []
        while self.queue:
            node = heapq.heappop(self.queue)[1]
            if not self.queue and node not in self.items and self.finer is None:
                key: tuple[object, ...] = (node, self.needs[node], self.scores, self.seed)
                if (known := self.walked.ends.get(key)) is not None:
                    known.give(self)
                    break
                marks.append((key, tuple(map(len, self.notes()))))
            self.visit(node)
        for key, mark in marks:
            self.walked.ends[key] = _End(self, mark)

    def notes(self) -> tuple[dict[str, Any] | list[Any], ...]:
        """What it writes down as it goes; what it asks of placeholders comes last."""
        return (self.layouts, self.products, self.crossed, self.within, self.stops, self.limits, self.asked)

    def cone(self, op: Op, wants: tuple[Layout, ...]) -> Cone:
        stop, reason = self.stops[0] if self.stops else ("", "")
        columns = tuple(name for name in self.products if self.is_first(name))
        return Cone(op.node.name, self.kind(columns), wants, self.layouts, columns, stop, reason, tuple(self.limits))

    def is_first(self, name: str) -> bool:
        """Whether no other product with a weight leads to this one: what it takes pieces of is whole somewhere above."""
        stack, seen = list(self.products[name]), set[fx.Node]()
        while stack:
            value = stack.pop()
            if value in seen or value.name not in self.layouts:
                continue
            if value.name in self.products:
                return False
            seen.add(value)
            stack += value.all_input_nodes
        return True

    def kind(self, columns: Collection[str]) -> Kind:
        first = set(columns)
        crossed = [name for value, name in self.crossed.items() if value not in first]
        if any(map(attends, crossed)):  # its heads are what is cut
            return "attention"
        return "linear" if all(name in STILL for name in crossed) else "mlp"

    def need(self, node: fx.Node, layout: Layout) -> None:
        """Ask for a value in a layout; two uses must agree."""
        if not layout.is_cut:
            return
        if node.op == "placeholder":
            self.asked.append((node, layout))
            self.hold(node, layout)
            return
        if node in self.needs:
            before = self.needs[node]
            layout = _joined(before, layout)
        else:
            heapq.heappush(self.queue, (-self.walked.order[node], node))
        self.needs[node] = layout

    def hold(self, node: fx.Node, layout: Layout) -> None:
        self.held[node] = _joined(self.held[node], layout) if node in self.held else layout

    def visit(self, node: fx.Node) -> None:
        if op_name(node) == "getitem":
            self.visit_item(node)
            return
        op = view_op(node, self.program.types)
        outs = self.outputs(node)
        try:
            if not has_rule(op):
                raise LayoutError(no_rule(op))
            ins = backward(op, outs, end=self.scores)
            full = forward(op, ins) if node in self.items else [self.needs[node]]
        except LayoutError as error:
            self.stops.append((node.name, str(error)))
            self.limits += [self.stops[-1]] if op.name in LIMITS else []
            self.finer = self.finer or finer(op, outs, self.seed)
            for item in node.users if node in self.items else ():
                self.layouts.pop(item.name, None)
            return
        self.layouts[node.name] = tuple(full) if node in self.items else full[0]
        for item in node.users if node in self.items else ():
            if op_name(item) == "getitem":
                self.layouts[item.name] = full[item.args[1]]  # type: ignore[index]
        self.crossed[node.name] = op.name
        for operand, layout in zip(op.operands, ins, strict=True):
            self.need(operand, layout)
        cut = [operand for operand, layout in zip(op.operands, ins, strict=True) if layout.is_cut]
        if node not in self.walked.weights and contracts(op):
            if any(operand in self.walked.weights for operand in cut):
                self.products[node.name] = [operand for operand in cut if operand not in self.walked.weights]
            else:
                self.within.append(node.name)

    def visit_item(self, node: fx.Node) -> None:
        parent, index = node.args
        assert isinstance(parent, fx.Node) and isinstance(index, int)
        self.layouts[node.name] = self.needs[node]
        if parent not in self.items:
            self.items[parent] = {}
            heapq.heappush(self.queue, (-self.walked.order[parent], parent))
        self.items[parent][index] = self.needs[node]

    def outputs(self, node: fx.Node) -> list[Layout | None]:
        kinds = self.program.types[node.name]
        if node in self.items:
            assert isinstance(kinds, tuple)
            return [self.items[node].get(index) for index in range(len(kinds))]
        return [self.needs[node]]


def _joined(a: Layout, b: Layout) -> Layout:
    return Layout(tuple(join(x, y) for x, y in zip(a.dims, b.dims, strict=True)))


def _seed_layout(tokens: Iterable[object], kind: TensorType, letter: str, seed: Dim) -> Layout:
    dims: list[Dim] = []
    for token, size in zip(tokens, kind.shape, strict=True):
        dims.append(seed if getattr(token, "letter", "") == letter and size != 1 else whole_dim(size))
    return Layout(tuple(dims))
