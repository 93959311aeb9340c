"""Which layers torch's engine may shard and gather as units."""

from __future__ import annotations

import torch
from parity_models import causal_batch, compiled
from torch import Tensor, nn

import tpcompile
from tpcompile.driver import Compilation
from tpcompile.passes._parts import arrange
from tpcompile.passes._units import units


def found(made: Compilation) -> list[tuple[str, ...]]:
    paths = {name: source.path for name, source in made.program.sources.items()}
    return [units(stage, made.program, arrange(stage, paths, made.program.layers)) for stage in made.stages]


def test_layers_are_units() -> None:
    assert found(compiled("gpt", "pp=2,tp=2")) == [("blocks.0",), ("blocks.1",)]
    assert found(compiled("gpt2", "tp=2")) == [("transformer.h.0", "transformer.h.1")]


class Layers(nn.Module):
    """Four layers; the middle two share a weight, and the last one's bias is used outside of it too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 12)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)) for _ in range(4))
        self.layers[2][0].weight = self.layers[1][0].weight  # type: ignore[index, union-attr]

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return (x * self.layers[3][2].bias).square().mean()  # type: ignore[index, union-attr]


def test_layers_whose_parameters_are_used_elsewhere_are_none() -> None:
    torch.manual_seed(0)
    made = tpcompile.compile(Layers(), "tp=1", {"input_ids": causal_batch()["input_ids"]})
    assert found(made.compilation) == [("layers.0",)]
