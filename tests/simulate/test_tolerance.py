"""How far numbers may be apart: by the type of the model, and of its loss."""

from __future__ import annotations

import pytest
import training_workers as workers

import tpcompile


@pytest.mark.parametrize("model", [workers.gpt2, workers.llama])
def test_a_float64_model_with_a_float32_loss(model: object) -> None:
    """Its own loss casts the logits to float32: the parts of micro-batches are rounded, and the whole one is."""
    assert callable(model)
    assert tpcompile.check(model(), "dp=2,pp=2,tp=2", workers.batch()).ok, "scores that are cut are rounded in other places"
    report = tpcompile.check(model(), "dp=2,pp=2,tp=2", workers.batch(), vocab_parallel=False)
    assert report.ok, report
    assert report.tolerance.loss == 2 * 2**-23
    assert max(report.grad_errors.values()) < 1e-9


def test_a_float64_loss_is_compared_as_such() -> None:
    report = tpcompile.check(workers.gpt2(), "pp=2,tp=2", workers.batch(labels="targets"), loss=workers.double_loss)
    assert report.ok, report
    assert report.tolerance.loss == 1e-10
