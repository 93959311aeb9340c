"""Layers that run again in backward: the same numbers, and fewer bytes kept for backward."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import tpcompile
from tpcompile.errors import InputError, Refused
from tpcompile.runtime.compiled import Compiled
from tpcompile.runtime.recompute import check_recompute


@pytest.fixture(autouse=True)
def _handmade() -> None:
    """The compiler itself, in place of the one that the other tests here use."""


def model() -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_positions=64, n_layer=2, n_head=4, n_embd=32, use_cache=False)
    return GPT2LMHeadModel(config).double().train()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(61, (4, 48), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@cache
def compiled_once(dropout: str) -> Compiled:
    return tpcompile.compile(model(), "tp=1", batch(), dropout=dropout)


@cache
def step(how: str, dropout: str = "local") -> tuple[float, dict[str, Tensor], int]:
    """The loss and the gradients of two steps, and what is alive between forward and backward of a third."""
    first = compiled_once(dropout)
    compiled = Compiled(first.model, first.mesh, replace(first.options, recompute=how), None)
    compiled._compilations = [replace(first.compilation, options=compiled.options)]
    torch.manual_seed(0)
    losses = [compiled.train_step(**batch()).item() for _ in range(2)]
    found = {name: p.grad.clone() for name, p in compiled.named_parameters() if p.grad is not None}
    compiled.eval_step(**batch())
    with kept() as storages:
        loss = compiled(**batch())["loss"]
        storages |= alive()
    del loss
    return sum(losses), found, sum(storages.values())


@contextmanager
def kept() -> Iterator[dict[int, int]]:
    """The bytes of what autograd keeps, and of tensors that appear, by the memory that they lie in."""
    before, found = alive(), dict[int, int]()

    def note(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield found
    for place in before:
        found.pop(place, None)


def alive() -> dict[int, int]:
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter) and one.device.type == "cpu"]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize("dropout", ["local", "fast"])
@pytest.mark.parametrize("how", ["full", "selective"])
def test_the_same_numbers(how: str, dropout: str) -> None:
    loss, gradients, _ = step(how, dropout)
    expected_loss, expected, _ = step("none", dropout)
    assert compiled_once(dropout).compilation.program.random or dropout == "fast"
    assert loss == expected_loss and gradients.keys() == expected.keys()
    assert all(torch.equal(grad, expected[name]) for name, grad in gradients.items())


def test_less_is_kept() -> None:
    none, selective, full = (step(how)[2] for how in ("none", "selective", "full"))
    assert selective < 0.75 * none and full < 0.1 * none, (none, selective, full)


def test_a_way_that_is_unknown() -> None:
    with pytest.raises(InputError) as error:
        check_recompute("all", "1f1b", 1)
    lines = [line for line in str(error.value).split("\n") if "from" not in line]
    assert lines == [
        "there is no recompute 'all'",
        "  at   compile(recompute='all')",
        '  fix  use recompute="none", "full" or "selective"',
    ]


def test_schedules_that_divide_backward() -> None:
    with pytest.raises(Refused) as error:
        check_recompute("full", "zbv", 2)
    lines = [line for line in str(error.value).split("\n") if "from" not in line]
    assert lines == [
        "schedule zbv divides backward in two, and each half would run forward again",
        "  at   compile(recompute='full')",
        '  fix  use recompute="none", or schedule="1f1b"',
    ]
    check_recompute("none", "zbv", 2)
