"""optimize: linear layers are joined with the collective of the value that they alone read, where they may be."""

from __future__ import annotations

import parity_models
import pytest
import torch
from pass_models import local, tiny
from torch import Tensor, nn

import tpcompile
from tpcompile.collectives.table import LINEARS
from tpcompile.errors import InputError
from tpcompile.ir import Local
from tpcompile.passes.optimize import optimize
from tpcompile.rules import op_name
from tpcompile.verify import verify


def squared(outputs: Tensor, batch: object) -> Tensor:
    return outputs.square().sum()


def joined(made: Local) -> list[tuple[str, list[str]]]:
    """The joined operators, and their weights."""
    nodes = [node for node in made.graph.nodes if op_name(node) in LINEARS]
    return [(op_name(node).split(".")[1], [weight.name for weight in node.args[-2]]) for node in nodes]


def test_without_overlap_the_graph_is_as_it_was() -> None:
    before = local(tiny(layers=2)[0], 2)
    apart = optimize(before, overlap=False)
    names = [op_name(node) for node in apart.graph.nodes]
    assert names == [op_name(node) for node in before.graph.nodes] and joined(apart) == []
    assert len(joined(verify(optimize(before)))) == names.count("tpcompile.enter.default") == 5


class Readers(nn.Module):
    """A value that two linears read, one with a bias and one without, or a linear and an activation."""

    def __init__(self, *, biased: bool, activation: bool) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(8, 12), nn.Linear(8, 12, bias=biased)
        self.first, self.down = nn.Linear(8, 8), nn.Linear(12, 8)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        entered = self.first(x).sin()
        other = entered.repeat(1, 1, 2)[..., :12] if self.activation else self.gate(entered).relu()
        return entered + self.down(self.up(entered) * other)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("biased", "activation"), [(True, False), (False, False), (True, True)])
def test_readers_that_can_be_joined(biased: bool, activation: bool) -> None:
    """All of them linears, with biases or without: else they stay apart. The numbers are right in any case."""
    model, batch = Readers(biased=biased, activation=activation).double(), {"x": torch.randn(4, 6, 8, dtype=torch.float64)}
    found = joined(tpcompile.compile(model, "tp=2", batch, loss=squared).history["optimize"].made)
    assert found == ([("enter_linear", ["p_gate_weight", "p_up_weight"])] if biased and not activation else [])
    report = tpcompile.check(model, "tp=2", batch, loss=squared)
    assert report.ok, f"\n{report}"


class Decoder(nn.Module):
    """Two layers that read one value beside the stream, as decoders read what an encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)
        self.layers = nn.ModuleList(Cross() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.second(self.first(x).relu()).sin()
        for layer in self.layers:
            x = layer(x, memory)
        return x


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.q, self.o = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.o(self.q(x.tanh()) * self.k(memory))  # type: ignore[no-any-return]


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,tp=2"])
def test_what_several_layers_read_stays_apart(mesh: str) -> None:
    """They may come to be on several stages."""
    model, batch = Decoder().double(), {"x": torch.randn(4, 6, 8, dtype=torch.float64)}
    made = tpcompile.compile(model, mesh, batch, loss=squared).history["optimize"].made
    weights = [weight for _, own in joined(made) for weight in own]
    assert "p_layers_1_q_weight" in weights and not any(weight.endswith("_k_weight") for weight in weights)
    report = tpcompile.check(model, mesh, batch, loss=squared)
    assert report.ok, f"\n{report}"


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "zbv"])
def test_halved_backwards_have_the_gradients_apart(schedule: str) -> None:
    """A schedule that runs backward in halves computes the weights' later: there nothing is joined, and its stages are halved as before."""
    per_rank = {} if schedule == "1f1b" else {"stages_per_rank": 2}
    made = parity_models.compiled("gpt2", "pp=2,tp=2", schedule=schedule, **per_rank)
    assert bool(joined(made.local)) == (schedule == "1f1b")
    alone = parity_models.compiled("gpt2", "tp=2", schedule=schedule, **per_rank)
    assert joined(alone.local), "one stage has nothing to halve"
    if schedule != "1f1b":
        assert [stage.unhalved for stage in made.stages] == [""] * 4


def test_what_is_neither_true_nor_false() -> None:
    with pytest.raises(InputError) as error:
        tpcompile.compile(Decoder(), "tp=2", overlap="off")  # type: ignore[arg-type]
    assert (error.value.what, error.value.fix) == ("overlap='off' is neither True nor False", "use overlap=True or overlap=False")
