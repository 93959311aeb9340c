"""First values of a model on the meta device: its own initialisers', the same on every mesh, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import weights_workers as workers
from torch import Tensor, nn

import tpcompile
from tpcompile.errors import InputError
from tpcompile.runtime.checkpoint.boxes import Box
from tpcompile.runtime.initial import Initialiser


def values(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """What every parameter would start with."""
    source, found = Initialiser(model, seed), dict[str, Tensor]()
    for name, p in model.named_parameters():
        found[name] = torch.empty(p.shape)
        source.read(name, Box((0,) * p.dim(), tuple(p.shape)), found[name])
    return found


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


class Hooked(nn.Module):
    """A table and a tied head, and a linear that a hook of the whole model sets."""

    def __init__(self, std: float = 0.02) -> None:
        super().__init__()
        self.std = std
        self.tokens = nn.Embedding(50, 64, padding_idx=3)
        self.middle = nn.Linear(64, 64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.tokens.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=self.std, a=-2 * self.std, b=2 * self.std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class Orthogonal(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)
        with torch.no_grad():
            self.bias.copy_(torch.arange(self.out_features))
            self.bias[1:3].mul_(10)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.positions = nn.Parameter(torch.zeros(5, 4))


class Asking(nn.Linear):
    def _init_weights(self, module: nn.Module) -> None:
        if self.weight.sum() > 0:
            nn.init.ones_(self.weight)


def test_every_mesh_starts_with_the_same() -> None:
    one, other = workers.initialised("tp=1", 5), workers.initialised("tp=1", 6)
    assert one is not None and other is not None
    on_ranks = tpcompile.launch(workers.initialised, "pp=2,tp=2", "pp=2,tp=2", 5)[0]
    assert on_ranks.keys() == one.keys() and all(torch.equal(on_ranks[name], value) for name, value in one.items())
    drawn = [name for name, value in one.items() if value.std() > 0]
    assert len(drawn) > 6 and not any(torch.equal(one[name], other[name]) for name in drawn), "the seed counts"


def test_the_model_s_own_initialisers() -> None:
    """The hook comes after a module's own reset; a tied weight is the table's, whose row of padding is zero."""
    found = values(on_meta(Hooked))
    assert found.keys() == {"tokens.weight", "middle.weight", "middle.bias"}
    assert found["tokens.weight"].std().item() == pytest.approx(1, rel=0.1) and not found["tokens.weight"][3].any()
    weight = found["middle.weight"]
    assert weight.std().item() == pytest.approx(0.88 * 0.02, rel=0.1) and weight.abs().max() <= 0.04 and not found["middle.bias"].any()


def test_initialisers_that_compute() -> None:
    found = values(on_meta(lambda: Orthogonal(6, 6)))
    assert torch.allclose(found["weight"] @ found["weight"].T, torch.eye(6), atol=1e-6)
    assert found["bias"].tolist() == [0, 10, 20, 3, 4, 5]


@pytest.mark.parametrize("kind", ["Llama", "Bert", "T5"])
def test_as_the_constructor_would(kind: str) -> None:
    """Every parameter has the mean and the spread that it has in a model built with values."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {
        "Llama": lambda: transformers.LlamaConfig(**sizes, vocab_size=300),
        "Bert": lambda: transformers.BertConfig(**sizes, vocab_size=300),
        "T5": lambda: transformers.T5Config(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=300),
    }[kind]()
    make = {"Llama": transformers.LlamaForCausalLM, "Bert": transformers.BertForMaskedLM, "T5": transformers.T5ForConditionalGeneration}[
        kind
    ]
    torch.manual_seed(0)
    built, found = dict(make(config).named_parameters()), values(on_meta(lambda: make(config)))
    assert found.keys() == built.keys()
    for name, p in built.items():
        spread = max(p.std().item(), 1e-9) if p.numel() > 1 else 1.0
        assert abs(found[name].mean().item() - p.mean().item()) <= 6 * spread / p.numel() ** 0.5, name
        if p.numel() > 1000:
            assert found[name].std().item() == pytest.approx(p.std().item(), rel=0.15), name


def test_what_no_initialiser_sets_is_named() -> None:
    with pytest.raises(InputError) as error:
        values(on_meta(Bare))
    assert error.value.what == "positions is set by no initialiser of the model"


def test_an_initialiser_that_asks_for_values() -> None:
    with pytest.raises(InputError) as error:
        values(on_meta(lambda: nn.Sequential(Asking(2, 2))))
    assert error.value.what.startswith("0 is not initialised without values: ")


class Elsewhere(nn.Linear):
    """Drawn from numpy's generator, which has another state on every rank."""

    def _init_weights(self, module: nn.Module) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.tensor(np.random.rand(*self.weight.shape)))


def test_random_numbers_that_are_not_torch_s() -> None:
    with pytest.raises(InputError, match="draws random numbers from Python or numpy"):
        values(on_meta(lambda: Elsewhere(2, 2)))


def test_a_model_with_values_keeps_them() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    model: nn.Module = workers.GPT(workers.Config(vocab_size=9, layers=1, heads=1, hidden=4, inner=4))
    compiled = tpcompile.compile(model, "tp=1", {"input_ids": ids, "labels": ids}, weights=tpcompile.Initial())
    with pytest.raises(InputError, match="has values, which an initialisation would overwrite"):
        compiled.eval_step(input_ids=ids, labels=ids)
