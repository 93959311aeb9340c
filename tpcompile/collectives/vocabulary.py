"""Look-ups and sums over a dimension of which each rank has a part: what a cut vocabulary needs.

    look_up(table, index, start, whole, padding)      rows of a table, [..., columns]; zeros where another rank holds the row
    own_entries(x, dim, index, start, whole, ignore)  entries of x along a dimension, as torch.gather; zeros where another rank holds it
    own_scatter(x, dim, index, value, start, whole)   x with a number at some places along a dimension, as torch.scatter: at the own ones
    own_one_hot(index, start, held, whole)            the own columns of torch.one_hot(index, whole), `held` of them
    own_place(x, highest, dim, start, whole)          minus the first own index where x is the highest, which stays, of size one
    exp_sum(x, highest, dim)                          the sum of exp(x - highest) along a dimension, which stays, of size one

Indices count the whole dimension, of size `whole`; the local part starts at `start`. The ranks' sum is the whole operation's value, and
its gradient is right on every rank. An index that no rank holds is an error on all of them, as it is on one device; `ignore` is none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_library: Any = torch.library.Library("tpcompile", "FRAGMENT")  # type: ignore[no-untyped-call]


def _local(index: Tensor, start: int, held: int, whole: int, ignore: int | None = None) -> tuple[Tensor, Tensor]:
    """Indices into the local part, any where another rank holds it, and which these are."""
    known = (index >= 0) & (index < whole)
    skipped = torch.zeros_like(known) if ignore is None else index == ignore
    torch._assert_async((known | skipped).all(), f"an index is out of range: the size is {whole}")
    away = (index < start) | (index >= start + held) | skipped
    return (index - start).masked_fill(away, 0), away


def _look_up(table: Tensor, index: Tensor, start: int, whole: int, padding: int) -> Tensor:
    """`padding` is the row without a gradient, -1 for none."""
    held = table.shape[0]
    places, away = _local(index, start, held, whole)
    own = padding - start if start <= padding < start + held else None
    return functional.embedding(places, table, own).masked_fill(away.unsqueeze(-1), 0)


def _own_entries(x: Tensor, dim: int, index: Tensor, start: int, whole: int, ignore: int | None) -> Tensor:
    places, away = _local(index, start, x.shape[dim], whole, ignore)
    return x.gather(dim, places).masked_fill(away, 0)


def _own_scatter(x: Tensor, dim: int, index: Tensor, value: float, start: int, whole: int) -> Tensor:
    """What other ranks have is written behind the end, and left out."""
    held = x.shape[dim]
    places, away = _local(index, start, held, whole)
    longer = torch.cat([x, x.narrow(dim, 0, 1)], dim)
    return longer.scatter(dim, places.masked_fill(away, held), value).narrow(dim, 0, held)


def _own_one_hot(index: Tensor, start: int, held: int, whole: int) -> Tensor:
    places, away = _local(index, start, held, whole)
    words = torch.arange(held, device=index.device, dtype=index.dtype)
    return (places.masked_fill(away, -1).unsqueeze(-1) == words).to(torch.int64)


def _own_place(x: Tensor, highest: Tensor, dim: int, start: int, whole: int) -> Tensor:
    """Minus the last index of all where it is not here: the largest of all ranks' is the place."""
    at = x == highest
    first = at.to(torch.uint8).argmax(dim, keepdim=True) + start
    return -first.where(at.any(dim, keepdim=True), whole - 1)


def _exp_sum(x: Tensor, highest: Tensor, dim: int) -> Tensor:
    """Types of less than 32 bits are summed in float32."""
    shifted = x - highest
    return (shifted.float() if x.dtype in (torch.float16, torch.bfloat16) else shifted).exp().sum(dim, keepdim=True)


for _name, _arguments, _work in (
    ("look_up", "Tensor table, Tensor index, int start, int whole, int padding", _look_up),
    ("own_entries", "Tensor x, int dim, Tensor index, int start, int whole, int? ignore", _own_entries),
    ("own_scatter", "Tensor x, int dim, Tensor index, Scalar value, int start, int whole", _own_scatter),
    ("own_one_hot", "Tensor index, int start, int held, int whole", _own_one_hot),
    ("own_place", "Tensor x, Tensor highest, int dim, int start, int whole", _own_place),
    ("exp_sum", "Tensor x, Tensor highest, int dim", _exp_sum),
):
    _library.define(f"{_name}({_arguments}) -> Tensor")
    _library.impl(_name, _work, "CompositeImplicitAutograd")

exp_sum = torch.ops.tpcompile.exp_sum.default
look_up = torch.ops.tpcompile.look_up.default
own_entries = torch.ops.tpcompile.own_entries.default
own_one_hot = torch.ops.tpcompile.own_one_hot.default
own_place = torch.ops.tpcompile.own_place.default
own_scatter = torch.ops.tpcompile.own_scatter.default
