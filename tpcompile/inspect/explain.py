"""What was found, how it was cut, and what was left whole and why, as text."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tpcompile.driver import Compilation
from tpcompile.inspect import long, memory, nodes, pipeline, short
from tpcompile.inspect.cuts import LIMITS, attention, cuts
from tpcompile.inspect.fold import fold
from tpcompile.inspect.grid import Bubble
from tpcompile.inspect.load import Load
from tpcompile.inspect.questions import answers
from tpcompile.ir import Program

SCREEN, WIDTH = 120, 160
"""Columns of the short form and of the full one."""
LINES = 60
"""Of the short form: tables of a model that would need more are shortened, step by step."""
RANKS = 5
"""Pipeline ranks whose schedule the short form draws, at most."""
DEVICE_MEMORY = 80.0
"""GiB of a device, where nothing else is said."""


def explain(
    compilation: Compilation,
    width: int | None = None,
    devices_per_node: int | None = None,
    measured: Sequence[Bubble] | None = None,
    *,
    full: bool = False,
    device_memory: float = DEVICE_MEMORY,
) -> str:
    """The plan of a compiled model, for people, on one screen; `full` has every stage, every rank and every formula.

    `measured` says of every rank of a pipeline how long it worked and how long its steps took. `device_memory` is in GiB.

    cut over tp           found      weights                                   forward       backward
    blocks.0–3.mlp        mlp        up.weight [230@tp, 60]  down.weight …     1 all-reduce  1 all-reduce
    """
    made = io.StringIO()
    console = Console(file=made, width=width or (WIDTH if full else SCREEN), color_system=None, force_terminal=False, highlight=False)
    show(compilation, console, devices_per_node, measured, full=full, device_memory=device_memory)
    return "\n".join(line.rstrip() for line in made.getvalue().splitlines()).strip("\n") + "\n"


def show(
    compilation: Compilation,
    console: Console,
    devices_per_node: int | None = None,
    measured: Sequence[Bubble] | None = None,
    *,
    full: bool = False,
    device_memory: float = DEVICE_MEMORY,
) -> None:
    """Print what `explain` returns, in colours where the console has them."""
    load, per_node = Load(compilation), nodes.devices_per_node(devices_per_node)
    head = [_mesh(compilation, per_node), _questions(compilation, load, round(device_memory * (1 << 30)), per_node)]
    if full:
        parts = [
            *cuts(compilation),
            *attention(compilation),
            long.stages(compilation),
            *pipeline.schedule(compilation, console.width, measured),
        ]
        parts += [*pipeline.shared(compilation), memory.table(compilation), short.held(compilation, load, most=None)]
        parts += [*pipeline.sharing(compilation), *_updates(compilation.program), *long.traffic(compilation)]
    else:
        rest = [short.held(compilation, load), *pipeline.schedule(compilation, console.width, measured, RANKS)]
        rest += [*pipeline.shared(compilation), *pipeline.sharing(compilation), *_updates(compilation.program)]
        for limits in LIMITS:
            parts = [*cuts(compilation, limits), *attention(compilation, limits), *rest, *short.traffic(load, limits.small)]
            if sum(len(console.render_lines(part)) + 1 for part in (*head, *parts)) <= LINES + 1:
                break
    for part in (*head, *parts):
        console.print(part)
        console.print()


def _questions(compilation: Compilation, load: Load, device: int, per_node: int) -> RenderableType:
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column()
    for question, answer, good in answers(compilation, load, device, per_node):
        made.add_row(Text(question, "bold"), Text(answer, "" if good is None else "green" if good else "yellow"))
    return made


def _mesh(compilation: Compilation, per_node: int) -> RenderableType:
    mesh, own = compilation.mesh, compilation.step.per_rank
    words = {
        "dp": ("replica", "replicas"),
        "pp": ("stage", "stages") if own == 1 else ("pipeline rank", "pipeline ranks"),
        "tp": ("tensor rank", "tensor ranks"),
    }
    sizes = " × ".join(f"{mesh.axis(axis)} {words[axis][mesh.axis(axis) > 1]}" for axis in mesh.order)
    sizes += f", {own} stages on a rank" if own > 1 else ""
    made = Text.assemble(("mesh  ", "bold"), f"{mesh}: {mesh.size} rank{'s' * (mesh.size > 1)}, {sizes}")
    if backend := compilation.options.backend:
        graphs = [compilation.options.graphs(mesh, stage) for stage in compilation.stages]
        if found := sorted({str(one.of) for one in graphs if one.of}):
            made.append(f"\nruns through torch.compile's {backend}, a graph for each {' or '.join(found)}")
        elif graphs:
            made.append(f"\nruns eagerly, and not through {backend}: {graphs[0].reason}", "bold yellow")
    if warning := nodes.warning(mesh, per_node):
        made.append(f"\n{warning}", "bold yellow")
    return made


def _updates(program: Program) -> Iterator[RenderableType]:
    """The buffers that forward gives new values."""
    if program.updates:
        names = [name for name, _ in fold(program.updates, lambda name: name, lambda name: 0, program.layers)]
        piece = f"\na batch must be in one piece: {program.update_reason}" if program.update_reason else ""
        yield Text(f"forward updates {', '.join(names)}{piece}")
