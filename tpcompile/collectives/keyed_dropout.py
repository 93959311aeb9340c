"""Dropout whose mask depends on its key alone, so that recomputing it, or running it on another rank, gives the same one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library: Any = torch.library.Library("tpcompile", "FRAGMENT")  # type: ignore[no-untyped-call]


def mix(*numbers: int) -> int:
    """One 63-bit seed from whole numbers: each is added to the state, which then goes through the finalizer of splitmix64.

    Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (OOPSLA 2014), section 4; constants of Stafford's variant 13.
    """
    mask, state = (1 << 64) - 1, 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1


@torch.library.custom_op("tpcompile::dropout_mask", mutates_args=())
def _dropout_mask(x: Tensor, p: float, rng_key: Tensor, site: int, offset: int) -> Tensor:
    """Which elements of `x` stay. The key is read on the host: on a GPU, keep it in host memory, or every dropout waits."""
    generator = torch.Generator(device=x.device).manual_seed(mix(*rng_key.flatten().tolist(), site, offset))
    return torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p, generator=generator)


@_dropout_mask.register_fake
def _(x: Tensor, p: float, rng_key: Tensor, site: int, offset: int) -> Tensor:
    return torch.empty(x.shape, dtype=torch.bool, device=x.device)


def _dropout(x: Tensor, p: float, rng_key: Tensor, site: int, offset: int) -> Tensor:
    mask: Tensor = torch.ops.tpcompile.dropout_mask.default(x, p, rng_key, site, offset)
    return x * mask * (0.0 if p >= 1 else 1 / (1 - p))


_library.define("dropout(Tensor x, float p, Tensor rng_key, int site, int offset) -> Tensor")
_library.impl("dropout", _dropout, "CompositeImplicitAutograd")
