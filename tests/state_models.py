"""Models whose forward changes buffers: running statistics, counters, averages, in place and by assignment."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, SIDE, WIDTH, CLASSES, LENGTH = 4, 6, 6, 5, 5


class ConvBlock(nn.Module):
    """Convolutions with batch norms between, whose channels can be cut; the stream between blocks is whole."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)
        self.widen = nn.Conv2d(WIDTH, inner, 3, padding=1, bias=False)
        self.inner_norm = nn.BatchNorm2d(inner)
        self.narrow = nn.Conv2d(inner, WIDTH, 1)
        self.outer_norm = nn.BatchNorm2d(WIDTH, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.inner_norm(self.widen(self.norm(x))), inplace=True)
        return x + self.outer_norm(self.narrow(y))  # type: ignore[no-any-return]


class Statistics(nn.Module):
    """Images to classes, with batch norms that learn."""

    def __init__(self, inner: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, WIDTH, 3)
        self.stem_norm = nn.BatchNorm2d(WIDTH)
        self.blocks = nn.ModuleList(ConvBlock(inner) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(images))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class CountingBlock(nn.Module):
    """An MLP whose scale depends on how often it has run; its count has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("again", self.count)
        self.register_buffer("decay", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.decay = self.decay * 0.9  # read below as it is now
        return x + self.down(F.gelu(self.up(self.norm(x)))) / self.again * self.decay  # type: ignore[no-any-return]


class Counting(nn.Module):
    """What its forward does to its buffers depends on nothing but these."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("steps", torch.ones((), dtype=torch.float64))
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(CountingBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(x) + self.steps  # before it is changed
        self.steps.mul_(2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x) / self.steps, labels)


class AveragingBlock(nn.Module):
    """An MLP that subtracts a running mean of what is inside it, and keeps the last row and the largest value that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.register_buffer("mean", torch.zeros(9))
        self.register_buffer("seen", torch.zeros(2, WIDTH))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(self.norm(x)))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.seen[0] = self.seen[1]
            self.seen[1].copy_(x[-1])
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return x + self.down(y - self.mean)  # type: ignore[no-any-return]


class Averages(nn.Module):
    """Buffers that depend on all rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(AveragingBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), labels)


class Positions(nn.Module):
    """Running means over a stream whose positions can be cut: of its features, of each position, and of what is inside an MLP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(_mlp() for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("features", torch.zeros(WIDTH))
        self.register_buffer("places", torch.zeros(LENGTH, WIDTH))
        self.register_buffer("inner", torch.zeros(9))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            y = F.gelu(block["up"](block["norm"](x)))
            x = x + block["down"](y)
            if index == 2:
                with torch.no_grad():
                    self.features.lerp_(x.mean((0, 1)), 0.1)
                    self.places.lerp_(x.mean(0), 0.1)
                    self.inner.lerp_(y.mean((0, 1)), 0.1)
                x = x + self.features + self.places
        return F.cross_entropy(self.head(x).mT, labels)


def _mlp() -> nn.ModuleDict:
    return nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "up": nn.Linear(WIDTH, 9), "down": nn.Linear(9, WIDTH)})


def made(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in float64, and a batch."""
    model = {"statistics": Statistics, "counting": Counting, "averages": Averages, "positions": Positions}[name]().double()
    generator = torch.Generator().manual_seed(seed)
    if name == "positions":
        x, labels = torch.randint(CLASSES, (2, ROWS, LENGTH), generator=generator)
        return model, {"x": x, "labels": labels}
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    if name == "statistics":
        return model, {"images": torch.randn(ROWS, 3, SIDE, SIDE, generator=generator, dtype=torch.float64), "labels": labels}
    return model, {"x": torch.randn(ROWS, 3, generator=generator, dtype=torch.float64), "labels": labels}
