"""Layers that are alike are captured once: the graph is the one of a full capture, and where they are not alike, it is captured in full."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from alike_models import ALIKE, CALLS, LAYERS, SIZE, UNLIKE, Counting, Iterating, Layer, Model
from torch import Tensor, nn

from tpcompile.ir import Program
from tpcompile.passes import _export
from tpcompile.passes.capture import capture
from tpcompile.text import text


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    reset()
    yield
    reset()


def reset() -> None:
    """Put what the models count back."""
    Counting.state["calls"], CALLS[0] = 0, 0
    Iterating.numbers = itertools.cycle(range(1, LAYERS + 1))


def in_full(model: nn.Module, batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, **options: bool) -> Program:
    reset()
    attempt = _export._attempt
    with monkeypatch.context() as patch:
        patch.setattr(_export, "_attempt", lambda call, tensors, dims, once: attempt(call, tensors, dims, False))
        return capture(model, batch, **options)


def assert_as_in_full(make: Callable[[], nn.Module], batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, **options: bool) -> Program:
    """Every node, line, module, site and table is that of a full capture."""
    reset()
    once, full = capture(make(), batch, **options), in_full(make(), batch, monkeypatch, **options)
    assert text(once) == text(full)
    for table in ("types", "sources", "parameters", "buffers", "inputs", "aliases", "symbols", "layers", "loss", "outputs", "sites"):
        assert getattr(once, table) == getattr(full, table), table
    assert once.guards is not None and full.guards is not None
    assert set(once.guards.conditions) == set(full.guards.conditions) and once.guards.ranges == full.guards.ranges
    assert once.notes == full.notes and full.repeated == ()
    return once


def copies(program: Program) -> int:
    """How many layers were copied."""
    return sum(int(found[1]) for note in program.repeated if (found := re.match(r"copies of \S+, (\d+): ", note)))


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(3, 4, SIZE)}


@pytest.mark.parametrize("name", ALIKE)
def test_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, count = ALIKE[name]
    program = assert_as_in_full(make, batch(), monkeypatch, dynamic=False)
    assert copies(program) == count, program.repeated


@pytest.mark.parametrize("name", UNLIKE)
def test_not_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, count = UNLIKE[name]
    program = assert_as_in_full(make, batch(), monkeypatch, dynamic=False)
    assert copies(program) == count, program.repeated


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 61}
HEADS = SMALL | {"num_key_value_heads": 2}
T5 = {"num_layers": 4, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "vocab_size": 61, "decoder_start_token_id": 0}
TRANSFORMERS = {
    "llama": (HEADS | {"num_hidden_layers": 5}, 3),
    "gpt2": ({"n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": 61, "bos_token_id": 0, "eos_token_id": 0}, 2),
    "bert": (SMALL | {"num_hidden_layers": 4}, 2),
    "t5": (T5, 2),  # the first block of both stacks has a table of positions, which the others are given
    "gemma2": (HEADS | {"num_hidden_layers": 8, "head_dim": 8}, 4),  # every second layer has a sliding window
}
"""Types, and how many of their layers are copies."""


@pytest.mark.parametrize(("kind", "dynamic"), [*((kind, False) for kind in TRANSFORMERS), ("llama", True)])
def test_transformers(kind: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    settings, count = TRANSFORMERS[kind]
    auto = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}.get(kind, "AutoModelForCausalLM")

    def make() -> nn.Module:
        model: nn.Module = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(kind, **settings))
        return model.train()

    ids = torch.randint(61, (3, 8))
    program = assert_as_in_full(make, {"input_ids": ids, "labels": ids.clone()}, monkeypatch, dynamic=dynamic)
    assert copies(program) == count, program.repeated


def test_sizes_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that a layer computes are the same in all layers."""
    program = assert_as_in_full(Folding, batch(), monkeypatch)
    assert copies(program) == 3 and len(program.symbols) == 2


class Folding(Model):
    def __init__(self) -> None:
        super().__init__(Folds)


class Folds(Layer):
    def more(self, x: Tensor) -> Tensor:
        rows, length, size = x.shape
        return x.reshape(rows * length, size).cumsum(0).view(rows, length, size) * (length + 1)


def test_a_layer_that_says_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nothing could see beforehand: the operations of the last layer are compared with those of the first."""
    hidden = {"calls": 0}
    relu = torch.relu

    def counting(x: Tensor) -> Tensor:
        hidden["calls"] += 1
        return relu(x) * hidden["calls"]

    monkeypatch.setattr(torch, "relu", counting)
    program = capture(Model(), batch(), dynamic=False)
    factors = [node.args[1] for node in program.graph.nodes if str(node.target) == "aten.mul.Tensor"]
    assert len(factors) == LAYERS and len(set(factors)) == LAYERS
    assert program.repeated[0].startswith("all layers are captured: layers.4 computes %mul")
