"""The two ways to cut linears that follow each other, and what each would send: why column then row is chosen.

    column, row      X → [W1 W2] → [H1 H2] → H1·V1 + H2·V2       one all-reduce of the output
    column, column   X → [W1 W2] → [H1 H2] → H → H·[V1 V2]       an all-gather of the hidden value, and one of the output

In a ring of n ranks each sends (n - 1)/n of the value's bytes for an all-gather, and twice that for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy

from tpcompile.driver import Compilation
from tpcompile.ir import Program, Region
from tpcompile.layout import Size, TensorType, product


@dataclass(frozen=True)
class Option:
    """One way to cut a region's linears. `sent` is in bytes per rank, forward."""

    cut: str
    collectives: str
    sent: Size

    def __str__(self) -> str:
        return str(self.sent).replace("*", "·")


def options(compilation: Compilation, region: Region) -> tuple[Option, ...]:
    """The ways to cut a region that has linears of both kinds, the chosen one first; nothing for others."""
    if not region.rows or not region.columns or region.kind == "vocabulary":
        return ()
    program, ranks = compilation.program, compilation.mesh.tp
    hidden, output = sum(_inputs(program, region)), sum(_bytes(program, row) for row in region.rows)
    rows = len(region.rows)
    return (
        Option("column, row", f"{rows} all-reduce{'s' * (rows > 1)}", _share(2 * output, ranks)),
        Option("column, column", f"{2 * rows} all-gathers", _share(hidden + output, ranks)),
    )


def _inputs(program: Program, region: Region) -> Iterator[Size]:
    """Bytes of the cut values that the row-cut linears take."""
    nodes = program.nodes()
    for row in region.rows:
        yield _bytes(program, nodes[row].all_input_nodes[0].name)


def _bytes(program: Program, name: str) -> Size:
    kind = program.types[name]
    assert isinstance(kind, TensorType)
    return kind.dtype.itemsize * product(kind.shape)


def _share(size: Size, ranks: int) -> Size:
    """(n - 1)/n of a size."""
    share: sympy.Expr = sympy.sympify(size) * sympy.Rational(ranks - 1, ranks)
    return share
