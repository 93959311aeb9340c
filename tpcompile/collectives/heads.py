"""Key/value heads for the query heads of one rank, where these do not share them evenly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_library: Any = torch.library.Library("tpcompile", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("pick(Tensor x, int dim, int[] indices) -> Tensor")


def _pick(x: Tensor, dim: int, indices: Sequence[int]) -> Tensor:
    """The entries of a dimension at these indices, repeated where an index is."""
    return x.index_select(dim, torch.tensor(indices, dtype=torch.int64, device=x.device))


_library.impl("pick", _pick, "CompositeImplicitAutograd")

pick = torch.ops.tpcompile.pick.default
