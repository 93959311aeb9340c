"""The model of a repository whose CI checks that it trains the same in parallel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = nn.MultiheadAttention(size, heads, batch_first=True)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.second(x))))


class Classifier(nn.Module):
    """Tokens [batch, length] and a class for every row [batch]; returns the loss."""

    def __init__(self, words: int = 100, classes: int = 7, size: int = 24, heads: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, size)
        self.blocks = nn.ModuleList(Block(size, heads) for _ in range(layers))
        self.head = nn.Linear(size, classes)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean(1)), labels)
