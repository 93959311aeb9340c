"""Micro-batches with very unequal numbers of labels: most of one is padding, another has no label at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity_models import VOCABULARY, Batch, gpt2
from torch import Tensor

from tpcompile.simulate import check
from tpcompile.simulate.report import Tolerance

LENGTH, ROWS, PARTS = 11, 16, 8
KEPT = (10, 10, 10, 1, 10, 10, 0, 10)
"""Of ten labels a row, those that each part's rows have: 4 micro-batches of two rows on each of 2 replicas."""


def batch() -> Batch:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    kept = torch.arange(LENGTH)[None] <= torch.tensor(KEPT).repeat_interleave(ROWS // PARTS)[:, None]
    return {"input_ids": ids, "targets": ids.where(kept, -100)}


def shifted(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return outputs.logits[:, :-1], batch["targets"][:, 1:]


def mean(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    scores, labels = shifted(outputs, batch)
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def with_z_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The labels' mean, the mean over all places of logsumexp squared, the mean over rows of each row's own mean, and a penalty."""
    scores, labels = shifted(outputs, batch)
    mask = labels != -100
    each = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
    by_row = (each.sum(1) / mask.sum(1).clamp(min=1)).mean()
    return mean(outputs, batch) + 1e-2 * scores.logsumexp(-1).square().mean() + 0.3 * by_row + 0.1


def smoothed(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Smoothed labels, and a divergence from even odds where there are labels."""
    scores, labels = shifted(outputs, batch)
    even = F.kl_div(scores.log_softmax(-1), torch.full_like(scores, 1 / VOCABULARY), reduction="none").sum(-1)
    mask = (labels != -100).to(scores.dtype)
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), label_smoothing=0.1) + 0.5 * (even * mask).sum() / mask.sum()


@pytest.mark.parametrize("loss", [mean, with_z_loss, smoothed])
def test_four_micro_batches_on_two_replicas(loss: Callable[..., Tensor]) -> None:
    torch.manual_seed(5)
    model = gpt2()[0].double()
    report = check(model, "dp=2,pp=2,tp=2", batch(), loss=loss, microbatches=4)
    assert report.tolerance == Tolerance(1e-10, 1e-9)
    assert report.ok and report.loss_error <= 1e-10, str(report)


@pytest.mark.parametrize("loss", [mean, with_z_loss, smoothed])
def test_the_mean_of_the_parts_is_another_number(loss: Callable[..., Tensor]) -> None:
    """What the comparison above would show of a program that divides each part by its own count."""
    torch.manual_seed(5)
    model, whole = gpt2()[0].double().eval(), batch()
    parts = []
    for index, kept in enumerate(KEPT):
        rows = {name: value.chunk(PARTS)[index] for name, value in whole.items()}
        if kept:
            parts.append(loss(model(rows["input_ids"]), rows))
    assert abs(torch.stack(parts).mean() - loss(model(whole["input_ids"]), whole)) > 1e-3
