"""Random layouts, and tensors cut by them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from tpcompile.layout import Cut, Dim, Factor, Layout, bounds, cut_factors, pieces, size_of


def even(size: int, parts: int) -> Cut:
    """Equal pieces in order."""
    return Cut("tp", tuple((i * size // parts, (i + 1) * size // parts) for i in range(parts)))


def random_ranges(rng: random.Random, size: int, parts: int) -> Cut:
    """Ranges that cover a factor: of any lengths, empty ones among them, sometimes overlapping."""
    places = sorted(rng.randint(0, size) for _ in range(parts - 1))
    ranges = list(zip([0, *places], [*places, size], strict=True))
    if rng.random() < 0.3:
        at = rng.randrange(parts)
        ranges[at] = (max(0, ranges[at][0] - 1), ranges[at][1])
    return Cut("tp", tuple(ranges))


def random_factors(rng: random.Random, parts: int, *, cuts: int = 1) -> list[Factor]:
    """A few factors, `cuts` of them cut."""
    factors = [Factor(rng.choice([1, 2, 3, 4, 6])) for _ in range(rng.randint(max(cuts, 1), 4))]
    for at in rng.sample(range(len(factors)), cuts):
        size = rng.choice([2, 3, 4, 6])
        factors[at] = Factor(size, even(size, parts) if size % parts == 0 and rng.random() < 0.5 else random_ranges(rng, size, parts))
    return factors


def random_dim(rng: random.Random, parts: int) -> Dim:
    """One to three segments, some of them cut."""
    return tuple(tuple(random_factors(rng, parts, cuts=rng.randint(0, 1))) for _ in range(rng.randint(1, 3)))


def cut(value: Tensor, layout: Layout, coordinate: int) -> Tensor:
    """The piece of a value that a coordinate holds: every cut dimension by its ranges."""
    for dim, places in enumerate(layout.dims):
        if cut_factors(places):
            value = torch.cat([value.narrow(dim, start, stop - start) for start, stop in pieces(places, coordinate)], dim)
    return value


def put_together(values: Sequence[Tensor], layout: Layout, shape: Sequence[int], *, overlapping: str = "same") -> Tensor:
    """The whole value: the ranks' sum if it is partial, and their pieces at their places. Where pieces overlap they are equal, or added."""
    if not layout.is_cut:
        if layout.partial:
            return torch.stack(list(values)).sum(0)
        assert all(torch.equal(value, values[0]) for value in values)
        return values[0]
    total, count = values[0].new_zeros(shape), torch.zeros(tuple(shape))
    for coordinate, value in enumerate(values):
        index = index_of(layout, shape, coordinate)
        total[index] += value
        count[index] += 1
    return total if overlapping == "sum" or layout.partial else total / count


def index_of(layout: Layout, shape: Sequence[int], coordinate: int) -> tuple[Tensor, ...]:
    """The indices of a coordinate's piece, one open grid per dimension."""
    rows = [torch.cat([torch.arange(a, z) for a, z in pieces(places, coordinate)]) for places in layout.dims]
    return torch.meshgrid(*rows, indexing="ij") if rows else ()


def bounds_of(layout: Layout, parts: int) -> list[tuple[int, list[int]]]:
    """Every cut dimension with its ranges."""
    return [(dim, bounds(places, parts)) for dim, places in enumerate(layout.dims) if cut_factors(places)]


def sizes(layout: Layout) -> list[int]:
    return [int(size_of(dim)) for dim in layout.dims]
