"""What was found, how it was cut, and what was left whole and why, as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tpcompile.cost import all_flops, evaluate
from tpcompile.driver import Compilation
from tpcompile.inspect import grid, memory, nodes
from tpcompile.inspect.calls import AXES, MICROBATCHES, Calls, calls, formula, known, value
from tpcompile.inspect.fold import fold, spell, split_layer
from tpcompile.inspect.grid import Bubble
from tpcompile.inspect.options import options
from tpcompile.inspect.traffic import traffic
from tpcompile.ir import Left, Program, Region, Source, Stage
from tpcompile.layout import Layout, TensorType, local_size, product
from tpcompile.schedules import SCHEDULES

WIDTH = 160

Layouts = Mapping[str, Layout | tuple[Layout, ...]]


def explain(
    compilation: Compilation, width: int = WIDTH, devices_per_node: int | None = None, measured: Sequence[Bubble] | None = None
) -> str:
    """The plan of a compiled model, for people: mesh, regions, what stays whole, stages, their schedule, parameters per rank, traffic.

    `measured` says of every rank of a pipeline how long it worked and how long its steps took.

    cut over tp           found      weights                                   forward       backward
    blocks.0–3.mlp        mlp        up.weight [230@tp, 60]  down.weight …     1 all-reduce  1 all-reduce
    """
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        for part in (
            _mesh(compilation, nodes.devices_per_node(devices_per_node)),
            *_cuts(compilation),
            _stages(compilation),
            *_schedule(compilation, width, measured),
            *_shared(compilation),
            memory.table(compilation),
            *_updates(compilation.program),
            *_traffic(compilation),
        ):
            console.print(part)
            console.print()
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n") + "\n"


def _mesh(compilation: Compilation, per_node: int) -> RenderableType:
    mesh, own = compilation.mesh, compilation.step.per_rank
    words = {
        "dp": ("replica", "replicas"),
        "pp": ("stage", "stages") if own == 1 else ("pipeline rank", "pipeline ranks"),
        "tp": ("tensor rank", "tensor ranks"),
    }
    sizes = " × ".join(f"{mesh.axis(axis)} {words[axis][mesh.axis(axis) > 1]}" for axis in mesh.order)
    sizes += f", {own} stages on a rank" if own > 1 else ""
    warning = nodes.warning(mesh, per_node)
    return Text(f"mesh  {mesh}: {mesh.size} rank{'s' * (mesh.size > 1)}, {sizes}" + (f"\n{warning}" if warning else ""))


def _cuts(compilation: Compilation) -> Iterator[RenderableType]:
    if compilation.mesh.tp == 1:
        yield Text("one tensor rank: every weight is whole")
        return
    yield _regions(compilation) if compilation.plan.regions else Text("nothing is cut")
    if any(options(compilation, region) for region in compilation.plan.regions):
        yield _options(compilation)
    yield _left(compilation, "left whole", compilation.plan.whole) if compilation.plan.whole else Text("no weight is left whole")
    if compilation.sharded.stretches:
        yield _left(compilation, "needs all positions", compilation.sharded.stretches)


def _regions(compilation: Compilation) -> RenderableType:
    plan, program = compilation.plan, compilation.program
    sent = traffic(compilation.local)

    def counts(region: Region, way: int) -> str:
        return ", ".join(f"{count} {name}" for name, count in sent[region.name][way].items())

    def like(region: Region) -> tuple[object, ...]:
        return region.kind, _weights(region, program), counts(region, 0), counts(region, 1)

    table = _table(f"cut over {plan.regions[0].axis}", "found", "weights", "forward", "backward")
    for name, region in fold(plan.regions, lambda r: r.name, like, program.layers):
        table.add_row(name, region.kind, "\n".join(_weights(region, program)), counts(region, 0) or "–", counts(region, 1) or "–")
    return table


def _options(compilation: Compilation) -> RenderableType:
    """What the chosen cut of consecutive linears sends, and what the other would."""
    regions, layers = [(region, options(compilation, region)) for region in compilation.plan.regions], compilation.program.layers
    table = _table("ways to cut", "linears", "forward", "bytes that a rank sends", "", right=(3,))
    for name, (_, found) in fold([item for item in regions if item[1]], lambda item: item[0].name, lambda item: item[1], layers):
        for place, option in enumerate(found):
            table.add_row("" if place else name, option.cut, option.collectives, str(option), "" if place else "chosen")
    return table


def _weights(region: Region, program: Program) -> tuple[str, ...]:
    """up.weight [230@tp, 60], for a bias that is cut like it up.{weight, bias}; in the order of the model, below the region's name."""
    lines: dict[str, str] = {}
    for name in sorted(region.weights, key=list(program.parameters.values()).index):
        owner, _, own = name.rpartition(".")
        layout, weight = region.weights[name], f"{owner}.weight"
        if own == "bias" and weight in lines and region.weights[weight].startswith(layout[:-1] + ","):
            lines[weight] = lines[weight].replace(".weight ", ".{weight, bias} ", 1)
            continue
        within = name.removeprefix(f"{region.name}.")
        lines[name] = f"{within if within != name else split_layer(name, program.layers)[1]} {layout}"
    return tuple(lines.values())


