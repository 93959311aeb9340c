"""The proof that rows are kept apart: what it says is apart gives every part of a batch what the whole batch gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcompile.ir import Program
from tpcompile.passes._rows import Rows
from tpcompile.passes.capture import capture
from tpcompile.passes.normalize import normalize
from tpcompile.simulate.lockstep import run
from tpcompile.simulate.replay import flatten, rows

PARTS = 3


class Work(nn.Module):
    """A piece of work on features [rows, 4, 6] and whole numbers [rows, 4]."""

    def __init__(self, work: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.work = work
        self.weight = nn.Parameter(torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        return {"y": self.work(x, ids, self.weight)}


def batch() -> dict[str, Tensor]:
    """Six rows; the numbers of features that are chosen by `ids` differ from row to row."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "ids": torch.tensor([[0, 0, 0, 1], [2, 0, 1, 1], [1, 1, 1, 1], [0, 2, 2, 0], [2, 2, 1, 0], [0, 1, 2, 0]])}


def chosen(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Places of each kind with a weight of their own."""
    made = torch.zeros_like(x)
    for kind in range(3):
        mask = ids == kind
        made[mask] = x[mask] @ weight[kind]
    return made


def chosen_rows(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Whole rows, chosen by what stands first in them."""
    made = torch.zeros_like(x)
    mask = ids[:, 0] == 0
    made[mask] = (x[mask] @ weight[0]).softmax(1)
    return made


def sorted_back(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    order = ids.flatten().argsort()
    there = x.flatten(0, 1)[order].relu()
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return there[back].view_as(x)


def filled(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    y = x.clone()
    y[ids == 1] = 0.5
    y[:, 2] = weight[0, 0]
    return y


def in_groups(x: Tensor) -> Tensor:
    """Two places of a row as one, with what is the same for all of them."""
    pairs = x.flatten(0, 1).view(-1, 2, 6)
    return pairs[:, 0] * pairs[:, 1] + torch.ones(pairs.shape[0], 6)


def first_of_kind(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """The first place of each kind, kind by kind for all rows in one dimension."""
    rows, length = ids.shape
    kinds = F.embedding(ids, weight[0, :3])[..., :1].detach() * 0 + ids[..., None]
    place = torch.arange(length).expand(rows, -1)
    index = (torch.arange(rows) * 3).unsqueeze(-1) + ids
    first = torch.zeros(rows * 3).scatter_reduce(0, index.view(-1), place.reshape(-1).float(), "amin", include_self=False)
    return x * first.view(rows, 3).gather(1, ids)[..., None] + kinds


def from_starts(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """The highest places of each row, taken out of all rows' places."""
    rows, length, width = x.shape
    best = x.sum(-1).topk(2, -1).indices
    index = best + torch.arange(rows)[:, None] * length
    flat = x.reshape(rows * length, width)
    return flat[index] + flat.index_select(0, index.flatten()).view(rows, 2, width)


def windows(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    return F.unfold(x[..., None], (3, 1), padding=(1, 0)).unflatten(1, (4, 3))


APART: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "places that a mask chooses": chosen,
    "rows that a mask chooses": chosen_rows,
    "sorted and put back": sorted_back,
    "filled by a mask": filled,
    "tiles of merged rows": lambda x, ids, weight: (x.flatten(0, 1).repeat(3, 1).view(3, -1, 6) @ weight).view(3, -1, x.shape[1], 6).sum(0),
    "pooled": lambda x, ids, weight: F.adaptive_avg_pool1d(x.transpose(1, 2), 3) + F.avg_pool2d(x[:, None], 2).flatten(1)[:, :1, None],
    "resampled": lambda x, ids, weight: F.interpolate(x[:, None], (5, 7), mode="bilinear"),
    "windows": windows,
    "places from each row's start": from_starts,
    "the first of each kind": first_of_kind,
    "transformed": lambda x, ids, weight: torch.fft.fftn(x, dim=(1, 2)).real,
    "places in pairs": lambda x, ids, weight: in_groups(x),
    "parts whose size is not known": lambda x, ids, weight: torch.stack(torch.cat([x, x], 1).chunk(2, 1), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_what_is_apart_gives_each_part_its_own(name: str) -> None:
    program = program_of(APART[name])
    (made,) = program.returned()
    proof = Rows.of(program)
    assert proof.reason(program.nodes()[made]) == ""
    (layout,) = proof.layouts[program.nodes()[made]]
    (dim,) = [d for d, cut in enumerate(layout.dims) if any(factor.cut for segment in cut for factor in segment)]
    whole, parts = made_of(program, batch()), [made_of(program, part) for part in divided(program)]
    assert torch.allclose(torch.cat(parts, dim), whole, rtol=1e-12, atol=1e-12)


def neighbours(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Pairs in the order of a sort are of any rows."""
    return x.flatten(0, 1)[ids.flatten().argsort()].view(-1, 2, 6).sum(1)


def neighbours_chosen(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Columns first: a mask chooses places of all rows before the next places."""
    there = x.transpose(0, 1)[(ids >= 0).t()]
    return there.view(-1, 2, 6).sum(1)


def back_elsewhere(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """As many are put back as were chosen, each somewhere else."""
    made = torch.zeros_like(x)
    made[ids.flip(1) == 1] = x[ids == 1]
    return made


def numbered(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """How many were chosen before."""
    there = x[ids == 1]
    return there * torch.arange(there.shape[0])[:, None]


def from_far(x: Tensor, length: int, shift: int) -> Tensor:
    """Places of rows that are not so long."""
    flat = x[:, :4].flatten(0, 1)
    return flat[torch.arange(4) + shift + torch.arange(x.shape[0])[:, None] * length]


UNLIKE = "two uses of a value need it cut in different ways"

COUNTED = "it computes with the number of rows"
NUMBER = "it computes with a number that depends on how many rows there are"
GROWS = "a dimension that grows with the batch, and does not count rows"

MIXED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "neighbours of any rows": (lambda x, ids, weight: in_groups(x.transpose(0, 1)), "a view divides s at b*s/2"),
    "neighbours in an order": (neighbours, "a view puts neighbours of an order together"),
    "places of all rows by turns": (neighbours_chosen, "aten.index.Tensor needs this dimension whole"),
    "put back by another mask": (back_elsewhere, "what one mask chose is put back by another"),
    "numbers of the chosen": (numbered, UNLIKE),
    "what is chosen, in turn": (lambda x, ids, weight: x[ids == 1].cumsum(0), "aten.cumsum.default needs this dimension whole"),
    "the most of all chosen": (lambda x, ids, weight: x - x[ids == 1].amax(0), "aten.amax.default needs this dimension whole"),
    "pooled over the rows": (
        lambda x, ids, weight: F.avg_pool1d(x.permute(1, 2, 0), 2),
        "aten.avg_pool1d.default needs this dimension whole",
    ),
    "transformed over the rows": (lambda x, ids, weight: torch.fft.fft(x, dim=0).real, "aten.fft_fft.default needs this dimension whole"),
    "every row but one": (lambda x, ids, weight: x[1:], "the model takes 2 rows for granted"),
    "a number of rows that is no size": (lambda x, ids, weight: x / int(x.shape[0]), "the model takes 2 rows for granted"),
    "rolled over everything": (lambda x, ids, weight: x.roll(1), "aten.roll.default needs this dimension whole"),
    "filled with the number of rows": (lambda x, ids, weight: x + torch.full((x.shape[0], 1, 1), x.shape[0]), NUMBER),
    "as many places as rows": (lambda x, ids, weight: x[:, : x.shape[0]], GROWS),
    "a place by the number of rows": (lambda x, ids, weight: x[:, x.shape[0] - 1 :][:, :1], COUNTED),
    "a mean of as many weights as rows": (lambda x, ids, weight: x * weight.flatten()[: x.shape[0]].mean(), GROWS),
    "one more than rows": (lambda x, ids, weight: x * torch.arange(x.shape[0] + 1).amax(), GROWS),
    "rows backwards": (lambda x, ids, weight: x[torch.arange(x.shape[0] - 1, -1, -1)], NUMBER),
    "rows from the last": (lambda x, ids, weight: x[torch.arange(-1, x.shape[0] - 1)], "aten.arange.start makes rows that may differ"),
    "starts of longer rows": (lambda x, ids, weight: from_far(x, 5, 0), "rows look into other rows"),
    "places behind the row's end": (lambda x, ids, weight: from_far(x, 4, 1), "it computes with the number of a row"),
    "places that nothing bounds": (
        lambda x, ids, weight: x.flatten(0, 1)[ids + torch.arange(x.shape[0])[:, None] * x.shape[1]],
        "it computes with the number of a row",
    ),
    "the row before": (lambda x, ids, weight: x[torch.arange(x.shape[0]) + -1], "it computes with the number of a row"),
    "the first of all places": (
        lambda x, ids, weight: x.flatten(0, 1)[torch.arange(x.shape[0])] * x[:, 0],
        "rows look into other rows",
    ),
    "a weight for each row's number": (lambda x, ids, weight: x * weight.flatten()[: x.shape[0], None, None], GROWS),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_says_so(name: str) -> None:
    work, reason = MIXED[name]
    program = program_of(work)
    (made,) = program.returned()
    assert Rows.of(program).reason(program.nodes()[made]).endswith(f": {reason}")


def program_of(work: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Program:
    return normalize(capture(Work(work).double(), {name: value[:2] for name, value in batch().items()}))


def divided(program: Program) -> list[dict[str, Tensor]]:
    tensors = flatten(program, batch())
    return [rows(program, tensors, index, PARTS) for index in range(PARTS)]


def made_of(program: Program, given: Mapping[str, Any]) -> Tensor:
    model = Work(chosen).double()
    feed = {**given, **program.constants, **{key: model.get_parameter(path) for key, path in program.parameters.items()}}
    values = run(program.graph, {node.name: [feed[node.name]] for node in program.graph.find_nodes(op="placeholder")}, 1)
    (made,) = values["output"][0]
    return made  # type: ignore[no-any-return]
