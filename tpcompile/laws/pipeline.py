"""What every stage sends meets a receive of the same value, in an order in which no rank waits forever.

The timelines of all places along the pipeline run against each other, one step; tensor ranks and replicas of a place do the same, so one
of each stands for all. Where a rank holds one stage, they are named alike. Transfers between two ranks are strict: each side's are done in
the order in which it posted them, those posted together at once.
That is what NCCL does; gloo is content with less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tpcompile.errors import VerifyError
from tpcompile.laws.places import line_of
from tpcompile.messages import Sent
from tpcompile.schedules import Await, Wait
from tpcompile.timeline import Event, Posted, Step


def check_pipeline(step: Step) -> None:
    """Raise VerifyError for transfers that do not meet, naming the value, and for stages that wait for each other."""
    check_timelines(step, [step.timeline(place) for place in range(step.mesh.pp)])


def check_timelines(step: Step, timelines: Sequence[Sequence[Event]]) -> None:
    """The same for given timelines, one for each place along the pipeline."""
    run = _Run(step, [_Rank(place, deque(_crossing(events))) for place, events in enumerate(timelines)])
    while run.advance():
        pass
    waiting = [rank for rank in run.ranks if rank.events or any(rank.posted.values())]
    if waiting:
        values = [sent.value for rank in waiting for sent in rank.waits()]
        what = f"no {run.word} can go on: {'; '.join(run.wait(rank) for rank in waiting)}"
        raise VerifyError(what, at=f"schedule {step.schedule}", source=run.line(values[0]) if values else "")


def _crossing(events: Sequence[Event]) -> list[Event]:
    """What other ranks of the pipeline take part in."""
    return [event for event in events if not isinstance(event, Sent) or event.axis in ("pp", "all")]


@dataclass
class _Rank:
    """Where a rank stands: what it has yet to do, and what it has posted to each peer and is not done."""

    place: int
    events: deque[Event]
    posted: dict[int, deque[list[Sent]]] = field(default_factory=dict)
    blocking: list[list[Sent]] = field(default_factory=list)  # what it stands still for

    def post(self, event: Posted) -> None:
        for peer in dict.fromkeys(sent.places[0] for sent in event.transfers):
            together = [sent for sent in event.transfers if sent.places[0] == peer]
            self.posted.setdefault(peer, deque()).append(together)
            self.blocking += [together] if event.wait else []

    def has_open(self, wanted: Await) -> bool:
        """Whether a receive is not done."""
        key = ("recv", wanted.stage, wanted.direction, wanted.microbatch)
        open_ones = (sent for queue in self.posted.values() for together in queue for sent in together)
        return any((sent.call, sent.stage, sent.direction, sent.microbatch) == key for sent in open_ones)

    def waits(self) -> list[Sent]:
        """What it has posted and is not done, or the collective that it stands before."""
        head = self.events[0] if self.events else None
        posted = [sent for queue in self.posted.values() for together in queue for sent in together]
        return posted or ([head] if isinstance(head, Sent) else [])


@dataclass
class _Run:
    step: Step
    ranks: list[_Rank]

    def advance(self) -> bool:
        """Let every rank go as far as it can; whether any did."""
        moved = False
        for rank in self.ranks:
            while self._go(rank):
                moved = True
        for one in self.ranks:
            for peer in list(one.posted):
                moved |= one.place < peer and self._transfer(one, self.ranks[peer])
        return moved or self._meet()

    def _go(self, rank: _Rank) -> bool:
        rank.blocking = [together for together in rank.blocking if together]
        if rank.blocking or not rank.events:
            return False
        match rank.events[0]:
            case Posted() as event:
                rank.post(event)
            case Await() as event:
                if rank.has_open(event):
                    return False
            case Wait():
                if any(rank.posted.values()):
                    return False
            case Sent():
                return False
        rank.events.popleft()
        return True

    def _transfer(self, one: _Rank, other: _Rank) -> bool:
        """Do what the two have posted to each other, as far as it meets."""
        here, there = one.posted.setdefault(other.place, deque()), other.posted.setdefault(one.place, deque())
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

    def _check(self, one: _Rank, a: Sent, other: _Rank, b: Sent) -> None:
        if (a.value, a.direction, a.microbatch, a.dtype, a.elements) != (b.value, b.direction, b.microbatch, b.dtype, b.elements):
            what = f"{self.word} {one.place}: {_described(a)}; {self.word} {other.place}: {_described(b)}"
            raise VerifyError(f"a transfer meets another: {what}", at=f"schedule {self.step.schedule}", source=self.line(a.value))

    def _meet(self) -> bool:
        """A collective over the pipeline: all that take part stand before it."""
        heads = {rank.place: rank.events[0] for rank in self.ranks if rank.events and not rank.blocking}
        for place, event in heads.items():
            if not isinstance(event, Sent):
                continue
            members = range(len(self.ranks)) if event.axis == "all" else event.places
            others = [heads.get(member) for member in members]
            if place not in members or not all(isinstance(other, Sent) for other in others):
                continue
            if all(isinstance(other, Sent) and (other.axis, other.places) == (event.axis, event.places) for other in others):
                for member, other in zip(members, others, strict=True):
                    if other != event:
                        assert isinstance(other, Sent)
                        what = f"{self.word} {place}: {_described(event)}; {self.word} {member}: {_described(other)}"
                        raise VerifyError(f"a collective meets another: {what}", at=f"axis {event.axis}", source=self.line(event.value))
                for member in members:
                    self.ranks[member].events.popleft()
                return True
        return False

    @property
    def word(self) -> str:
        """What a place along the pipeline is called: a stage, where each rank holds one."""
        return "stage" if self.step.per_rank == 1 else "rank"

    def wait(self, rank: _Rank) -> str:
        waits = rank.waits()
        return f"{self.word} {rank.place} waits in {_described(waits[0])}" if waits else f"{self.word} {rank.place} is not done"

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