def _left(compilation: Compilation, title: str, items: Sequence[Left]) -> RenderableType:
    program = compilation.program

    def like(left: Left) -> tuple[object, ...]:
        return re.sub(r"_\d+", "", left.reason), str(left.source)

    table = _table(title, "because", "at")
    for name, left in fold(items, lambda item: item.name, like, program.layers):
        table.add_row(name, left.reason, Text(_code(left.source) if left.source else "", no_wrap=True, overflow="ellipsis"))
    return table


def _code(source: Source) -> str:
    """model.py:87  logits = self.head(self.norm(x))"""
    line = f"{source.file.rpartition('/')[2]}:{source.line}  {source.code}"
    return line if len(line) <= 72 else line[:71] + "…"


def _stages(compilation: Compilation) -> RenderableType:
    """Layers, compute and parameters of every stage: how even the stages are, and what each rank holds."""
    program, tp, layouts = compilation.program, compilation.mesh.tp, compilation.local.layouts
    flops, sizes = _flops(compilation)
    several = compilation.step.per_rank > 1
    named = ["stage", "layers", "compute" + sizes, "parameters", *(f"on tp {place}" for place in range(tp) if tp > 1)]
    table = _table(*named, *(["on pp"] if several else []), right=range(2, len(named)))
    for stage, cost in zip(compilation.stages, flops, strict=True):
        held = [sum(_elements(program, layouts, stage.parameters, place)) for place in range(tp) if tp > 1]
        whole = sum(_elements(program, {}, stage.parameters, 0))
        share = f"{cost / max(sum(flops), 1):.1%}"
        rank = [str(compilation.step.place_of(stage.index))] if several else []
        table.add_row(str(stage.index), _layers(stage, program), share, *(f"{count:,}" for count in (whole, *held)), *rank)
    return table


def _schedule(compilation: Compilation, width: int, measured: Sequence[Bubble] | None) -> Iterator[RenderableType]:
    """What every rank of a pipeline does in a step, and which share of it the pipeline stands idle."""
    step = compilation.step
    if step.mesh.pp == 1:
        return
    flops, _ = _flops(compilation)
    made = grid.slots(step, flops)
    lines = [f"schedule {step.schedule}, predicted: {grid.bubble(made)}   ({grid.legend(step)})"]
    lines += grid.draw(made, sum(flops) / len(flops) or 1.0, width)
    if measured:
        whole = Bubble(sum(own.busy for own in measured), sum(own.total for own in measured))
        ranks = ", ".join(f"rank {place} {own.of_time:.1%}" for place, own in enumerate(measured))
        lines.append(f"measured: {whole} ({ranks})")
    lines += _whole_backwards(compilation)
    yield Text("\n".join(lines), no_wrap=True)


