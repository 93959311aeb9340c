"""Dimensions that are made of others, as rules see them.

What splits and concatenations do to layouts: a dimension's parts follow each other, and each is cut in its own way. And operations whose
dimensions are products, taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tpcompile.factors import LayoutError, concatenate, divide, join, quotient
from tpcompile.layout import Dim, Layout, Size, TensorType, cut_factors, size_of, whole_dim
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


CONVOLUTIONS: Mapping[str, int] = {"aten.conv1d.default": 3, "aten.conv1d.padding": 3, "aten.conv2d.default": 4, "aten.conv2d.padding": 4}
"""Each with the number of dimensions of what it takes: rows, channels and places."""


def opened(op: Op) -> Op:
    """The operation with the dimensions that its rule has letters for.

    A convolution's channels in groups are groups and channels: x [b, 64, s] and weight [128, 16, 3] in 4 groups are x [b, 4, 16, s] and
    weight [4, 32, 16, 3]. The columns of windows are channels and windows: [b, 27, 100] of windows of 9 are [b, 3, 9, 100].
    """
    ins, outs = op.ins, op.outs
    if op.name in CONVOLUTIONS and op.argument("groups", 1) != 1 and op.rank(0) == op.rank(1) == CONVOLUTIONS[op.name]:
        groups = op.argument("groups")
        ins = tuple(_apart(kind, at, groups) for kind, at in zip(ins, (1, 0, 0), strict=False))
        outs = (_apart(outs[0], 1, groups),)
    elif op.name == "aten.im2col.default" and len(outs[0].shape) < op.rank(0):
        outs = (_apart(outs[0], -2, ins[0].shape[-3]),)
    elif op.name == "aten.col2im.default" and op.rank(0) < len(outs[0].shape):
        ins = (_apart(ins[0], -2, outs[0].shape[-3]),)
    return op if ins is op.ins and outs is op.outs else replace(op, ins=ins, outs=outs)


def _apart(kind: TensorType, at: int, first: Size) -> TensorType:
    """A dimension as two, of which one is the first."""
    at %= len(kind.shape)
    return TensorType(kind.dtype, (*kind.shape[:at], first, quotient(kind.shape[at], first), *kind.shape[at + 1 :]))
