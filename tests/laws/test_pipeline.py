"""pipeline: what is sent meets a receive of the same value, and no stage waits forever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from law_models import LINE, step

from tpcompile.errors import VerifyError
from tpcompile.laws.pipeline import check_timelines
from tpcompile.messages import Sent
from tpcompile.schedules import Wait
from tpcompile.timeline import Event, Posted, Step


def timelines(given: Step) -> list[list[Event]]:
    return [list(given.timeline(stage.index)) for stage in given.stages]


def refused(given: Step, events: Sequence[Sequence[Event]], what: str) -> str:
    with pytest.raises(VerifyError) as error:
        check_timelines(given, events)
    assert error.value.what.startswith(what), error.value.what
    assert error.value.source.startswith(LINE), str(error.value)
    return error.value.what


def posted(events: Sequence[Event]) -> list[int]:
    return [place for place, event in enumerate(events) if isinstance(event, Posted)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 5), (3, 3), (3, 7), (4, 4), (4, 9)])
def test_the_schedules_go_through(schedule: str, stages: int, microbatches: int) -> None:
    """Every micro-batch crosses every boundary once in each direction."""
    given = step(f"pp={stages}", layers=4, schedule=schedule, microbatches=microbatches)
    events = timelines(given)
    check_timelines(given, events)
    sends = [sent for own in events for event in own if isinstance(event, Posted) for sent in event.transfers if sent.call == "send"]
    assert len(sends) == 2 * microbatches * (stages - 1) == len({(sent.places, sent.direction, sent.microbatch) for sent in sends})


def test_fewer_micro_batches_than_stages() -> None:
    given = step("pp=4", layers=4, schedule="gpipe", microbatches=1)
    check_timelines(given, timelines(given))


def test_a_send_that_nobody_receives() -> None:
    given = step("pp=2", layers=2)
    first, second = timelines(given)
    place = posted(second)[1]
    event = second[place]
    assert isinstance(event, Posted) and [sent.call for sent in event.transfers] == ["send", "recv"]
    second[place] = replace(event, transfers=event.transfers[:1])
    refused(given, [first, second], "no stage can go on: stage 0 waits in send add_1 of micro-batch 1, forward (float64, 6·b·s elements)")


def test_micro_batches_in_another_order() -> None:
    given = step("pp=2", layers=2, schedule="gpipe")
    first, second = timelines(given)
    a, b = posted(second)[:2]
    second[a], second[b] = second[b], second[a]
    what = "a transfer meets another: stage 0: send add_1 of micro-batch 0, forward"
    assert "stage 1: recv add_1 of micro-batch 1, forward" in refused(given, [first, second], what)


@pytest.mark.parametrize("change", [{"dtype": torch.float32}, {"elements": 5}, {"value": "add"}], ids=["type", "size", "value"])
def test_a_receive_of_something_else(change: dict[str, object]) -> None:
    given = step("pp=2", layers=2)
    first, second = timelines(given)
    place = posted(second)[0]
    event = second[place]
    assert isinstance(event, Posted)
    second[place] = replace(event, transfers=tuple(replace(sent, **change) for sent in event.transfers))
    refused(given, [first, second], "a transfer meets another: stage 0: send add_1 of micro-batch 0, forward (float64, 6·b·s elements)")


def test_both_sides_send_first() -> None:
    """1F1B without joining a stage's forward send with the receive of the gradient: each waits for the other to receive."""
    given = step("pp=2", layers=2)
    apart: list[list[Event]] = []
    for events in timelines(given):
        own: list[Event] = []
        for event in events:
            own += [Posted((sent,), event.wait) for sent in event.transfers] if isinstance(event, Posted) else [event]
        apart.append(own)
    what = refused(given, apart, "no stage can go on: stage 0 waits in send add_1 of micro-batch 1, forward")
    assert "; stage 1 waits in send add_1 of micro-batch 0, backward" in what


def test_a_stage_that_waits_before_it_receives() -> None:
    given = step("pp=2", layers=2, schedule="gpipe")
    first, second = timelines(given)
    ours = posted(first)[0]
    event = first[ours]
    assert isinstance(event, Posted)
    late = posted(second)[0]
    second[late : late + 1] = [Posted((replace(event.transfers[0], places=(0,), direction="backward"),), wait=True), second[late]]
    refused(given, [first, second], "no stage can go on: stage 0 waits in send add_1 of micro-batch 0, forward")


def test_two_collectives_swapped_on_one_stage() -> None:
    """The tied weight's gradient is summed over the stages, and the loss goes to all of them: in this order."""
    given = step("pp=2", layers=2)
    first, second = timelines(given)
    places = [place for place, event in enumerate(second) if isinstance(event, Sent) and event.axis == "pp"]
    assert [second[place].value for place in places] == ["embed.weight", "loss"]  # type: ignore[union-attr]
    a, b = places
    second[a], second[b] = second[b], second[a]
    what = "a collective meets another: stage 0: all_reduce embed.weight, backward (float64, 42 elements)"
    assert "stage 1: broadcast loss, step" in refused(given, [first, second], what)


def test_a_collective_that_a_stage_leaves_out() -> None:
    given = step("pp=2", layers=2)
    first, second = timelines(given)
    second = [event for event in second if not (isinstance(event, Sent) and event.axis == "pp")]
    refused(given, [first, second], "no stage can go on: stage 0 waits in all_reduce embed.weight, backward")


def test_waiting_for_what_is_never_posted_ends() -> None:
    given = step("pp=2", layers=2)
    check_timelines(given, [[Wait(), *events] for events in timelines(given)])
