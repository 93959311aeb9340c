"""A schedule as a grid, ranks × time, with the share of the time in which ranks stand idle, from what the stages cost.

    schedule 1f1b, predicted: idle 20.0% of the time, 25.0% of the work
    rank 0  F0 F1 ·  ·  B0 ── F2 B1 ── F3 B2 ── ·  B3 ──
    rank 1  ·  F0 B0 ── F1 B1 ── F2 B2 ── F3 B3 ── ·  ·

A forward takes a stage's forward FLOPs, a backward twice as long, each half of one as long as a forward; what is sent takes no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpcompile.schedules import Run, actions
from tpcompile.timeline import Step


@dataclass(frozen=True)
class Slot:
    """One run on a rank, and when it takes place, in the units of the costs."""

    run: Run
    start: float
    stop: float


def slots(step: Step, costs: Sequence[float]) -> tuple[tuple[Slot, ...], ...]:
    """When each rank runs what, given the cost of every stage's forward."""
    pp = step.mesh.pp
    todo = [
        [action for action in actions(step.schedule, place, pp, step.per_rank, step.microbatches) if isinstance(action, Run)]
        for place in range(pp)
    ]
    done, made = dict[tuple[str, int, int], float](), [list[Slot]() for _ in range(pp)]
    moved = True
    while moved:
        moved = False
        for place in range(pp):
            while len(made[place]) < len(todo[place]):
                run = todo[place][len(made[place])]
                needs = [done.get(key) for key in _needs(run, len(step.stages))]
                ready = [end for end in needs if end is not None]
                if len(ready) < len(needs):
                    break
                start = max([made[place][-1].stop if made[place] else 0.0, *ready])
                stop = start + costs[run.stage] * _weight(step, run)
                made[place].append(Slot(run, start, stop))
                done["back" if run.work in ("backward", "input") else run.work, run.stage, run.microbatch] = stop
                moved = True
    return tuple(map(tuple, made))


def _needs(run: Run, stages: int) -> Iterator[tuple[str, int, int]]:
    """What must be done before a run: by work, stage and micro-batch."""
    if run.work == "forward" and run.stage:
        yield "forward", run.stage - 1, run.microbatch
    if run.work in ("backward", "input"):
        yield ("back", run.stage + 1, run.microbatch) if run.stage < stages - 1 else ("forward", run.stage, run.microbatch)


def _weight(step: Step, run: Run) -> int:
    """How many forwards a run is worth: a backward that is not halved is whole in its first half, and the first stage's in its second."""
    match run.work:
        case "forward":
            return 1
        case "backward":
            return 2
    if run.stage == 0 or step.stages[run.stage].unhalved:
        return 2 * ((run.work == "weight") == (run.stage == 0))
    return 1


@dataclass(frozen=True)
class Bubble:
    """What ranks do and how long a step takes them, in the same unit, added up over ranks."""

    busy: float
    total: float

    @property
    def of_time(self) -> float:
        return 1 - self.busy / self.total if self.total else 0.0

    @property
    def of_work(self) -> float:
        return self.total / self.busy - 1 if self.busy else 0.0

    def __str__(self) -> str:
        return f"idle {self.of_time:.1%} of the time, {self.of_work:.1%} of the work"


def bubble(grid: Sequence[Sequence[Slot]]) -> Bubble:
    """From the first run of any rank to the last."""
    end = max((slot.stop for own in grid for slot in own), default=0.0)
    return Bubble(sum(slot.stop - slot.start for own in grid for slot in own), end * len(grid))


def draw(grid: Sequence[Sequence[Slot]], unit: float, width: int) -> list[str]:
    """One line for each rank; a column is a unit of time. What does not fit is left out of the middle.

    A run is named by its work and micro-batch, and by its stage before these where a rank has several.
    """
    several = any(len({slot.run.stage for slot in own}) > 1 for own in grid)
    names = [[f"{slot.run.stage}{slot.run}" if several else str(slot.run) for slot in own] for own in grid]
    wide = 1 + max((len(name) for own in names for name in own), default=1)
    lines = [_cells(own, named, unit, wide) for own, named in zip(grid, names, strict=True)]
    longest = max(map(len, lines), default=0)
    label = len(f"rank {len(grid) - 1}  ")
    kept = (width - label) // wide
    drawn = []
    for place, cells in enumerate(lines):
        cells = [*cells, *["·".ljust(wide)] * (longest - len(cells))]
        if longest > kept:
            cells = [*cells[: (kept - 1) // 2], "…".ljust(wide), *cells[longest - (kept - 1) // 2 :]]
        drawn.append(f"rank {place}".ljust(label) + "".join(cells).rstrip())
    return drawn


def _cells(own: Sequence[Slot], names: Sequence[str], unit: float, wide: int) -> list[str]:
    """One rank's columns: a run begins with its name, goes on as a line, and takes one column at least, unless it takes no time."""
    cells: list[str] = []
    for slot, name in zip(own, names, strict=True):
        if slot.stop == slot.start:
            continue
        begin, end = round(slot.start / unit), round(slot.stop / unit)
        cells += ["·".ljust(wide)] * (begin - len(cells))
        cells += [name.ljust(wide), *[("─" * (wide - 1)).ljust(wide)] * (end - begin - 1)]
    return cells


def legend(step: Step) -> str:
    """The letters of a drawing."""
    works = {action.work for action in actions(step.schedule, 0, step.mesh.pp, step.per_rank, step.microbatches) if isinstance(action, Run)}
    words = {"forward": "F forward", "backward": "B backward", "input": "I of inputs", "weight": "W of weights"}
    return ", ".join(word for work, word in words.items() if work in works)
