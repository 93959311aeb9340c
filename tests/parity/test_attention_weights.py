"""Attention that returns its weights, over batch and heads in one dimension; and class weights that the forward computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tpcompile

ROWS, LENGTH, WIDTH, CLASSES = 8, 5, 12, 17


class ReturnsWeights(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=batch_first)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.table(ids) if self.batch_first else self.table(ids).transpose(0, 1)
        mixed, weights = self.attention(x, x, x, attn_mask=torch.ones(LENGTH, LENGTH).triu(1).bool(), need_weights=True)
        mixed = mixed if self.batch_first else mixed.transpose(0, 1)
        return {"loss": F.cross_entropy(self.head(mixed).flatten(0, 1), labels.flatten()), "weights": weights}


class WeighsClasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        weights = torch.linspace(0.1, 2, CLASSES).double()
        return F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), labels.flatten(), weight=weights, label_smoothing=0.2)


def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(CLASSES, (ROWS, LENGTH))
    labels[1:3] = -100
    return {"ids": torch.randint(CLASSES, (ROWS, LENGTH)), "labels": labels}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3"])
def test_weights_that_cannot_be_gathered_leave_attention_whole(batch_first: bool, mesh: str) -> None:
    model = ReturnsWeights(batch_first).double()
    tpcompile.testing.assert_parity(model, mesh, batch())
    assert (
        "cannot be gathered: the batch is part of the dimension that is cut" in tpcompile.compile(model, mesh, batch()).history["plan"].text
    )


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_computed_class_weights_are_counted(mesh: str) -> None:
    tpcompile.testing.assert_parity(WeighsClasses().double(), mesh, batch())
