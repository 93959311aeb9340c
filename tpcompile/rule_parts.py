"""What splits and concatenations do to layouts: a dimension's parts follow each other, and each is cut in its own way."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.factors import LayoutError, concatenate, divide, join
from tpcompile.layout import Dim, Layout, cut_factors, size_of, whole_dim
from tpcompile.operation import Op


def split(op: Op, source: Layout) -> list[Layout]:
    """The parts' layouts, given that of the value that is split."""
    at = op.dims("dim")[0]
    parts = divide(source.dims[at], [kind.shape[at] for kind in op.outs])
    return [_with(source, at, part) for part in parts]


def unsplit(op: Op, outs: Sequence[Layout | None]) -> Layout:
    """What a value must be so that its parts have these layouts; None for a part that nobody needs cut.

    Raises LayoutError where some parts are cut and others, which are used, whole: of the value's gradient every rank would have its own
    piece of the one, and all of the other.
    """
    at = op.dims("dim")[0]
    required = [layout for layout in outs if layout is not None]
    dims = list(required[0].dims)
    for layout in required[1:]:
        dims = [d if i == at else join(d, e) for i, (d, e) in enumerate(zip(dims, layout.dims, strict=True))]
    parts = [layout.dims[at] if layout else whole_dim(kind.shape[at]) for layout, kind in zip(outs, op.outs, strict=True)]
    used = {user.args[1] for user in op.node.users}
    whole = _are_whole([part for index, part in enumerate(parts) if index in used])
    dims[at] = whole_dim(op.ins[0].shape[at]) if whole else concatenate(parts)
    return Layout(tuple(dims))


def joined(op: Op, ins: Sequence[Layout]) -> Layout:
    """The layout of a concatenation, given those of its parts."""
    at = op.dims("dim")[0]
    if any(layout.partial for layout in ins):
        raise LayoutError("a partial sum is used before it is reduced")
    dims = list(ins[0].dims)
    for layout in ins[1:]:
        dims = [d if i == at else join(d, e) for i, (d, e) in enumerate(zip(dims, layout.dims, strict=True))]
    parts = [layout.dims[at] for layout in ins]
    dims[at] = whole_dim(op.outs[0].shape[at]) if _are_whole(parts) else concatenate(parts)
    return Layout(tuple(dims))


def unjoined(op: Op, out: Layout) -> list[Layout]:
    """What the parts of a concatenation must be for it to have this layout."""
    at = op.dims("dim")[0]
    parts = divide(out.dims[at], [kind.shape[at] for kind in op.ins])
    _are_whole(parts)
    return [_with(out, at, part) for part in parts]


def _are_whole(parts: Sequence[Dim]) -> bool:
    """Whether parts are whole, all of them. Raises LayoutError where some are and some are cut."""
    cut = {bool(cut_factors(part)) for part in parts if size_of(part) != 0}
    if len(cut) > 1:
        raise LayoutError("only a part of it is cut")
    return True not in cut


def _with(layout: Layout, at: int, dim: Dim) -> Layout:
    return Layout((*layout.dims[:at], dim, *layout.dims[at + 1 :]), layout.partial)
