"""Our operators in torch's own and three calls between ranks, for formats that hold a forward alone: ONNX and AOTInductor's packages.

They are written for any length of the sequence: without a choice between two sizes, which tracing would settle. A reduce-scatter is an
all-reduce and a slice, which moves more bytes than training does, and computes the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpcompile.collectives import held_by, holders, length, ops, place, take


@dataclass(frozen=True)
class Calls:
    """What a format says for the calls between ranks. They are asked for axes of more than one rank, in tensors that are contiguous."""

    all_reduce: Callable[[Tensor, str], Tensor]
    all_gather: Callable[[Tensor, str], Tensor]  # all ranks' tensors one after another along the first dimension
    largest: Callable[[Tensor, str], Tensor]


def decompositions(calls: Calls) -> dict[Any, Callable[..., Any]]:
    """What stands for each of our operators, as `ExportedProgram.run_decompositions` takes it."""
    spelled = _Spelled(calls)
    return {
        ops.enter.default: lambda x, *rest: x.clone(),
        ops.enter_later.default: lambda x, *rest: x.clone(),
        ops.shared.default: lambda x, *rest: x.clone(),
        ops.reduce.default: spelled.all_reduce,
        ops.reduce_max.default: spelled.largest,
        ops.gather.default: spelled.gather,
        ops.local_slice.default: _local_slice,
        ops.seq_gather.default: spelled.gather_positions,
        ops.seq_whole.default: spelled.gather_positions,
        ops.seq_scatter.default: spelled.scatter_positions,
        ops.seq_slice.default: _own_positions,
        ops.enter_linear.default: lambda x, axis, weights, biases: _linears(x, weights, biases),
        ops.kept_linear.default: spelled.linears,
        ops.seq_linear.default: spelled.linears,
    }


class _Spelled:
    """The operators that communicate."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        return x.clone() if place(axis)[1] == 1 else self._calls.all_reduce(x.contiguous(), axis)

    def largest(self, x: Tensor, axis: str) -> Tensor:
        return x.clone() if place(axis)[1] == 1 else self._calls.largest(x.contiguous(), axis)

    def gather(self, x: Tensor, axis: str, dim: int, bounds: Sequence[int]) -> Tensor:
        """Pieces are filled up to the longest with zeros, and cut after."""
        parts = place(axis)[1]
        longest = max(length(held_by(bounds, c, parts)) for c in range(parts))
        rows = x.movedim(dim, 0)
        if rows.shape[0] < longest:
            rows = torch.cat([rows, rows.new_zeros([longest - rows.shape[0], *rows.shape[1:]])])
        gathered = self._calls.all_gather(rows.contiguous(), axis) if parts > 1 else rows
        taken = [gathered.narrow(0, holder * longest + at, stop - start) for start, stop, holder, at in holders(bounds, parts)]
        return torch.cat(taken).movedim(0, dim).contiguous()

    def gather_positions(self, x: Tensor, axis: str, dim: int, length: int) -> Tensor:
        """Pieces are filled up to the longest with their last position, and cut after."""
        parts = place(axis)[1]
        if parts == 1:
            return x.clone()
        longest = (length + parts - 1) // parts
        rows = x.movedim(dim, 0)
        filled = rows.index_select(0, torch.arange(longest, device=x.device).clamp(max=rows.shape[0] - 1))
        gathered = self._calls.all_gather(filled.contiguous(), axis)
        pieces = [gathered.narrow(0, c * longest, _piece(length, c, parts)[1]) for c in range(parts)]
        return torch.cat(pieces).movedim(0, dim).contiguous()

    def scatter_positions(self, x: Tensor, axis: str, dim: int, length: int) -> Tensor:
        return _own_positions(self.all_reduce(x, axis), axis, dim, length)

    def linears(self, x: Tensor, axis: str, dim: int, length: int, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
        return _linears(self.gather_positions(x, axis, dim, length), weights, biases)


def _linears(whole: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    return [torch.nn.functional.linear(whole, weight, biases[i] if biases else None) for i, weight in enumerate(weights)]


def _local_slice(x: Tensor, axis: str, dim: int, bounds: Sequence[int]) -> Tensor:
    return take(x, dim, held_by(bounds, *place(axis)))


def _own_positions(x: Tensor, axis: str, dim: int, length: int) -> Tensor:
    return x.narrow(dim, *_piece(length, *place(axis))).contiguous().clone()


def _piece(length: int, coordinate: int, parts: int) -> tuple[int, int]:
    """As `tpcompile.collectives.piece`, for a length that is open."""
    lengths = [(length + parts - 1 - c) // parts for c in range(coordinate + 1)]
    return sum(lengths[:-1]), lengths[-1]
