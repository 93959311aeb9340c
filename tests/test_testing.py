"""`assert_parity`, as a user's own test suite calls it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import tpcompile
from tpcompile.demo.model import GPT, Config
from tpcompile.simulate import Divergence, Report, Tolerance


def batch(rows: int = 4) -> dict[str, Tensor]:
    ids = torch.randint(97, (rows, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(replace(Config(), layers=2)).double()


def test_a_model_that_trains_the_same_passes() -> None:
    tpcompile.testing.assert_parity(model(), "dp=2,pp=2,tp=2", batch(8))


def test_options_go_to_the_checker() -> None:
    tpcompile.testing.assert_parity(model(), "tp=2", batch(), microbatches=2, overrides={"*mlp": "whole"})


def test_a_difference_fails_with_the_report_and_the_first_value(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Divergence("value", "linear_3", 0.25, 0, "model.py:52")
    broken = Report("tp=2", Tolerance(1e-10, 1e-9), 4.6, 0.5, 0.0, {"mlp.down.bias": 0.125}, {}, first_divergence=first)
    monkeypatch.setattr("tpcompile.testing.check", lambda *args, **options: broken)
    with pytest.raises(AssertionError) as failure:
        tpcompile.testing.assert_parity(model(), "tp=2", batch())
    said = str(failure.value)
    assert said.startswith("the compiled model differs on dp=1,pp=1,tp=2\n")
    for words in ("DIFFERENT on tp=2", "mlp.down.bias", "value linear_3 in stage 0, off by 2.5e-01, from model.py:52"):
        assert words in re.sub(r"\s+", " ", said)
