"""The tables of `explain(full=True)`: every stage on every tensor rank, and the formula of every count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.console import RenderableType

from tpcompile.cost import flops_at
from tpcompile.driver import Compilation
from tpcompile.inspect.calls import MICROBATCHES, by_stages, formula
from tpcompile.inspect.fold import spell, split_layer
from tpcompile.inspect.tables import table
from tpcompile.ir import Program, Stage
from tpcompile.layout import Layout, TensorType, local_size, product

Layouts = Mapping[str, Layout | tuple[Layout, ...]]


def stages(compilation: Compilation) -> RenderableType:
    """Layers, compute and parameters of every stage: how even the stages are, and what each rank holds."""
    program, tp, layouts = compilation.program, compilation.mesh.tp, compilation.local.layouts
    costs, sizes = flops(compilation)
    several = compilation.step.per_rank > 1
    named = ["stage", "layers", "compute" + sizes, "parameters", *(f"on tp {place}" for place in range(tp) if tp > 1)]
    made = table(*named, *(["on pp"] if several else []), right=range(2, len(named)))
    for stage, cost in zip(compilation.stages, costs, strict=True):
        held = [sum(_elements(program, layouts, stage.parameters, place)) for place in range(tp) if tp > 1]
        whole = sum(_elements(program, {}, stage.parameters, 0))
        share = f"{cost / max(sum(costs), 1):.1%}"
        rank = [str(compilation.step.place_of(stage.index))] if several else []
        made.add_row(str(stage.index), layers(stage, program), share, *(f"{count:,}" for count in (whole, *held)), *rank)
    return made


def traffic(compilation: Compilation) -> Iterator[RenderableType]:
    """What a rank hands to the process groups in a step; stages that do the same share a line."""
    rows = by_stages(compilation)
    if not rows:
        return
    at = ", ".join(f"{symbol}={size}" for symbol, size in (*compilation.sizes.items(), (MICROBATCHES, compilation.options.microbatches)))
    headings = ("calls in a step", "", "stage", "", "count", "", "bytes that a rank gives", f"at {at}", "sent in a ring", "")
    made = table(*headings, right=(5, 7, 9))
    for row, values, stages in rows:
        shown = [
            text for size, number in zip((row.count, row.bytes, row.sent), values, strict=True) for text in (formula(size), f"{number:,}")
        ]
        made.add_row(row.axis, row.direction, spell(map(str, stages)), row.call.replace("_", "-"), *shown)
    yield made


def flops(compilation: Compilation) -> tuple[list[int], str]:
    """Forward FLOPs of every stage at the example batch's sizes; and a word on these."""
    program, origins, sizes = compilation.program, compilation.local.origins, compilation.sizes
    costs = flops_at(program, sizes)
    word = ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())
    stages = [sum(costs.get(origins.get(node.name, node.name), 0) for node in stage.graph.nodes) for stage in compilation.stages]
    return stages, f" at {word}" if word else ""


def layers(stage: Stage, program: Program) -> str:
    """The layers that a stage runs."""
    return spell(dict.fromkeys(ran(stage, program))) or "–"


def ran(stage: Stage, program: Program) -> list[str]:
    """The layer of every call of a stage that is in one."""
    names = [node.name for node in stage.graph.nodes if node.op == "call_function" and node.name in program.sources]
    return [layer for name in names if (layer := split_layer(program.sources[name].path, program.layers)[0])]


def _elements(program: Program, layouts: Layouts, placeholders: Iterable[str], place: int) -> Iterator[int]:
    """Sizes of the parameters' pieces that a coordinate holds."""
    for name in placeholders:
        kind, layout = program.types[name], layouts.get(name)
        if isinstance(layout, Layout):
            yield int(product(local_size(dim, place) for dim in layout.dims))
        elif isinstance(kind, TensorType):
            yield int(product(kind.shape))
