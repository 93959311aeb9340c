"""place_dropout: the rows of the batch are found in whatever is dropped, wherever they lie; else it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_models import before_and_after
from torch import Tensor, nn

import tpcompile
from tpcompile.errors import Refused
from tpcompile.ir import Program
from tpcompile.passes.capture import capture
from tpcompile.passes.normalize import normalize
from tpcompile.passes.place_dropout import place_dropout
from tpcompile.rules import argument, op_name

Work = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """Something dropped of [rows, 4, 6], and a sum over rows."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.work = work
        self.first, self.table = nn.Linear(6, 6), nn.Parameter(torch.rand(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.work(self, self.first(x)) ** 2).sum()


def model(work: Work) -> nn.Module:
    return Model(work).double()


def batch(rows: int = 6) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}


def program(work: Work, rows: int = 3) -> Program:
    return normalize(capture(model(work), batch(rows)), "exact")


def placed(found: Program) -> list[int]:
    return [argument(node, "rows") for node in found.graph.nodes if op_name(node) == "tpcompile.dropout_at.default"]


def drop(x: Tensor, p: float = 0.5) -> Tensor:
    return F.dropout(x, p)


CASES: dict[str, tuple[Work, int]] = {
    # what is dropped, and which dimension of it counts rows
    "first": (lambda m, x: drop(x), 0),
    "second": (lambda m, x: drop(x.transpose(0, 1)), 1),
    "last": (lambda m, x: drop(x.permute(1, 2, 0)), 2),
    "merged with what follows": (lambda m, x: drop(x.flatten(0, 1)), 0),
    "merged with what precedes": (lambda m, x: drop(x.transpose(0, 1).flatten(0, 1)), 1),
    "between others": (lambda m, x: drop(x.transpose(0, 1).flatten()), 1),
    "of heads and rows in one": (lambda m, x: drop(x.unflatten(2, (2, 3)).transpose(1, 2).flatten(0, 1)), 0),
    "twice one after the other": (lambda m, x: drop(torch.stack([x, 2 * x]).flatten(0, 1)), 1),
    "alone": (lambda m, x: x * drop(torch.ones_like(x[:, :1, :1])), 0),
    "a parameter": (lambda m, x: x + drop(m.table), -1),
    "an index that all rows share": (lambda m, x: x + drop(torch.arange(x.shape[1]).double())[:, None], -1),
}  # fmt: skip


@pytest.mark.parametrize("rows", [2, 1])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_found(name: str, rows: int) -> None:
    """In a capture of several rows, and in one of a single row by the capture of two."""
    work, dim = CASES[name]
    witness = program(work, 2) if rows == 1 else None
    assert placed(place_dropout(program(work, rows), 6, witness)) == [dim]


@pytest.mark.parametrize("mesh", ["dp=2", "dp=3"])
@pytest.mark.parametrize("name", CASES)
def test_parts_have_the_masks_of_the_whole_batch(name: str, mesh: str) -> None:
    """Against the untouched model; a part of it has one row on dp=6."""
    tpcompile.testing.assert_parity(model(CASES[name][0]), mesh, batch(), dropout="exact")


def test_parts_of_one_row() -> None:
    for name in ("first", "second", "merged with what precedes", "alone"):
        tpcompile.testing.assert_parity(model(CASES[name][0]), "dp=3", batch(), microbatches=2, dropout="exact")


def test_a_batch_that_is_not_divided_needs_no_place() -> None:
    found = program(lambda m, x: drop(x.flatten()[x.flatten().argsort()]))
    assert place_dropout(found, 1) is found


def test_golden(golden: Callable[..., None]) -> None:
    def work(m: Any, x: Tensor) -> Tensor:
        return drop(drop(x, 0.1).transpose(0, 1).flatten(0, 1), 0.2)

    golden(before_and_after(lambda found: place_dropout(found, 2), program(work)), "place_dropout")


def test_rows_that_are_mixed_are_refused() -> None:
    with pytest.raises(Refused) as error:
        place_dropout(program(lambda m, x: drop(x.flatten(0, 1).cumsum(0))), 2)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("dropout of a value in which the rows of the batch have no place: aten.cumsum.default at ")
    assert lines[0].endswith("aten.cumsum.default needs this dimension whole")
    assert lines[1] == '  at   compile(dropout="exact")' and "test_place_dropout.py" in lines[2]
    assert lines[3] == '  fix  use dropout="local", or dp=1 and microbatches=1'


def test_rows_in_an_order_of_their_own_are_refused() -> None:
    """Sorted by a number of theirs, a part's rows do not stand together in the sorted batch."""

    def work(m: Any, x: Tensor) -> Tensor:
        return drop(x[x[:, 0, 0].argsort()])

    with pytest.raises(Refused, match="have no place: they are in an order of their own\n"):
        place_dropout(program(work), 2)


def test_a_fixed_number_of_rows_does_not_tell_rows_from_others() -> None:
    def work(m: Any, x: Tensor) -> Tensor:
        rows = 3 if x.shape[0] == 3 else 2  # captured for one number of rows
        return x * drop(torch.ones(rows, 1, 1, dtype=x.dtype))

    found = program(work)
    assert [str(symbol) for symbol in found.symbols] == ["s"]
    with pytest.raises(Refused, match="have no place: it was captured for a fixed number of rows\n"):
        place_dropout(found, 2)


def test_more_rows_tell_which_they_are_in_a_capture_of_one() -> None:
    """Without a witness a dimension of size one would be taken for one that all rows share."""
    work = CASES["alone"][0]
    assert placed(place_dropout(program(work, 1), 2, program(work, 2))) == [0]
