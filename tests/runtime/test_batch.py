"""Batches: names, rows, equal parts, and every complaint word for word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tpcompile.errors import InputError
from tpcompile.ir import Input
from tpcompile.runtime import batch as batches
from tpcompile.runtime.batch import Division

INPUTS = {"input_ids": Input("input_ids", 0), "past_0_key": Input("past.0.key", 1), "table": Input("table", None)}


def whole() -> dict[str, Any]:
    return {"input_ids": torch.arange(8).view(4, 2), "past": [{"key": torch.arange(4).view(1, 4)}], "table": torch.zeros(4), "flag": True}


def test_flatten_and_parts() -> None:
    flat = batches.flatten(whole(), INPUTS, "call")
    assert list(flat) == ["input_ids", "past_0_key", "table"]
    assert batches.rows_of(flat, INPUTS, "call") == 4
    part = batches.part(flat, {name: i.batch_dim for name, i in INPUTS.items()}, 1, 2)
    assert part["input_ids"].tolist() == [[4, 5], [6, 7]]
    assert part["past_0_key"].tolist() == [[2, 3]]
    assert part["table"].shape == (4,)


def test_example_has_the_shape_of_a_microbatch() -> None:
    batch = {"x": torch.zeros(8, 3), "y": torch.zeros(8), "positions": torch.zeros(1, 3), "flag": True}
    shapes = [getattr(leaf, "shape", leaf) for leaf in batches.example(batch, Division(2, 2, 1)).values()]
    assert shapes == [(2, 3), (2,), (1, 3), True]
    assert batches.example({"x": torch.zeros(6, 3)}, Division(4, 2, 1))["x"].shape == (3, 3)  # one replica's rows
    assert batches.example({"x": torch.zeros(5, 3)}, Division(2, 2, 1))["x"].shape == (5, 3)  # one micro-batch


def forward(x: Tensor, y: Tensor, *, z: Tensor | None = None) -> None:
    """Arguments to bind to."""


def test_positional_arguments() -> None:
    assert batches.bind(forward, (1, 2), {"z": 3}) == {"x": 1, "y": 2, "z": 3}
    with pytest.raises(InputError) as error:
        batches.bind(forward, (1, 2, 3), {})
    assert error.value.what == "forward takes 2 positional arguments, 3 were given"
    assert error.value.fix == "pass at most x, y"


def test_targets() -> None:
    assert [batches.is_target(path, forward) for path in ("x", "z.0", "labels", "answer")] == [False, False, True, True]


DIVISIONS = (
    (10, Division(1, 4, 1), "4 equal micro-batches", "a batch of 8 or 12 rows, or microbatches=2 or 5"),
    (3, Division(1, 4, 1), "4 equal micro-batches", "a batch of 4 rows, or microbatches=3"),
    (9, Division(2, 2, 2), "2 replicas of 2 equal micro-batches", "a batch of 8 or 12 rows"),
    (10, Division(2, 4, 2), "2 replicas of 4 equal micro-batches", "a batch of 8 or 16 rows, or microbatches=5"),
    (9, Division(2, 1, 1), "2 replicas", "a batch of 8 or 10 rows"),
    (0, Division(1, 2, 1), "2 equal micro-batches", "a batch of 2 rows"),
)


@pytest.mark.parametrize(("rows", "division", "into", "fix"), DIVISIONS)
def test_rows_that_do_not_divide(rows: int, division: Division, into: str, fix: str) -> None:
    with pytest.raises(InputError) as error:
        batches.check_rows(rows, division, "compiled.train_step(input_ids=[10, 128])")
    assert str(error.value) == (
        f"a batch of {rows} rows cannot be divided into {into}\n"
        f"  at   compiled.train_step(input_ids=[10, 128])\n  from {error.value.source}\n  fix  use {fix}"
    )


def test_no_rows_at_all() -> None:
    batches.check_rows(None, Division(1, 1, 1), "call")
    with pytest.raises(InputError) as error:
        batches.check_rows(None, Division(1, 2, 1), "call")
    assert str(error.value) == (
        f"a batch without rows cannot be divided into 2 equal micro-batches\n  at   call\n  from {error.value.source}\n"
        "  fix  use dp=1 and microbatches=1, or inputs whose first dimension counts rows"
    )


def test_missing_and_extra_inputs() -> None:
    call = batches.describe("train_step", {"input_ids": torch.zeros(4, 2), "flag": True})
    assert call == "compiled.train_step(input_ids=[4, 2], flag=True)"
    with pytest.raises(InputError) as error:
        batches.flatten({"input_ids": torch.zeros(4, 2)}, INPUTS, call)
    assert str(error.value) == (
        "past.0.key and table are missing\n"
        "  at   compiled.train_step(input_ids=[4, 2], flag=True)\n"
        f"  from {error.value.source}\n"
        "  fix  pass past.0.key and table, or compile with example_inputs that leave them out"
    )
    with pytest.raises(InputError) as error:
        batches.flatten({**whole(), "mask": torch.zeros(2)}, INPUTS, call)
    assert error.value.what == "the model was compiled without mask"


def test_rows_that_disagree() -> None:
    flat = batches.flatten({**whole(), "input_ids": torch.zeros(3, 2)}, INPUTS, "call")
    with pytest.raises(InputError) as error:
        batches.rows_of(flat, INPUTS, "call")
    assert str(error.value) == (
        "the inputs do not have the same number of rows: input_ids has 3, past.0.key has 4\n"
        f"  at   call\n  from {error.value.source}\n  fix  pass equally many rows of every input"
    )
