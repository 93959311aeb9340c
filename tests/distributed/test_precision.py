"""Computing in 16 bits on real processes, beside one device that casts its parameters likewise."""

from __future__ import annotations

from functools import cache

import parallel_workers as workers
import pytest
import torch
from parallel_workers import Case, Narrow

import tpcompile

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CASES: dict[str, tuple[tuple[Case, str], ...]] = {
    "dp=2,tp=2": ((Case("llama", "dp=2,tp=2", "zero3", recompute="full"), "bf16"), (Case("llama", "dp=2,tp=2", "zero1"), "fp16")),
    "dp=2,pp=2": ((Case("llama", "dp=2,pp=2", "zero2"), "fp16"),),
}
EXACT = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Half the distance between neighbouring numbers near 1."""


@cache
def results(mesh: str) -> list[list[Narrow]]:
    ranks = tpcompile.launch(workers.run_narrow, mesh, CASES[mesh])
    return [list(found) for found in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    ("mesh", "job"), [pytest.param(m, job, id=f"{case} {how}") for m, cases in CASES.items() for job, (case, how) in enumerate(cases)]
)
def test_three_steps_in_16_bits(mesh: str, job: int) -> None:
    """Rounding of values near 4, in sums of some hundred terms; a step that overflows is left out everywhere.

    A replica's loss counts twice before the mean over both: times 32,768, that is above the largest number of float16.
    """
    exact, ranks = EXACT[CASES[mesh][job][1]], results(mesh)[job]
    for found in ranks:
        assert found.types == {torch.float32}
        assert found.loss_error <= 8 * exact and found.norm_error <= 8 * exact and found.gradients <= 8 * exact, found
        assert (found.losses, found.scales, found.moved) == (ranks[0].losses, ranks[0].scales, ranks[0].moved)
        expected = ([False, False, True], [32768.0, 16384.0, 16384.0]) if exact == EXACT["fp16"] else ([True] * 3, [None] * 3)
        assert (found.moved, found.scales) == expected
    for name in ranks[0].parameters:
        for first, second in ((0, 2), (1, 3)) if "pp" not in mesh else ():
            assert torch.equal(ranks[first].parameters[name], ranks[second].parameters[name]), "replicas stay equal"


def test_one_rank_overflows_and_all_leave_out_the_step() -> None:
    ranks = tpcompile.launch(workers.one_overflows, "dp=2")
    assert ranks[0] == ranks[1] == [(65536.0, False, True), (32768.0, True, False), (32768.0, False, True)]
