"""Private to divide_loss: what is known of a program's sums, by itself or by a witness of the same model with more rows.

A program that was captured for one row says nothing of what happens to rows: their dimension is one of size one, and their number the
number 1. The witness does. From the loss back, as far as rows are summed up or their number is used, the two are walked side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.ir import Program
from tpcompile.layout import Size
from tpcompile.operation import op_name
from tpcompile.passes._rows import Rows


@dataclass(frozen=True)
class Study:
    """The nodes of a program that are sums and totals, and the arguments that are totals, or sizes of the whole batch, as numbers."""

    source: Program  # in whose symbols sizes are
    sums: set[fx.Node]
    totals: set[fx.Node]
    numbers: dict[fx.Node, dict[str, fx.Node | Size]]


def studied(rows: Rows) -> Study:
    """A program's own rows."""
    sums = rows.sums
    numbers = {node: {name: _number(rows, value) for name, value in found.items()} for node, found in sums.numbers.items()}
    return Study(rows.program, sums.partial, sums.totals, numbers)


def _number(rows: Rows, value: fx.Node) -> fx.Node | Size:
    operand = value.args[0] if value.args else None
    if isinstance(operand, fx.Node) and operand in rows.sums.totals:
        return operand
    size = rows.program.types[value.name]
    assert isinstance(size, (int, sympy.Expr))
    return size


def paired(program: Program, witness: Rows) -> Study:
    """A program's rows, by its witness's. Raises LayoutError where the two are not the same."""
    known = studied(witness)
    pairs = _Pairs(witness, known)
    assert program.loss is not None and witness.program.loss is not None
    pairs.walk(program.nodes()[program.loss], witness.program.nodes()[witness.program.loss])
    twins = {theirs: ours for ours, theirs in pairs.found.items()}
    numbers: dict[fx.Node, dict[str, fx.Node | Size]] = {}
    for ours, theirs in pairs.found.items():
        if theirs in known.numbers:
            numbers[ours] = {n: twins[v] if isinstance(v, fx.Node) else v for n, v in known.numbers[theirs].items()}
    sums = {ours for ours, theirs in pairs.found.items() if theirs in known.sums}
    totals = {ours for ours, theirs in pairs.found.items() if theirs in known.totals}
    return Study(known.source, sums, totals, numbers)


class _Pairs:
    """Which node of the witness each node of the program is, of those that have to do with sums."""

    def __init__(self, witness: Rows, known: Study) -> None:
        self.witness, self.found = witness, dict[fx.Node, fx.Node]()
        self.mixed = {*known.sums, *known.totals, *known.numbers, *witness.sums.own}
        for node in witness.program.graph.nodes:
            if any(operand in self.mixed for operand in node.all_input_nodes):
                self.mixed.add(node)

    def walk(self, ours: fx.Node, theirs: fx.Node) -> None:
        todo = [(ours, theirs)]
        while todo:
            ours, theirs = todo.pop()
            if theirs not in self.mixed or ours in self.found:
                continue
            mine, other = list(_leaves(ours)), list(_leaves(theirs))
            if ours.op != theirs.op or op_name(ours) != op_name(theirs) or [name for name, _ in mine] != [name for name, _ in other]:
                self.differ(theirs)
            self.found[ours] = theirs
            for (name, a), (_, b) in zip(mine, other, strict=True):
                if isinstance(a, fx.Node) and isinstance(b, fx.Node):
                    todo.append((a, b))
                elif b in self.mixed if isinstance(b, fx.Node) else a != b and _computes(theirs, name):
                    self.differ(theirs)

    def differ(self, theirs: fx.Node) -> None:
        raise LayoutError(f"{self.witness.at(theirs)}: with another number of rows the model computes something else")


def _leaves(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """Arguments by place, lists taken apart."""
    for place, value in [*((str(i), a) for i, a in enumerate(node.args)), *node.kwargs.items()]:
        if isinstance(value, (list, tuple)):
            yield from ((f"{place}.{i}", item) for i, item in enumerate(value))
        else:
            yield place, value


def _computes(node: fx.Node, place: str) -> bool:
    """Whether an argument is a number to compute with, and no size."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    declared = node.target._schema.arguments
    first = place.split(".")[0]
    kinds = [str(spec.type) for index, spec in enumerate(declared) if first in (str(index), spec.name)]
    return not kinds or not any(word in kinds[0] for word in ("int", "List[int]"))
