"""What every rank of a pipeline does, and in which order: the tables of the schedules that torch runs, and which stages a rank holds.

    1f1b, pp=2, 4 micro-batches            gpipe
    stage 0   F0 F1 B0 F2 B1 F3 B2 B3      F0 F1 F2 F3          B0 B1 B2 B3
    stage 1      F0 B0 F1 B1 F2 B2 F3 B3      F0 F1 F2 F3 B0 B1 B2 B3

    a loop, pp=2, 4 stages                 a V
    rank 0    stages 0, 2                  stages 0, 3
    rank 1    stages 1, 3                  stages 1, 2

Between computations, operations are posted, some of them together, and waited for. Those of GPipe and 1F1B are drawn from
`_step_microbatches` of their classes in torch.distributed.pipelining.schedules (2.13), whose own tables leave out what is sent. All others
are torch's tables of computation and communication, made by the classes that run them, without a process group. Tests hold both against
what ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

from torch.distributed.pipelining import schedules as torchs

from tpcompile.errors import InputError, caller

Direction = Literal["forward", "backward"]
Work = Literal["forward", "backward", "input", "weight"]
"""A forward, a whole backward, or one of its halves: the gradients of what a stage receives, and then those of its weights."""


@dataclass(frozen=True)
class Run:
    """One micro-batch on one stage."""

    work: Work
    microbatch: int
    stage: int

    def __str__(self) -> str:
        letter = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}[self.work]
        return f"{letter}{self.microbatch}"


@dataclass(frozen=True)
class Transfer:
    """One micro-batch's values, or their gradients, between a stage of this rank and its neighbour on another."""

    call: Literal["send", "recv"]
    direction: Direction
    microbatch: int
    peer: int  # the other rank's place along the axis
    stage: int  # this rank's stage


@dataclass(frozen=True)
class Post:
    """Transfers that begin together; with `wait` the rank stands still until they are done."""

    transfers: tuple[Transfer, ...]
    wait: bool = True


@dataclass(frozen=True)
class Await:
    """The rank stands still until a stage has received a micro-batch's values, or gradients."""

    stage: int
    direction: Direction
    microbatch: int


@dataclass(frozen=True)
class Wait:
    """The rank stands still until everything that it has posted is done."""


@dataclass(frozen=True)
class Reduce:
    """Replicas reduce the gradients of a stage."""

    stage: int


@dataclass(frozen=True)
class Gather:
    """Replicas gather the parameters of a stage that they share out, ahead of its work, if they are not there."""

    stage: int


@dataclass(frozen=True)
class Drop:
    """They drop them again."""

    stage: int


Action = Run | Post | Await | Wait | Reduce | Gather | Drop


@dataclass(frozen=True)
class Schedule:
    """One kind of schedule: torch's class, how many stages of its own a rank holds, and which."""

    kind: str
    per_rank: int  # by default
    fixed: bool  # no other number will do
    placement: Literal["loop", "v"] = "loop"
    halves: bool = False  # runs backward in halves


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "1f1b": Schedule("Schedule1F1B", 1, True),
        "gpipe": Schedule("ScheduleGPipe", 1, True),
        "interleaved_1f1b": Schedule("ScheduleInterleaved1F1B", 2, False),
        "looped_bfs": Schedule("ScheduleLoopedBFS", 2, False),
        "interleaved_zero_bubble": Schedule("ScheduleInterleavedZeroBubble", 2, False, halves=True),
        "zbv": Schedule("ScheduleZBVZeroBubble", 2, True, "v", halves=True),
        "dualpipev": Schedule("ScheduleDualPipeV", 2, True, "v", halves=True),
    }
)


def place_of(schedule: str, stage: int, pp: int) -> int:
    """The place along the pipeline axis of the rank that holds a stage."""
    turn, place = divmod(stage, pp)
    return pp - 1 - place if turn % 2 and SCHEDULES[schedule].placement == "v" else place


def stages_at(schedule: str, place: int, pp: int, stages: int) -> tuple[int, ...]:
    """The stages that a rank holds, in order."""
    return tuple(stage for stage in range(stages) if place_of(schedule, stage, pp) == place)


# ------------------------------------------------------------------------------------------------- requirements


