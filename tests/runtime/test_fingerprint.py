"""Ranks that compiled different programs, or were given different batches, say so instead of hanging."""

from __future__ import annotations

import pytest
import runtime_workers as workers
import torch
from torch import nn

from tpcompile.runtime.fingerprint import difference, shapes, values
from tpcompile.runtime.launch import launch


def test_equal_ranks() -> None:
    assert difference([{"plan": "a"}] * 3) is None


def test_what_differs_and_where() -> None:
    everyone = [{"mesh": "m", "plan": "a"}] * 3 + [{"mesh": "m", "plan": "b"}, {"mesh": "m", "plan": "a"}]
    assert str(difference(everyone)) == (
        "the ranks differ in their plan\n  at   ranks 0-2, 4 have a; rank 3 has b\n  fix  compile with the same tpcompile on all ranks"
    )


def test_several_differences() -> None:
    error = difference([{"mesh": "m", "graph": "a"}, {"mesh": "n", "graph": "b"}])
    assert str(error).split("\n")[:2] == ["2 problems", "the ranks differ in their mesh"]


def test_values_see_every_bit_and_shapes_see_types() -> None:
    model = nn.Linear(3, 2)
    before = values(model), shapes(model)
    with torch.no_grad():
        model.weight[1, 2] = model.weight[1, 2].nextafter(torch.tensor(9.0))
    assert values(model) != before[0] and shapes(model) == before[1]
    assert shapes(model.double()) != before[1]
    assert values(model.to("meta")) == ""
    for dtype in (torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn):
        holder = nn.Module()
        holder.register_buffer("x", torch.ones(3).to(dtype))
        holder.register_buffer("empty", torch.ones(0).to(dtype))
        assert values(holder)


@pytest.mark.processes
def test_other_weights_on_one_rank() -> None:
    for message in launch(workers.other_seed, "dp=2"):
        what, at, fix = message.split("\n")
        assert what == "the ranks differ in their parameter values"
        assert at.startswith("  at   rank 0 has ") and "; rank 1 has " in at
        assert fix == ("  fix  call torch.manual_seed with the same seed on all ranks before the model is built, or load the same weights")


@pytest.mark.processes
@pytest.mark.parametrize("split", [True, False], ids=["whole batch", "own rows"])
@pytest.mark.parametrize("length", [5, 6], ids=["other values", "other shapes"])
def test_other_batch_on_one_rank(length: int, split: bool) -> None:
    for rank, message in enumerate(launch(workers.other_batch, "pp=2", length, split)):
        differ = "different batches of the same shape" if length == 5 else "batches of different shapes"
        own = length if length == 5 else length + rank
        lines = message.split("\n")
        assert lines[0] == f"ranks 0 and 1 were given {differ}"
        assert lines[1] == f"  at   rank {rank}: compiled.train_step(input_ids=[8, {own}], labels=[8, {own}])"
        assert lines[2].startswith("  from runtime_workers.py:")
        assert lines[3] == (
            "  fix  pass the same batch on every rank (same seed and order of the data), or compile with split_batches=False"
            if split
            else "  fix  pass the same rows on all ranks of a replica, and rows of one shape on all replicas"
        )
