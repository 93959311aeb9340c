"""Tensor ranks communicate while weights' gradients are computed: in a step of training on real processes, as a profiler's trace shows."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from linear_workers import products_meanwhile
from torch import Tensor

import tpcompile

pytestmark = [pytest.mark.processes, pytest.mark.slow]

WAYS = [(model, sequence_parallel) for model in ("gpt", "llama") for sequence_parallel in (True, False)]


@cache
def results(model: str, sequence_parallel: bool, overlap: bool) -> list[tuple[list[int], list[int], dict[str, Tensor], Tensor]]:
    """What each rank found."""
    return tpcompile.launch(products_meanwhile, "tp=2", model, sequence_parallel, overlap)


@pytest.mark.parametrize(("model", "sequence_parallel"), WAYS)
def test_products_run_between_the_start_and_the_wait(model: str, sequence_parallel: bool) -> None:
    """For every operator as many as it has weights; all other collectives have none, and without `overlap` none has any."""
    for found, weights, _, _ in results(model, sequence_parallel, True):
        assert [count for count in found if count] == weights and len(weights) == 5
    for found, weights, _, _ in results(model, sequence_parallel, False):
        assert weights == [] and len(found) > 5 and not any(found)


@pytest.mark.parametrize(("model", "sequence_parallel"), WAYS)
def test_the_numbers_are_the_same(model: str, sequence_parallel: bool) -> None:
    for (_, _, grads, loss), (_, _, others, other) in zip(*(results(model, sequence_parallel, how) for how in (True, False)), strict=True):
        torch.testing.assert_close(loss, other, rtol=1e-12, atol=0)
        assert grads.keys() == others.keys() and len(grads) > 10
        for name, grad in grads.items():
            torch.testing.assert_close(grad, others[name], rtol=1e-9, atol=1e-11)
