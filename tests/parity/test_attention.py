"""Attention in its normal form computes what the untouched model computes: on tensor ranks, in stages, with and without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tpcompile
from tpcompile.errors import InputError
from tpcompile.operation import argument, op_name

SDPA = "aten.scaled_dot_product_attention.default"
WORDS, LENGTH = 64, 7


class Layer(nn.Module):
    """Attention as textbooks write it, with the mask made where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) * 4**-0.5
        lower = torch.tril(torch.ones(x.shape[1], x.shape[1]))
        weights = scores.masked_fill(lower == 0, float("-inf")).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(WORDS, 16), nn.ModuleList(Layer() for _ in range(2)), nn.Linear(16, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model(kind: str) -> nn.Module:
    """A tiny model, "family" or "family, how it attends"."""
    torch.manual_seed(0)
    family, _, how = kind.partition(", ")
    if family == "gpt":
        return Gpt()
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, dict[str, Any]] = {
        "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 4, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None},
        "llama": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24},
        "bert": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24},
    }
    more = {"attention_probs_dropout_prob": 0.0} if family == "bert" else {}
    config = transformers.AutoConfig.for_model(family, vocab_size=WORDS, **sizes[family], **more)
    kind_of = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    made: nn.Module = kind_of.from_config(config, attn_implementation=how)
    return made


def batch(padded: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    if not padded:
        return {"input_ids": ids, "labels": ids.clone()}
    mask = torch.ones_like(ids)
    mask[1, 4:] = mask[2, :3] = 0  # on the right; and on the left, where causal rows see nothing
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def said(kind: str, dtype: torch.dtype, given: dict[str, Tensor], **options: Any) -> tuple[str, ...]:
    return tpcompile.compile(model(kind).to(dtype), "tp=2", given, **options).compilation.program.attention


CAUSAL, JOINED, ONE = "2 whose mask is causal", "2 written out, now one operation that is causal", "2 written out, now one operation"
KINDS = [
    ("gpt", torch.float64, JOINED),
    ("gpt", torch.float32, JOINED),
    ("gpt2, sdpa", torch.float64, CAUSAL),
    ("gpt2, eager", torch.float64, JOINED),
    ("gpt2, eager", torch.float32, JOINED),
    ("llama, sdpa", torch.float32, CAUSAL),
    ("llama, eager", torch.float32, JOINED),
    ("llama, eager", torch.float64, "2 left as written: its softmax is computed in another type"),
    ("bert, eager", torch.float64, ONE),
]


@pytest.mark.parametrize(("kind", "dtype", "expected"), KINDS)
def test_parity(kind: str, dtype: torch.dtype, expected: str) -> None:
    """Loss, gradients and a step on two tensor ranks, and on two stages."""
    assert said(kind, dtype, batch())[0] == expected
    for mesh in ("tp=2", "pp=2"):
        tpcompile.testing.assert_parity(model(kind).to(dtype), mesh, batch())


@pytest.mark.parametrize("kind", ["gpt2, eager", "gpt2, sdpa", "bert, eager"])
def test_padding_stays(kind: str) -> None:
    """A row that hides all of its keys has the untouched model's gradients too: kernels would make others."""
    assert all("depends on attention_mask" in each for each in said(kind, torch.float64, batch(padded=True)))
    tpcompile.testing.assert_parity(model(kind).double(), "tp=2", batch(padded=True))


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=4"])
def test_shared_heads(mesh: str) -> None:
    """Two key/value heads for four query heads: on as many ranks, on three, where one rank has both, and on four, each with half."""
    held = model("llama, sdpa").bfloat16()
    found = tpcompile.compile(held, mesh, batch()).compilation
    assert found.program.attention == ("2 whose mask is causal", "2 that shares key/value heads")
    assert all(argument(node, "enable_gqa") for node in found.local.graph.nodes if op_name(node) == SDPA)
    tpcompile.testing.assert_parity(held, mesh, batch())


def test_as_written() -> None:
    """With the option off there is no such pass, and the graph is what normalize makes."""
    found = tpcompile.compile(model("gpt"), "tp=2", batch(), attention="written")
    assert "attend" not in found.history and found.compilation.program.attention == ()
    assert sum(op_name(node) == "aten.softmax.int" for node in found.compilation.program.graph.nodes) == 2
    tpcompile.testing.assert_parity(model("gpt").double(), "tp=2", batch(), attention="written")


def test_history_says_what_became_of_it() -> None:
    assert tpcompile.compile(model("gpt"), "tp=2", batch()).history["attend"].says == JOINED


@pytest.mark.parametrize("call", [tpcompile.compile, tpcompile.check])
def test_no_such_way(call: Any) -> None:
    with pytest.raises(InputError) as error:
        call(model("gpt"), "tp=2", batch(), attention="fused")
    what, at, source, fix = str(error.value).splitlines()
    assert what == "there is no attention 'fused'" and at == f"  at   {call.__name__}(attention='fused')"
    assert "test_attention.py" in source and fix == '  fix  use attention="normal" or attention="written"'
