"""exact_dropout: an eager model drops what a compiled one does, in the order of its dropouts, and again where it recomputes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import tpcompile
from tpcompile import collectives
from tpcompile.testing import exact_dropout


def expected(x: Tensor, p: float, site: int, *, seed: int = 0, step: int = 0) -> Tensor:
    return collectives.dropout_at(x, p, torch.tensor([collectives.mix(seed, step), 0, 1]), site)  # type: ignore[no-any-return]


def test_dropouts_are_numbered_as_they_run() -> None:
    x = torch.rand(4, 5) + 1
    with exact_dropout(3, step=2):
        made = [F.dropout(x, 0.5), nn.Dropout(0.2)(x), torch.dropout(x, 0.5, True), F.dropout(x.clone(), 0.3, inplace=True)]
    wanted = [expected(x, p, site, seed=3, step=2) for site, p in enumerate((0.5, 0.2, 0.5, 0.3))]
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


def test_what_drops_nothing_has_no_number() -> None:
    x = torch.rand(4, 5)
    with exact_dropout(0):
        for still in (F.dropout(x, 0.0), F.dropout(x, 0.5, training=False), nn.Dropout(0.5).eval()(x), F.dropout(x, 0.0, inplace=True)):
            assert torch.equal(still, x)
        assert torch.equal(F.dropout(x, 0.5), expected(x, 0.5, 0))


def test_attention_drops_its_weights() -> None:
    q, k, v = torch.rand(3, 2, 4, 5, 6, dtype=torch.float64)
    weights = (q @ k.mT / 6**0.5).softmax(-1)
    attend = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True).double()
    with exact_dropout(1):
        assert torch.allclose(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), expected(weights, 0.5, 0, seed=1) @ v, rtol=1e-12)
        full = attend(q[0], k[0], v[0])[0]
        assert torch.equal(F.dropout(q, 0.5), expected(q, 0.5, 2, seed=1))
    with exact_dropout(1):
        F.dropout(q, 0.5)
        assert torch.allclose(attend(q[0], k[0], v[0], need_weights=False)[0], full, rtol=1e-12)


def test_it_ends() -> None:
    """Outside, torch draws from its own generator again, and checkpointing is as it was."""
    x = torch.ones(1000)
    with pytest.raises(RuntimeError, match="inside"), exact_dropout(0):
        raise RuntimeError("inside")
    torch.manual_seed(0)
    first = F.dropout(x, 0.5)
    torch.manual_seed(0)
    assert torch.equal(F.dropout(x, 0.5), first) and not torch.equal(first, expected(x, 0.5, 0))
    assert "apply" not in vars(CheckpointFunction)


def test_the_seed_is_that_of_torch() -> None:
    x = torch.ones(1000)
    torch.manual_seed(42)
    with exact_dropout():
        assert torch.equal(F.dropout(x, 0.5), expected(x, 0.5, 0, seed=42))


class Layers(nn.Module):
    """Three layers with dropouts outside, inside, and in attention; recomputed in backward on request."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.embed, self.head = nn.Embedding(11, 12), nn.Linear(12, 11)
        sizes = ((12, 36), (12, 12), (12, 20), (20, 12))
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(*size) for size in sizes) for _ in range(3))

    def layer(self, x: Tensor, index: int) -> Tensor:
        qkv, out, up, down = self.layers[index]  # type: ignore[misc]
        q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
        x = x + F.dropout(out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).transpose(1, 2).flatten(2)), 0.2)
        return x + F.dropout(down(F.dropout(F.gelu(up(x)), 0.4)), 0.1)  # type: ignore[no-any-return]

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.embed(ids), 0.25)
        for index in range(len(self.layers)):
            x = self.layer(x, index) if self.reentrant is None else checkpoint(self.layer, x, index, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    ids, labels = torch.randint(0, 11, (2, 8, 5), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "labels": labels}


def gradients(reentrant: bool | None, *, inside: bool) -> list[Tensor]:
    model = Layers(reentrant).double()
    with exact_dropout(5):
        loss = model(**batch())
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_recomputed_drops_the_same(reentrant: bool, inside: bool) -> None:
    plain = gradients(None, inside=True)
    assert len(plain) == 28
    assert all(torch.equal(a, b) for a, b in zip(gradients(reentrant, inside=inside), plain, strict=True))


@pytest.mark.parametrize("mesh", ["dp=2", "tp=3", "pp=2,tp=2"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_recomputes_equals_its_compiled_one(reentrant: bool, mesh: str) -> None:
    tpcompile.testing.assert_parity(Layers(reentrant).double(), mesh, batch(), dropout="exact", steps=2)


class Wastes(nn.Module):
    """Drops something that nobody uses before what is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        F.dropout(y.exp(), 0.5)
        _, kept = F.dropout(y.cos(), 0.2).sum(), F.dropout(y, 0.5)
        return kept.sum()


def test_dropouts_that_nobody_uses_are_counted() -> None:
    tpcompile.testing.assert_parity(Wastes().double(), "dp=2", {"x": torch.rand(4, 6, dtype=torch.float64)}, dropout="exact")
