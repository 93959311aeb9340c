"""Programs of all ranks as files: readable source for each stage, weights for each rank, and a manifest.

build/
  stage_0.py              the modules of stage 0, for all ranks that hold it
  rank_000.safetensors    a rank's parameters, buffers and constants, by their names in the model; replicas share the file
  counts.py               what the whole batch is asked before the first forward, if the loss needs it
  plan.txt                what was cut and why
  manifest.json           versions, mesh, ranks, shapes, collectives in order, the SHA-256 of every other file
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from tpcompile.driver import Compilation
from tpcompile.errors import InputError, Refused, caller
from tpcompile.export.files import write_manifest, written_whole
from tpcompile.export.manifest import manifest
from tpcompile.ir import Program
from tpcompile.passes._source import function
from tpcompile.passes.emit import RankProgram

FORMATS = {"onnx": "onnx", "pt2": "pt2", "aoti": "aoti.pt2"}
"""What may be written beside the sources and the weights, and how the files' names end."""

_COUNTS = '''"""Numbers of the whole batch that its loss is computed with: the sums of its parts' shares."""

import torch

aten = torch.ops.aten
'''


def emit(compilation: Compilation, model: nn.Module, directory: Path, formats: Sequence[str] = ()) -> None:
    """Write the programs of all ranks, or after an error none. One rank's tensors are in memory at a time."""
    bare = any(tensor.is_meta for tensor in model.parameters())
    _check_formats(formats, bare, random=compilation.program.random)
    with written_whole(directory) as folder:
        ranks = _write_ranks(compilation, model, folder, formats, bare=bare)
        write_counts(compilation.program, model, folder)
        write_plan(compilation, folder)
        write_manifest(folder, manifest(compilation, model, ranks))


def _write_ranks(
    compilation: Compilation, model: nn.Module, directory: Path, formats: Sequence[str], *, bare: bool
) -> list[dict[str, Any]]:
    """Sources, weights and other formats. Returns every rank's place and the files that it has, for the manifest."""
    mesh = compilation.mesh
    ranks, written = [], set[int]()
    held = {rank: _stages(compilation, rank) for rank in range(mesh.size)}
    first = {tuple(stages): rank for rank, stages in reversed(held.items())}  # stages → the lowest rank that holds them
    for rank, stages in held.items():
        place = mesh.coordinates(rank)
        stem = f"rank_{mesh.rank({**place, 'dp': 0}):03d}"
        if first[tuple(stages)] == rank or (place["dp"] == 0 and not bare):
            program = compilation.rank_program(model, rank)
            for stage, source in zip(program.stages, program.sources, strict=True):
                if stage.index not in written:
                    (directory / f"stage_{stage.index}.py").write_text(source, encoding="utf-8")
                    written.add(stage.index)
            if not bare:
                save_file(tensors_of(program.modules), directory / f"{stem}.safetensors")
                for name in formats:
                    _write_as(name, compilation, program, directory, stem)
        others = {name: [_named(stem, stage, stages, name) for stage in stages] for name in formats}
        ranks.append({"rank": rank, **place, "stages": stages, "weights": None if bare else f"{stem}.safetensors", **others})
    return ranks


def with_values(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """A model with these values under the names of its state dict, beside the model, which keeps its own; what is tied stays tied."""
    made: dict[int, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, nn.Parameter):
            made.setdefault(id(tensor), nn.Parameter(values[name], tensor.requires_grad))
        elif isinstance(tensor, Tensor):
            made.setdefault(id(tensor), values[name])
    return copy.deepcopy(model, made)


def _check_formats(formats: Sequence[str], bare: bool, *, random: bool) -> None:
    """Before anything is written, what would keep a format from being."""
    from tpcompile.export.aoti import check_aoti

    at = f"compiled.emit(formats={list(formats)!r})"
    if unknown := [name for name in formats if name not in FORMATS]:
        raise InputError(f"there is no format {unknown[0]!r}", at=at, source=caller(), fix=f"use {', '.join(FORMATS)}")
    if formats and bare:
        what = "the model is on the meta device: these formats hold weights"
        raise InputError(what, at=at, source=caller(), fix="leave formats out, or give the model values")
    if random and (fixed := [name for name in formats if name != "pt2"]):
        what = f"the program draws random numbers, which {fixed[0]} does not repeat"
        raise Refused(what, at=at, source=caller(), fix="compile the model in eval mode")
    if "aoti" in formats:
        check_aoti()


def _write_as(name: str, compilation: Compilation, program: RankProgram, directory: Path, stem: str) -> None:
    """A rank's stages in one of the other formats."""
    from tpcompile.export.aoti import write_aoti
    from tpcompile.export.onnx import write_onnx
    from tpcompile.export.pt2 import write_pt2

    work = {"onnx": write_onnx, "pt2": write_pt2, "aoti": write_aoti}[name]
    held = [stage.index for stage in program.stages]
    for stage, module in zip(program.stages, program.modules, strict=True):
        file = directory / _named(stem, stage.index, held, name)
        work(module, compilation.program, stage, compilation.sizes, program.coordinates["tp"], file)


def _named(stem: str, stage: int, held: Sequence[int], name: str) -> str:
    """rank_000.onnx; of a rank that holds several stages, rank_000_stage_2.onnx."""
    return f"{stem}.{FORMATS[name]}" if len(held) == 1 else f"{stem}_stage_{stage}.{FORMATS[name]}"


def _stages(compilation: Compilation, rank: int) -> list[int]:
    """The stages that a rank holds."""
    return [stage.index for stage in compilation.step.stages_at(compilation.mesh.coordinates(rank)["pp"])]


def write_plan(compilation: Compilation, directory: Path) -> None:
    from tpcompile.inspect.explain import explain

    (directory / "plan.txt").write_text(explain(compilation) + "\n", encoding="utf-8")


def tensors_of(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """A rank's parameters, buffers and constants by name; of tied ones the first name."""
    named = ((name, tensor) for module in modules for name, tensor in (*module.named_parameters(), *module.named_buffers()))
    return {name: tensor.detach().contiguous() for name, tensor in named}


def write_counts(program: Program, model: nn.Module, directory: Path) -> None:
    """What the whole batch is asked, as functions, and the buffers and constants that these read."""
    graphs = {count.name: count.graph for count in program.counts if count.graph is not None}
    if not graphs:
        return
    bodies = [function(name, graph, "A part's share.") for name, graph in graphs.items()]
    (directory / "counts.py").write_text("\n\n".join([_COUNTS, *bodies]) + "\n", encoding="utf-8")
    names = {node.name for graph in graphs.values() for node in graph.find_nodes(op="placeholder")}
    values = {name: program.constants[name] for name in names if name in program.constants}
    values |= {name: model.get_buffer(program.buffers[name]) for name in names if name in program.buffers}
    if values:
        save_file({name: value.detach().clone().contiguous() for name, value in values.items()}, directory / "counts.safetensors")
