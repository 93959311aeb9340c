"""Small models of the families that parity is shown for, with batches whose rows have very different numbers of labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcompile.demo.model import GPT, Config
from tpcompile.driver import Compilation, Options, lower_captured
from tpcompile.ir import Program
from tpcompile.mesh import Mesh
from tpcompile.passes.capture import capture

ROWS, LENGTH, VOCABULARY = 8, 6, 40

Batch = dict[str, Tensor]
Loss = Callable[..., Tensor]


class Encoder(nn.Module):
    """torch's own encoder over embedded tokens, classifying each row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        layer = nn.TransformerEncoderLayer(24, 4, 38, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(24, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embed(tokens)).mean(1))
        return logits


class Experts(nn.Module):
    """Two of four experts for every token, in a loop, beside one that all tokens share."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(12, 4)
        self.up = nn.Parameter(torch.randn(4, 10, 12) / 4)
        self.down = nn.Parameter(torch.randn(4, 12, 10) / 4)
        self.shared_up, self.shared_down = nn.Linear(12, 9), nn.Linear(9, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 12)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        kept = torch.zeros(rows.shape[0], 4, dtype=x.dtype).scatter(1, chosen, weights)
        made = torch.zeros_like(rows)
        for expert in range(4):
            made = made + F.linear(F.silu(F.linear(rows, self.up[expert])), self.down[expert]) * kept[:, expert, None]
        return made.view_as(x) + self.shared_down(F.silu(self.shared_up(x)))


class Tempered(nn.Module):
    """Scores under a temperature: a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 12), nn.Linear(12, VOCABULARY)
        self.up, self.down = nn.Linear(12, 30), nn.Linear(30, 12)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        scores = self.head(x + self.down(F.gelu(self.up(x)))) * self.temperature
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def classified(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["classes"])


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def causal_batch() -> Batch:
    """Labels are ignored at the end of most rows."""
    ids = tokens()
    kept = torch.arange(LENGTH)[None] <= torch.arange(ROWS)[:, None] % LENGTH
    return {"input_ids": ids, "labels": ids.where(kept, -100)}


def masked_batch() -> Batch:
    """One row has all of its tokens masked, some have none."""
    ids = tokens()
    masked = torch.arange(LENGTH)[None] < torch.tensor([6, 0, 1, 3, 0, 2, 5, 1])[:, None]
    attended = (torch.arange(LENGTH)[None] < torch.tensor([6, 6, 4, 6, 5, 6, 6, 3])[:, None]).long()
    return {"input_ids": ids.where(~masked, 3), "attention_mask": attended, "labels": ids.where(masked, -100)}


def gpt() -> tuple[nn.Module, Batch, Loss | None]:
    return GPT(Config(vocab_size=VOCABULARY, positions=16, layers=2, heads=5, hidden=20, inner=23)), causal_batch(), None


def frozen() -> tuple[nn.Module, Batch, Loss | None]:
    """Embeddings and the first block are not trained."""
    model, batch, loss = gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("tokens.", "positions.", "blocks.0.")))
    return model, batch, loss


def encoder() -> tuple[nn.Module, Batch, Loss | None]:
    return Encoder(), {"tokens": tokens(), "classes": torch.arange(ROWS) % 5}, classified


def gpt2() -> tuple[nn.Module, Batch, Loss | None]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=4, use_cache=False)
    return GPT2LMHeadModel(config), causal_batch(), None


def gpt2_exact() -> tuple[nn.Module, Batch, Loss | None]:
    """With a loss that does not cast to float32, as the model's own does."""
    model, batch, _ = gpt2()
    return model, {"input_ids": batch["input_ids"], "targets": batch["labels"]}, next_token


def llama_exact() -> tuple[nn.Module, Batch, Loss | None]:
    model, batch, _ = llama()
    return model, {"input_ids": batch["input_ids"], "targets": batch["labels"]}, next_token


def next_token(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["targets"][:, 1:].flatten())


def llama(heads: int = 4, groups: int = 2) -> tuple[nn.Module, Batch, Loss | None]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=heads * 4,
        intermediate_size=22,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=16,
        use_cache=False,
    )
    return LlamaForCausalLM(config), causal_batch(), None


def neox() -> tuple[nn.Module, Batch, Loss | None]:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=46,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        use_cache=False,
    )
    return GPTNeoXForCausalLM(config), causal_batch(), None


def gptj() -> tuple[nn.Module, Batch, Loss | None]:
    from transformers import GPTJConfig, GPTJForCausalLM

    config = GPTJConfig(vocab_size=VOCABULARY, n_embd=32, n_inner=46, n_layer=2, n_head=4, rotary_dim=4, n_positions=16, use_cache=False)
    return GPTJForCausalLM(config), causal_batch(), None


def bert() -> tuple[nn.Module, Batch, Loss | None]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=46,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
    )
    return BertForMaskedLM(config), masked_batch(), None


def tempered() -> tuple[nn.Module, Batch, Loss | None]:
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH))
    return Tempered(), {"input_ids": ids, "labels": ids.roll(1, 1)}, None


FACTORIES: Mapping[str, Callable[[], tuple[nn.Module, Batch, Loss | None]]] = {
    "gpt": gpt,
    "frozen": frozen,
    "encoder": encoder,
    "gpt2": gpt2,
    "gpt2 exact": gpt2_exact,
    "llama": llama,
    "llama exact": llama_exact,
    "neox": neox,
    "bert": bert,
    "gptj": gptj,
    "llama14on2": lambda: llama(14, 2),
    "llama24on3": lambda: llama(24, 3),
    "llama6on3": lambda: llama(6, 3),
    "llama4on1": lambda: llama(4, 1),
    "tempered": tempered,
}


@cache
def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Batch, Loss | None]:
    """A model in training mode, its batch and its loss."""
    torch.manual_seed(11)
    model, batch, loss = FACTORIES[name]()
    return model.to(dtype).train(), batch, loss


@cache
def captured(name: str, dtype: torch.dtype = torch.float64) -> Program:
    """One capture for all meshes, of two of the batch's rows."""
    model, batch, loss = made(name, dtype)
    return capture(model, {key: value[:2] for key, value in batch.items()}, loss=loss)


def compiled(name: str, mesh: str, dtype: torch.dtype = torch.float64, **options: Any) -> Compilation:
    """A model compiled for a mesh from the shared capture, with as many micro-batches as stages."""
    model, batch, loss = made(name, dtype)
    placed = Mesh.of(mesh)
    rows = ROWS // (placed.dp * placed.pp)
    part = {key: value[:rows] for key, value in batch.items()}
    return lower_captured(captured(name, dtype), model, placed, part, Options(loss, placed.pp, **options))
