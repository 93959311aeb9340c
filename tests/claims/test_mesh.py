"""The picture of 3D parallelism: who forms a group with whom, and models on meshes larger than any machine here."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tpcompile
from tpcompile.demo.model import GPT, Config
from tpcompile.mesh import Mesh


def test_rank_groups_256() -> None:
    """2 replicas of 16 stages of 8 tensor ranks: tensor ranks are neighbours, stages 8 apart, replicas 128."""
    mesh = Mesh(dp=2, pp=16, tp=8)
    assert mesh.groups("dp") == tuple((k, k + 128) for k in range(128))
    assert mesh.groups("tp") == tuple(tuple(range(start, start + 8)) for start in range(0, 256, 8))
    assert mesh.groups("pp") == tuple(tuple(range(128 * dp + tp, 128 * dp + 128, 8)) for dp in range(2) for tp in range(8))


def test_classic_3d_32() -> None:
    """4-way TP × 4-way PP × 2-way DP: 32 ranks train to the numbers of one device."""
    torch.manual_seed(0)
    model = GPT(Config(layers=4, heads=4, hidden=32, inner=56)).double()
    ids, labels = torch.randint(0, 97, (2, 8, 6))
    report = tpcompile.check(model, "dp=2,pp=4,tp=4", {"input_ids": ids, "labels": labels})
    assert report.ok, report


@pytest.mark.parametrize(
    ("mesh", "devices_per_node", "words"),
    [
        ("dp=2,tp=8", 8, ""),
        ("dp=2,tp=16", 8, "ranks 0–15, 16–31"),
        ("dp=6,tp=3", 8, "ranks 6–8, 15–17"),
        ("dp=6,tp=3", 6, ""),
        ("dp=32,tp=16", 8, "ranks 0–15, 16–31, 32–47 and 29 more"),
    ],
)
def test_tp_across_nodes_warns(mesh: str, devices_per_node: int, words: str) -> None:
    """Tensor ranks talk in every layer: a plan says which of their groups do not fit on one node."""
    model = GPT(Config(layers=1, heads=16, hidden=32, inner=48))
    ids = torch.zeros(64, 6, dtype=torch.int64)
    plan = tpcompile.compile(model, mesh, {"input_ids": ids}).explain(devices_per_node=devices_per_node)
    warning = f"warning: tensor groups cross nodes of {devices_per_node} ranks, and slow down every layer: {words}"
    assert (warning in plan.splitlines()) == bool(words)
    assert ("warning" in plan) == bool(words)


def test_a_node_has_as_many_ranks_as_the_launcher_started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(Config(layers=1, heads=4, hidden=32, inner=48))
    compiled = tpcompile.compile(model, "dp=2,tp=4", {"input_ids": torch.zeros(2, 6, dtype=torch.int64)})
    assert "warning" not in compiled.explain()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "warning: tensor groups cross nodes of 2 ranks, and slow down every layer: ranks 0–3, 4–7" in compiled.explain().splitlines()
    assert "warning" not in compiled.explain(devices_per_node=8)


# ------------------------------------------------------------------------------------------------- 512 B parameters


@dataclass(frozen=True)
class Sizes:
    """512 B parameters in 96 layers. The vocabulary is small, since its table is whole on every tensor rank."""

    vocabulary: int = 4096
    layers: int = 96
    heads: int = 160
    groups: int = 160
    hidden: int = 20480
    inner: int = 59392


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight)


class Layer(nn.Module):
    """Norm, attention without biases, norm, gated MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.norm_1, self.norm_2 = sizes.heads, Norm(sizes.hidden), Norm(sizes.hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(sizes.hidden, sizes.hidden, bias=False) for _ in range(4))
        self.up, self.gate = (nn.Linear(sizes.hidden, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Plain(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm, self.head = Norm(sizes.hidden), nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@pytest.mark.slow
def test_512b_16x8() -> None:
    """512 B parameters on 16 stages of 8 tensor ranks: 32 B in a stage, 4 B on a device, 128 devices in a replica."""
    with torch.device("meta"):
        model = Plain(Sizes())
        ids = torch.zeros(16, 2048, dtype=torch.int64)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(512e9, rel=0.01)
    compiled = tpcompile.compile(model, "pp=16,tp=8", {"input_ids": ids}, microbatches=16)
    assert compiled.mesh.size == 128
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    for stage in compiled.compilation.stages:
        assert sum(sizes[name] for name in stage.parameters.values()) == pytest.approx(32e9, rel=0.05)
    for rank in (0, 7, 60, 127):
        module = compiled.program(rank).module
        assert all(p.is_meta for p in module.parameters())
        assert sum(p.numel() for p in module.parameters()) == pytest.approx(4e9, rel=0.05)