def _whole_backwards(compilation: Compilation) -> Iterator[str]:
    """The stages that do not run backward in halves, where their schedule would."""
    reasons: dict[str, list[str]] = {}
    for stage in compilation.stages if SCHEDULES[compilation.step.schedule].halves else ():
        if stage.unhalved:
            reasons.setdefault(stage.unhalved, []).append(str(stage.index))
    for reason, stages in reasons.items():
        yield f"stage{'s' * (len(stages) > 1)} {', '.join(stages)}: backward is not halved, since {reason}"


def _shared(compilation: Compilation) -> Iterator[RenderableType]:
    """The weights that several stages use."""
    holders: dict[str, list[int]] = {}
    for stage in compilation.stages:
        for name in stage.parameters.values():
            holders.setdefault(name, []).append(stage.index)
    for name, stages in holders.items():
        if len(stages) > 1:
            yield Text(f"{name} is on stages {', '.join(map(str, stages))}: its gradients are summed")


def _traffic(compilation: Compilation) -> Iterator[RenderableType]:
    """What a rank hands to the process groups in a step; stages that do the same share a line."""
    rows: dict[tuple[Calls, tuple[int, ...]], list[int]] = {}
    for stage in compilation.stages:
        sizes = known(compilation, stage)
        for row in calls(compilation, stage):
            values = tuple(value(size, sizes) for size in (row.count, row.bytes, row.sent))
            rows.setdefault((row, values), []).append(stage.index)
    if not rows:
        return
    at = ", ".join(f"{symbol}={size}" for symbol, size in (*compilation.sizes.items(), (MICROBATCHES, compilation.options.microbatches)))
    headings = ("calls in a step", "", "stage", "", "count", "", "bytes that a rank gives", f"at {at}", "sent in a ring", "")
    table = _table(*headings, right=(5, 7, 9))
    for (row, values), stages in sorted(rows.items(), key=lambda item: (AXES.index(item[0][0].axis), item[1])):
        shown = [
            text for size, number in zip((row.count, row.bytes, row.sent), values, strict=True) for text in (formula(size), f"{number:,}")
        ]
        table.add_row(row.axis, row.direction, spell(map(str, stages)), row.call.replace("_", "-"), *shown)
    yield table


def _updates(program: Program) -> Iterator[RenderableType]:
    """The buffers that forward gives new values."""
    if program.updates:
        names = [name for name, _ in fold(program.updates, lambda name: name, lambda name: 0, program.layers)]
        piece = f"\na batch must be in one piece: {program.update_reason}" if program.update_reason else ""
        yield Text(f"forward updates {', '.join(names)}{piece}")


def _flops(compilation: Compilation) -> tuple[list[int], str]:
    """Forward FLOPs of every stage at the example batch's sizes; and a word on these."""
    program, origins, sizes = compilation.program, compilation.local.origins, compilation.sizes
    costs = {name: evaluate(size, sizes) for name, size in all_flops(program).items()}
    word = ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())
    stages = [sum(costs.get(origins.get(node.name, node.name), 0) for node in stage.graph.nodes) for stage in compilation.stages]
    return stages, f" at {word}" if word else ""


def _layers(stage: Stage, program: Program) -> str:
    """The layers that a stage runs."""
    calls = [node.name for node in stage.graph.nodes if node.op == "call_function" and node.name in program.sources]
    held = dict.fromkeys(layer for name in calls if (layer := split_layer(program.sources[name].path, program.layers)[0]))
    return spell(held) or "–"


def _elements(program: Program, layouts: Layouts, placeholders: Iterable[str], place: int) -> Iterator[int]:
    """Sizes of the parameters' pieces that a coordinate holds."""
    for name in placeholders:
        kind, layout = program.types[name], layouts.get(name)
        if isinstance(layout, Layout):
            yield int(product(local_size(dim, place) for dim in layout.dims))
        elif isinstance(kind, TensorType):
            yield int(product(kind.shape))


def _table(*columns: str, right: Sequence[int] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place in right else "left", overflow="fold")
    return table