def check_schedule(
    schedule: str, pp: int, per_rank: int | None = None, microbatches: int | None = None, call: str = "compile"
) -> tuple[int, int]:
    """The stages of a rank and the number of micro-batches, by default as many as there are stages; or 1 of each without a pipeline.

    Raises InputError for an unknown schedule, or one that these numbers do not allow.
    """
    if schedule not in SCHEDULES:
        *names, last = SCHEDULES
        raise _refused(f"unknown schedule {schedule!r}", f"{call}(schedule={schedule!r})", f"use {', '.join(names)} or {last}")
    made = SCHEDULES[schedule]
    if pp == 1 and not (made.per_rank == 1 and per_rank in (None, 1)):
        what = f"schedule {schedule} needs" if made.per_rank > 1 else f"{per_rank} stages on a rank need"
        at = f"{call}(schedule={schedule!r})" if made.per_rank > 1 else f"{call}(stages_per_rank={per_rank})"
        other = 'leave schedule= as it is, "1f1b"' if made.per_rank > 1 else "leave stages_per_rank out"
        raise _refused(f"{what} a pipeline, and the mesh has one stage", at, f"use a mesh with pp=2 or more, or {other}")
    own = made.per_rank if per_rank is None else per_rank
    if own < 1 or (made.fixed and own != made.per_rank):
        many = "a stage" if made.per_rank == 1 else f"{made.per_rank} stages"
        what = f"schedule {schedule} has {many} on a rank" if made.fixed else "a rank has at least one stage"
        loops = " or ".join(f'"{name}"' for name, other in SCHEDULES.items() if not other.fixed)
        fix = f"use stages_per_rank={made.per_rank}" if made.fixed else "use stages_per_rank=1 or more"
        fix += f", or schedule={loops}" if made.fixed and own > 0 else ""
        raise _refused(what, f"{call}(stages_per_rank={per_rank})", fix)
    count = pp * own if microbatches is None else microbatches
    _check_microbatches(schedule, pp, own, count, f"{call}(microbatches={count})")
    return own, count


