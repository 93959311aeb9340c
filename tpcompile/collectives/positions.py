"""The operators of sequence parallelism: values cut along their positions, in pieces that differ by one at most, the longer first.

`length` is the whole dimension's, which may be known only when the program runs. Where it does not divide, pieces are padded for the
transport, and cut after.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpcompile.collectives.groups import check_bound, group_of, place
from tpcompile.collectives.pieces import summed_in


def piece(length: int, coordinate: int, parts: int) -> tuple[int, int]:
    """Where a coordinate's piece starts, and how long it is.

    >>> [piece(7, c, 3) for c in range(3)]
    [(0, 3), (3, 2), (5, 2)]
    """
    return coordinate * (length // parts) + min(coordinate, length % parts), (length + parts - 1 - coordinate) // parts


def all_gather_positions(x: Tensor, axis: str, dim: int, length: int) -> Tensor:
    """All coordinates' pieces, put together."""
    return start_gather(x, axis, dim, length)()


def start_gather(x: Tensor, axis: str, dim: int, length: int) -> Callable[[], Tensor]:
    """The same, under way: what is computed before the result is asked for runs meanwhile."""
    parts = place(axis)[1]
    if parts == 1:
        return partial(x.clone, memory_format=torch.contiguous_format)
    functional = torch.ops._c10d_functional
    if _in_rows(x, dim, length, parts):
        gathered = functional.all_gather_into_tensor.default(x.contiguous(), parts, group_of(axis))
        return lambda: torch.cat(functional.wait_tensor.default(gathered).chunk(parts), dim)
    longest = -(-length // parts)
    rows = _padded(x.movedim(dim, 0), longest)
    sent = bool(rows.numel())
    if sent:
        rows = functional.all_gather_into_tensor.default(rows, parts, group_of(axis))

    def finish() -> Tensor:
        made: Tensor = functional.wait_tensor.default(rows) if sent else rows.new_zeros([longest * parts, *rows.shape[1:]])
        if length % parts:
            made = torch.cat([made.narrow(0, c * longest, piece(length, c, parts)[1]) for c in range(parts)])
        return made.movedim(0, dim).contiguous()

    return finish


def reduce_scatter_positions(x: Tensor, axis: str, dim: int, length: int) -> Tensor:
    """This coordinate's piece of the sum over all."""
    return start_scatter(x, axis, dim, length)()


def start_scatter(x: Tensor, axis: str, dim: int, length: int) -> Callable[[], Tensor]:
    """The same, under way."""
    coordinate, parts = place(axis)
    if parts == 1:
        return partial(x.clone, memory_format=torch.contiguous_format)
    functional = torch.ops._c10d_functional
    if _in_rows(x, dim, length, parts):
        together = torch.cat(x.to(summed_in(x.dtype)).chunk(parts, dim))
        summed = functional.reduce_scatter_tensor.default(together, "sum", parts, group_of(axis))
        return lambda: functional.wait_tensor.default(summed).to(x.dtype)
    longest, (_, own) = -(-length // parts), piece(length, coordinate, parts)
    rows = x.movedim(dim, 0)
    if length % parts:
        rows = torch.cat([_padded(rows.narrow(0, *piece(length, c, parts)), longest) for c in range(parts)])
    rows = rows.to(summed_in(x.dtype)).contiguous()
    sent = bool(rows.numel())
    if sent:
        rows = functional.reduce_scatter_tensor.default(rows, "sum", parts, group_of(axis))

    def finish() -> Tensor:
        made: Tensor = functional.wait_tensor.default(rows) if sent else rows
        return made.to(x.dtype).narrow(0, 0, own).movedim(0, dim).contiguous()

    return finish


def _in_rows(x: Tensor, dim: int, length: int, parts: int) -> bool:
    """Whether there are several rows of equal pieces: these are sent as they lie, and put in order with one copy of the whole."""
    return length % parts == 0 and length > 0 and math.prod(x.shape[:dim]) > 1 and x.numel() > 0


def own_positions(x: Tensor, axis: str, dim: int, length: int) -> Tensor:
    """This coordinate's piece of a whole value, in memory of its own: an operator must not return a view of its input."""
    return x.narrow(dim, *piece(length, *place(axis))).clone(memory_format=torch.contiguous_format)


def _padded(rows: Tensor, longest: int) -> Tensor:
    if rows.shape[0] == longest:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros([longest - rows.shape[0], *rows.shape[1:]])])


def _define(name: str, forward: Callable[..., Tensor], backward: Callable[..., Tensor], first_order: Callable[[Any], Any]) -> None:
    """An operator of this family: `forward` and `backward` take (x, axis, dim, length)."""

    def run(x: Tensor, axis: str, dim: int, length: int) -> Tensor:
        check_bound(axis)
        return forward(x, axis, dim, length)

    def fake(x: Tensor, axis: str, dim: int, length: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = length if forward is all_gather_positions else piece(length, *place(axis))[1]
        return x.new_empty(shape)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.rest = inputs[1:]

    schema = "(Tensor x, str axis, int dim, SymInt length) -> Tensor"
    made = torch.library.custom_op(f"tpcompile::{name}", run, mutates_args=(), schema=schema)
    made.register_fake(fake)
    made.register_autograd(first_order(lambda ctx, grad: (backward(grad, *ctx.rest), None, None, None)), setup_context=setup)


def define(first_order: Callable[[Any], Any]) -> None:
    """Register the operators. `first_order` guards a backward against being recorded itself."""
    _define("seq_scatter", reduce_scatter_positions, all_gather_positions, first_order)
    _define("seq_gather", all_gather_positions, reduce_scatter_positions, first_order)
    _define("seq_whole", all_gather_positions, own_positions, first_order)
    _define("seq_slice", own_positions, all_gather_positions, first_order)
