"""The ways to split a layer over tensor ranks, and what each costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import counting
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tpcompile
from tpcompile.demo.model import GPT, Config
from tpcompile.layout import Layout, pieces
from tpcompile.runtime.compiled import Compiled


def compiled_linear(way: str, rows: int = 4, inputs: int = 8, outputs: int = 6, device: str = "cpu") -> Compiled:
    model = nn.Linear(inputs, outputs, device=device)
    return tpcompile.compile(model, "tp=2", {"input": torch.randn(rows, inputs, device=device)}, overrides={"*": way})


def same_as_alone(way: str) -> bool:
    torch.manual_seed(0)
    batch = {"input": torch.randn(4, 8, dtype=torch.float64)}
    return bool(tpcompile.check(nn.Linear(8, 6).double(), "tp=2", batch, overrides={"*": way}).ok)


def test_column_split() -> None:
    """Y = X [W1 W2] = [X W1, X W2]: each rank has whole columns of the output, and forward ends in one all-gather."""
    program = compiled_linear("column").program()
    assert program.module.weight.shape == (3, 8)
    assert counting.forward(program.graph) == {"all_gather": 1}
    assert same_as_alone("column")


def test_row_split() -> None:
    """Y = X1 W1 + X2 W2: each rank has a whole, partial output; one all-reduce adds them."""
    program = compiled_linear("row").program()
    assert program.module.weight.shape == (6, 4)
    assert counting.forward(program.graph) == {"all_reduce": 1}
    assert same_as_alone("row")


@pytest.mark.parametrize("rank", [0, 1])
def test_halves(rank: int) -> None:
    """A weight of 4096 inputs and 8192 outputs, cut in two by its outputs, leaves 4096 × 4096 on each device."""
    program = compiled_linear("column", inputs=4096, outputs=8192, device="meta").program(rank)
    assert program.module.weight.shape == (4096, 4096)


class MLP(nn.Module):
    """Something trained before it, larger than its input, so that it is the input whose gradient is summed."""

    def __init__(self, activation: Callable[[Tensor], Tensor], gated: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(500_000, 8)
        self.up, self.down = nn.Linear(8, 30), nn.Linear(30, 8)
        self.gate = nn.Linear(8, 30) if gated else None
        self.activation = activation

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        hidden = self.activation(self.up(x))
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        out: Tensor = self.down(hidden)
        return out


def ids() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"input_ids": torch.randint(0, 11, (4, 5))}


def test_mlp_one_all_reduce() -> None:
    """Column then row needs one all-reduce; column then column two all-gathers. The first is chosen, and both are printed."""
    compiled = tpcompile.compile(MLP(F.gelu), "tp=2", ids(), vocab_parallel=False)
    graph = compiled.program().graph
    assert counting.forward(graph) == {"all_reduce": 1} == counting.backward(graph)
    lines = [line.split() for line in compiled.explain().splitlines()]
    assert ["mlp", "column,", "row", "1", "all-reduce", "32·b·s", "chosen"] in lines  # 2 · 1/2 · 8 elements of 4 bytes
    assert ["column,", "column", "2", "all-gathers", "76·b·s"] in lines  # 1/2 · (30 + 8) elements of 4 bytes


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "celu": F.celu,
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "log_sigmoid": F.logsigmoid,
    "mish": F.mish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu6": F.relu6,
    "relu_squared": lambda x: F.relu(x).square(),
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_local(name: str, gated: bool) -> None:
    """An element-wise activation works on each rank's columns: nothing more is sent, and nothing changes."""
    torch.manual_seed(0)
    model = MLP(ACTIVATIONS[name], gated)
    graph = tpcompile.compile(model, "tp=2", ids(), vocab_parallel=False).program().graph
    assert counting.forward(graph) == {"all_reduce": 1} == counting.backward(graph)
    assert tpcompile.check(model.double(), "tp=2", ids()).ok


def test_heads_64_on_4() -> None:
    """Heads are independent: each of 4 ranks computes 16 of 64 whole heads, and one all-reduce adds their projections."""
    model = GPT(Config(layers=1, heads=64, hidden=128, inner=64))
    compiled = tpcompile.compile(model, "tp=4", ids(), overrides={"blocks.0.mlp": "whole"}, vocab_parallel=False)
    graph = compiled.program().graph
    assert counting.forward(graph) == {"all_reduce": 1} == counting.backward(graph)
    (attention,) = [node.name for node in graph.nodes if "scaled_dot_product_attention" in str(node.target)]
    layout = compiled.compilation.local.layouts[attention]
    assert isinstance(layout, Layout)
    for rank in range(4):
        assert pieces(layout.dims[1], rank) == [(16 * rank, 16 * rank + 16)]  # dimensions: rows, heads, positions, features
        assert pieces(layout.dims[3], rank) == [(0, 2)]
        module = compiled.program(rank).module
        assert module.get_parameter("blocks.0.attention.qkv.weight").shape == (3 * 16 * 2, 128)
        assert module.get_parameter("blocks.0.attention.out.weight").shape == (128, 16 * 2)
