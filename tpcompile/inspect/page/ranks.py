"""The stages and the ranks that hold them: what each computes, keeps, sends, and when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tpcompile.collectives.table import RANKS
from tpcompile.cost import evaluate
from tpcompile.driver import Compilation
from tpcompile.inspect import grid, memory
from tpcompile.inspect.calls import MICROBATCHES, by_stages, formula
from tpcompile.inspect.fold import spell
from tpcompile.inspect.grid import Slot
from tpcompile.inspect.page.lines import state
from tpcompile.inspect.page.places import Places
from tpcompile.inspect.page.templates import Packed
from tpcompile.inspect.page.weights import held_bytes
from tpcompile.ir import Boundary, Stage
from tpcompile.layout import product
from tpcompile.text import type_text


def stages(compilation: Compilation, places: Places, order: Mapping[str, int], flops: Mapping[str, int]) -> list[Packed]:
    """Every stage: its rank along the pipeline, its parts with their FLOPs, and the bytes on each tensor rank."""
    mesh, done = compilation.mesh, defaultdict[str, set[str]](set)
    packed = []
    for stage in compilation.stages:
        parts = _parts(compilation, places, stage, done, flops)
        kept = memory.of_stages(compilation, [stage])
        packed.append({
            "place": compilation.step.place_of(stage.index), "flops": sum(count for _, count, _ in parts),
            "parts": [[order[part], count, again] for part, count, again in parts],
            "parameters": [sum(held_bytes(compilation, name, rank) for name in stage.parameters) for rank in range(mesh.tp)],
            "memory": {"parameters": kept.parameters, "gradients": kept.gradients, "moments": kept.optimizer, "most": kept.most},
            "sends": [_sent(compilation, boundary) for boundary in stage.sends],
            "unhalved": stage.unhalved,
        })  # fmt: skip
    return packed


def _parts(
    compilation: Compilation, places: Places, stage: Stage, done: dict[str, set[str]], flops: Mapping[str, int]
) -> list[tuple[str, int, bool]]:
    """The parts that a stage runs, in order: with their FLOPs, and whether stages before it have `done` all of this too."""
    program, origins = compilation.program, compilation.local.origins
    own = defaultdict[str, list[str]](list)
    for node in stage.graph.nodes:
        name = origins.get(node.name, node.name)
        if node.op == "call_function" and name in program.sources:
            own[places.of_path(program.sources[name].path)].append(name)
    found = [(part, sum(flops.get(name, 0) for name in names), done[part].issuperset(names)) for part, names in own.items()]
    for part, names in own.items():
        done[part].update(names)
    return found


def _sent(compilation: Compilation, boundary: Boundary) -> Packed:
    """What crosses to the next stage: bytes of tensor rank 0, for one micro-batch."""
    size = boundary.type.dtype.itemsize * product(boundary.shape(0))
    return {
        "name": boundary.name, "type": type_text(boundary.type, boundary.layout), "state": state(boundary.layout),
        "bytes": evaluate(size, {**compilation.sizes, RANKS: compilation.mesh.tp}), "gradient": boundary.requires_grad,
    }  # fmt: skip


def schedule(compilation: Compilation, own: Sequence[Packed]) -> Packed:
    """When each rank of the pipeline runs what, in forwards of a mean stage; and the share of time in which ranks stand idle."""
    step, flops = compilation.step, [stage["flops"] for stage in own]
    made, unit = grid.slots(step, flops if any(flops) else [1.0] * len(flops)), sum(flops) / len(flops) or 1.0
    letters = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}

    def packed(slot: Slot) -> list[Any]:
        return [letters[slot.run.work], slot.run.microbatch, slot.run.stage, round(slot.start / unit, 3), round(slot.stop / unit, 3)]

    rows = [[packed(slot) for slot in row] for row in made]
    return {"name": step.schedule, "microbatches": step.microbatches, "idle": str(grid.bubble(made)), "rows": rows}


def traffic(compilation: Compilation) -> Packed:
    """What a rank hands to the process groups in a step: by axis, direction, stages and call, as formulas and at the example's sizes."""
    packed = [
        {
            "axis": row.axis, "direction": row.direction, "call": row.call.replace("_", "-"), "stages": spell(map(str, held)),
            "formulas": [formula(size) for size in (row.count, row.bytes, row.sent)], "numbers": numbers,
        }
        for row, numbers, held in by_stages(compilation)
    ]  # fmt: skip
    shown = (*compilation.sizes.items(), (MICROBATCHES, compilation.options.microbatches))
    return {"at": ", ".join(f"{symbol}={size}" for symbol, size in shown), "rows": packed}


def sources(compilation: Compilation, model: Any) -> Iterator[str]:
    """The source that the ranks of every stage run, without weights."""
    mesh, found = compilation.mesh, dict[int, str]()
    for place in range(mesh.pp):
        program = compilation.rank_program(model, mesh.rank({"pp": place}), "meta")
        found |= {stage.index: source for stage, source in zip(program.stages, program.sources, strict=True)}
    yield from (found[stage.index] for stage in compilation.stages)
