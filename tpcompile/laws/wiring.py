"""Every operation reads, of its rank, pieces of what it reads in the whole program, in layouts that make its own.

    whole program   %y = linear(%x, %w, %b)
    a rank          %y_partial = linear(%x, %w) : +tp     of pieces of %x and %w, cut along the features alike
                    %y_sum = reduce(%y_partial), %y = add(%y_sum, %b)

What a rank adds up may stand in another order: there the addends are compared, each once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import fx

from tpcompile.collectives.table import LINEARS
from tpcompile.factors import LayoutError
from tpcompile.ir import Local, results
from tpcompile.laws.places import broken
from tpcompile.layout import Layout, TensorType, fits, same, whole
from tpcompile.operation import Op, op_name, view_op
from tpcompile.rules import addend, forward, has_rule, no_rule

ADD = "aten.add.Tensor"
REDUCTIONS = ("tpcompile.reduce.default", "tpcompile.seq_scatter.default")
SPELLED: Mapping[str, str] = {
    "aten.mm.default": "aten.addmm.default",
    "aten.bmm.default": "aten.baddbmm.default",
    "aten.reshape.default": "aten.view.default",
    "tpcompile.look_up.default": "aten.embedding.default",
}
"""Operations of a rank that stand for another one of the program, with the same operands in the same order, but for what it adds."""


def check_wiring(local: Local) -> None:
    """Raise VerifyError for an operation that reads something else than in the whole program, or in a layout that does not fit."""
    wiring = _Wiring(local)
    for node in local.graph.nodes:
        if node.op == "call_function":
            wiring.check(node)
    wiring.check_returned()


class _Wiring:
    def __init__(self, local: Local) -> None:
        self.local, self.program = local, local.program
        self.whole = local.program.nodes()

    def check(self, node: fx.Node) -> None:
        if op_name(node) == "getitem":
            self.check_item(node)
            return
        origin = self.whole.get(self.local.origins.get(node.name, node.name.removesuffix("_partial")))
        if origin is None or origin.op != "call_function":
            return
        if self.stands_for(node, origin):
            pairs = list(_pairs((origin.args, origin.kwargs), self.arguments(node, origin)))
            self.check_operands(node, pairs)
            self.check_layouts(node, origin, dict(pairs))
        elif op_name(node) == ADD and self.local.origins.get(node.name) == origin.name:
            self.check_addends(node, origin)

    def stands_for(self, node: fx.Node, origin: fx.Node) -> bool:
        """Whether a node is the program's call on pieces: as it is, or before what is reduced, or without what is added to it."""
        if op_name(origin) not in (op_name(node), SPELLED.get(op_name(node))):
            return False
        known = self.local.origins.get(node.name) == origin.name or addend(origin) is not None
        return node.name == origin.name or (known and node.name == f"{origin.name}_partial")

    def arguments(self, node: fx.Node, origin: fx.Node) -> tuple[Any, Any]:
        """A call's arguments, with a gap for what the program's call adds first and this one does not."""
        gap = op_name(node) != op_name(origin) and addend(origin) is not None and origin.args[0] is addend(origin)
        return ((None, *node.args), node.kwargs) if gap else (node.args, node.kwargs)

    # --- what is read

    def value(self, node: fx.Node) -> str:
        """The value of the program that a node is a piece of, or prepares a piece of; "" where several are in it."""
        while (name := self.local.origins.get(node.name)) is None:
            if node.name in self.whole and node.op == "placeholder":
                return node.name
            sources = [one for one in node.all_input_nodes if one.name in self.local.layouts]
            if len(sources) != 1 or op_name(node) in REDUCTIONS:
                return ""
            node = sources[0]
        return name

    def check_operands(self, node: fx.Node, pairs: list[tuple[fx.Node, fx.Node]]) -> None:
        for wanted, given in pairs:
            if self.is_tensor(wanted) and (found := self.value(given)) and found != wanted.name:
                raise broken(self.local, node, f"reads {given.name}, a piece of {found}, and the program reads {wanted.name}")

    def is_tensor(self, node: fx.Node) -> bool:
        kind = self.program.types.get(node.name)
        return isinstance(kind, (TensorType, tuple))

    def check_item(self, node: fx.Node) -> None:
        """An item of several outputs is that output."""
        made, index = node.args
        assert isinstance(made, fx.Node) and isinstance(index, int)
        origin, parts = self.whole.get(self.local.origins.get(node.name, "")), self.local.layouts.get(made.name)
        if origin is not None and op_name(made) in LINEARS:
            self.check_joined(node, view_op(origin, self.program.types), made, index)
        layout = self.local.layouts.get(node.name)
        if isinstance(parts, tuple) and isinstance(layout, Layout) and not same(parts[index], layout):
            raise broken(self.local, node, f"is {parts[index]} and is declared {layout}")

    def check_joined(self, node: fx.Node, op: Op, made: fx.Node, index: int) -> None:
        """An item of joined linear layers is the layer whose weight stands in its place, of their value made whole."""
        value, *_, weights, biases = made.args
        assert isinstance(weights, (list, tuple)) and isinstance(biases, (list, tuple))
        given = [one for one in (value, weights[index], *biases[index : index + 1]) if isinstance(one, fx.Node)]
        self.check_operands(node, list(zip(op.operands, given, strict=True)))
        layouts = [self.local.layouts.get(one.name) for one in given]
        if all(isinstance(layout, Layout) for layout in layouts):
            self.check_rule(node, op, [whole(*op.ins[0].shape), *layouts[1:]])  # type: ignore[list-item]

    def check_returned(self) -> None:
        """What the program returns, the rank returns, in the same places."""
        wanted, renewed = results(self.program.graph, self.program.updates)
        given, new = results(self.local.graph, self.program.updates)
        for one, other in [*zip(wanted, given, strict=True), *((renewed[name], new[name]) for name in renewed)]:
            if (found := self.value(other)) and found != one.name:
                raise broken(self.local, other, f"is returned, a piece of {found}, and the program returns {one.name}")

    # --- what is added up

    def check_addends(self, node: fx.Node, origin: fx.Node) -> None:
        mine = list(self.addends(node))
        theirs = Counter(self.summands(origin, set(mine)))
        if "" not in mine and Counter(mine) != theirs:
            more, less = Counter(mine) - theirs, theirs - Counter(mine)
            what = f"adds up {', '.join(more.elements()) or 'nothing else'}, and the program {', '.join(less.elements()) or 'nothing else'}"
            raise broken(self.local, node, what)

    def addends(self, node: fx.Node, inside: bool = True) -> Iterator[str]:
        """The values of which a rank makes a sum; `%y =` stands for a product without what the program adds to it."""
        name = node.name.removesuffix("_partial")
        if op_name(node) == ADD and not node.kwargs and (inside or self.local.origins.get(node.name) is None):
            for operand in node.args:
                yield from self.addends(operand, False) if isinstance(operand, fx.Node) else [str(operand)]
        elif op_name(node) in REDUCTIONS and self.local.origins.get(node.name) is None:
            yield from self.addends(node.all_input_nodes[0], False)
        elif self.local.origins.get(node.name) is None and name in self.whole and addend(self.whole[name]) is not None:
            yield f"{name} ="
        else:
            yield self.value(node)

    def summands(self, origin: fx.Node, stops: Collection[str], inside: bool = True) -> Iterator[str]:
        """The same of the program, as far down as a rank has them."""
        added = addend(origin)
        if f"{origin.name} =" in stops and added is not None:
            yield from (f"{origin.name} =", added.name)
        elif op_name(origin) == ADD and (inside or origin.name not in stops):
            for operand in origin.args:
                yield from self.summands(operand, stops, False) if isinstance(operand, fx.Node) else [str(operand)]
        else:
            yield origin.name

    # --- how it is cut

    def check_layouts(self, node: fx.Node, origin: fx.Node, given: Mapping[fx.Node, fx.Node]) -> None:
        """The rule of the operation, applied to its operands as they are, makes the layout that is declared."""
        if op_name(node) == "tpcompile.look_up.default" or not self.is_tensor(origin):
            return
        op = view_op(origin, self.program.types)
        ins: list[Layout] = []
        for operand, kind in zip(op.operands, op.ins, strict=True):
            one = self.local.layouts.get(given[operand].name) if operand in given else whole(*kind.shape)
            if not isinstance(one, Layout):
                return
            ins.append(one)
        self.check_rule(node, op, ins)

    def check_rule(self, node: fx.Node, op: Op, ins: list[Layout]) -> None:
        declared = self.local.layouts.get(node.name)
        expected = list(declared) if isinstance(declared, tuple) else [declared] if declared is not None else []
        if not expected or all(layout.is_whole for layout in (*ins, *expected)):
            return
        try:
            if not has_rule(op):
                raise LayoutError(no_rule(op))
            made = forward(op, ins, expected)
        except LayoutError as error:
            raise broken(self.local, node, f"reads {', '.join(map(str, ins))}: {error}") from None
        if not all(fits(a, b) for a, b in zip(made, expected, strict=True)):
            raise broken(self.local, node, f"makes {', '.join(map(str, made))} and is declared {', '.join(map(str, expected))}")


def _pairs(wanted: Any, given: Any) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The program's operands with those that stand in their places."""
    match wanted, given:
        case fx.Node(), fx.Node():
            yield wanted, given
        case (list() | tuple(), list() | tuple()):
            for one, other in zip(wanted, given, strict=False):
                yield from _pairs(one, other)
        case dict(), dict():
            for name in wanted.keys() & given.keys():
                yield from _pairs(wanted[name], given[name])
