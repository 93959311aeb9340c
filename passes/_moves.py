"""Private to attend: operations that put elements in other places: for each index of what they are given, a line of the result's.

%y = slice(%x, 1, 2, END) : i64[s, s - 2]      i0, i1 + 2
%y = transpose(%x, 0, 1) : i64[4, s]           i1, i0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tpcompile.layout import Size, TensorType
from tpcompile.operation import argument, aten_names, op_name
from tpcompile.passes._indices import ZERO, Line, index, least_is

Places = Mapping[int, Line]

RESHAPES = aten_names(
    "_unsafe_view.default flatten.using_ints reshape.default squeeze.default squeeze.dim squeeze.dims unflatten.int unsqueeze.default "
    "view.default"
)
MOVES = RESHAPES | aten_names(
    "expand.default expand_as.default flip.default index.Tensor numpy_T.default permute.default select.int slice.Tensor t.default "
    "transpose.int"
)


WHOLE = (torch.int64,)
"""Types of lines: in narrower ones they might not be exact for all sizes that tensors have."""


def moved(
    node: fx.Node,
    before: Sequence[Size],
    after: Sequence[Size],
    size: Callable[[Any], Size | None],
    line: Callable[[fx.Node], Line | None],
    types: Mapping[str, Any],
) -> Places | None:
    """Where each element of a result stood, by dimension of the operand; None for an operation that is not followed.

    `size` gives a number that the call is given, `line` a tensor of indices.
    """
    rank = len(before)
    match op_name(node):
        case name if name in RESHAPES:
            return _reshaped(before, after)
        case "aten.expand.default" | "aten.expand_as.default":
            more = len(after) - rank
            return {dim: ZERO if before[dim] == 1 else index(dim + more) for dim in range(rank)}
        case "aten.transpose.int":
            a, b = (argument(node, name) % rank for name in ("dim0", "dim1"))
            return {dim: index({a: b, b: a}.get(dim, dim)) for dim in range(rank)}
        case "aten.t.default" | "aten.numpy_T.default" if rank == 2:
            return {0: index(1), 1: index(0)}
        case "aten.permute.default":
            return {dim % rank: index(place) for place, dim in enumerate(argument(node, "dims"))}
        case "aten.flip.default":
            turned = [dim % rank for dim in argument(node, "dims")]
            return {dim: Line.of({dim: -1}, before[dim] - 1) if dim in turned else index(dim) for dim in range(rank)}
        case "aten.select.int":
            dim, at = argument(node, "dim") % rank, _from_front(size(argument(node, "index")), before[argument(node, "dim")])
            return None if at is None else {d: Line.of({}, at) if d == dim else index(d - (d > dim)) for d in range(rank)}
        case "aten.slice.Tensor":
            return _sliced(node, before, size)
        case "aten.index.Tensor":
            return _looked_up(node, before, after, line, types)
    return None


def _reshaped(before: Sequence[Size], after: Sequence[Size]) -> Places | None:
    """Dimensions of size one come and go."""
    old, new = ([dim for dim, size in enumerate(shape) if size != 1] for shape in (before, after))
    if [before[dim] for dim in old] != [after[dim] for dim in new]:
        return None
    pairs = dict(zip(old, new, strict=True))
    return {dim: index(pairs[dim]) if dim in pairs else ZERO for dim in range(len(before))}


def _from_front(at: Size | None, size: Size) -> Size | None:
    """A place counted from the front; None where it is not known from which end it counts."""
    if at is None:
        return None
    if least_is(at, 0):
        return at
    return at + size if least_is(-at, 1) and least_is(at + size, 0) else None


def _sliced(node: fx.Node, before: Sequence[Size], size: Callable[[Any], Size | None]) -> Places | None:
    """What is cut off at the end is in the result's own size; a start behind the end leaves nothing."""
    rank = len(before)
    dim, step, given = argument(node, "dim") % rank, argument(node, "step"), argument(node, "start")
    start = 0 if given is None else _from_front(size(given), before[dim])
    if start is None or not isinstance(step, int):
        return None
    return {d: Line.of({d: step}, start) if d == dim else index(d) for d in range(rank)}


def _looked_up(
    node: fx.Node,
    before: Sequence[Size],
    after: Sequence[Size],
    line: Callable[[fx.Node], Line | None],
    types: Mapping[str, Any],
) -> Places | None:
    """x[i, j]: the first dimensions by lines, which stand before those that are left. Indices below 0 would count from the end."""
    indices = list(argument(node, "indices"))
    width = len(after) - (len(before) - len(indices))
    places: dict[int, Line] = {dim: index(width + dim - len(indices)) for dim in range(len(indices), len(before))}
    for dim, each in enumerate(indices):
        kind = types[each.name] if isinstance(each, fx.Node) else None
        found = line(each) if isinstance(kind, TensorType) and kind.dtype in WHOLE else None
        if found is None or not isinstance(kind, TensorType) or not least_is(found.least(kind.shape), 0):
            return None
        places[dim] = found.placed({d: index(d + width - len(kind.shape)) for d, _ in found.terms})
    return places
