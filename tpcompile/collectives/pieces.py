"""Index ranges: which coordinate holds what of a dimension. `bounds` is explained in tpcompile.collectives."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from tpcompile.errors import TpcompileError

Range = tuple[int, int]


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of a type are added up over ranks: 32 bits for those of 16."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


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


def holders(bounds: Sequence[int], size: int) -> tuple[tuple[int, int, int, int], ...]:
    """The whole dimension as runs (start, stop, lowest holder, offset in that holder's piece), in order."""
    runs = []
    for start, stop, held in _spans(tuple(bounds), size):
        if not held:
            raise TpcompileError(f"no coordinate holds the indices {start}:{stop} of bounds {list(bounds)}")
        runs.append((start, stop, *held[0]))
    return tuple(runs)


def overlap(bounds: Sequence[int], size: int) -> list[Range]:
    """The index ranges that more than one coordinate holds."""
    return [(start, stop) for start, stop, held in _spans(tuple(bounds), size) if len(held) > 1]


@lru_cache(maxsize=1024)
def _spans(bounds: tuple[int, ...], size: int) -> tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]:
    """The whole dimension cut at every bound: (start, stop, the coordinates that hold it, each with the offset in its piece)."""
    edges = sorted({0, *bounds})
    offsets: list[dict[int, int]] = []  # for every coordinate, edge → offset
    for coordinate in range(size):
        offset, own = 0, dict[int, int]()
        for start, stop in held_by(bounds, coordinate, size):
            inside = edges[bisect_left(edges, start) : bisect_left(edges, stop)]
            own |= {edge: offset + edge - start for edge in inside}
            offset += stop - start
        offsets.append(own)
    return tuple(
        (start, stop, tuple((c, own[start]) for c, own in enumerate(offsets) if start in own))
        for start, stop in zip(edges, edges[1:], strict=False)
    )
