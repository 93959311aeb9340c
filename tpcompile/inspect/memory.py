"""The bytes of training state that the ranks of every stage hold, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tpcompile.driver import Compilation
from tpcompile.gradients import trained
from tpcompile.ir import Stage
from tpcompile.layout import Layout, TensorType, local_size
from tpcompile.memory import Held, Memory, memory
from tpcompile.passes._parts import layer_of
from tpcompile.timeline import shared_weights

SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def held(compilation: Compilation, stage: Stage, place: int) -> tuple[Held, ...]:
    """The parameters of a stage that a coordinate of the tensor axis holds; those that no graph uses are left out."""
    program, found = compilation.program, []
    asked = trained(program)
    for placeholder, name in stage.parameters.items():
        kind, layout = program.types[placeholder], compilation.local.layouts.get(placeholder)
        assert isinstance(kind, TensorType)
        shape = tuple(int(local_size(dim, place)) for dim in layout.dims) if isinstance(layout, Layout) else tuple(map(int, kind.shape))
        found.append(Held(shape, kind.dtype, placeholder in asked, layer_of(name, program.layers)))
    return tuple(found)


def of_stages(compilation: Compilation, stages: Sequence[Stage], *, moments: int = 2) -> Memory:
    """The most that any tensor rank with these stages holds, on the first replica: no other holds more."""
    mesh, mode = compilation.mesh, compilation.options.data_parallel
    how: dict[str, Any] = {"pipeline": mesh.pp > 1, "microbatches": compilation.options.microbatches, "moments": moments}
    found = (memory(_together(compilation, stages, place), mode, mesh.dp, **how) for place in range(mesh.tp))
    return max(found, key=lambda one: one.most)


def _together(compilation: Compilation, stages: Sequence[Stage], place: int) -> Iterator[Held]:
    """The parameters of a rank's stages. One that two of them use is the same tensor, except where replicas' gradients are reduced."""
    seen = set[str]()
    for stage in stages:
        for name, one in zip(stage.parameters.values(), held(compilation, stage, place), strict=True):
            if name not in seen or compilation.mesh.dp > 1:
                yield replace(one, twin=name in seen)
            seen.add(name)


def table(compilation: Compilation) -> RenderableType:
    """Parameters, gradients and Adam's two moments on a rank, between steps and in one: a line for each place along the pipeline."""
    mesh, step, mode = compilation.mesh, compilation.step, compilation.options.data_parallel
    over = f" under {mode} over {mesh.dp} replicas" if mesh.dp > 1 else ""
    shown = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0))
    headings = (f"held by a rank{over}", "parameters", "gradients", "two moments", "gathered in a step", "whole gradients in it", "at most")
    for place, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if place else "left")
    for place in range(mesh.pp):
        stages = step.stages_at(place)
        one, named = of_stages(compilation, stages), ", ".join(str(stage.index) for stage in stages)
        sizes = (one.parameters, one.gradients, one.optimizer, one.gathered, one.unreduced, one.most)
        label = f"stage{'s' * (len(stages) > 1)} {named}" if mesh.pp > 1 else "all of it"
        shown.add_row(label, *(Text(spelled(size)) for size in sizes))
    return Group(shown, *_on_several_ranks(compilation))


def _on_several_ranks(compilation: Compilation) -> Iterator[Text]:
    """What the lines' sum has more than once."""
    for name, stages in shared_weights(compilation.stages).items():
        ranks = sorted({compilation.step.place_of(stage) for stage in stages})
        if len(ranks) > 1:
            lines = ", ".join(map(str, ranks))
            yield Text(f"{name} is in {len(ranks)} of these lines: the ranks of places {lines} each hold, and step, a copy of it")


def spelled(size: int) -> str:
    """12.5 MiB; – for nothing."""
    for unit, name in SIZES:
        if size >= unit:
            return f"{size / unit:.4g} {name}" if unit > 1 else f"{size} B"
    return "–"
