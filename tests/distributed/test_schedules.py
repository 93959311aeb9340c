"""Every schedule with two stages on a rank, on real processes: three steps of AdamW beside one device's, with a tied weight and without."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import pytest
import schedule_workers as others
import training_workers as workers
from training_workers import SEVERAL, Case, Found

import tpcompile

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SETTINGS = {"schedule": "interleaved_1f1b", "loss": workers.double_loss, "lengths": (5, 5, 6)}
CASES = {  # four stages are cut from four layers
    mesh: tuple(Case(partial(model, layers=4), mesh, rows=8 * (1 + ("dp" in mesh)), **SETTINGS) for model in (workers.gpt2, workers.llama))
    for mesh in ("pp=2", "dp=2,pp=2", "pp=2,tp=2")
}


OTHERS = (
    *(others.Case(make, "pp=2", schedule) for make in (others.scaled, others.sided, others.frozen) for schedule in ("zbv", "dualpipev")),
    *(others.Case(others.counting, "pp=2", schedule) for schedule in ("interleaved_1f1b", "zbv")),
    *(others.Case(make, "dp=2,pp=2", "zbv", 2) for make in (others.scaled, others.frozen, others.counting)),
)


@cache
def ran(mesh: str) -> list[list[Any]]:
    """What every rank found, job by job: all of a mesh run in the same processes."""
    jobs = [*((workers.train_schedules, case) for case in CASES[mesh]), *((others.trained, case) for case in OTHERS if case.mesh == mesh)]
    return [list(found) for found in zip(*tpcompile.launch(workers.run, mesh, tuple(jobs)), strict=True)]


def results(mesh: str) -> list[list[list[Found]]]:
    """By case and schedule."""
    return [[list(ranks) for ranks in zip(*found, strict=True)] for found in ran(mesh)[: len(CASES[mesh])]]


def trained() -> list[list[others.Found]]:
    """Those of the other cases, in their order."""
    return [found for mesh in ("pp=2", "dp=2,pp=2") for found in ran(mesh)[len(CASES[mesh]) :]]


@pytest.mark.parametrize("schedule", SEVERAL)
@pytest.mark.parametrize(
    ("mesh", "job"), [pytest.param(m, job, id=str(case)) for m, cases in CASES.items() for job, case in enumerate(cases)]
)
def test_three_steps_equal_one_device(mesh: str, job: int, schedule: str) -> None:
    """The third batch is longer; losses are of eight rows, the first three of which have no label."""
    ranks = results(mesh)[job][SEVERAL.index(schedule)]
    for found in ranks:
        assert max(found.loss_errors) <= 1e-10, found
        assert len(found.gradients) == 3 and max(found.gradients).error <= 1e-9, found
        assert found.parameters.error <= 1e-7 and found.skipped < found.compared / 2, found
        assert found.losses == ranks[0].losses, "the loss is the same value on every rank"
    assert frozenset().union(*(found.names for found in ranks)) == {name for name, _ in CASES[mesh][job].model().named_parameters()}


@pytest.mark.parametrize("job", range(len(OTHERS)), ids=[str(case) for case in OTHERS])
def test_training_evaluation_and_buffers(job: int) -> None:
    """Two steps of two lengths, with another length in eval mode between them."""
    case, ranks = OTHERS[job], trained()[job]
    for found in ranks:
        assert found.loss <= 1e-10 and found.gradient <= 1e-9 and found.evaluation <= 1e-10 and found.buffers <= 1e-12, found
    assert frozenset().union(*(found.names for found in ranks)) == {name for name, _ in case.make()[0].named_parameters()}
    reasons = {"scaled": "scale is used in several places", "frozen": "nothing that it receives has a gradient"}
    assert case.make.__name__ not in reasons or reasons[case.make.__name__] in ranks[0].reasons
    assert case.make is not others.counting or not any(ranks[0].reasons)


def test_the_share_of_idle_time_is_measured() -> None:
    """Every rank knows that of all, and says it beside what the stages' costs predict."""
    for case, ranks in zip(OTHERS, trained(), strict=True):
        lines = [[line for line in found.explained.splitlines() if re.match("schedule|measured", line)] for found in ranks]
        assert lines[0] == lines[1] and len(lines[0]) == 2, case
        measured = re.fullmatch(r"measured: idle (\S+)% of the time, (\S+)% of the work \(rank 0 (\S+)%, rank 1 (\S+)%\)", lines[0][1])
        assert measured and all(0 < float(share) < 100 for share in measured.group(1, 3, 4))
