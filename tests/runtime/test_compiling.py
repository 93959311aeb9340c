"""Which parts of a program go through a backend of torch.compile, and why none do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tpcompile
from tpcompile.backend import unit
from tpcompile.demo.model import gpt
from tpcompile.errors import InputError

BATCH = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "labels": torch.zeros(2, 8, dtype=torch.long)}
USUAL: dict[str, Any] = {"schedule": "1f1b", "pp": 1, "dp": 1, "data_parallel": "ddp", "recompute": "none"}


@pytest.mark.parametrize(
    ("changed", "of", "reason"),
    [
        ({}, "stage", ""),
        ({"pp": 2}, "stage", ""),
        ({"dp": 2}, "layer", ""),
        ({"dp": 2, "pp": 2}, "stage", ""),
        ({"dp": 2, "pp": 2, "data_parallel": "zero3"}, "layer", ""),
        ({"recompute": "full"}, "layer", ""),
        ({"recompute": "selective"}, None, "the core of attention that runs again in backward is a part of a layer's graph"),
        ({"pp": 2, "schedule": "zbv"}, None, "schedule zbv divides backward in two, and that of a compiled graph is one piece"),
        ({"pp": 1, "schedule": "zbv"}, "stage", ""),
    ],
)
def test_what_is_compiled(changed: dict[str, Any], of: str | None, reason: str) -> None:
    assert unit("inductor", 2, **USUAL | changed) == (of, reason)
    assert unit("inductor", 13, **USUAL | changed) == ("layer" if of else None, reason), "deep stages are compiled by layers"
    assert unit("inductor", 0, **USUAL | changed) == ("stage" if of else None, reason), "there are no layers"
    assert unit(None, 2, **USUAL | changed) == (None, "")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        tpcompile.compile(gpt(), "tp=2", BATCH, backend="inducter")
    assert caught.value.what == "torch.compile has no backend 'inducter'" and "inductor" in caught.value.fix
