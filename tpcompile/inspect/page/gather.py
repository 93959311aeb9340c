"""Everything that a page shows, as JSON: the model's parts, its stages and ranks, every pass, its parameters, its schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from tpcompile.cost import flops_at
from tpcompile.driver import Compilation
from tpcompile.inspect.fold import fold
from tpcompile.inspect.page import ranks
from tpcompile.inspect.page.history import passes
from tpcompile.inspect.page.places import Places, ordered
from tpcompile.inspect.page.templates import Packed, Pool
from tpcompile.inspect.page.weights import parameters
from tpcompile.ir import Left
from tpcompile.layout import TensorType, product


def gather(compilation: Compilation, model: nn.Module | None = None) -> Packed:
    """The data of a page; with the model also the stages' sources."""
    program, mesh, pool = compilation.program, compilation.mesh, Pool()
    places = Places(compilation.captured)
    names = ordered(places, compilation.captured.graph)
    order = {part: index for index, part in enumerate(names)}
    numbers = dict(_numbers(names, program.layers))
    flops = flops_at(program, compilation.sizes)
    made = passes(compilation, places, pool, numbers, order)
    own = ranks.stages(compilation, places, order, flops)
    return {
        "model": type(model).__name__ if model is not None else "model",
        "mesh": {"text": str(mesh), "order": mesh.order, "dp": mesh.dp, "pp": mesh.pp, "tp": mesh.tp, "size": mesh.size},
        "options": dict(_options(compilation)),
        "elements": sum(int(product(kind.shape)) for name in program.parameters if isinstance(kind := program.types[name], TensorType)),
        "sizes": {str(symbol): size for symbol, size in compilation.sizes.items()},
        "parts": [{"name": part, "number": numbers[part]} if part in numbers else {"name": part} for part in names],
        "passes": made,
        "templates": pool.packed,
        "lines": [list(source) for source in pool.sources],
        "stages": own,
        "parameters": parameters(compilation, places, order),
        "schedule": ranks.schedule(compilation, own),
        "traffic": ranks.traffic(compilation),
        "whole": list(_all_left(compilation)),
        "notes": list(program.notes),
        **(_sources(compilation, model) if model is not None else {"code": [], "sources": []}),
    }


def _sources(compilation: Compilation, model: nn.Module) -> Packed:
    """The lines of all stages' sources, each once, and which of them each source has: those of equal layers are in many."""
    code = dict[str, int]()
    sources = [[code.setdefault(line, len(code)) for line in source.split("\n")] for source in ranks.sources(compilation, model)]
    return {"code": list(code), "sources": sources}


def _numbers(parts: Iterable[str], layers: Iterable[str]) -> Iterator[tuple[str, int]]:
    """The place of every layer in its stack."""
    count, known = dict[str, int](), frozenset(layers)
    for part in parts:
        if part in known:
            stack = part.rpartition(".")[0]
            yield part, count.get(stack, 0)
            count[stack] = count.get(stack, 0) + 1


def _options(compilation: Compilation) -> Iterator[tuple[str, str]]:
    """How it was compiled, in the words of the keywords."""
    options = compilation.options
    yield "schedule", options.schedule
    yield "micro-batches", str(options.microbatches)
    yield "data parallel", options.data_parallel
    yield "sequence parallel", {"True": "on", "False": "off"}.get(str(options.sequence_parallel), str(options.sequence_parallel))
    yield "precision", options.precision or "the model's"
    yield "recompute", options.recompute


def _all_left(compilation: Compilation) -> Iterator[Packed]:
    """What is not cut where something could be, and what needs all positions of what is."""
    if compilation.mesh.tp > 1:
        yield from _left(compilation, compilation.plan.whole)
        yield from _left(compilation, compilation.sharded.stretches, "needs all positions: ")


def _left(compilation: Compilation, items: Iterable[Left], prefix: str = "") -> Iterator[Packed]:
    """What stays whole, where it is, and why; equal layers once."""
    folded = fold(tuple(items), lambda left: left.name, lambda left: (left.reason, str(left.source)), compilation.program.layers)
    for name, left in folded:
        source = [left.source.file, left.source.line, left.source.code] if left.source else None
        yield {"name": name, "reason": prefix + left.reason, "source": source}
