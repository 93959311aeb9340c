"""Kinds of blocks, each as small as it can be: what is cut of it, and that it computes what the untouched model computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpcompile.driver import Options, lower
from tpcompile.layout import Layout
from tpcompile.mesh import Mesh
from tpcompile.simulate import check

WIDTH, HEADS, ROWS, PLACES = 8, 4, 4, 5


class Block(nn.Module):
    """A residual stream around a block."""

    block: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.before = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(self.before(x))


class Joined(Block):
    """Linear attention: q, k and v joined, mixed over places channel by channel, and taken apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mix = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 2, padding=1, groups=3 * WIDTH)

    def block(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.q(x), self.k(x), self.v(x)], -1).transpose(1, 2)
        mixed = F.silu(self.mix(joined)[:, :, :PLACES]).transpose(1, 2)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in mixed.split(WIDTH, -1))
        return self.out(((q @ k.transpose(-1, -2)).tril() @ v).transpose(1, 2).flatten(-2))


class SharedKeys(Block):
    """Linear attention whose keys serve two value heads each, projected head by head from one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 2 * (4 + 4 + 8)), nn.Linear(2 * 8, WIDTH)

    def block(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 16)).split([4, 4, 8], -1)
        v = v.reshape(*v.shape[:2], HEADS, 4).transpose(1, 2)
        q, k = (part.repeat_interleave(2, 2).transpose(1, 2) for part in (q, k))
        return self.out(((q @ k.transpose(-1, -2)).tril() @ v).transpose(1, 2).flatten(-2))


class Scaled(Block):
    """One weight makes what is cut and a factor that every rank needs: the gradient of x would count that once for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(12, WIDTH)

    def block(self, x: Tensor) -> Tensor:
        hidden, scale = self.up(x).split([12, 1], -1)
        return self.down(torch.relu(hidden) * scale)


class Mixed(Block):
    """A gated MLP whose second factor comes through a norm: whole, and each rank takes its piece of that."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.other, self.down = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def block(self, x: Tensor) -> Tensor:
        other = self.other(x)
        other = other * torch.rsqrt(other.pow(2).mean(-1, keepdim=True) + 1e-3)
        return self.down(F.gelu(self.gate(x)) * other)


class Kept(Block):
    """An MLP whose hidden value is wanted entire by something else: the one linear that makes it is whole, the gate beside it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def block(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(F.silu(self.gate(x)) * up) * up.softmax(-1).amax(-1, keepdim=True)


class Branches(Block):
    """Two branches joined, of which one is attention: the join is cut in each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.gate, self.up = (nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def block(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        other = (F.gelu(self.gate(x)) * self.up(x)).unflatten(-1, (HEADS, -1))
        return self.out(torch.cat([mixed, other], 2).flatten(-2))


class OneHead(Block):
    """One head cannot be shared; the channels of its values can."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def block(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (1, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Stacked(Block):
    """Heads that are made one by one, and stacked: each of them is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * 6), nn.Linear(2 * 6, WIDTH)

    def block(self, x: Tensor) -> Tensor:
        hidden = self.up(x).unflatten(-1, (2, 6))
        return self.down(torch.stack([F.silu(hidden[:, :, 0]), torch.tanh(hidden[:, :, 1])], 2).flatten(-2))


class Groups(Block):
    """Projections in groups, by convolutions: those before attention are cut by groups, those of the MLP within each group."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv1d(WIDTH, WIDTH, 1, groups=4) for _ in range(3))
        self.out = nn.Conv1d(WIDTH, WIDTH, 1)
        self.up, self.down = nn.Conv1d(WIDTH, 24, 1, groups=2), nn.Conv1d(24, WIDTH, 1, groups=2)
        self.norm = nn.LayerNorm(WIDTH)

    def block(self, x: Tensor) -> Tensor:
        q, k, v = (part(x.transpose(1, 2)).unflatten(1, (HEADS, -1)).transpose(2, 3) for part in (self.q, self.k, self.v))
        mixed = self.out(F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(1, 2))
        return self.down(F.gelu(self.up(self.norm(mixed.transpose(1, 2)).transpose(1, 2)))).transpose(1, 2)


class Indexer(Block):
    """Attention to the places that scores choose: sums over heads, each of which is computed by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.weights = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // HEADS), nn.Linear(WIDTH, HEADS)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def block(self, x: Tensor) -> Tensor:
        scores = torch.einsum("bshd,btd->bsht", self.q(x).unflatten(-1, (HEADS, -1)), self.k(x)).relu()
        total = (self.weights(x).unsqueeze(-2) @ scores).squeeze(-2)
        kept = total.scatter(-1, total.topk(3).indices, 0.0)
        return self.down(torch.relu(self.up(x))) + (total - kept).softmax(-1) @ x


class Windows(Block):
    """A convolution whose weights are computed, by windows of each place: cut by the heads that have their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.values, self.out = nn.Linear(WIDTH, HEADS * 3), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def block(self, x: Tensor) -> Tensor:
        weights = self.weights(x).unflatten(-1, (HEADS, 3)).softmax(-1)
        values = F.unfold(self.values(x).transpose(1, 2).unsqueeze(-1), [3, 1], padding=[1, 0]).transpose(1, 2)
        return self.out((values.unflatten(-1, (HEADS, 2, 3)) * weights.unsqueeze(-2)).sum(-1).flatten(-2))


KINDS: dict[Callable[[], Block], set[str]] = {
    Joined: {"q.weight", "k.weight", "v.weight", "mix.weight", "out.weight"},
    SharedKeys: {"qkv.weight", "out.weight"},
    Scaled: set(),
    Mixed: {"gate.weight", "down.weight"},
    Kept: {"gate.weight", "down.weight"},
    Branches: {"q.weight", "k.weight", "v.weight", "gate.weight", "up.weight", "out.weight"},
    OneHead: {"v.weight", "out.weight"},
    Stacked: {"up.weight", "down.weight"},
    Groups: {"q.weight", "k.weight", "v.weight", "out.weight", "up.weight", "down.weight"},
    Indexer: {"q.weight", "weights.weight", "up.weight", "down.weight"},
    Windows: {"weights.weight", "values.weight", "out.weight"},
}
"""Each kind, and the weights that are cut of it over two ranks."""


@pytest.mark.parametrize(("kind", "weights"), KINDS.items())
def test_what_is_cut_and_that_it_is_equal(kind: Callable[[], Block], weights: set[str]) -> None:
    model = kind().double()
    batch = {"x": torch.randn(ROWS, PLACES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}
    made = lower(model, Mesh.of("tp=2"), batch, Options())
    layouts = {name: made.sharded.layouts[placeholder] for placeholder, name in made.program.parameters.items()}
    assert {name for name, layout in layouts.items() if isinstance(layout, Layout) and layout.is_cut and layout.dims[1:]} == weights
    for mesh in ("tp=2", "tp=3"):
        report = check(model, mesh, batch)
        assert report.ok, f"{mesh}\n{report}"
