"""In which types a model computes: held parameters stay in their own, and are cast where they are used.

    "bf16", "fp16"   floating parameters of 32 bits or more, and floating inputs of forward, are cast; buffers keep their types

What the model itself casts, such as a loss or a norm in float32, it casts as before. Gradients are in the held type; sums over ranks of
values of 16 bits are taken in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from tpcompile.errors import InputError, caller

TYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: str | None) -> str | None:
    """Raises InputError for a precision that there is not."""
    if precision is not None and precision not in TYPES:
        at, fix = (
            f"compile(precision={precision!r})",
            'use precision="bf16" or "fp16", or leave it out to compute in the model\'s own types',
        )
        raise InputError(f"there is no precision {precision!r}", at=at, source=caller(), fix=fix)
    return precision


def held_types(model: nn.Module) -> dict[str, torch.dtype]:
    """The types of a model's parameters, by every name."""
    return {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}


def narrowed(dtype: torch.dtype, precision: str) -> torch.dtype:
    """The type in which a value of a type is computed with."""
    return TYPES[precision] if dtype in (torch.float32, torch.float64) else dtype


@contextmanager
def computing_in(model: nn.Module, precision: str | None) -> Iterator[None]:
    """While it lasts, the model's parameters are copies in the type that it computes in; the model itself is not changed."""
    if precision is None:
        yield
        return
    made: dict[int, nn.Parameter] = {}
    for p in model.parameters():
        made[id(p)] = nn.Parameter(p.detach().to(narrowed(p.dtype, precision)), requires_grad=p.requires_grad)
    named = {name: made[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    with _reparametrize_module(model, named):  # type: ignore[arg-type]
        yield
