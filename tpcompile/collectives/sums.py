"""Sums over an axis: of somebody's value as a new tensor, of one of our own in its place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tpcompile.collectives.groups import group_of, place
from tpcompile.collectives.pieces import summed_in


def plain(x: Tensor) -> bool:
    """Whether a tensor is run eagerly: nothing traces it, and nothing looks on."""
    return type(x) in (Tensor, nn.Parameter) and not torch._is_functional_tensor(x) and not torch._C._len_torch_dispatch_stack()


def all_reduce(x: Tensor, axis: str, how: str = "sum") -> Tensor:
    """The sum over an axis, or the largest, as a new tensor."""
    if place(axis)[1] == 1 or x.numel() == 0:
        return x.clone(memory_format=torch.contiguous_format)
    functional, given = torch.ops._c10d_functional, x if how == "max" else x.to(summed_in(x.dtype))
    made: Tensor = functional.wait_tensor.default(functional.all_reduce.default(given, how, group_of(axis)))
    return made.to(x.dtype)


def start_sum(made: Tensor, axis: str) -> Callable[[], Tensor]:
    """The sum over an axis, under way: what is computed before it is asked for runs meanwhile. `made` is contiguous, and is given up.

    Run eagerly, it is added up in its own place; while something traces, in a new tensor, of which a compiler can make the same.
    """
    if place(axis)[1] == 1 or made.numel() == 0:
        return lambda: made
    functional, wide = torch.ops._c10d_functional, made.to(summed_in(made.dtype))
    call = functional.all_reduce_.default if plain(made) else functional.all_reduce.default
    sent = call(wide, "sum", group_of(axis))

    def finish() -> Tensor:
        total: Tensor = functional.wait_tensor.default(sent)
        return total.to(made.dtype)

    return finish
