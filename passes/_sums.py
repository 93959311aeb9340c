"""Private to divide_loss: sums over the batch's rows, and what becomes of them.

A value of a part of the batch, beside the whole batch's:

    apart   the part's own rows of it              `Rows` has a layout in which the rows are cut
    same    equal to it                            `Rows` has a whole layout
    sum     a summand of it
    total   a sum that the inputs alone decide     known for the whole batch before the first forward, hence the same in every part
    own     something else, which the user accepts: the batch's is the mean of the parts'

    %s = sum(%losses)                   a sum
    %n = sum(%mask)                     a total
    %y = div(%s, clamp(%n, 1))          a sum
    %z = add(%y, %penalty)              a sum: each part adds its share of what is the same everywhere
    %r = sqrt(%y)                       refused, for it is not linear in a sum
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import sympy
import torch
from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.ir import Program
from tpcompile.layout import Layout, whole
from tpcompile.operation import Op, argument, op_name
from tpcompile.passes._additive import SUMS, check_linear
from tpcompile.passes._counts import mask_of
from tpcompile.passes._losses import MEAN, MEANS, labelled, mean_size, sum_text
from tpcompile.rules import addend, forward

if TYPE_CHECKING:
    from tpcompile.passes._rows import Rows

ITEMS = ("aten.item.default", "aten._local_scalar_dense.default")


@dataclass
class Sums:
    """What is known of values that are neither apart nor simply the same."""

    accepted: tuple[str, ...] = ()  # patterns of what the user accepts per micro-batch
    matched: set[str] = field(default_factory=set)
    partial: set[fx.Node] = field(default_factory=set)
    totals: set[fx.Node] = field(default_factory=set)
    own: set[fx.Node] = field(default_factory=set)
    given: set[fx.Node] = field(default_factory=set)  # made of inputs and buffers alone, of a part's rows
    numbers: dict[fx.Node, dict[str, fx.Node]] = field(default_factory=dict)  # arguments that are numbers of rows, or totals as numbers

    def look(self, node: fx.Node, program: Program) -> None:
        """Note whether a value is made of inputs alone. A total is not: its parts are none of the batch's parts any more."""
        if node.op == "placeholder":
            learned = node.name in program.parameters or program.buffers.get(node.name) in program.updates
            known = not learned and node.name != "rng_key"
        else:
            known = op_name(node) == "aten.sym_size.int" or all(o in self.given and o not in self.totals for o in node.all_input_nodes)
        if known:
            self.given.add(node)

    def accept(self, node: fx.Node, program: Program) -> bool:
        """Whether the user accepts a value as each micro-batch has it, by its module's path, its line, or the text of the line."""
        source = program.sources.get(node.name)
        names = (source.path, str(source), source.code) if source else ()
        found = [pattern for pattern in self.accepted if any(fnmatchcase(name, pattern) for name in names)]
        self.matched.update(found)
        if found:
            self.own.add(node)
        return bool(found)

    def item(self, node: fx.Node, parent: fx.Node) -> None:
        """One of several outputs is what all of them are."""
        for kind in (self.partial, self.own):
            if parent in kind:
                kind.add(node)

    def call(self, op: Op, rows: Rows) -> tuple[Layout, ...] | None:
        """The layouts of an operation on sums, or that makes one; None for any other. Raises LayoutError for what cannot be divided."""
        self.count_rows(op, rows)
        sums, own = (any(operand in kind for operand in op.operands) for kind in (self.partial, self.own))
        if sums and not (own and op.name not in SUMS):
            apart = {operand for operand in op.operands if rows.depends(operand)}
            check_linear(op, self.partial, apart)
            self.partial.add(op.node)
            return _whole(op)
        if sums:
            raise LayoutError("it is not linear in a sum over the batch's rows")
        if own:
            self.own.add(op.node)
            return _whole(op)
        if (text := sum_text(op)) is None or not any(rows.depends(operand) for operand in op.operands):
            return None
        made = forward(op, [rows.layouts[operand][0] for operand in op.operands], text=text)
        return self.start(op, rows) if made[0].partial else None

    def start(self, op: Op, rows: Rows) -> tuple[Layout, ...]:
        """A value that is a sum over the rows."""
        if addend(op.node) is not None:
            raise LayoutError("it adds a bias to a sum over the rows")
        if labelled(op) and op.argument("reduction", MEAN) == MEAN:
            counted = [value for value in (op.argument("target"), op.argument("weight")) if value is not None]
            if not all(value in self.given for value in counted):
                raise LayoutError("its labels or class weights depend on parameters: how many are not ignored is not known before")
        elif sum_text(op) is not None and not self.counted(sympy.sympify(mean_size(op)).free_symbols, rows.program):
            raise LayoutError("it is a mean of a number of elements that is not known before")
        is_sum = op.name in MEANS or sum_text(op) is None  # what a loss function makes of inputs alone is no count
        (self.totals if op.node in self.given and is_sum else self.partial).add(op.node)
        return _whole(op)

    # --- numbers

    def count_rows(self, op: Op, rows: Rows) -> None:
        """Note the arguments that are not sizes but numbers to compute with, and differ between a part and the whole batch."""
        found: dict[str, fx.Node] = {}
        for name, value, is_tensor in _numbers(op):
            if not self.differs(value, rows):
                continue
            if not is_tensor and op.name != "aten.scalar_tensor.default":
                raise LayoutError("it computes with a number that depends on how many rows there are")
            found[name] = value
        if found:
            self.numbers[op.node] = found
            self.given.discard(op.node)

    def differs(self, number: fx.Node, rows: Rows) -> bool:
        """Whether a number differs between a part and the batch. Raises LayoutError unless the batch's is the sum of the parts'."""
        if op_name(number) in ITEMS and number.args[0] in self.totals:
            return True
        program, expression, items = rows.program, sympy.sympify(rows.program.types[number.name]), _items(number)
        if not all(self.is_same(item.args[0], rows) for item in items):  # type: ignore[arg-type]
            raise LayoutError("it computes with a number that depends on the batch's rows")
        read = {symbol for item in items for symbol in sympy.sympify(program.types[item.name]).free_symbols}
        growing = (expression.free_symbols & rows.symbols) | (expression.free_symbols - set(program.symbols) - read)
        if not growing:
            return False
        times = sympy.Symbol("times", positive=True)
        grown = expression.subs({symbol: times * symbol for symbol in growing}, simultaneous=True)
        if not self.counted(growing, program) or sympy.simplify(grown - times * expression) != 0:
            raise LayoutError("it computes with a number that depends on how many rows there are")
        return True

    def counted(self, symbols: Iterable[sympy.Basic], program: Program) -> bool:
        """Whether sizes are known before: those of inputs, and how many elements a mask chooses that inputs alone decide."""
        return all(symbol in program.symbols or mask_of(program, symbol) in self.given for symbol in symbols)

    def is_same(self, node: fx.Node, rows: Rows) -> bool:
        """Whether a value is the same in every part, without being known of the whole batch only."""
        known = node in rows.layouts and not rows.depends(node)
        return known and not any(node in kind for kind in (self.partial, self.totals, self.own))


def _whole(op: Op) -> tuple[Layout, ...]:
    return tuple(whole(*kind.shape) for kind in op.outs)


def _numbers(op: Op) -> Iterator[tuple[str, fx.Node, bool]]:
    """Arguments that are numbers computed in the graph, and no sizes: their names, and whether a tensor may stand there."""
    if not isinstance(op.node.target, torch._ops.OpOverload):
        return
    for declared in op.node.target._schema.arguments:
        value, kind = argument(op.node, declared.name), str(declared.type).removeprefix("Optional[").removesuffix("]")
        is_number = isinstance(value, fx.Node) and value not in op.operands and kind in ("Tensor", "number", "float")
        if is_number and not (op.name.startswith("aten.arange") and declared.name == "end"):
            yield declared.name, value, kind == "Tensor"


def _items(number: fx.Node) -> list[fx.Node]:
    """The elements of tensors from which a number is computed."""
    if op_name(number) in ITEMS or op_name(number) == "aten.sym_size.int":
        return [number] if op_name(number) in ITEMS else []
    return [item for operand in number.all_input_nodes for item in _items(operand)]
