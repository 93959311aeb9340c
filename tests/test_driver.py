"""The compiler as a guest of its process."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import tpcompile
from tpcompile import driver


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).sum()


def test_what_a_large_compile_left_is_collected_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier program is part of cycles: only a collection of old objects finds it."""
    monkeypatch.setattr(driver, "MANY", 0)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)  # what files of tests have left is frozen
    held = Pair()
    held.__dict__["again"], gone = held, weakref.ref(held)
    tpcompile.compile(Pair(), "tp=2", {"x": torch.rand(2, 4)})
    del held
    gc.collect(1)
    assert gone() is not None and gc.isenabled()
    tpcompile.compile(Pair(), "tp=2", {"x": torch.rand(2, 4)})
    assert gone() is None and gc.isenabled()


def test_what_is_frozen_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MANY", 0)
    gc.freeze()
    frozen = gc.get_freeze_count()
    tpcompile.compile(Pair(), "tp=2", {"x": torch.rand(2, 4)})
    assert frozen / 2 < gc.get_freeze_count() <= frozen  # some of it is freed
