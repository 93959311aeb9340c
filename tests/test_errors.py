"""What a user reads when a call does not fit: every message word for word, through the public functions and the real compiler."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runtime_workers as workers
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tpcompile
from tpcompile import Mesh, TpcompileError
from tpcompile.demo.model import GPT, Config


def gpt(layers: int = 2) -> GPT:
    return GPT(Config(vocab_size=23, layers=layers, heads=2, hidden=16, inner=24))


def batch(rows: int = 8, length: int = 6) -> dict[str, Tensor]:
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}


def message(call: Callable[[], Any]) -> str:
    """The error's text; its source is the line of the call here, shown as `from here`."""
    with pytest.raises(TpcompileError) as error:
        call()
    lines, start = inspect.getsourcelines(call)
    places = "|".join(str(number) for number in range(start, start + len(lines)))
    return re.sub(rf"  from {re.escape(Path(__file__).name)}:({places})$", "  from here", str(error.value), flags=re.MULTILINE)


@pytest.mark.processes
def test_a_mesh_that_does_not_match_the_number_of_processes() -> None:
    (first, second) = tpcompile.launch(workers.wrong_world, "dp=2", "dp=2,pp=2")
    assert first == second
    assert re.sub(r"runtime_workers.py:\d+", "here", first) == (
        "mesh dp=2,pp=2,tp=1 needs 4 processes, 2 are running\n"
        "  at   compiled.train_step(input_ids=[8, 5], labels=[8, 5])\n"
        "  from here\n"
        "  fix  start 4 processes (torchrun --nproc-per-node 4), or use a mesh whose sizes multiply to 2"
    )


def test_no_processes_at_all() -> None:
    compiled = tpcompile.compile(gpt(), "dp=2,tp=2", batch())
    assert message(lambda: compiled.train_step(**batch())) == (
        "mesh dp=2,pp=1,tp=2 needs 4 processes, and no process group is initialised\n"
        "  at   compiled.train_step(input_ids=[8, 6], labels=[8, 6])\n"
        "  from here\n"
        "  fix  start with torchrun --nproc-per-node 4 and call torch.distributed.init_process_group(), or use tpcompile.launch(fn, mesh)"
    )


MESHES = [
    ("tp=2,ep=2", "unknown mesh axis 'ep'", "the axes are dp, pp and tp"),
    ("tp=2,dp=2,tp=4", "mesh axis 'tp' is given twice", "give tp once"),
    ("tp:2", "'tp:2' is not axis=size", 'write a mesh as "dp=2,pp=2,tp=2"'),
]


@pytest.mark.parametrize(("mesh", "what", "fix"), MESHES, ids=[mesh for mesh, _, _ in MESHES])
def test_a_mesh_that_is_none(mesh: str, what: str, fix: str) -> None:
    expected = f"{what}\n  at   mesh '{mesh}'\n  from here\n  fix  {fix}"
    assert message(lambda: Mesh.of(mesh)) == expected
    assert message(lambda: tpcompile.compile(gpt(), mesh, batch())) == expected
    assert message(lambda: tpcompile.check(gpt(), mesh, batch())) == expected


def test_an_axis_without_ranks() -> None:
    assert message(lambda: tpcompile.compile(gpt(), "tp=0", batch())) == (
        "axis tp has size 0\n  at   Mesh(tp=0)\n  from here\n  fix  give tp a whole number of 1 or more"
    )


def test_example_inputs_that_forward_does_not_take() -> None:
    example = {"input_ids": batch()["input_ids"], "lables": batch()["labels"]}
    expected = (
        "forward takes no 'lables'\n  at   GPT.forward(input_ids, labels=None)\n  from here\n  fix  rename it to 'labels', or leave it out"
    )
    assert message(lambda: tpcompile.compile(gpt(), "tp=2", example)) == expected
    assert message(lambda: tpcompile.check(gpt(), "tp=2", example)) == expected


def test_example_inputs_that_forward_needs() -> None:
    example = {"labels": batch()["labels"]}
    assert message(lambda: tpcompile.compile(gpt(), "tp=2", example)) == (
        "forward needs 'input_ids', which the batch does not have\n"
        "  at   GPT.forward(input_ids, labels=None)\n"
        "  from here\n"
        "  fix  add 'input_ids' to the batch"
    )


def test_more_example_inputs_than_arguments() -> None:
    example = tuple(torch.zeros(4, 6, dtype=torch.int64) for _ in range(3))
    assert message(lambda: tpcompile.compile(gpt(), "tp=2", example)) == (
        "forward takes 2 positional arguments, 3 were given\n"
        "  at   (argument 0=[4, 6], argument 1=[4, 6], argument 2=[4, 6])\n"
        "  from here\n"
        "  fix  pass at most input_ids, labels"
    )


