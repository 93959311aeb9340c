"""A batch for a program on disk, made from its manifest alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tpcompile.export.outline import program_of
from tpcompile.export.read import Saved
from tpcompile.export.traced import LARGEST
from tpcompile.layout import Size, TensorType

LENGTH = 8
"""Of every size that is open, but the number of rows."""


def made_batch(saved: Saved, seed: int = 0) -> dict[str, Any]:
    """A batch with two rows in every micro-batch of every replica, by the paths of its tensors: numbers 0 and 1, or normal ones."""
    program, generator = program_of(saved), torch.Generator().manual_seed(seed)
    rows = 2 * saved.mesh.dp * int(saved.content["options"]["microbatches"])
    parts = saved.mesh.dp * int(saved.content["options"]["microbatches"])
    batch: dict[str, Any] = dict(program.guards.leaves) if program.guards else {}
    for name, entry in program.inputs.items():
        kind = program.types[name]
        assert isinstance(kind, TensorType)
        shape = [_length(size, dim == entry.batch_dim, rows, parts) for dim, size in enumerate(kind.shape)]
        batch[entry.path] = _values(shape, kind.dtype, generator)
    return batch


def _length(size: Size, counts_rows: bool, rows: int, parts: int) -> int:
    if isinstance(size, int):
        return size * parts if counts_rows else size
    return rows if counts_rows else int(size.subs(dict.fromkeys(size.free_symbols, LENGTH)))


def _values(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    return torch.randint(LARGEST, shape, generator=generator).to(dtype)


def nested(batch: Mapping[str, Any]) -> dict[str, Any]:
    """{"past.key": k} as forward takes it: {"past": {"key": k}}."""
    found: dict[str, Any] = {}
    for path, value in batch.items():
        *outer, last = path.split(".")
        place = found
        for word in outer:
            place = place.setdefault(word, {})
        place[last] = value
    return found
