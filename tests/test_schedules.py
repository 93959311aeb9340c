"""Schedules: which stages a rank holds, what is required, and torch's tables for many sizes, as no rank waits forever in them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from law_models import step

from tpcompile.errors import InputError, VerifyError
from tpcompile.laws.pipeline import check_timelines
from tpcompile.schedules import SCHEDULES, Await, Post, Run, actions, check_schedule, place_of, stages_at
from tpcompile.timeline import Step

SEVERAL = [name for name, schedule in SCHEDULES.items() if schedule.per_rank == 2]


def test_stages_in_a_loop_and_in_a_v() -> None:
    assert [stages_at("looped_bfs", place, 2, 6) for place in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert [stages_at("zbv", place, 3, 6) for place in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [place_of("gpipe", stage, 4) for stage in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_schedule_takes_by_default(schedule: str) -> None:
    """As many micro-batches as stages; without a pipeline, one of each."""
    own = SCHEDULES[schedule].per_rank
    assert check_schedule(schedule, 3) == (own, 3 * own)
    if own == 1:
        assert check_schedule(schedule, 1) == (1, 1) and check_schedule(schedule, 1, microbatches=4) == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "what", "at", "fix"),
    [
        (
            ("zigzag", 2),
            "unknown schedule 'zigzag'",
            "schedule='zigzag'",
            "use 1f1b, gpipe, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv or dualpipev",
        ),
        (
            ("1f1b", 2, None, 1),
            "schedule 1f1b over 2 stages needs 2 micro-batches or more",
            "microbatches=1",
            'use microbatches=2 or more, or schedule="gpipe"',
        ),
        (
            ("dualpipev", 2, None, 3),
            "schedule dualpipev over 4 stages needs 4 micro-batches or more",
            "microbatches=3",
            'use microbatches=4 or more, or schedule="zbv"',
        ),
        (
            ("interleaved_1f1b", 4, None, 9),
            "schedule interleaved_1f1b over 4 ranks runs 9 micro-batches in 2 rounds, which must be equal",
            "microbatches=9",
            'use microbatches=8 or 12, or schedule="looped_bfs"',
        ),
        (("gpipe", 2, None, 0), "a batch has at least one micro-batch", "microbatches=0", "use microbatches=1 or more"),
        (
            ("zbv", 1),
            "schedule zbv needs a pipeline, and the mesh has one stage",
            "schedule='zbv'",
            'use a mesh with pp=2 or more, or leave schedule= as it is, "1f1b"',
        ),
        (
            ("1f1b", 1, 2),
            "2 stages on a rank need a pipeline, and the mesh has one stage",
            "stages_per_rank=2",
            "use a mesh with pp=2 or more, or leave stages_per_rank out",
        ),
        (
            ("zbv", 2, 3),
            "schedule zbv has 2 stages on a rank",
            "stages_per_rank=3",
            'use stages_per_rank=2, or schedule="interleaved_1f1b" or "looped_bfs" or "interleaved_zero_bubble"',
        ),
        (("looped_bfs", 2, 0), "a rank has at least one stage", "stages_per_rank=0", "use stages_per_rank=1 or more"),
    ],
    ids=str,
)
def test_what_a_schedule_requires(arguments: tuple[object, ...], what: str, at: str, fix: str) -> None:
    with pytest.raises(InputError) as error:
        check_schedule(*arguments)  # type: ignore[arg-type]
    assert str(error.value) == f"{what}\n  at   compile({at})\n  from {error.value.source}\n  fix  {fix}"


@pytest.mark.parametrize("schedule", SEVERAL)
@pytest.mark.parametrize("pp", [2, 3, 4, 5])
def test_tables_do_everything_once(schedule: str, pp: int) -> None:
    """Whatever is allowed has a table: every micro-batch goes through every stage, on the rank that holds it, and what is sent arrives."""
    found = 0
    for own in (2,) if SCHEDULES[schedule].fixed else (1, 2, 3):
        for count in range(1, 13):
            try:
                check_schedule(schedule, pp, own, count)
            except InputError:
                continue
            found += 1
            ran, moved = Counter[tuple[str, int, int]](), Counter[tuple[object, ...]]()
            for place in range(pp):
                table = actions(schedule, place, pp, own, count)
                runs = [action for action in table if isinstance(action, Run)]
                assert {run.stage for run in runs} == set(stages_at(schedule, place, pp, pp * own))
                ran.update((run.work, run.stage, run.microbatch) for run in runs)
                sent = [transfer for action in table if isinstance(action, Post) for transfer in action.transfers]
                moved.update((t.direction, t.microbatch, *sorted((place, t.peer))) for t in sent)
                received = {(t.stage, t.direction, t.microbatch) for t in sent if t.call == "recv"}
                assert received == {(a.stage, a.direction, a.microbatch) for a in table if isinstance(a, Await)}
            assert max(ran.values()) == 1 and not any(times % 2 for times in moved.values())
            for stage in range(pp * own):
                for index in range(count):
                    back = {work for work in ("backward", "input", "weight") if ran[work, stage, index]}
                    assert ran["forward", stage, index] and back in ({"backward"}, {"input", "weight"})
    assert found


@cache
def cut(pp: int) -> Step:
    """Two stages for each rank."""
    return step(f"pp={pp}", layers=2 * pp, schedule="looped_bfs", per_rank=2)


@pytest.mark.parametrize("schedule", SEVERAL)
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (2, 6), (3, 6), (4, 8), (4, 12)])
def test_no_rank_waits_forever(schedule: str, pp: int, microbatches: int) -> None:
    given = replace(cut(pp), schedule=schedule, microbatches=microbatches)
    check_timelines(given, [given.timeline(place) for place in range(pp)])


def test_a_receive_that_is_never_posted() -> None:
    given = replace(cut(2), schedule="zbv", microbatches=4)
    timelines = [list(given.timeline(place)) for place in range(2)]
    (place, _), *_ = [(place, event) for place, event in enumerate(timelines[1]) if isinstance(event, Await)]
    del timelines[1][place - 1]
    with pytest.raises(VerifyError, match=r"rank 0: send add_1 of micro-batch 0, .*; rank 1: recv add_1 of micro-batch 1"):
        check_timelines(given, timelines)
