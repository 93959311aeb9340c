"""Look-ups and sums over a dimension of which each rank has a part: what a cut vocabulary needs.

    look_up(table, index, start, whole, padding)      rows of a table, [..., columns]; zeros where another rank holds the row
    own_entries(x, dim, index, start, whole, ignore)  entries of x along a dimension, as torch.gather; zeros where another rank holds it
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


def _exp_sum(x: Tensor, highest: Tensor, dim: int) -> Tensor:
    """Types of less than 32 bits are summed in float32."""
    shifted = x - highest
    return (shifted.float() if x.dtype in (torch.float16, torch.bfloat16) else shifted).exp().sum(dim, keepdim=True)


for _name, _arguments, _work in (
    ("look_up", "Tensor table, Tensor index, int start, int whole, int padding", _look_up),
    ("own_entries", "Tensor x, int dim, Tensor index, int start, int whole, int? ignore", _own_entries),
    ("exp_sum", "Tensor x, Tensor highest, int dim", _exp_sum),
):
    _library.define(f"{_name}({_arguments}) -> Tensor")
    _library.impl(_name, _work, "CompositeImplicitAutograd")

exp_sum = torch.ops.tpcompile.exp_sum.default
look_up = torch.ops.tpcompile.look_up.default
own_entries = torch.ops.tpcompile.own_entries.default
