"""Every schedule, on real processes: three steps of AdamW beside one device's, for a model with a tied weight and one without."""

from __future__ import annotations

from functools import cache, partial

import pytest
import training_workers as workers
from training_workers import Case, Found

import tpcompile
from tpcompile.schedules import SCHEDULES

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MESHES = ("pp=2", "dp=2,pp=2", "pp=2,tp=2")
MODELS = (workers.gpt2, workers.llama)


def cases(mesh: str) -> tuple[Case, ...]:
    """All schedules of a mesh, in the same processes. Four stages are cut from four layers."""
    rows = 16 if "dp" in mesh else 8
    return tuple(
        Case(partial(model, layers=4), mesh, schedule, exact=model is workers.gpt2, loss=workers.double_loss, lengths=(5, 5, 6), rows=rows)
        for schedule in SCHEDULES
        for model in MODELS
    )


@cache
def results(mesh: str) -> list[list[Found]]:
    """What every rank found, case by case."""
    ranks = tpcompile.launch(workers.run, mesh, tuple((workers.train, case) for case in cases(mesh)))
    return [list(case) for case in zip(*ranks, strict=True)]


@pytest.mark.parametrize(("mesh", "job"), [pytest.param(m, job, id=f"{case} {case.schedule}") for m in MESHES for job, case in enumerate(cases(m))])
def test_three_steps_equal_one_device(mesh: str, job: int) -> None:
    case = cases(mesh)[job]
    loss, gradient = (1e-10, 1e-9) if case.exact else (1e-7, 1e-6)
    model = {name for name, _ in case.model().named_parameters()}
    for found in results(mesh)[job]:
        assert max(found.loss_errors) <= max(loss, 2 * found.spacing), found
        assert len(found.gradients) == 3 and max(found.gradients).error <= gradient, found
        assert found.parameters.error <= 1e-6 and found.skipped < found.compared / 2, found
        assert found.losses == results(mesh)[job][0].losses, "the loss is the same value on every rank"
    assert frozenset().union(*(found.names for found in results(mesh)[job])) == model
