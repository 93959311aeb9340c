"""Every schedule with two stages on a rank, on real processes: three steps of AdamW beside one device's, with a tied weight and without."""

from __future__ import annotations

import re
from functools import cache, partial

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


@cache
def results(mesh: str) -> list[list[list[Found]]]:
    """What every rank found, by case and schedule."""
    ranks = tpcompile.launch(workers.run, mesh, tuple((workers.train_schedules, case) for case in CASES[mesh]))
    return [[[rank[job][place] for rank in ranks] for place in range(len(SEVERAL))] for job in range(len(CASES[mesh]))]


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


OTHERS = (
    *(others.Case(make, "pp=2", schedule) for make in (others.scaled, others.sided, others.frozen) for schedule in ("zbv", "dualpipev")),
    *(others.Case(others.counting, "pp=2", schedule) for schedule in ("interleaved_1f1b", "zbv")),
)


@cache
def trained() -> list[list[others.Found]]:
    """What every rank found, by case."""
    return [list(found) for found in zip(*tpcompile.launch(others.run, "pp=2", OTHERS), strict=True)]


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
    for ranks in trained():
        lines = [[line for line in found.explained.splitlines() if re.match("schedule|measured", line)] for found in ranks]
        assert lines[0] == lines[1] and len(lines[0]) == 2
        measured = re.fullmatch(r"measured: idle (\S+)% of the time, (\S+)% of the work \(rank 0 (\S+)%, rank 1 (\S+)%\)", lines[0][1])
        assert measured and all(0 < float(share) < 100 for share in measured.group(1, 3, 4))
