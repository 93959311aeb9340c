"""The grid of a schedule: the drawing, the share of idle time against the field's formulas, and what explain says."""

from __future__ import annotations

from dataclasses import replace

import parity_models
import pytest
from law_models import step

from tpcompile.inspect import grid
from tpcompile.inspect.explain import explain
from tpcompile.inspect.grid import Bubble
from tpcompile.mesh import Mesh


def test_the_drawing_in_the_docstring() -> None:
    drawn = [line.strip() for line in (grid.__doc__ or "").splitlines() if line.strip().startswith("rank")]
    made = grid.slots(step("pp=2", layers=2, microbatches=4), [3.0, 3.0])
    assert grid.draw(made, 3.0, 160) == drawn
    assert str(grid.bubble(made)) in (grid.__doc__ or "")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs"])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_bubbles_of_even_stages(schedule: str, pp: int, microbatches: int) -> None:
    """(p - 1) / (v m) of the work, for p ranks of v stages and m micro-batches (Narayanan et al. 2021, section 2.2)."""
    own = 1 if schedule in ("1f1b", "gpipe") else 2
    given = replace(step("pp=2", layers=4, schedule=schedule, per_rank=own), microbatches=microbatches)
    wider = replace(given, mesh=Mesh(pp=pp), stages=given.stages[:1] * pp * own)
    found = grid.bubble(grid.slots(wider, [1.0] * pp * own))
    assert found.of_work == pytest.approx((pp - 1) / (own * microbatches))


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv", "dualpipev"])
def test_halved_backwards_fill_the_bubble(schedule: str) -> None:
    given = step("pp=2", layers=4, schedule="looped_bfs", per_rank=2)
    idle = {
        name: grid.bubble(grid.slots(replace(given, schedule=name, microbatches=8), [1.0] * 4)).of_time for name in (schedule, "looped_bfs")
    }
    assert 0 < idle[schedule] < 0.5 * idle["looped_bfs"]


def test_a_slow_stage_is_waited_for() -> None:
    given = step("pp=2", layers=2, schedule="gpipe", microbatches=2)
    made = grid.slots(given, [1.0, 3.0])
    assert [(str(slot.run), slot.start, slot.stop) for slot in made[1]] == [("F0", 1, 4), ("F1", 4, 7), ("B0", 7, 13), ("B1", 13, 19)]
    assert grid.draw(made, 1.0, 100) == [
        "rank 0  F0 F1 ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  B0 ── ·  ·  ·  ·  B1 ──",
        "rank 1  ·  F0 ── ── F1 ── ── B0 ── ── ── ── ── B1 ── ── ── ── ── ·  ·",
    ]


def test_what_does_not_fit_is_left_out_of_the_middle() -> None:
    made = grid.slots(step("pp=2", layers=2, microbatches=9), [1.0, 1.0])
    whole, folded = grid.draw(made, 1.0, 200), grid.draw(made, 1.0, 50)
    for line, short in zip(whole, folded, strict=True):
        begin, end = short.split("…")
        assert len(short) <= 50 and line.startswith(begin.rstrip()) and line.endswith(end.strip()) and len(begin) > 15


def test_explain_draws_the_schedule() -> None:
    compiled = parity_models.compiled("frozen", "pp=2", schedule="zbv", stages_per_rank=2)
    text = explain(compiled, measured=[Bubble(3.0, 4.0), Bubble(1.0, 4.0)])
    assert "mesh  dp=1,pp=2,tp=1: 2 ranks, 1 replica × 2 pipeline ranks × 1 tensor rank, 2 stages on a rank" in text
    assert "schedule zbv, predicted: idle " in text and "rank 1  ·" in text
    assert "measured: idle 50.0% of the time, 100.0% of the work (rank 0 25.0%, rank 1 75.0%)" in text
    assert "stages 1, 2: backward is not halved, since nothing that it receives has a gradient" in text
