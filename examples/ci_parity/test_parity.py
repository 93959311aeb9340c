"""Fails when a change makes the model train otherwise on a mesh than on one device; runs in one process, without a GPU."""

from __future__ import annotations

import pytest
import torch
from model import Classifier

import tpcompile


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "pp=2", "dp=2,pp=2,tp=2"])
def test_trains_the_same_in_parallel(mesh: str) -> None:
    torch.manual_seed(0)
    batch = {"tokens": torch.randint(100, (8, 12)), "labels": torch.randint(7, (8,))}
    tpcompile.testing.assert_parity(Classifier().double(), mesh, batch)
