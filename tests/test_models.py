"""What a user types for a model, and what is said when it cannot be had."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tpcompile.errors import InputError
from tpcompile.models import Sizes, load


def says(text: str) -> str:
    return f"^{re.escape(text)}$"


def test_a_factory_of_a_model() -> None:
    model, batch = load("tpcompile.demo.model:gpt", Sizes(rows=4, sequence=9))
    assert {name: list(value.shape) for name, value in batch.items()} == {"input_ids": [4, 9], "labels": [4, 9]}
    assert model(**batch)["loss"].ndim == 0


def test_the_same_numbers_every_time() -> None:
    first, second = (load("tpcompile.demo.model:gpt", Sizes()) for _ in range(2))
    assert all(map(torch.equal, first[0].state_dict().values(), second[0].state_dict().values()))
    assert torch.equal(first[1]["input_ids"], second[1]["input_ids"])


def test_a_factory_of_a_model_and_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import torch\ndef pair():\n    return torch.nn.Linear(2, 3), {'input': torch.ones(4, 2)}\n"
    (tmp_path / "own_pair.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    model, batch = load("own_pair:pair", Sizes())
    assert isinstance(model, torch.nn.Linear) and list(batch) == ["input"]


def test_a_batch_of_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import torch\ndef one():\n    return torch.nn.Linear(2, 3)\ndef example_batch():\n    return {'input': torch.ones(4, 2)}\n"
    (tmp_path / "own_module.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert list(load("own_module:one", Sizes())[1]["input"].shape) == [4, 2]


def test_a_transformers_model() -> None:
    model, batch = load("hf:llama,num_hidden_layers=1,hidden_size=64,intermediate_size=96,num_attention_heads=4,vocab_size=91", Sizes(2, 5))
    assert model.config.hidden_size == 64 and len(model.model.layers) == 1  # type: ignore[union-attr, arg-type]
    assert model(**batch).loss.ndim == 0


def test_a_transformers_task() -> None:
    sizes = "num_hidden_layers=1,hidden_size=32,intermediate_size=48,num_attention_heads=2,vocab_size=91"
    assert type(load(f"hf:bert,{sizes}", Sizes())[0]).__name__ == "BertForMaskedLM"
    assert type(load(f"hf:bert,task=causal,{sizes}", Sizes())[0]).__name__ == "BertLMHeadModel"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpt", "'gpt' names no model\n  at   MODEL gpt\n  fix  write package.module:factory, or hf:llama,num_hidden_layers=2"),
        (
            "no_such.thing:x",
            "no module named 'no_such'\n  at   MODEL no_such.thing:x\n  fix  run in the folder that holds it, or install it",
        ),
        (
            "tpcompile.demo.model:gtp",
            "module tpcompile.demo.model has no function 'gtp'\n  at   MODEL tpcompile.demo.model:gtp\n  fix  perhaps gpt",
        ),
        (
            "tpcompile.demo.model:dataclass",
            "dataclass() returned function\n  at   MODEL tpcompile.demo.model:dataclass\n  fix  return an nn.Module, or (model, batch)",
        ),
        (
            "torch.nn:Flatten",
            "no batch is known for Flatten\n  at   MODEL torch.nn:Flatten\n  fix  return it with the model: (model, batch)",
        ),
        ("hf:lama", "transformers has no model type 'lama'\n  at   MODEL hf:lama\n  fix  perhaps llama"),
        ("hf:llama,layers", "'layers' is not key=value\n  at   MODEL hf:llama,layers\n  fix  write hf:llama,num_hidden_layers=2"),
        (
            "hf:llama,hiden_size=64",
            "the config of llama has no 'hiden_size'\n  at   MODEL hf:llama,hiden_size=64\n  fix  perhaps hidden_size",
        ),
        ("hf:llama,task=masked", "llama has no masked model\n  at   MODEL hf:llama,task=masked\n  fix  use task=causal"),
    ],
)
def test_what_cannot_be_had(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=says(message)):
        load(spec, Sizes())