def _check_microbatches(schedule: str, pp: int, per_rank: int, count: int, at: str) -> None:
    least = {"1f1b": pp, "dualpipev": pp * per_rank}.get(schedule, 1) if pp > 1 else 1
    if count < least:
        what = f"schedule {schedule} over {pp * per_rank} stages needs {least} micro-batches or more"
        other = {"1f1b": "gpipe", "dualpipev": "zbv"}.get(schedule)
        fix = f"use microbatches={least} or more" + (f', or schedule="{other}"' if other and count > 0 else "")
        raise _refused(what if least > 1 else "a batch has at least one micro-batch", at, fix)
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and count % (count // pp or 1):
        rounds = count // pp
        below, above = count // rounds * rounds, count // pp * pp + pp
        what = f"schedule {schedule} over {pp} ranks runs {count} micro-batches in {rounds} rounds, which must be equal"
        raise _refused(what, at, f'use microbatches={below} or {above}, or schedule="looped_bfs"')


def _refused(what: str, at: str, fix: str) -> InputError:
    return InputError(what, at=at, source=caller(), fix=fix)


# ------------------------------------------------------------------------------------------- one stage on a rank


@dataclass(frozen=True)
class _Place:
    """A stage among others, alone on its rank, and what it exchanges with its neighbours for one micro-batch."""

    stage: int
    stages: int

    def receive(self, direction: Direction, microbatch: int) -> tuple[Transfer, ...]:
        peer = self.stage + (-1 if direction == "forward" else 1)
        return (Transfer("recv", direction, microbatch, peer, self.stage),) if 0 <= peer < self.stages else ()

    def send(self, direction: Direction, microbatch: int) -> tuple[Transfer, ...]:
        peer = self.stage + (1 if direction == "forward" else -1)
        return (Transfer("send", direction, microbatch, peer, self.stage),) if 0 <= peer < self.stages else ()


def gpipe(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """All forwards, then all backwards."""
    place = _Place(stage, stages)
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        for index in range(microbatches):
            yield Post(place.receive(direction, index))
            yield Run(direction, index, stage)
            yield Post(place.send(direction, index), wait=False)
        yield Wait()
    yield Reduce(stage)


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """As many forwards as there are stages to go, then one backward and one forward in turn, then the backwards that are left."""
    place = _Place(stage, stages)
    ahead = min(microbatches, stages - stage)
    for index in range(ahead):
        yield Post(place.receive("forward", index))
        yield Run("forward", index, stage)
        yield Wait()
        if index < ahead - 1:
            yield Post(place.send("forward", index), wait=False)
    for index in range(ahead, microbatches + 1):
        done = index - ahead
        yield Post((*place.send("forward", index - 1), *place.receive("backward", done)))
        yield Run("backward", done, stage)
        if index < microbatches:
            yield Post((*place.send("backward", done), *place.receive("forward", index)))
            yield Run("forward", index, stage)
    yield Post(place.send("backward", microbatches - ahead), wait=False)
    for index in range(microbatches - ahead + 1, microbatches):
        yield Post(place.receive("backward", index))
        yield Run("backward", index, stage)
        yield Wait()
        yield Post(place.send("backward", index), wait=False)
    yield Wait()
    yield Reduce(stage)


ACTIONS: Mapping[str, Callable[[int, int, int], Iterator[Action]]] = MappingProxyType({"1f1b": one_forward_one_backward, "gpipe": gpipe})
"""By the schedule's name: the actions of a stage, given its index, the number of stages and that of micro-batches."""


# --------------------------------------------------------------------------------------------------- torch's tables


@cache
def _tables(schedule: str, pp: int, per_rank: int, microbatches: int) -> Mapping[int, Sequence[Any]]:
    """What torch's class would run on each rank, communication included."""
    stage = SimpleNamespace(num_stages=pp * per_rank, group_size=pp, group_rank=0, stage_index=0, submod=None)
    kind: Any = getattr(torchs, SCHEDULES[schedule].kind)
    made = kind([stage] * per_rank, microbatches)
    return MappingProxyType(made.pipeline_order_with_comms)


WORK: Mapping[Any, Work] = {torchs.F: "forward", torchs.B: "backward", torchs.I: "input", torchs.W: "weight"}
MOVES: Mapping[Any, tuple[Literal["send", "recv"], Direction, int]] = {
    torchs.SEND_F: ("send", "forward", 1),
    torchs.RECV_F: ("recv", "forward", -1),
    torchs.SEND_B: ("send", "backward", -1),
    torchs.RECV_B: ("recv", "backward", 1),
}
"""Torch's name of a transfer: the call, what it carries, and how far off the other stage is."""

OF_REPLICAS: Mapping[Any, Callable[[int], Action]] = {torchs.REDUCE_GRAD: Reduce, torchs.UNSHARD: Gather, torchs.RESHARD: Drop}


def _from_torch(schedule: str, place: int, pp: int, per_rank: int, microbatches: int) -> Iterator[Action]:
    """Every transfer begins alone and is waited for where it is needed: what is received before its use, what is sent at the end."""
    last = pp * per_rank - 1
    for both in _tables(schedule, pp, per_rank, microbatches)[place]:
        for action in both.sub_actions or (both,):
            kind, stage, index = action.computation_type, action.stage_index, action.microbatch_index
            if (work := WORK.get(kind)) is not None:
                direction: Direction = "forward" if work == "forward" else "backward"
                source = stage - 1 if work == "forward" else stage + 1
                if work != "weight" and 0 <= source <= last and place_of(schedule, source, pp) != place:
                    yield Await(stage, direction, index)
                yield Run(work, index, stage)
            elif kind in MOVES:
                call, direction, away = MOVES[kind]
                yield Post((Transfer(call, direction, index, place_of(schedule, stage + away, pp), stage),), wait=False)
            elif kind in OF_REPLICAS:
                yield OF_REPLICAS[kind](stage)
    yield Wait()


@cache
def actions(schedule: str, place: int, pp: int, per_rank: int, microbatches: int) -> tuple[Action, ...]:
    """What a rank does in one step of training; what exchanges nothing is left out."""
    if pp == 1:
        works: tuple[Work, ...] = ("forward", "backward")
        return (*(Run(work, index, 0) for index in range(microbatches) for work in works), Reduce(0))
    if schedule in ACTIONS:
        found = ACTIONS[schedule](place, pp, microbatches)
    else:
        found = _from_torch(schedule, place, pp, per_rank, microbatches)
    return tuple(action for action in found if not isinstance(action, Post) or action.transfers)
