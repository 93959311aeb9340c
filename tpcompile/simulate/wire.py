"""What the ranks of a lockstep run hand to each other, noted where it moves.

Nothing here knows the table of collectives or the program's formulas: the bytes are those of the tensors that are moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tpcompile.collectives import held_by, holders, overlap, piece, spread, summed_in, take

Work = Callable[..., Sequence[Tensor]]
"""A function of a value on all ranks."""


@dataclass(frozen=True)
class Moved:
    """One call of a process group: what one rank gave to it."""

    stage: int  # the place along the pipeline of the rank
    axis: str
    direction: str  # "forward" or "backward"; "step" for what is done once for all micro-batches
    call: str
    value: str
    bytes: int


@dataclass(frozen=True)
class Total:
    """The calls of one kind that a rank of a stage made in a step."""

    stage: int  # the place along the pipeline
    axis: str  # "tp", "pp" or "dp"
    direction: str  # "forward", "backward" or "step"
    call: str  # all_reduce, all_gather, reduce_scatter, broadcast or send
    count: int  # of a rank's calls
    bytes: int | None  # None where a formula has a size that only a run of the model gives


@dataclass
class Wire:
    """All calls so far, in their order. `rank` is the tensor coordinate whose bytes are noted."""

    rank: int = 0
    moved: list[Moved] = field(default_factory=list)

    def note(self, stage: int, axis: str, direction: str, call: str, value: str, *tensors: Tensor) -> None:
        if total := sum(tensor.numel() * tensor.element_size() for tensor in tensors):
            self.moved.append(Moved(stage, axis, direction, call, value, total))

    def line(self, stage: int, value: str, axis: str = "tp") -> Line:
        return Line(self, stage, axis, value)

    def totals(self) -> tuple[Total, ...]:
        """How often, and how much, by stage, axis, direction and call."""
        counts, sizes = Counter[tuple[int, str, str, str]](), Counter[tuple[int, str, str, str]]()
        for m in self.moved:
            counts[m.stage, m.axis, m.direction, m.call] += 1
            sizes[m.stage, m.axis, m.direction, m.call] += m.bytes
        return tuple(Total(*key, counts[key], sizes[key]) for key in sorted(counts))


@dataclass(frozen=True)
class Line:
    """What one operator can do over its axis: functions of its value on all ranks. They are called in forward, or in backward."""

    wire: Wire
    stage: int
    axis: str
    value: str

    def note(self, direction: str, call: str, *tensors: Tensor) -> None:
        self.wire.note(self.stage, self.axis, direction, call, self.value, *tensors)

    def sums(self, direction: str) -> Work:
        """Every rank gets the sum."""

        def work(*values: Tensor) -> list[Tensor]:
            wide = [value.to(summed_in(value.dtype)) for value in values]
            self.note(direction, "all_reduce", wide[self.wire.rank])
            total = torch.stack(wide).sum(0)
            return [total.to(value.dtype, copy=True) for value in values]

        return work

    def highest(self, direction: str) -> Work:
        """Every rank gets the largest of each element."""

        def work(*values: Tensor) -> list[Tensor]:
            self.note(direction, "all_reduce", values[self.wire.rank])
            highest = torch.stack(values).amax(0)
            return [highest.clone() for _ in values]

        return work

    def sums_of_common(self, direction: str, dim: int, bounds: Sequence[int]) -> Work:
        """Every rank gets the sum of what several hold, in its own piece."""

        def work(*pieces: Tensor) -> list[Tensor]:
            ranks, whole = len(pieces), max(bounds)
            if not (several := overlap(bounds, ranks)):
                return list(pieces)
            wide = [held.to(summed_in(held.dtype)) for held in pieces]
            full = [spread(held, dim, held_by(bounds, c, ranks), whole) for c, held in enumerate(wide)]
            self.note(direction, "all_reduce", take(full[self.wire.rank], dim, several))
            total = torch.stack(full).sum(0).to(pieces[0].dtype)
            return [take(total, dim, held_by(bounds, c, ranks)) for c in range(ranks)]

        return work

    def whole(self, direction: str, dim: int, bounds: Sequence[int]) -> Work:
        """Every rank gets the whole value; pieces travel as long as the longest."""

        def work(*pieces: Tensor) -> list[Tensor]:
            self.note(direction, "all_gather", max(pieces, key=Tensor.numel))
            runs = holders(bounds, len(pieces))
            whole = torch.cat([pieces[holder].narrow(dim, at, stop - start) for start, stop, holder, at in runs], dim)
            return [whole.clone() for _ in pieces]

        return work

    def all_positions(self, direction: str, dim: int) -> Work:
        """Every rank gets the whole value; pieces are consecutive, and travel as long as the longest."""

        def work(*pieces: Tensor) -> list[Tensor]:
            self.note(direction, "all_gather", max(pieces, key=Tensor.numel))
            return [torch.cat(pieces, dim) for _ in pieces]

        return work

    def own_positions(self, dim: int, length: int) -> Work:
        """Every rank keeps its piece of its own value."""

        def work(*values: Tensor) -> list[Tensor]:
            return [value.narrow(dim, *piece(length, rank, len(values))).contiguous() for rank, value in enumerate(values)]

        return work

    def summed_positions(self, direction: str, dim: int, length: int) -> Work:
        """Every rank gets its piece of the sum; pieces travel as long as the longest."""

        def work(*values: Tensor) -> list[Tensor]:
            wide = [value.to(summed_in(value.dtype)) for value in values]
            longest = wide[0].narrow(dim, 0, piece(length, 0, len(values))[1])
            self.note(direction, "reduce_scatter", *[longest] * len(values))
            total = torch.stack(wide).sum(0).to(values[0].dtype)
            return list(self.own_positions(dim, length)(*[total] * len(values)))

        return work

    def sends(self, direction: str) -> Work:
        """Every rank sends its value to its neighbour along the axis."""

        def work(*values: Tensor) -> list[Tensor]:
            self.note(direction, "send", values[self.wire.rank])
            return copies(*values)

        return work


def copies(*values: Tensor) -> list[Tensor]:
    """Nothing moves."""
    return [value.clone() for value in values]
