"""Programs through torch.compile on real processes, beside one device that runs the untouched model eagerly."""

from __future__ import annotations

from functools import cache

import parallel_workers as workers
import pytest
from parallel_workers import Case, Found

import tpcompile

pytestmark = [pytest.mark.processes, pytest.mark.slow]

THROUGH = "aot_eager"
CASES: dict[str, tuple[Case, ...]] = {
    "tp=2": (
        Case("gpt2", "tp=2", backend="inductor"),
        Case("llama of 4", "tp=2", backend=THROUGH),
        Case("llama", "tp=2", recompute="full", backend=THROUGH),
    ),
    "dp=2": tuple(Case("llama", "dp=2", mode, backend=THROUGH) for mode in ("ddp", "zero3")),
    "pp=2": (Case("llama", "pp=2", backend=THROUGH),),
}


@cache
def results(mesh: str) -> list[list[tuple[Found, int, int]]]:
    ranks = tpcompile.launch(workers.through_backends, mesh, CASES[mesh])
    return [list(found) for found in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    ("mesh", "job"), [pytest.param(m, job, id=str(case)) for m, cases in CASES.items() for job, case in enumerate(cases)]
)
def test_three_steps_equal_one_device(mesh: str, job: int) -> None:
    for found, graphs, breaks in results(mesh)[job]:
        assert max(found.loss_error, found.evaluation_error) <= 1e-10 and found.norm_error <= 1e-9, found
        assert max(found.gradients.values()) <= 1e-9 and max(found.parameters.values()) <= 1e-9, found
        assert graphs > 0, "what is to be compiled is compiled"
        assert breaks == 0, "collectives are inside the graphs"
