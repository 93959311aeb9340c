"""Private to detect: where else a dimension may be cut when an operation needs the factor whole that was cut first."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.factors import LayoutError
from tpcompile.layout import Dim, Factor, Layout, Open, canonical, cut_factors
from tpcompile.rules import JOINS, PARTED, Op, bind_rule


def finer(op: Op, outs: Sequence[Layout | None], seed: Dim) -> Dim | None:
    """The seed's dimension cut below what this operation needs whole, or in each part that it joins; None where there is no such cut.

    A walk starts with the whole dimension, and its cut stays with the first factor that a view takes apart: heads, not half heads.

    before  %y = stack(%heads) : [b, s, 2@?, 16] of a seed 32@?        after  2·16@?    each head is cut
    before  %y = cat(%a, %b) : [b, s, 48@?] of a seed 48@?              after  16@? | 32@?
    """
    sizes = next(filter(None, (_needed(op, index, layout) for index, layout in enumerate(outs) if layout is not None)), [])
    if not sizes or len(seed) != 1 or not isinstance(seed[0][-1].cut, Open):
        return None
    *before, last = seed[0]
    total = sum(sizes)
    if not isinstance(last.size, int) or last.size % total:
        return None
    inner = last.size // total
    if len(sizes) == 1:
        return ((*before, Factor(total), Factor(inner, last.cut)),) if inner > 1 else None
    return None if before else tuple((Factor(size * inner, last.cut),) for size in sizes)


def _needed(op: Op, index: int, layout: Layout) -> list[int]:
    """The size of the cut factor that an operation needs whole for one of its outputs, or the sizes of the parts that it joins."""
    if op.name in JOINS:
        at = op.dims("dim")[0]
        return [int(kind.shape[at]) for kind in op.ins] if _is_open(layout.dims[at]) and _known(op, at) else []
    if op.name in PARTED:
        return []
    try:
        bound = bind_rule(op)
    except LayoutError:
        return []
    if all(token.letter == "_" for tokens in bound.ins for token in tokens):
        return []
    tokens = zip(bound.outs[index], layout.dims, strict=True)
    return next(([int(cut_factors(dim)[0].size)] for token, dim in tokens if token.letter in bound.never and _is_open(dim)), [])


def _known(op: Op, at: int) -> bool:
    return all(isinstance(kind.shape[at], int) and kind.shape[at] != 0 for kind in op.ins)


def _is_open(dim: Dim) -> bool:
    """Whether a dimension is one factor, of a size that is known, whose cut has no ranges yet."""
    segments = canonical(dim)
    first = segments[0][0]
    return len(segments) == len(segments[0]) == 1 and isinstance(first.cut, Open) and isinstance(first.size, int)
