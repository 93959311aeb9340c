"""What attend knows of masks is what they are, for lengths that the capture has not seen; and what it does not know it says."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tpcompile.layout import TensorType, symbol
from tpcompile.passes._indices import Condition, Line
from tpcompile.passes._masks import Value, masks_of
from tpcompile.passes.capture import capture
from tpcompile.passes.normalize import normalize

Mask = Callable[[Tensor], Tensor]


class Masks(nn.Module):
    """Makes masks for x of [rows, places]; returns them beside what it learns."""

    def __init__(self, masks: Sequence[Mask]) -> None:
        super().__init__()
        self.masks = masks
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("lower", torch.ones(8, 8, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"loss": (x * self.weight).sum(), "masks": [mask(x) for mask in self.masks]}


def known(model: Masks) -> tuple[list[Value | str], list[TensorType]]:
    """What follows from indices and sizes about each mask, or why nothing does; and its type."""
    program = normalize(capture(model, {"x": torch.randn(3, 6)}))
    found, names = masks_of(program), [name for name in program.outputs if name != program.loss]
    assert len(names) == len(model.masks)
    kinds = [program.types[str(name)] for name in names]
    return [found.values.get(str(name), found.why.get(str(name), "")) for name in names], kinds  # type: ignore[misc]


def number(size: Any, rows: int, places: int) -> int:
    return size if isinstance(size, int) else int(size.subs({symbol("b"): rows, symbol("s"): places}))


def lines(line: Line, kind: TensorType, rows: int, places: int) -> Tensor:
    shape = [number(size, rows, places) for size in kind.shape]
    made = torch.full(shape, number(line.constant, rows, places))
    for dim, times in line.terms:
        made += times * torch.arange(shape[dim]).view([-1 if d == dim else 1 for d in range(len(shape))])
    return made


def holds(condition: Condition, kind: TensorType, rows: int, places: int) -> Tensor:
    shape = [number(size, rows, places) for size in kind.shape]
    made = torch.zeros(shape, dtype=torch.bool)
    for lines_ in condition:
        every = torch.ones(shape, dtype=torch.bool)
        for line in lines_:
            every &= lines(line, kind, rows, places) >= 0
        made |= every
    return made


def realized(value: Value, kind: TensorType, rows: int, places: int) -> Tensor:
    """The tensor that a value is. At every place exactly one case holds."""
    if isinstance(value, Line):
        return lines(value, kind, rows, places).to(kind.dtype)
    made = torch.zeros([number(size, rows, places) for size in kind.shape], dtype=kind.dtype)
    seen = torch.zeros(made.shape, dtype=torch.int64)
    for each, condition in value:
        where = holds(condition, kind, rows, places)
        made[where] = each
        seen += where
    assert (seen == 1).all()
    return made


# ------------------------------------------------------------------------------------------------- masks at random


def counted(rng: random.Random) -> Mask:
    """Whole numbers of [places]."""
    start, step, shift, times = rng.randint(-2, 2), rng.randint(1, 3), rng.randint(-3, 3), rng.choice([-1, 1, 1, 2])
    base: Mask = rng.choice(
        [
            lambda x: torch.arange(x.shape[1]),
            lambda x: torch.arange(start, x.shape[1] + start),
            lambda x: torch.arange(0, step * x.shape[1], step),
            lambda x: torch.ones(x.shape[1], dtype=torch.int64).cumsum(0),
            lambda x: torch.ones_like(x[0], dtype=torch.int64).cumsum(0),
            lambda x: torch.arange(x.shape[1])[None].expand_as(x)[1],
            lambda x: torch.arange(x.shape[1] + 2)[2:],
            lambda x: torch.arange(2 * x.shape[1])[::2],
            lambda x: torch.arange(x.shape[1]).flip(0),
            lambda x: torch.arange(x.shape[1])[torch.arange(x.shape[1])],
            lambda x: torch.diff(torch.arange(x.shape[1]), prepend=torch.tensor([-1])),
            lambda x: x.shape[1] - torch.arange(x.shape[1]),
            lambda x: torch.arange(x.shape[1]).expand(x.shape[0], -1)[1],
        ]
    )
    return lambda x: base(x) * times + shift


def truths(rng: random.Random, depth: int = 2) -> Mask:
    """Conditions of [places, places]."""
    if depth == 0 or rng.random() < 0.2:
        a, b, compare = (
            counted(rng),
            counted(rng),
            rng.choice([operator.ge, operator.gt, operator.le, operator.lt, operator.eq, operator.ne]),
        )
        diagonal = rng.randint(-2, 2)
        return rng.choice(
            [
                lambda x: compare(a(x)[:, None], b(x)[None]),
                lambda x: compare(a(x)[:, None], b(x)[None]),
                lambda x: compare(a(x)[:, None].expand(-1, x.shape[1]), torch.arange(1)),
                lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(diagonal),
                lambda x: x.new_ones(x.shape[1], x.shape[1]).triu(diagonal) == 1,
                lambda x: (compare(a(x), diagonal))[None].expand(x.shape[1], -1),
            ]
        )
    a, b, join = truths(rng, depth - 1), truths(rng, depth - 1), rng.choice([operator.and_, operator.or_, torch.logical_xor])
    return rng.choice(
        [
            lambda x: join(a(x), b(x)),
            lambda x: torch.logical_not(a(x)),
            lambda x: a(x).transpose(0, 1),
            lambda x: torch.where(a(x), b(x), ~b(x)),
            lambda x: a(x)[None, None].expand(x.shape[0], 1, -1, -1)[0, 0],
            lambda x: a(x).unsqueeze(0).flip(2).view(x.shape[1], x.shape[1]),
        ]
    )


def masks(rng: random.Random) -> Mask:
    """Masks to multiply with, to add, or to ask."""
    truth, low = truths(rng), rng.choice([-torch.inf, torch.finfo(torch.float32).min, -1e9, -1.0])
    return rng.choice(
        [
            truth,
            lambda x: torch.where(truth(x), 0.0, low),
            lambda x: torch.zeros(x.shape[1], x.shape[1]).masked_fill(truth(x), low),
            lambda x: ((1 - truth(x).float()) * max(low, -3e38))[None, None],
            lambda x: torch.full((x.shape[1], x.shape[1]), low).triu(1),
            lambda x: truth(x).long() + 1,
            lambda x: truth(x)[None, None, 1:, :-1].expand(x.shape[0], 1, -1, -1),
        ]
    )


@pytest.mark.parametrize("seed", range(6))
def test_what_is_known_is_so(seed: int) -> None:
    """Numbers at all places, of lengths from 2 to 7, are those that torch computes."""
    rng = random.Random(seed)
    chosen = [masks(rng) for _ in range(20)] + [counted(rng) for _ in range(6)]
    found, kinds = known(Masks(chosen))
    assert sum(not isinstance(value, str) for value in found) >= 20, [value for value in found if isinstance(value, str)]
    for places in range(2, 8):
        x = torch.randn(2, places)
        for mask, value, kind in zip(chosen, found, kinds, strict=True):
            if not isinstance(value, str):
                assert torch.equal(realized(value, kind, 2, places), mask(x)), (value, places)


# ------------------------------------------------------------------------------------------------- what is not known


def test_what_is_not_known() -> None:
    """Data, what is learned, buffers and operations that are not followed: each is named."""
    model = Masks([])
    model.masks = [
        lambda x: x > 0,
        lambda x: (x > 0) & (torch.arange(x.shape[1]) > 2),
        lambda x: torch.arange(x.shape[1]).roll(1),
        lambda x: torch.arange(x.shape[1])[torch.arange(x.shape[1]) - 1],
        lambda x: torch.arange(x.shape[1]).to(torch.float32).cos(),
        lambda x: model.lower[: x.shape[1], : x.shape[1]],
        lambda x: torch.arange(x.shape[1]) > model.weight,
    ]
    found, _ = known(model)
    assert found == [
        "it depends on x",
        "it depends on x",
        "aten.roll.default is not followed",
        "aten.index.Tensor is not followed",
        "aten.to.dtype is not followed",
        "it reads the buffer lower, which may change",
        "it is learned",
    ]
