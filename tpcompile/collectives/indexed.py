"""Random numbers that depend on the seed, the step, the site, and where an element lies in the value of the whole batch: nothing else.

Element number i of a value, counted row by row over its whole shape, stays if the i-th number of a stream is at least p. The streams
are those of SplitMix64, a generator without state between its numbers: number i of stream k is finalize(k + (i + 1) · GAMMA).
Any rank can so compute the mask of any piece.

Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (OOPSLA 2014), figure 14 and section 4; the finalizer's constants are
variant 13 of D. Stafford's: Better Bit Mixing (2011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.collectives.keyed_dropout import mix

GAMMA = 0x9E3779B97F4A7C15 - 2**64
"""The odd number nearest to 2^64 divided by the golden ratio, as a signed one: what two neighbouring numbers of a stream are apart."""

ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""How many elements are worked on at a time: on a CPU, so that the dozen passes over numbers of eight bytes stay in a cache; elsewhere, so
that these numbers need little memory."""

OWN = -2
"""In the place of the dimension that counts rows: a part of a batch has numbers of its own, wherever its rows are."""

_library: Any = torch.library.Library("tpcompile", "FRAGMENT")  # type: ignore[no-untyped-call]


def finalize(z: Tensor) -> Tensor:
    """The finalizer of SplitMix64, in place, on 64-bit numbers of which torch knows the signed kind alone. int64[...]."""
    for shift, factor in ROUNDS:
        z.bitwise_xor_(_shifted(z, shift)).mul_(factor)
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: Tensor, by: int) -> Tensor:
    """A shift that brings in zeros, not the sign."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def kept(x: Tensor, p: float, rng_key: Tensor, site: int, rows: int, cuts: Sequence[int]) -> Tensor:
    """Which elements of `x` stay: bool, in the shape of `x`."""
    if p >= 1:
        return torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    if x.dim() == 0:
        return kept(x[None], p, rng_key, site, rows, cuts)[0]
    outer, inner = _states(x.shape, rng_key.to(x.device).flatten(), site, rows, cuts)
    least = math.ceil(p * 2**64) - 2**63
    plain = type(x) in (Tensor, nn.Parameter) and not torch._is_functional_tensor(x) and not torch._C._len_torch_dispatch_stack()
    chunk = CHUNK.get(x.device.type, 1 << 24)
    if not plain or x.numel() <= chunk:
        return (finalize(outer[:, None] + inner) >= least).view(x.shape)
    mask = torch.empty(outer.shape[0], inner.shape[0], dtype=torch.bool, device=x.device)
    at_once = max(1, chunk // inner.shape[0])
    for start in range(0, outer.shape[0], at_once):
        torch.ge(finalize(outer[start : start + at_once, None] + inner), least, out=mask[start : start + at_once])
    return mask.view(x.shape)


def _states(shape: Sequence[Any], key: Tensor, site: int, rows: int, cuts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The stream's key + (i + 1) · GAMMA, as a sum of a number for all dimensions but the last and one for the last.

    A whole dimension behind a cut one is counted with it: together they are a range.
    """
    special: dict[int, tuple[Any, Any]] = {dim: (start, whole) for dim, start, whole in zip(cuts[::3], cuts[1::3], cuts[2::3], strict=True)}
    vectors: list[Tensor] = []
    stride: Any = 1  # of the dimension at hand, in elements of the whole value
    run: Any = 1  # the size of the whole dimensions behind it that are counted with it
    for dim in reversed(range(len(shape))):
        if 0 < dim < len(shape) - 1 and dim != rows and dim not in special:
            run = run * shape[dim]
            continue
        size = shape[dim]
        positions = torch.arange(size * run, device=key.device)
        start, whole = (key[1] * size, key[2] * size) if dim == rows else special.get(dim, (0, size))
        if dim == rows or dim in special:
            positions += start * run
        vectors.insert(0, positions.mul_(stride).mul_(GAMMA))
        stride, run = stride * whole * run, 1
    outer = key[:1] + (mix(site) + GAMMA)
    if rows == OWN:
        outer = outer + finalize(key[1:2] * GAMMA)
    for vector in vectors[:-1]:
        outer = (outer[:, None] + vector).flatten()
    return outer, vectors[-1]


def _dropout_at(x: Tensor, p: float, rng_key: Tensor, site: int, rows: int = -1, cuts: Sequence[int] = ()) -> Tensor:
    return x * kept(x, p, rng_key, site, rows, cuts) * (0.0 if p >= 1 else 1 / (1 - p))


DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Binary places of a number between 0 and 1 that is a multiple of the smallest: as torch.rand has them."""


def _uniform(size: Sequence[Any], rng_key: Tensor, site: int, rows: int = -1, *, dtype: torch.dtype) -> Tensor:
    digits = DIGITS[dtype]
    outer, inner = _states(size or [1], rng_key.flatten(), site, rows, ())
    places = _shifted(finalize(outer[:, None] + inner), 64 - digits)
    return (places.to(dtype) * 2.0**-digits).view(size)


_library.define("dropout_at(Tensor x, float p, Tensor rng_key, int site, int rows=-1, SymInt[] cuts=[]) -> Tensor")
_library.impl("dropout_at", _dropout_at, "CompositeImplicitAutograd")
"""`rows` is the dimension that counts the batch's rows; -1 is for a value that all rows share, or a batch that is not divided. `cuts`
are triples (dimension, start, whole): the piece has of this dimension what follows `start`, of `whole` elements. Starts may be computed
when the program runs. `rng_key` is int64[3]: the mixed seed and step, which part of the batch's rows this is, and of how many."""

_library.define("uniform(SymInt[] size, Tensor rng_key, int site, int rows=-1, *, ScalarType dtype) -> Tensor")
_library.impl("uniform", _uniform, "CompositeImplicitAutograd")
"""Numbers in [0, 1) on the key's device; with `rows=OWN` each part of the batch's rows has others."""
