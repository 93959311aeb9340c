"""Index ranges: which coordinate holds what of a dimension. `bounds` is explained in tpcompile.collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpcompile.errors import TpcompileError

Range = tuple[int, int]


def held_by(bounds: Sequence[int], coordinate: int, size: int) -> list[Range]:
    """The index ranges that a coordinate holds."""
    count = len(bounds) // (2 * size)
    mine = bounds[2 * count * coordinate : 2 * count * (coordinate + 1)]
    return [(mine[2 * i], mine[2 * i + 1]) for i in range(count)]


def length(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def take(x: Tensor, dim: int, ranges: Sequence[Range]) -> Tensor:
    """The pieces of a whole value that `ranges` names, joined."""
    filled = [(start, stop) for start, stop in ranges if stop > start] or [(0, 0)]
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in filled], dim)


def spread(x: Tensor, dim: int, ranges: Sequence[Range], whole: int) -> Tensor:
    """The whole value that holds `x` in `ranges` and zero elsewhere."""
    shape = list(x.shape)
    shape[dim] = whole
    full = x.new_zeros(shape)
    offset = 0
    for start, stop in ranges:
        full.narrow(dim, start, stop - start).add_(x.narrow(dim, offset, stop - start))
        offset += stop - start
    return full


def holders(bounds: Sequence[int], size: int) -> list[tuple[int, int, int, int]]:
    """The whole dimension as runs (start, stop, lowest holder, offset in that holder's piece), in order."""
    edges = sorted(set(bounds) | {0})
    runs = []
    for start, stop in zip(edges, edges[1:], strict=False):
        held = [(c, at) for c in range(size) for at in _offsets(held_by(bounds, c, size), start)]
        if not held:
            raise TpcompileError(f"no coordinate holds the indices {start}:{stop} of bounds {list(bounds)}")
        runs.append((start, stop, *held[0]))
    return runs


def _offsets(ranges: Sequence[Range], index: int) -> list[int]:
    """Where in a coordinate's piece a global index lies."""
    found, offset = [], 0
    for start, stop in ranges:
        if start <= index < stop:
            found.append(offset + index - start)
        offset += stop - start
    return found


def overlap(bounds: Sequence[int], size: int) -> list[Range]:
    """The index ranges that more than one coordinate holds."""
    edges = sorted(set(bounds))
    spans = list(zip(edges, edges[1:], strict=False))
    return [(a, b) for a, b in spans if sum(bool(_offsets(held_by(bounds, c, size), a)) for c in range(size)) > 1]
