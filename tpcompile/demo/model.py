"""A GPT in plain PyTorch: nothing here knows about parallelism, and nothing here comes from elsewhere than torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of the model. The defaults are odd on purpose: five heads and 97 characters do not divide by two."""

    vocab_size: int = 97
    positions: int = 64
    layers: int = 4
    heads: int = 5
    hidden: int = 60
    inner: int = 230


class Attention(nn.Module):
    """Causal attention; query, key and value are stacked in one weight."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, hidden = x.shape
        q, k, v = (part.view(rows, length, self.heads, hidden // self.heads).transpose(1, 2) for part in self.qkv(x).split(hidden, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, hidden))
        return y


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.inner)
        self.down = nn.Linear(config.inner, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        x = x + self.mlp(self.norm_2(x))
        return x


class GPT(nn.Module):
    """Token and position embedding, blocks, a norm, and a head that shares the token embedding's weight."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.positions = nn.Embedding(config.positions, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if name.endswith("weight") and "norm" not in name:
                nn.init.normal_(weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits [rows, length, vocabulary], and the mean cross-entropy where labels are given; a label of -100 is not counted."""
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def gpt() -> GPT:
    """The demo's model: 181,000 parameters in four blocks."""
    return GPT(Config())
