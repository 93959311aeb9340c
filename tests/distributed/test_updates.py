"""Buffers that forward updates, on real processes: after two steps every rank has those of one device."""

from __future__ import annotations

from functools import cache

import pytest
import state_workers as workers
from state_models import made
from state_workers import Case, Found

import tpcompile
from tpcompile.mesh import Mesh

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CASES: dict[str, tuple[Case, ...]] = {
    "tp=2": (Case("statistics", "tp=2"), Case("averages", "tp=2"), Case("counting", "tp=2", 2)),
    "pp=2": (Case("statistics", "pp=2"), Case("averages", "pp=2"), Case("counting", "pp=2", 4, "1f1b")),
    "dp=2": (Case("counting", "dp=2", 2),),
    "dp=2,pp=2": (Case("counting", "dp=2,pp=2", 2, "1f1b"),),
}


@cache
def results(mesh: str) -> list[list[Found]]:
    """What every rank found, case by case."""
    ranks = tpcompile.launch(workers.run, mesh, tuple((workers.trained, case) for case in CASES[mesh]))
    return [list(case) for case in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    ("mesh", "place"), [pytest.param(mesh, place, id=str(case)) for mesh, cases in CASES.items() for place, case in enumerate(cases)]
)
def test_buffers_after_two_steps(mesh: str, place: int) -> None:
    case, ranks = CASES[mesh][place], results(mesh)[place]
    names = {name for name, _ in made(case.name)[0].named_buffers(remove_duplicate=False)}
    assert len(ranks) == Mesh.of(mesh).size
    for found in ranks:
        assert max(found.loss, found.gradient, found.evaluation) <= 1e-10, found
        assert max(found.buffers.values()) <= 1e-12, found
        own = f"blocks.{found.place['pp']}." if "pp" in mesh else ""
        assert {name for name in found.buffers if name.startswith(own)} == {name for name in names if name.startswith(own)}
    assert frozenset().union(*(found.buffers for found in ranks)) == names