def test_a_batch_that_does_not_divide_into_micro_batches() -> None:
    compiled = tpcompile.compile(gpt(), "tp=1", batch(), microbatches=4)
    assert message(lambda: compiled.train_step(**batch(10))) == (
        "a batch of 10 rows cannot be divided into 4 equal micro-batches\n"
        "  at   compiled.train_step(input_ids=[10, 6], labels=[10, 6])\n"
        "  from here\n"
        "  fix  use a batch of 8 or 12 rows, or microbatches=2 or 5"
    )


def test_a_batch_that_does_not_divide_among_replicas() -> None:
    assert message(lambda: tpcompile.check(gpt(), "dp=2,pp=2", batch(6), microbatches=2)) == (
        "a batch of 6 rows cannot be divided into 2 replicas of 2 equal micro-batches\n"
        "  at   check(input_ids=[6, 6], labels=[6, 6])\n"
        "  from here\n"
        "  fix  use a batch of 4 or 8 rows, or microbatches=3"
    )


class Branching(nn.Module):
    """Looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:
            y = y * 2
        return F.relu(y)


def test_a_forward_that_cannot_be_exported() -> None:
    _, start = inspect.getsourcelines(Branching)
    text = message(lambda: tpcompile.compile(Branching(), "tp=2", {"x": torch.zeros(2, 4)}))
    assert text == (
        "torch.export cannot capture Branching: Could not guard on data-dependent expression Eq(u0, 1)\n"
        "  at   if y.sum() > 0:\n"
        f"  from {Path(__file__).name}:{start + 9}\n"
        "  fix  choose with torch.where instead of a Python branch, so that the graph is the same for all values"
    )


def test_more_stages_than_there_are_places_to_cut() -> None:
    assert message(lambda: tpcompile.compile(nn.Linear(4, 4), "pp=2", {"input": torch.zeros(4, 4)})) == (
        "2 pipeline stages for a model that can be cut into 1 part\n  at   compile(mesh pp=2)\n  from here\n  fix  use pp=1"
    )


def test_a_step_of_a_model_without_a_loss() -> None:
    compiled = tpcompile.compile(gpt(), "tp=1", {"input_ids": batch()["input_ids"]})
    assert message(lambda: compiled.train_step(input_ids=batch()["input_ids"])) == (
        "the model has no loss: its output is neither a scalar nor has a .loss\n"
        "  at   compiled.train_step(input_ids=[8, 6])\n"
        "  from here\n"
        "  fix  pass loss= to tpcompile.compile, or the labels with the batch"
    )


def test_labels_missing() -> None:
    compiled = tpcompile.compile(gpt(), "tp=1", batch())
    assert message(lambda: compiled.train_step(input_ids=batch()["input_ids"])) == (
        "labels is missing\n  at   compiled.train_step(input_ids=[8, 6])\n  from here\n  fix  pass labels: the loss is computed from it"
    )


def test_overrides_that_fit_nothing() -> None:
    assert message(lambda: tpcompile.compile(gpt(), "tp=2", batch(), overrides={"blocks.*.mlp": "split"})) == (
        "overrides['blocks.*.mlp'] is 'split'\n  at   compile(overrides=…)\n  from here\n"
        '  fix  use "whole", "cut", "column", "row" or "per micro-batch"'
    )
    text = message(lambda: tpcompile.compile(gpt(1), "tp=2", batch(), overrides={"block.*": "whole"}))
    assert text == (
        "overrides name no region: 'block.*'\n"
        "  at   compile(overrides=…)\n"
        "  from here\n"
        "  fix  the regions are blocks.0.attention, blocks.0.mlp, vocabulary"
    )


@pytest.mark.parametrize("mesh", [2, (2, 2, 2), {"tp": 2}])
def test_what_is_no_mesh(mesh: object) -> None:
    with pytest.raises(TpcompileError, match="is no mesh") as error:
        Mesh.of(mesh)  # type: ignore[arg-type]
    assert error.value.fix == 'write a mesh as "dp=2,pp=2,tp=2"'


class Counting(nn.Module):
    """Does something else for more than five rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).square()
        return (y if x.shape[0] <= 5 else 2 * y).sum()


@pytest.mark.parametrize(("mesh", "rows", "parts"), [("dp=2", 6, 3), ("dp=2,pp=2", 8, 2), ("dp=6", 6, 1)])
def test_a_model_that_branches_by_the_number_of_rows(mesh: str, rows: int, parts: int) -> None:
    """Parts of the batch would go another way than one device goes with all of it."""
    made = message(lambda: tpcompile.check(Counting().double(), mesh, {"x": torch.ones(rows, 4).double()}))
    assert made == (
        f"the model does not do for {rows} rows what it does for {parts}, for which it takes b <= 5 for granted\n"
        f"  at   check(x=[{rows}, 4])\n  from here\n"
        "  fix  use dp=1 and microbatches=1, or a model that does the same for any number of rows"
    )
    assert tpcompile.check(Counting().double(), "dp=2", {"x": torch.ones(4, 4).double()}).ok
