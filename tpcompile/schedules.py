"""What every stage of a pipeline does, and in which order: the tables of the schedules that torch runs.

    1f1b, pp=2, 4 micro-batches            gpipe
    stage 0   F0 F1 B0 F2 B1 F3 B2 B3      F0 F1 F2 F3          B0 B1 B2 B3
    stage 1      F0 B0 F1 B1 F2 B2 F3 B3      F0 F1 F2 F3 B0 B1 B2 B3

Between these, operations are posted, some of them together, and waited for. Source: `_step_microbatches` of ScheduleGPipe and
Schedule1F1B in torch.distributed.pipelining.schedules (2.13), whose own tables, `_get_pipeline_order`, leave out what is sent; tests hold
these against what ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Run:
    """Forward or backward of one micro-batch."""

    direction: Direction
    microbatch: int


@dataclass(frozen=True)
class Transfer:
    """One micro-batch's values, or their gradients, to or from a neighbouring stage."""

    call: Literal["send", "recv"]
    direction: Direction
    microbatch: int
    peer: int


@dataclass(frozen=True)
class Post:
    """Transfers that begin together; with `wait` the stage stands still until they are done."""

    transfers: tuple[Transfer, ...]
    wait: bool = True


@dataclass(frozen=True)
class Wait:
    """The stage stands still until everything that it has posted is done."""


Action = Run | Post | Wait


@dataclass(frozen=True)
class _Place:
    """A stage among others, and what it exchanges with its neighbours for one micro-batch."""

    stage: int
    stages: int

    def receive(self, direction: Direction, microbatch: int) -> tuple[Transfer, ...]:
        peer = self.stage + (-1 if direction == "forward" else 1)
        return (Transfer("recv", direction, microbatch, peer),) if 0 <= peer < self.stages else ()

    def send(self, direction: Direction, microbatch: int) -> tuple[Transfer, ...]:
        peer = self.stage + (1 if direction == "forward" else -1)
        return (Transfer("send", direction, microbatch, peer),) if 0 <= peer < self.stages else ()


def gpipe(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """All forwards, then all backwards."""
    place = _Place(stage, stages)
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        for index in range(microbatches):
            yield Post(place.receive(direction, index))
            yield Run(direction, index)
            yield Post(place.send(direction, index), wait=False)
        yield Wait()


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """As many forwards as there are stages to go, then one backward and one forward in turn, then the backwards that are left."""
    place = _Place(stage, stages)
    ahead = min(microbatches, stages - stage)
    for index in range(ahead):
        yield Post(place.receive("forward", index))
        yield Run("forward", index)
        yield Wait()
        if index < ahead - 1:
            yield Post(place.send("forward", index), wait=False)
    for index in range(ahead, microbatches + 1):
        done = index - ahead
        yield Post((*place.send("forward", index - 1), *place.receive("backward", done)))
        yield Run("backward", done)
        if index < microbatches:
            yield Post((*place.send("backward", done), *place.receive("forward", index)))
            yield Run("forward", index)
    yield Post(place.send("backward", microbatches - ahead), wait=False)
    for index in range(microbatches - ahead + 1, microbatches):
        yield Post(place.receive("backward", index))
        yield Run("backward", index)
        yield Wait()
        yield Post(place.send("backward", index), wait=False)
    yield Wait()


ACTIONS: Mapping[str, Callable[[int, int, int], Iterator[Action]]] = MappingProxyType({"1f1b": one_forward_one_backward, "gpipe": gpipe})
"""By the schedule's name: the actions of a stage, given its index, the number of stages and that of micro-batches."""


def actions(schedule: str, stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    """What a stage does in one step of training; what exchanges nothing is left out."""
    if stages == 1:
        both = (run for index in range(microbatches) for run in (Run("forward", index), Run("backward", index)))
        return tuple(both)
    return tuple(action for action in ACTIONS[schedule](stage, stages, microbatches) if not isinstance(action, Post) or action.transfers)
