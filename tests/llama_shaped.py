"""The shape of a Llama of 405 B parameters in plain PyTorch, of any number of layers, without memory for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, INNER, HEADS, GROUPS, WORDS, LENGTH = 16384, 53248, 128, 8, 128256, 4096


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = HIDDEN // HEADS
        self.q_proj, self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(HIDDEN, GROUPS * size, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        size = HIDDEN // HEADS
        q, k, v = (part(x).unflatten(-1, (-1, size)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k, v = (value.repeat_interleave(HEADS // GROUPS, 1) for value in (k, v))
        made: Tensor = self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return made


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return made


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.self_attn, self.norm_2, self.mlp = Norm(), Attention(), Norm(), Gated()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm_1(x), cos, sin)
        made: Tensor = x + self.mlp(self.norm_2(x))
        return made


class Llama(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.lm_head = Norm(), nn.Linear(HIDDEN, WORDS, bias=False)
        size = HIDDEN // HEADS
        self.register_buffer("frequencies", 500000.0 ** (torch.arange(0, size, 2) / -size))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        angles = torch.arange(input_ids.shape[1], device=input_ids.device)[:, None] * self.frequencies
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def made(layers: int) -> nn.Module:
    with torch.device("meta"):
        return Llama(layers)


def batch(rows: int) -> dict[str, Tensor]:
    ids = torch.zeros(rows, LENGTH, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}
