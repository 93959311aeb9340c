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

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.before = nn.LayerNorm(WIDTH)

    def block(self, x: Tensor) -> Tensor:
        raise NotImplementedError

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


KINDS: dict[Callable[[], Block], set[str]] = {
    Joined: {"q.weight", "k.weight", "v.weight", "mix.weight", "out.weight"},
    SharedKeys: {"qkv.weight", "out.weight"},
    Scaled: set(),
    Mixed: {"gate.weight", "down.weight"},
    Kept: {"gate.weight", "down.weight"},
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
