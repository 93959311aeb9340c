"""The cores of attention that run again in backward: where they begin and end, and that the numbers are the same to the last bit."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.measure import ROWS, part, sample, weighted_sum

import tpcompile

KINDS = {  # the cores of each class of layers
    "causal/bloom": [1],  # positions are added to scores by baddbmm
    "causal/gpt_oss": [1],  # a sink of its own in every softmax
    "causal/gptj": [1],  # the MLP stands beside attention
    "causal/mixtral": [1],  # a router's softmax is none
    "s2s/t5": [1, 2],  # a decoder's layer looks at itself and at the encoder
}


def trained(model: nn.Module, batch: dict[str, Tensor], how: str, loss: object = None) -> tuple[Tensor, dict[str, Tensor], str]:
    """The loss and the gradients of a step, and the source."""
    compiled = tpcompile.compile(model, "tp=1", batch, loss=loss, recompute=how, dropout="exact")  # type: ignore[arg-type]
    torch.manual_seed(0)
    value = compiled.train_step(**batch)
    return value, {name: p.grad for name, p in compiled.named_parameters() if p.grad is not None}, compiled.program().source


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers(kind: str) -> None:
    model, batch = sample(kind)
    batch = part(batch, ROWS)
    loss, gradients, _ = trained(model, batch, "none", weighted_sum)
    again, found, source = trained(model, batch, "selective", weighted_sum)
    assert torch.equal(loss, again) and gradients.keys() == found.keys()
    assert all(torch.equal(grad, found[name]) for name, grad in gradients.items())
    classes = [text for text in source.split("\nclass ")[1:] if not text.startswith("Stage")]
    counts = {len(re.findall(r"    def core(?:_\d+)?\(", text)) for text in classes}
    assert sorted(counts) == KINDS[kind]
    bodies = re.findall(r"    def core.*?\n        return", source, re.DOTALL)
    assert bodies and all("softmax" in body or "attention" in body for body in bodies) and "aten.linear" not in "".join(bodies)


class Layer(nn.Module):
    """Attention whose queries are the layer's own values, and a module of the name that a core would have."""

    def __init__(self, projected: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.core = nn.Linear(8, 8)
        self.keys = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        self.query = nn.Linear(8, 8) if projected else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        scores = (self.query(y) @ self.keys(y).transpose(1, 2)).softmax(-1)
        return x + self.out(scores @ self.core(y))


class Model(nn.Module):
    def __init__(self, projected: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(projected) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, torch.ones_like(x))


@pytest.mark.parametrize("projected", [True, False])
def test_a_core_runs_in_one_go_or_there_is_none(projected: bool) -> None:
    """Without a projection the norm leads to scores both by itself and through the keys': a core would be given what it makes."""
    torch.manual_seed(0)
    model, batch = Model(projected).double(), {"x": torch.randn(2, 5, 8, dtype=torch.float64)}
    loss, gradients, _ = trained(model, batch, "none")
    again, found, source = trained(model, batch, "selective")
    assert torch.equal(loss, again) and all(torch.equal(grad, found[name]) for name, grad in gradients.items())
    assert ("def core_1(" in source) == projected and "def core(" not in source


class Crossed(nn.Module):
    """Two attentions, each of which adds to its scores what a linear makes of the other's queries."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.to_one, self.to_other, self.out = (nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.one(x).tanh(), self.other(x).tanh()
        to_b, to_a = self.to_other(a), self.to_one(b)
        first = (a @ a.transpose(1, 2) + to_a @ to_a.transpose(1, 2)).softmax(-1) @ a
        second = (b @ b.transpose(1, 2) + to_b @ to_b.transpose(1, 2)).softmax(-1) @ b
        return x + self.out(first + second)


def test_cores_that_wait_for_each_other() -> None:
    """Each runs in one go, but not both: the second stays as it is. Gradients of queries, used outside too, add up in another order."""
    torch.manual_seed(0)
    model = Model(True).double()
    model.layers = nn.ModuleList(Crossed() for _ in range(2)).double()
    batch = {"x": torch.randn(2, 5, 8, dtype=torch.float64)}
    loss, gradients, _ = trained(model, batch, "none")
    again, found, source = trained(model, batch, "selective")
    assert torch.equal(loss, again) and max((grad - found[name]).abs().max().item() for name, grad in gradients.items()) <= 1e-15
    assert source.count("def core") == 1
