"""Every call that a real step makes of its process groups is in the timeline: which, over which ranks, how many bytes, in which order.

The record is kept by the process group itself; it sees autograd's, the pipeline's and the data-parallel engines' calls as well as ours.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import traffic_workers as workers
from traffic_workers import Case, Traffic

import tpcompile
from tpcompile.schedules import SCHEDULES

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def several(model: str, mesh: str, microbatches: int | None = None) -> tuple[Case, ...]:
    """A model under every schedule with two stages on a rank."""
    return tuple(Case(model, mesh, schedule, microbatches) for schedule, made in SCHEDULES.items() if made.per_rank == 2)


LAUNCHES: dict[str, tuple[Case, ...]] = {
    "tp=2": (
        Case("llama", "tp=2"),
        Case("llama", "tp=2", recompute="full"),
        Case("llama4on1", "tp=2", microbatches=2),
        Case("neox", "tp=2"),
        Case("encoder", "tp=2"),
    ),
    "tp=3": (Case("gpt", "tp=3"), Case("llama14on2", "tp=3")),
    "pp=2": (
        Case("gpt2", "pp=2", "gpipe", 4),
        Case("gpt2", "pp=2", microbatches=4),
        Case("bert", "pp=2"),
        Case("frozen", "pp=2"),
        *several("gpt2", "pp=2", 4),
    ),
    "dp=2": (
        Case("llama", "dp=2"),
        Case("bert", "dp=2", microbatches=2),
        Case("llama", "dp=2", data_parallel="zero1"),
        Case("llama", "dp=2", data_parallel="zero2"),
        Case("gpt2", "dp=2", data_parallel="zero3", microbatches=2),
        Case("tempered", "dp=2", data_parallel="zero2", microbatches=2),
    ),
    "dp=2,pp=2": (
        Case("gpt2", "dp=2,pp=2", "zbv", 4, data_parallel="zero1"),
        Case("gpt2", "dp=2,pp=2", data_parallel="zero3", microbatches=4),
        Case("gpt2", "dp=2,pp=2", "interleaved_1f1b", 4, data_parallel="zero3"),
        Case("gpt2", "dp=2,pp=2", "looped_bfs", 4, data_parallel="zero2"),
        Case("gpt2", "dp=2,pp=2", "zbv", 4, data_parallel="zero2"),
        Case("llama", "dp=2,pp=2", "dualpipev", 4, data_parallel="zero3"),
    ),
    "dp=2,pp=2,tp=2": (Case("gpt2", "dp=2,pp=2,tp=2"), Case("llama", "dp=2,pp=2,tp=2", "gpipe"), *several("llama", "dp=2,pp=2,tp=2")),
}


@cache
def results(mesh: str) -> list[list[Traffic]]:
    """Of every case, what each rank found."""
    ranks = tpcompile.launch(workers.steps, mesh, LAUNCHES[mesh], backend="recorded")
    return [[rank[job] for rank in ranks] for job in range(len(LAUNCHES[mesh]))]


CASES = [pytest.param(mesh, job, id=str(case)) for mesh, cases in LAUNCHES.items() for job, case in enumerate(cases)]


@pytest.mark.parametrize(("mesh", "job"), CASES)
def test_a_step_makes_the_calls_of_its_timeline(mesh: str, job: int) -> None:
    for traffic in results(mesh)[job]:
        if LAUNCHES[mesh][job].recompute == "full":  # when a layer runs again, in its backward, is autograd's to say
            assert traffic.ran and Counter(traffic.ran) == Counter(traffic.expected), f"rank {traffic.rank}"
            continue
        assert traffic.ran and order(traffic.ran) == order(traffic.expected), f"rank {traffic.rank}"
        if "dp" not in mesh or "pp" in mesh:  # without a pipeline, the gradients' reduction overlaps backward
            assert traffic.ran == traffic.expected, f"rank {traffic.rank}"


@pytest.mark.parametrize(("mesh", "job"), CASES)
def test_explain_says_as_much(mesh: str, job: int) -> None:
    """Its table has the first tensor rank's sizes. The calls of clipping and of an optimizer's step are in it too."""
    for traffic in results(mesh)[job]:
        if traffic.mesh.coordinates(traffic.rank)["tp"] == 0:
            said, ran = ({key: (one.count, one.bytes) for key, one in found.items()} for found in (traffic.stated, workers.totals(traffic)))
            assert said == ran, f"rank {traffic.rank}"


def order(calls: list[workers.Call]) -> dict[tuple[int, ...], list[workers.Call]]:
    """The calls of each group, in order."""
    return {ranks: [call for call in calls if call.ranks == ranks] for ranks in {call.ranks for call in calls}}
