"""Models in bfloat16 beside the untouched model in bfloat16: other orders of adding up differ by its rounding, and by no more."""

from __future__ import annotations

import pytest
import torch
from parity_models import compiled, made
from vocabulary_models import words

import tpcompile
from tpcompile.simulate import compare
from tpcompile.simulate.report import Report

ROUNDED = 2 * torch.finfo(torch.bfloat16).eps
"""Two units in the last place: of the loss, and of gradients on the scale of the model's largest."""

CASES = {
    "tp=2": {},
    "tp=3": {"sequence_parallel": "regather"},
    "dp=2,pp=2,tp=2": {"outputs": "loss"},
    "pp=2,tp=2": {"sequence_parallel": False, "vocab_parallel": False},
}


@pytest.mark.parametrize("mesh", CASES)
@pytest.mark.parametrize("name", ["gpt", "llama", "neox", "bert", "encoder"])
def test_models(name: str, mesh: str) -> None:
    close(compare(made(name, torch.bfloat16)[0], compiled(name, mesh, torch.bfloat16, **CASES[mesh]), made(name)[1]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["mean", "sum", "untied, with a bias", "with a padding row", "smoothed", "weighed and smoothed", "far out"]
)
def test_losses_of_cut_scores(name: str) -> None:
    model, rows = words(name)
    close(tpcompile.check(model.to(torch.bfloat16), "tp=3", rows, microbatches=2))


def close(report: Report) -> None:
    """Bytes included: what is summed in float32 travels as that."""
    assert report.ok, f"\n{report}"
    assert max(report.loss_error, report.capture_error, *report.grad_errors.values()) <= ROUNDED, f"\n{report}"
