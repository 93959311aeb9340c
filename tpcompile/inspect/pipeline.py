"""How a pipeline's stages follow each other in time, what they share, and what a schedule changes, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from tpcompile.driver import Compilation
from tpcompile.inspect import grid
from tpcompile.inspect.grid import Bubble
from tpcompile.inspect.long import flops
from tpcompile.schedules import SCHEDULES
from tpcompile.sharing import gathers_again
from tpcompile.timeline import shared_weights


def schedule(compilation: Compilation, width: int, measured: Sequence[Bubble] | None, most: int | None = None) -> Iterator[RenderableType]:
    """What every rank of a pipeline does in a step, and which share of it the pipeline stands idle; `most` ranks are drawn."""
    step = compilation.step
    if step.mesh.pp == 1:
        return
    costs, _ = flops(compilation)
    made = grid.slots(step, costs)
    drawn = grid.draw(made, sum(costs) / len(costs) or 1.0, width)
    if most is not None and len(drawn) > most:
        drawn = [*drawn[: most // 2], f"… {len(drawn) - most + 1} ranks more", *drawn[len(drawn) - (most - 1) // 2 :]]
    title = f"schedule {step.schedule}, predicted: {grid.bubble(made)}   ({grid.legend(step)})"
    parts: list[RenderableType] = [Text(title), Text("\n".join(drawn), no_wrap=True)]
    if measured:
        whole = Bubble(sum(own.busy for own in measured), sum(own.total for own in measured))
        ranks = ", ".join(f"rank {place} {own.of_time:.1%}" for place, own in enumerate(measured))
        parts.append(Text(f"measured: {whole} ({ranks})"))
    yield Group(*parts, *map(Text, _whole_backwards(compilation)))


def _whole_backwards(compilation: Compilation) -> Iterator[str]:
    """The stages that do not run backward in halves, where their schedule would."""
    reasons: dict[str, list[str]] = {}
    for stage in compilation.stages if SCHEDULES[compilation.step.schedule].halves else ():
        if stage.unhalved:
            reasons.setdefault(stage.unhalved, []).append(str(stage.index))
    for reason, stages in reasons.items():
        yield f"stage{'s' * (len(stages) > 1)} {', '.join(stages)}: backward is not halved, since {reason}"


def shared(compilation: Compilation) -> Iterator[RenderableType]:
    """The weights that several stages use."""
    for name, stages in shared_weights(compilation.stages).items():
        yield Text(f"{name} is on stages {', '.join(map(str, stages))}: its gradients are summed")


def sharing(compilation: Compilation) -> Iterator[RenderableType]:
    """Where zero3 gathers as zero2 does, and why."""
    step = compilation.step
    if step.data_parallel != "zero3" or step.mesh.dp == 1 or gathers_again(step.data_parallel, step.schedule, step.mesh.pp):
        return
    yield Text(
        f"zero3 runs as zero2: schedule {step.schedule} runs backward in halves, which find no gradients where layers are gathered again "
        "for it; so layers' parameters stay gathered from their first forward in a step to the end of its backward",
        "yellow",
    )
