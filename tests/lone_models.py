"""Blocks with a linear beside attention and MLP that no region wants, and what is in them that stays whole all the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pass_models import Block
from torch import Tensor, nn


class After(Block):
    """A linear between a norm and the residual stream."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__(hidden, heads, inner)
        self.mix = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(super().forward(x)))


class Beside(After):
    """A linear whose output is added to the MLP's."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        return x + (self.down(F.relu(self.up(x))) + self.mix(self.norm(x)))


class Spelled(Block):
    """A convolution of one place, then a product with twice a matrix that is stored the other way around."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__(hidden, heads, inner)
        self.conv = nn.Conv1d(hidden, hidden, 1)
        self.matrix = nn.Parameter(torch.randn(hidden, hidden) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x = x + self.conv(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.norm(x) @ (2 * self.matrix)


class Choosing(Block):
    """A router, whose best place is taken."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__(hidden, heads, inner)
        self.gate = nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * self.gate(x).sigmoid().topk(1).values


class Normed(Block):
    """A pair of low rank with a norm of root mean squares between, written out."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__(hidden, heads, inner)
        self.a, self.b = nn.Linear(hidden, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        y = self.a(x)
        return x * self.b(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5))


class LowRank(Block):
    """A pair of low rank with nothing between, whose second is as a number for each token."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__(hidden, heads, inner)
        self.a, self.b = nn.Linear(hidden, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * self.b(self.norm(x) @ self.a.weight.T)


class Shared(After):
    """A linear that is used twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.mix(x)


class Small(Block):
    """A linear that makes one number."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__(hidden, heads, inner)
        self.scale = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * self.scale(x)


class Scanning(Block):
    """Products of values outside of any attention: a state space in little."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__(hidden, heads, inner)
        self.enter, self.leave = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        y = self.enter(x)
        return x + self.leave((y @ y.transpose(1, 2)).cumsum(1) @ y)
