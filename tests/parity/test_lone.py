"""Models with linears that are cut by themselves, beside the untouched ones; sizes that do not divide."""

from __future__ import annotations

import pytest
import torch
from lone_models import After, Beside, Spelled
from pass_models import Block, Tiny

import tpcompile
from tpcompile.testing import assert_parity


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 7, (4, 5), generator=generator)
    labels[1, 2:] = -100
    return {"ids": torch.randint(0, 7, (4, 5), generator=generator), "labels": labels}


@pytest.mark.parametrize("along", [True, False])
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "pp=2,tp=3"])
@pytest.mark.parametrize("block", [After, Beside, Spelled])
def test_parity(block: type[Block], mesh: str, along: bool) -> None:
    torch.manual_seed(0)
    model = Tiny(2, 10, 5, 7, block).double()
    assert_parity(model, mesh, batch(), sequence_parallel=along)


def test_the_plan_tells_of_it_with_its_collectives() -> None:
    plan = tpcompile.compile(Tiny(2, 10, 5, 7, After), "tp=2", batch(), sequence_parallel=False).explain()
    (line,) = (line.split() for line in plan.splitlines() if line.startswith("layers.0–1.mix"))
    assert " ".join(line) == "layers.0–1.mix column weight [10@tp, 10] 1 all-gather 1 all-reduce"
