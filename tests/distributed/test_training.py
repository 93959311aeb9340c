"""Models trained by real processes: every rank's loss, gradients and parameters beside those of one device."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import training_workers as workers
from training_workers import Case, Found, Masked

import tpcompile
from tpcompile.mesh import Mesh

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ALL = "dp=2,pp=2,tp=2"


def pipelined(mesh: str) -> list[tuple[Any, Case]]:
    return [
        (workers.train_both_schedules, Case(workers.gpt2, mesh, loss=workers.double_loss)),
        (workers.train_both_schedules, Case(workers.llama, mesh, exact=False, loss=workers.double_loss)),
        (workers.train_both_schedules, Case(workers.again, mesh)),
    ]


LAUNCHES: dict[str, list[tuple[Any, Case]]] = {
    "tp=2": [
        (workers.train, Case(workers.gpt2, "tp=2", loss=workers.double_loss)),
        (workers.train, Case(workers.llama, "tp=2", exact=False, loss=workers.double_loss)),
        (workers.train, Case(workers.turning, "tp=2")),
        (workers.called, Case(workers.gpt2, "tp=2", exact=False)),
        (workers.with_and_without_labels, Case(workers.gpt2, "tp=2", exact=False)),
        (workers.with_and_without_labels, Case(workers.llama, "tp=2", exact=False)),
        (workers.with_and_without_labels, Case(workers.bert, "tp=2")),
        (workers.dropout, Case(partial(workers.gpt2, 0.1), "tp=2")),
        (workers.train, Case(partial(workers.gpt2, 0.1), "tp=2", loss=workers.double_loss, dropout="exact")),
    ],
    "pp=2": pipelined("pp=2"),
    "dp=2": [(workers.train, Case(workers.bert, "dp=2")), (workers.train, Case(workers.bert, "dp=2", microbatches=4))],
    "dp=2,pp=2": [(workers.train, Case(workers.gpt2, "dp=2,pp=2", microbatches=4, loss=workers.several_losses))],
    "pp=2,tp=2": [
        (workers.train_on_own_mesh, Case(workers.gpt, "pp=2,tp=2")),
    ],
    ALL: [
        *pipelined(ALL),
        (workers.dropout, Case(partial(workers.gpt2, 0.1), ALL)),
        (workers.dropout_of_schedules, Case(partial(workers.gpt2, 0.1), ALL, microbatches=4)),
        (workers.train_both_schedules, Case(partial(workers.gpt2, 0.1, recomputes=True), ALL, loss=workers.double_loss, dropout="exact")),
    ],
}


@cache
def results(mesh: str) -> list[list[Any]]:
    """What every rank found, job by job."""
    ranks = tpcompile.launch(workers.run, mesh, tuple(LAUNCHES[mesh]))
    return [[rank[job] for rank in ranks] for job in range(len(LAUNCHES[mesh]))]


def jobs(*kinds: Any) -> list[Any]:
    found = [(mesh, job, kind, case) for mesh, cases in LAUNCHES.items() for job, (kind, case) in enumerate(cases)]
    return [pytest.param(mesh, job, id=str(case)) for mesh, job, kind, case in found if kind in kinds]


@pytest.mark.parametrize(("mesh", "job"), jobs(workers.train, workers.train_on_own_mesh))
def test_three_steps_equal_one_device(mesh: str, job: int) -> None:
    check(LAUNCHES[mesh][job][1], results(mesh)[job])


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("mesh", "job"), jobs(workers.train_both_schedules))
def test_three_steps_through_a_pipeline_equal_one_device(mesh: str, job: int, schedule: str) -> None:
    check(LAUNCHES[mesh][job][1], [found[schedule == "gpipe"] for found in results(mesh)[job]])


def check(case: Case, ranks: list[Found]) -> None:
    """Losses, every rank's gradients of every stage before each step, and the parameters at the end; the third batch is longer.

    A loss of type float32 is rounded to it in the parts of every micro-batch, and on one device: its last two places say nothing.
    """
    loss, gradient = (1e-10, 1e-9) if case.exact else (1e-7, 1e-6)
    for found in ranks:
        assert max(found.loss_errors) <= max(loss, 2 * found.spacing), found
        assert len(found.gradients) == 3 and max(found.gradients).error <= gradient, found
        assert found.parameters.error <= 1e-6, found
        assert found.skipped < found.compared / 2, found
        assert found.losses == ranks[0].losses, "the loss is the same value on every rank"
    check_places(Mesh.of(case.mesh), case, ranks)


def check_places(mesh: Mesh, case: Case, ranks: list[Found]) -> None:
    """All coordinates are there, and their stages hold all parameters of the model."""
    assert len({tuple(found.place.items()) for found in ranks}) == mesh.size == len(ranks)
    model = {name for name, _ in case.model().named_parameters()}
    for replica in range(mesh.dp):
        for place in range(mesh.tp):
            held = [found.names for found in ranks if (found.place["dp"], found.place["tp"]) == (replica, place)]
            assert frozenset().union(*held) == model


def test_a_capture_made_anew_has_the_same_parameters() -> None:
    """The model computes something else for long sequences; its numbers are compared above."""
    (turning,) = [job for job, (_, case) in enumerate(LAUNCHES["tp=2"]) if case.model is workers.turning]
    assert [found.captures for found in results("tp=2")[turning]] == [2, 2]


@pytest.mark.parametrize(("mesh", "job"), jobs(workers.called))
def test_an_ordinary_module(mesh: str, job: int) -> None:
    for found in results(mesh)[job]:
        assert found.kind == "CausalLMOutputWithCrossAttentions"
        assert found.loss_error <= max(1e-7, 2 * found.spacing) and found.logits_error <= 1e-10 and found.gradients.error <= 1e-6, found


@pytest.mark.parametrize(("mesh", "job"), jobs(workers.with_and_without_labels))
def test_a_capture_without_labels_keeps_the_pieces(mesh: str, job: int) -> None:
    """The head that was cut with its loss stays cut without one; and one that was whole stays whole with a loss."""
    for found in results(mesh)[job]:
        assert found.logits <= 1e-10 and found.gradient <= 1e-6, found
        assert found.cut < found.whole, "the first capture had labels, and cut the vocabulary"


@pytest.mark.parametrize(("mesh", "job"), jobs(workers.dropout))
def test_dropout_trains_and_whole_values_stay_equal(mesh: str, job: int) -> None:
    ranks: list[Masked] = results(mesh)[job]
    for found in ranks:
        (first,) = [other for other in ranks if other.place == {**found.place, "dp": 0, "tp": 0}]
        assert found.losses == ranks[0].losses and len(set(found.losses)) == 5
        assert found.losses[-1] < found.losses[0] - 0.3
        assert found.whole.keys() == first.whole.keys() and found.whole
        assert all(torch.equal(value, first.whole[name]) for name, value in found.whole.items())
        assert found.logits is None or torch.equal(found.logits, first.logits)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mesh", "job"), jobs(workers.dropout_of_schedules))
def test_every_schedule_draws_the_same_masks(mesh: str, job: int) -> None:
    """Micro-batches run in other orders, and so does what they add up to."""
    for one, other in results(mesh)[job]:
        assert len(one) == len(other) > 10 and one[0] != one[1], "two steps drop differently"
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(one, other, strict=True))
