"""What was found, how it was cut, and what was left whole and why, as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tpcompile.driver import Compilation
from tpcompile.inspect.fold import fold, spell, split_layer
from tpcompile.inspect.traffic import traffic
from tpcompile.ir import Left, Program, Region, Source, Stage, TensorType
from tpcompile.layout import Layout, local_size, product
from tpcompile.mesh import Mesh

WIDTH = 160

Layouts = Mapping[str, Layout | tuple[Layout, ...]]


def explain(compilation: Compilation, width: int = WIDTH) -> str:
    """The plan of a compiled model, for people: mesh, regions, what stays whole, stages, parameters per rank.

    cut over tp           found      weights                                   forward       backward
    blocks.0–3.mlp        mlp        up.weight [230@tp, 60]  down.weight …     1 all-reduce  1 all-reduce
    """
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        for part in (_mesh(compilation.mesh), _regions(compilation), _whole(compilation), _stages(compilation)):
            console.print(part, end="\n\n")
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n") + "\n"


def _mesh(mesh: Mesh) -> RenderableType:
    words = {"dp": ("replica", "replicas"), "pp": ("stage", "stages"), "tp": ("tensor rank", "tensor ranks")}
    sizes = " × ".join(f"{mesh.axis(axis)} {words[axis][mesh.axis(axis) > 1]}" for axis in mesh.order)
    return Text(f"mesh  {mesh}: {mesh.size} rank{'s' * (mesh.size > 1)}, {sizes}")


def _regions(compilation: Compilation) -> RenderableType:
    plan, program = compilation.plan, compilation.program
    if not plan.regions:
        return Text("nothing is cut")
    sent = traffic(compilation.local)

    def counts(region: Region, way: int) -> str:
        return ", ".join(f"{count} {name}" for name, count in sent[region.name][way].items())

    def like(region: Region) -> tuple[object, ...]:
        return region.kind, _weights(region, program), counts(region, 0), counts(region, 1)

    table = _table(f"cut over {plan.regions[0].axis}", "found", "weights", "forward", "backward")
    for name, region in fold(plan.regions, lambda r: r.name, like, program.layers):
        table.add_row(name, region.kind, "\n".join(_weights(region, program)), counts(region, 0) or "–", counts(region, 1) or "–")
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


def _whole(compilation: Compilation) -> RenderableType:
    plan, program = compilation.plan, compilation.program
    if not plan.whole:
        return Text("no weight is left whole")

    def like(left: Left) -> tuple[object, ...]:
        return re.sub(r"_\d+", "", left.reason), str(left.source)

    table = _table("left whole", "because", "at")
    for name, left in fold(plan.whole, lambda item: item.name, like, program.layers):
        table.add_row(name, left.reason, _code(left.source) if left.source else "")
    return table


def _code(source: Source) -> str:
    """model.py:87  logits = self.head(self.norm(x))"""
    line = f"{source.file.rpartition('/')[2]}:{source.line}  {source.code}"
    return line if len(line) <= 72 else line[:71] + "…"


def _stages(compilation: Compilation) -> RenderableType:
    """Layers and parameters of every stage, and how even the stages are."""
    program, tp = compilation.program, compilation.mesh.tp
    model = sum(_elements(program, {}, program.parameters, 0))
    table = _table("stage", "layers", "parameters", "of the model", *(f"tp {place}" for place in range(tp)), right=range(2, 4 + tp))
    layouts = compilation.local.layouts
    for stage in compilation.stages:
        whole = sum(_elements(program, {}, stage.parameters, 0))
        held = [sum(_elements(program, layouts, stage.parameters, place)) for place in range(tp)]
        share = f"{whole / model:.1%}" if model else "–"
        table.add_row(str(stage.index), _layers(stage, program), f"{whole:,}", share, *(f"{count:,}" for count in held))
    return table


def _layers(stage: Stage, program: Program) -> str:
    """The layers whose nodes a stage runs."""
    paths = [program.sources[node.name].path for node in stage.graph.nodes if node.name in program.sources]
    held = dict.fromkeys(layer for path in paths if (layer := split_layer(path, program.layers)[0]))
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
