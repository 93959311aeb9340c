"""What every stage sends meets a receive of the same value, in an order in which no stage waits forever.

The timelines of all stages run against each other, one step; tensor ranks and replicas of a stage do the same, so one of each stands for
all. Transfers between two stages are strict: each side's are done in the order in which it posted them, those posted together at once.
That is what NCCL does; gloo is content with less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tpcompile.errors import VerifyError
from tpcompile.laws.places import line_of
from tpcompile.messages import Sent
from tpcompile.schedules import Wait
from tpcompile.timeline import Event, Posted, Step


def check_pipeline(step: Step) -> None:
    """Raise VerifyError for transfers that do not meet, naming the value, and for stages that wait for each other."""
    check_timelines(step, [step.timeline(stage.index) for stage in step.stages])


def check_timelines(step: Step, timelines: Sequence[Sequence[Event]]) -> None:
    """The same for given timelines, one for each stage."""
    run = _Run(step, [_Stage(index, deque(_crossing(events))) for index, events in enumerate(timelines)])
    while run.advance():
        pass
    waiting = [stage for stage in run.stages if stage.events or any(stage.posted.values())]
    if waiting:
        values = [sent.value for stage in waiting for sent in stage.waits()]
        what = f"no stage can go on: {'; '.join(map(_wait, waiting))}"
        raise VerifyError(what, at=f"schedule {step.schedule}", source=run.line(values[0]) if values else "")


def _crossing(events: Sequence[Event]) -> list[Event]:
    """What other stages take part in."""
    return [event for event in events if not isinstance(event, Sent) or event.axis in ("pp", "all")]


@dataclass
class _Stage:
    """Where a stage stands: what it has yet to do, and what it has posted to each peer and is not done."""

    index: int
    events: deque[Event]
    posted: dict[int, deque[list[Sent]]] = field(default_factory=dict)
    blocking: list[list[Sent]] = field(default_factory=list)  # what it stands still for

    def post(self, event: Posted) -> None:
        for peer in dict.fromkeys(sent.stages[0] for sent in event.transfers):
            together = [sent for sent in event.transfers if sent.stages[0] == peer]
            self.posted.setdefault(peer, deque()).append(together)
            self.blocking += [together] if event.wait else []

    def waits(self) -> list[Sent]:
        """What it has posted and is not done, or the collective that it stands before."""
        head = self.events[0] if self.events else None
        posted = [sent for queue in self.posted.values() for together in queue for sent in together]
        return posted or ([head] if isinstance(head, Sent) else [])


@dataclass
class _Run:
    step: Step
    stages: list[_Stage]

    def advance(self) -> bool:
        """Let every stage go as far as it can; whether any did."""
        moved = False
        for stage in self.stages:
            while self._go(stage):
                moved = True
        for one in self.stages:
            for peer in list(one.posted):
                moved |= one.index < peer and self._transfer(one, self.stages[peer])
        return moved or self._meet()

    def _go(self, stage: _Stage) -> bool:
        stage.blocking = [together for together in stage.blocking if together]
        if stage.blocking or not stage.events:
            return False
        match stage.events[0]:
            case Posted() as event:
                stage.post(event)
            case Wait():
                if any(stage.posted.values()):
                    return False
            case Sent():
                return False
        stage.events.popleft()
        return True

    def _transfer(self, one: _Stage, other: _Stage) -> bool:
        """Do what the two have posted to each other, as far as it meets."""
        here, there = one.posted.setdefault(other.index, deque()), other.posted.setdefault(one.index, deque())
        moved = False
        while here and there:
            pairs = [(a, b) for a in here[0][:] if (b := _answer(a, there[0])) is not None]
            if not pairs:
                break
            a, b = pairs[0]
            self._check(one, a, other, b)
            here[0].remove(a)
            there[0].remove(b)
            for queue in (here, there):
                while queue and not queue[0]:
                    queue.popleft()
            moved = True
        return moved

    def _check(self, one: _Stage, a: Sent, other: _Stage, b: Sent) -> None:
        if (a.value, a.direction, a.microbatch, a.dtype, a.elements) != (b.value, b.direction, b.microbatch, b.dtype, b.elements):
            what = f"stage {one.index}: {_described(a)}; stage {other.index}: {_described(b)}"
            raise VerifyError(f"a transfer meets another: {what}", at=f"schedule {self.step.schedule}", source=self.line(a.value))

    def _meet(self) -> bool:
        """A collective over stages: all that take part stand before it."""
        heads = {stage.index: stage.events[0] for stage in self.stages if stage.events and not stage.blocking}
        for index, event in heads.items():
            if not isinstance(event, Sent):
                continue
            members = range(len(self.stages)) if event.axis == "all" else event.stages
            others = [heads.get(member) for member in members]
            if index not in members or not all(isinstance(other, Sent) for other in others):
                continue
            if all(isinstance(other, Sent) and (other.axis, other.stages) == (event.axis, event.stages) for other in others):
                for member, other in zip(members, others, strict=True):
                    if other != event:
                        assert isinstance(other, Sent)
                        what = f"stage {index}: {_described(event)}; stage {member}: {_described(other)}"
                        raise VerifyError(f"a collective meets another: {what}", at=f"axis {event.axis}", source=self.line(event.value))
                for member in members:
                    self.stages[member].events.popleft()
                return True
        return False

    def line(self, value: str) -> str:
        """The user's line of a value; of a parameter, that of its first use."""
        local = self.step.local
        names = {name: place for place, name in local.program.parameters.items()}
        wanted = names.get(value, value)
        return next((line_of(local, node) for node in local.graph.nodes if node.name == wanted), "")


def _answer(sent: Sent, others: list[Sent]) -> Sent | None:
    """The first transfer on the other side that goes the other way."""
    return next((other for other in others if {sent.call, other.call} == {"send", "recv"}), None)


def _described(sent: Sent) -> str:
    batch = "" if sent.microbatch is None else f" of micro-batch {sent.microbatch}"
    kind = f"{str(sent.dtype).removeprefix('torch.')}, {sent.elements} elements"
    return f"{sent.call} {sent.value}{batch}, {sent.direction} ({kind})".replace("*", "·")


def _wait(stage: _Stage) -> str:
    waits = stage.waits()
    return f"stage {stage.index} waits in {_described(waits[0])}" if waits else f"stage {stage.index} is not done"
