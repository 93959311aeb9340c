"""delay: partial sums pass through what is linear in them, and are reduced where they are smallest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import fx

from tpcompile.ir import Program, Sharded
from tpcompile.layout import Layout, Size, TensorType, product, whole
from tpcompile.linear import is_linear
from tpcompile.passes._entering import differentiable, entering
from tpcompile.passes._lengths import usual
from tpcompile.rules import ENDS, SUMMED, Op, addend, op_name, view_op


def delay(sharded: Sharded) -> Sharded:
    """Reduce later, where that moves no more bytes: experts' outputs are reduced once, after the tokens are put together.

    before  %y = grouped_mm(…) : f32[2*b*s, h], row-cut;  %z = mul(%y, %weights), %t = sum(%z, 1) : f32[b*s, h]
    after   %y : +tp, %z : +tp, %t : f32[b*s, h], whole: the reduction stands behind the sum; %weights enter
    """
    found = _Waiting(sharded)
    for component in found.components():
        if found.pays(component):
            found.accept(component)
    if not found.layouts:
        return sharded
    layouts = {**sharded.layouts, **found.layouts}
    rows = {**sharded.rows, **found.rows}
    return replace(sharded, layouts=layouts, rows=rows, entering=entering(sharded.program, layouts, rows, found.flowing))


class _Waiting:
    """Which values could be partial sums that wait: `waiting` are those that only linear operations read, `ends` where they reduce."""

    def __init__(self, sharded: Sharded) -> None:
        self.sharded, self.program = sharded, sharded.program
        self.flowing = differentiable(sharded.program)
        self.nodes = [node for node in sharded.program.graph.nodes if node.op == "call_function"]
        self.layouts: dict[str, Layout] = {}
        self.rows: dict[str, tuple[Layout, ...]] = {}
        self.able: dict[fx.Node, Op] = {}
        for node in self.nodes:
            if self.is_source(node) or self.can_wait(node):
                self.able[node] = view_op(node, self.program.types)
        self.settle()

    def is_source(self, node: fx.Node) -> bool:
        adds_up = op_name(node) not in ENDS or op_name(node) in SUMMED
        return adds_up and node.name in self.sharded.rows and addend(node) is None and isinstance(self.program.types[node.name], TensorType)

    def can_wait(self, node: fx.Node) -> bool:
        """Whether a value may be partial if those before it are: whole so far, no longer than what it is made of."""
        kind, layout = self.program.types.get(node.name), self.sharded.layouts.get(node.name)
        if not isinstance(kind, TensorType) or not kind.dtype.is_floating_point or not isinstance(layout, Layout) or layout.is_cut:
            return False
        held = [operand for operand in node.all_input_nodes if operand in self.able]
        return bool(held) and elements(self.program, node) <= sum(elements(self.program, operand) for operand in held)

    def settle(self) -> None:
        """Take out, until nothing changes, what is not linear in those of its operands that wait."""
        while True:
            self.waiting = {node for node in self.able if node.users and all(user in self.able for user in node.users)}
            out = [n for n, op in self.able.items() if not self.is_source(n) and not is_linear(op, self.held(op))]
            if not out:
                return
            for node in out:
                del self.able[node]

    def held(self, op: Op) -> list[int]:
        return [position for position, operand in enumerate(op.operands) if operand in self.waiting]

    def components(self) -> Iterable[list[fx.Node]]:
        """What waits together: a reduction is put off for all of a component or for none."""
        group: dict[fx.Node, list[fx.Node]] = {}
        for node in self.able:
            joined = [node]
            for operand in {o for o in node.all_input_nodes if o in self.waiting and o in group}:
                if group[operand] is not joined:
                    joined = group[operand] + joined
                    group.update(dict.fromkeys(joined, joined))
            group.update(dict.fromkeys(joined, joined))
        return [members for members in {id(g): g for g in group.values()}.values() if len(members) > 1]

    def pays(self, component: list[fx.Node]) -> bool:
        """Whether no more elements are reduced at the ends, gradients of other operands included, than at the sources."""
        before = sum(elements(self.program, node) for node in component if self.is_source(node))
        after = sum(elements(self.program, node) for node in component if node not in self.waiting)
        others = {
            operand
            for node in component
            if not self.is_source(node)
            for operand in self.able[node].operands
            if operand.name in self.flowing
        } - self.waiting
        return after + sum(elements(self.program, operand) for operand in others) <= before

    def accept(self, component: list[fx.Node]) -> None:
        axis = self.sharded.axis
        for node in component:
            kind = self.program.types[node.name]
            assert isinstance(kind, TensorType)
            if node in self.waiting:
                self.layouts[node.name] = Layout(whole(*kind.shape).dims, (axis,))
            if not self.is_source(node):
                op, held = self.able[node], self.held(self.able[node])
                self.rows[node.name] = tuple(
                    Layout(whole(*operand.shape).dims, (axis,) if position in held else ()) for position, operand in enumerate(op.ins)
                )
        for node in component:
            if node not in self.waiting:
                self.layouts.setdefault(node.name, _whole(self.sharded.layouts, node.name))


def _whole(layouts: Mapping[str, Layout | tuple[Layout, ...]], name: str) -> Layout:
    layout = layouts[name]
    assert isinstance(layout, Layout)
    return layout


def elements(program: Program, node: fx.Node) -> int:
    """The number of a value's elements, with all symbolic sizes as usual."""
    kind = program.types[node.name]
    assert isinstance(kind, TensorType)
    count: Size = product(kind.shape)
    return usual(count)
