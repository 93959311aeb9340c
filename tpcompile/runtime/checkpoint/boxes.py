"""Boxes: the parts of a whole tensor that ranks hold, and who writes which.

    c_attn.weight [64, 192], q, k and v stacked, on 2 ranks      a rank's local tensor [64, 96]
    rank 0   [0:64, 0:32]  [0:64, 64:96]    [0:64, 128:160]      at columns 0, 32, 64
    rank 1   [0:64, 32:64] [0:64, 96:128]   [0:64, 160:192]

Boxes of one rank do not overlap; those of different ranks may: replicas, weights of several stages, shared key/value heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tpcompile.errors import TpcompileError
from tpcompile.passes.emit import Piece

Index = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Index ranges along every dimension: where they start, and how long they are."""

    start: Index
    size: Index

    @property
    def stop(self) -> Index:
        return tuple(a + n for a, n in zip(self.start, self.size, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def meet(self, other: Box) -> Box | None:
        """What two boxes share; None if they share no element."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def without(self, other: Box) -> list[Box]:
        """Boxes that make up this one less another: a slab before and one after the other along each dimension."""
        if (shared := self.meet(other)) is None:
            return [self]
        rest, start, stop = [], list(self.start), list(self.stop)
        for dim in range(len(start)):
            for low, high in ((start[dim], shared.start[dim]), (shared.stop[dim], stop[dim])):
                if low < high:
                    ends = [*shared.stop[:dim], high, *stop[dim + 1 :]]
                    begins = (*shared.start[:dim], low, *start[dim + 1 :])
                    rest.append(Box(begins, tuple(b - a for a, b in zip(begins, ends, strict=True))))
        return rest

    def of(self, tensor: Tensor) -> Tensor:
        """The view of a tensor that the box names."""
        for dim, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor

    def moved(self, by: Sequence[int]) -> Box:
        return Box(tuple(a + step for a, step in zip(self.start, by, strict=True)), self.size)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True)
class Part:
    """A box of the whole tensor, and where it starts in the tensor that this rank holds."""

    box: Box
    at: Index

    def local(self, box: Box) -> Box:
        """Where a box inside this one is in the rank's tensor."""
        return box.moved([place - start for place, start in zip(self.at, self.box.start, strict=True)])


def parts(piece: Piece, shape: Sequence[int], held: Tensor) -> tuple[Part, ...]:
    """The boxes of a tensor of a global `shape` that a rank holds: its piece of it or, of a DTensor, its shard of that piece.

    Raises TpcompileError if what is held has another shape.
    """
    own = _of_piece(piece, tuple(shape))
    size = list(shape)
    if piece.dim is not None:
        size[piece.dim] = sum(stop - start for start, stop in piece.ranges)
    window = whole(size)
    if isinstance(held, DTensor):
        local, offset = compute_local_shape_and_global_offset(tuple(size), held.device_mesh, held.placements)
        window = Box(tuple(offset), tuple(local))
        held = held.to_local()
    if tuple(held.shape) != window.size:
        raise TpcompileError(f"a tensor of local shape {list(held.shape)} is held for the piece {window} of {list(shape)}")
    found = []
    for part in own:
        if (shared := part.local(part.box).meet(window)) is not None:
            start = tuple(a - place + b for a, place, b in zip(shared.start, part.at, part.box.start, strict=True))
            found.append(Part(Box(start, shared.size), shared.moved([-a for a in window.start]).start))
    return tuple(found)


def _of_piece(piece: Piece, shape: Index) -> list[Part]:
    if piece.dim is None:
        return [Part(whole(shape), (0,) * len(shape))]
    found, offset = [], 0
    for low, high in piece.ranges:
        if high > low:
            start, size, at = [0] * len(shape), list(shape), [0] * len(shape)
            start[piece.dim], size[piece.dim], at[piece.dim] = low, high - low, offset
            found.append(Part(Box(tuple(start), tuple(size)), tuple(at)))
            offset += high - low
    return found


def shared_out(held: Sequence[Mapping[str, Iterable[Box]]], bytes_of: Mapping[str, int]) -> list[list[tuple[str, Box]]]:
    """Which rank writes what, so that every element is written once: for each rank, names and boxes inside what it holds.

    `held` are every rank's boxes by name, `bytes_of` the size of an element. Of several holders, the one with the least to write does.
    """
    writes: list[list[tuple[str, Box]]] = [[] for _ in held]
    load = [0] * len(held)
    for name in dict.fromkeys(name for boxes in held for name in boxes):
        holders: dict[Box, list[int]] = {}
        for rank, boxes in enumerate(held):
            for box in boxes.get(name, ()):
                holders.setdefault(box, []).append(rank)
        taken: list[Box] = []
        for box, ranks in holders.items():
            left = [box]
            for other in taken:
                left = [piece for rest in left for piece in rest.without(other)]
            taken += left
            writer = min(dict.fromkeys(ranks), key=load.__getitem__)
            writes[writer] += [(name, piece) for piece in left]
            load[writer] += bytes_of[name] * sum(piece.numel for piece in left)
    return writes
