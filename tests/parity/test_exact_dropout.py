"""With dropout="exact" every mesh trains as one device: the untouched model drops by global index too, and all numbers are compared."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcompile
from tpcompile.driver import Compilation, Options, lower_captured
from tpcompile.ir import PerRank, Program
from tpcompile.mesh import Mesh
from tpcompile.passes.capture import capture
from tpcompile.rules import op_name
from tpcompile.simulate import compare
from tpcompile.simulate.replay import Replay
from tpcompile.simulate.report import Tolerance

MESHES = ("dp=1", "dp=4", "tp=2", "tp=3", "pp=2", "dp=2,pp=2,tp=2")
EXACT = Tolerance(1e-10, 1e-9)
LENGTH, WORDS = 5, 17


class Block(nn.Module):
    """Attention and an MLP that drop wherever a value is cut: stacked q, k, v; shared key/value heads; weights; the MLP's inside."""

    def __init__(self, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, hidden = heads, groups, 4 * heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.q, self.k, self.v = nn.Linear(hidden, hidden), nn.Linear(hidden, 4 * groups), nn.Linear(hidden, 4 * groups)
        self.mix = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 23), nn.Linear(23, hidden)

    def stacked(self, x: Tensor) -> Tensor:
        """Heads and rows in one dimension, as older models have them."""
        rows = x.shape[0]
        parts = F.dropout(self.qkv(x), 0.1).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, 4)).transpose(1, 2).flatten(0, 1) for part in parts)
        weights = F.dropout((q @ k.transpose(1, 2) / 2).softmax(-1), 0.3)
        return self.out(F.dropout((weights @ v).view(rows, self.heads, -1, 4).transpose(1, 2).flatten(2), 0.2))  # type: ignore[no-any-return]

    def shared(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, 4)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, F.dropout(k, 0.2), v, dropout_p=0.3, is_causal=True, enable_gqa=True)
        return self.mix(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.stacked(x), 0.1)
        x = x + F.dropout(self.shared(x), 0.2)
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.4))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, 4 * heads), nn.Linear(4 * heads, WORDS)
        self.layers = nn.ModuleList(Block(heads, groups) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.embed(ids), 0.1)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    ids, labels = torch.randint(0, WORDS, (2, 8, LENGTH), generator=torch.Generator().manual_seed(0))
    kept = torch.arange(LENGTH)[None] <= torch.arange(8)[:, None] % LENGTH
    return {"ids": ids, "labels": labels.where(kept, -100)}


@cache
def model(heads: int = 4, groups: int = 2) -> nn.Module:
    return Model(heads, groups).double()


@cache
def captured(heads: int, groups: int) -> Program:
    """One capture for all meshes, of two of the batch's rows."""
    return capture(model(heads, groups), {name: value[:2] for name, value in batch().items()})


def compiled(mesh: str, heads: int = 4, groups: int = 2, dropout: str = "exact", **options: Any) -> Compilation:
    placed = Mesh.of(mesh)
    chosen = Options(microbatches=placed.pp, dropout=dropout, **options)
    part = {name: value[: 8 // chosen.parts(placed)] for name, value in batch().items()}
    return lower_captured(captured(heads, groups), model(heads, groups), placed, part, chosen)


@cache
def undropped() -> float:
    return float(Model().double().eval()(**batch()).detach())


@pytest.mark.parametrize("mesh", MESHES)
def test_two_steps_equal_one_device(mesh: str) -> None:
    report = compare(model(), compiled(mesh), batch(), steps=2)
    assert report.ok and report.tolerance == EXACT and not report.notes, f"\n{report}"
    assert report.loss != pytest.approx(undropped(), rel=1e-3), "nothing was dropped"


@pytest.mark.parametrize(("heads", "groups", "mesh"), [(5, 5, "tp=3"), (6, 3, "tp=2"), (4, 2, "tp=4"), (4, 1, "dp=2,tp=3"), (7, 7, "tp=4")])
def test_uneven_and_shared_heads(heads: int, groups: int, mesh: str) -> None:
    found = compiled(mesh, heads, groups)
    assert [region.kind for region in found.plan.regions].count("attention") == 4
    report = compare(model(heads, groups), found, batch())
    assert report.ok and report.tolerance == EXACT, f"\n{report}"


def test_every_cut_dropout_is_told_its_piece() -> None:
    """Stacked q, k and v in three steps; heads and rows taken apart; one range elsewhere."""
    found = compiled("tp=3,dp=2", 5, 5, sequence_parallel=False).local
    nodes = [node for node in found.graph.nodes if op_name(node) == "tpcompile.dropout_at.default"]
    told = [(node.args[4], node.args[5] if len(node.args) > 5 else []) for node in nodes[1:8]]
    heads, columns = PerRank((0, 2, 4)), PerRank((0, 8, 16))
    assert told == [
        (0, [3, columns, 20]),
        (0, [1, heads, 5]),
        (0, [2, columns, 20]),
        (0, []),
        (0, [1, heads, 5]),
        (0, [1, heads, 5]),
        (0, []),
    ]


def test_steps_draw_other_masks() -> None:
    replay = Replay(model(), compiled("tp=2"), dropout=True)
    losses = [float(replay.step(batch())[0]) for _ in range(3)]
    assert len(set(losses)) == 3


def test_a_wrong_piece_is_found() -> None:
    """The checker sees a rank that draws the mask of another's heads."""
    found = compiled("tp=2")
    (stage,) = found.stages
    node = next(n for n in stage.graph.nodes if op_name(n) == "tpcompile.dropout_at.default" and n.args[5:] and n.args[5][0] == 1)
    node.args = (*node.args[:5], [1, 0, 4])
    report = compare(model(), found, batch())
    assert not report.ok and report.first_divergence is not None


def test_local_dropout_of_heads_that_ranks_share_stays_whole() -> None:
    """Each rank would drop something else of the same heads, so these are gathered; by global index they drop the same."""
    local, exact = (compiled("tp=4", dropout=how).plan for how in ("local", "exact"))
    assert [region.name for region in local.regions if region.kind == "column"] == ["layers.0.k", "layers.1.k"]
    assert not [region for region in exact.regions if region.kind == "column"]
    assert not [left for plan in (local, exact) for left in plan.whole if "layers" in left.name]


def test_the_untouched_model_is_the_single_device() -> None:
    """A user's own loop under exact_dropout gives the loss of the compiled model's step, for the same seed and step."""
    replay = Replay(model(), compiled("dp=2,pp=2,tp=2"), dropout=True, seed=3)
    losses = [float(replay.step(batch())[0]) for _ in range(2)]
    for step, loss in enumerate(losses):
        with tpcompile.testing.exact_dropout(3, step=step):
            assert float(model()(**batch()).detach()) == pytest.approx(loss, rel=1e-12)
