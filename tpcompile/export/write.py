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
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tpcompile.driver import Compilation
from tpcompile.errors import InputError, caller
from tpcompile.export.files import MANIFEST, write_manifest
from tpcompile.export.numbers import encode
from tpcompile.ir import Boundary, Program, Stage
from tpcompile.layout import TensorType
from tpcompile.passes._source import function
from tpcompile.passes.emit import RankProgram
from tpcompile.runtime.data_parallel import reached
from tpcompile.timeline import summed_later

FORMATS = ("onnx", "pt2")
"""What may be written beside the sources and the weights."""

_COUNTS = '''"""Numbers of the whole batch that its loss is computed with: the sums of its parts' shares."""

import torch

aten = torch.ops.aten
'''


def emit(compilation: Compilation, model: nn.Module, directory: Path, formats: Sequence[str] = ()) -> None:
    """Write the programs of all ranks. One rank's tensors are in memory at a time."""
    mesh = compilation.mesh
    bare = any(tensor.is_meta for tensor in model.parameters())
    _check_formats(formats, bare)
    prepare(directory)
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
    write_counts(compilation.program, model, directory)
    write_plan(compilation, directory)
    write_manifest(directory, manifest(compilation, model, ranks))


def with_values(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """A model with these values under the names of its state dict, beside the model, which keeps its own; what is tied stays tied."""
    made: dict[int, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, nn.Parameter):
            made.setdefault(id(tensor), nn.Parameter(values[name], tensor.requires_grad))
        elif isinstance(tensor, Tensor):
            made.setdefault(id(tensor), values[name])
    return copy.deepcopy(model, made)


def _check_formats(formats: Sequence[str], bare: bool) -> None:
    at = f"compiled.emit(formats={list(formats)!r})"
    if unknown := [name for name in formats if name not in FORMATS]:
        raise InputError(f"there is no format {unknown[0]!r}", at=at, source=caller(), fix=f"use {' or '.join(FORMATS)}")
    if formats and bare:
        what = "the model is on the meta device: these formats hold weights"
        raise InputError(what, at=at, source=caller(), fix="leave formats out, or give the model values")


def _write_as(name: str, compilation: Compilation, program: RankProgram, directory: Path, stem: str) -> None:
    """A rank's stages in one of the other formats."""
    from tpcompile.export.onnx import write_onnx
    from tpcompile.export.pt2 import write_pt2

    held = [stage.index for stage in program.stages]
    for stage, module in zip(program.stages, program.modules, strict=True):
        file = directory / _named(stem, stage.index, held, name)
        work = write_onnx if name == "onnx" else write_pt2
        work(module, compilation.program, stage, compilation.sizes, program.coordinates["tp"], file)


def _named(stem: str, stage: int, held: Sequence[int], ending: str) -> str:
    """rank_000.onnx; of a rank that holds several stages, rank_000_stage_2.onnx."""
    return f"{stem}.{ending}" if len(held) == 1 else f"{stem}_stage_{stage}.{ending}"


def _stages(compilation: Compilation, rank: int) -> list[int]:
    """The stages that a rank holds."""
    return [stage.index for stage in compilation.step.stages_at(compilation.mesh.coordinates(rank)["pp"])]


def prepare(directory: Path) -> None:
    """Make a folder, or clear one that a program was written to. Raises InputError for a folder with other files."""
    directory.mkdir(parents=True, exist_ok=True)
    found = list(directory.iterdir())
    if found and not (directory / MANIFEST).is_file():
        what = f"{directory} is not empty, and no program was written there"
        raise InputError(what, at=f"compiled.emit({str(directory)!r})", source=caller(), fix="give a new folder")
    if found:
        written = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name in (MANIFEST, *written):
            (directory / Path(name).name).unlink(missing_ok=True)


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


def manifest(compilation: Compilation, model: nn.Module, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a program needs beside its sources and weights, as JSON."""
    options, program = compilation.options, compilation.program
    batches = ("microbatches", "schedule", "stages_per_rank", "split_batches")
    chosen = (*batches, "data_parallel", "recompute", "precision", "dropout", "backend")
    return {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "mesh": str(compilation.mesh),
        "options": {name: getattr(options, name) for name in chosen},
        "training": model.training,
        "program": _program(program, model),
        "parameters": _parameters(compilation, model),
        "buffers": _buffers(model),
        "twins": _twins(model),
        "stages": [_stage(compilation, stage) for stage in compilation.stages],
        "ranks": list(ranks),
    }


def _program(program: Program, model: nn.Module) -> dict[str, Any]:
    types = program.types
    forward = inspect.signature(model.forward).parameters
    return {
        "forward": {name: p.kind.name for name, p in forward.items()},
        "inputs": {
            name: {"path": i.path, "batch_dim": i.batch_dim, **_type(types[name], f"input {i.path}")} for name, i in program.inputs.items()
        },
        **_taken(program),
        "values": _plain(program),
        "other_rows": _taken(program.witness) if program.witness else None,
        "loss": program.loss and {"name": program.loss, **_type(types[program.loss], "the loss")},
        "returned": {name: _type(types[name], name) for name in program.returned()},
        "outputs": _outputs(program),
        "counts": [
            {"name": count.name, "computed": count.graph is not None, **_type(types[count.name], count.name)} for count in program.counts
        ],
        "random": program.random,
        "updates": list(program.updates),
        "aliases": dict(program.aliases),
        "trained": sorted(reached(program)),
    }


def _taken(program: Program) -> dict[str, Any]:
    """What holds of every batch that a program serves."""
    guards = program.guards
    return {
        "symbols": {symbol.name: list(place) for symbol, place in program.symbols.items()},
        "ranges": {symbol.name: list(between) for symbol, between in guards.ranges.items()} if guards else {},
        "conditions": [encode(condition) for condition in guards.conditions] if guards else [],
    }


def _plain(program: Program) -> dict[str, Any]:
    """What a batch holds beside tensors."""
    found = dict(program.guards.leaves) if program.guards else {}
    for path, leaf in found.items():
        if not isinstance(leaf, (bool, int, float, str, type(None))):
            raise InputError(f"{path} is a {type(leaf).__name__}, which has no place in a file", at="compiled.emit", fix="leave it out")
    return found


def _outputs(program: Program) -> Any:
    """The model's output: in the place of each tensor its name, in that of other leaves their values; objects as mappings."""

    def shown(index: int, name: str | None) -> Any:
        value = program.output_constants.get(index)
        if name is None and not isinstance(value, (bool, int, float, str, type(None))):
            raise InputError(f"the output holds a {type(value).__name__}, which has no place in a file", at="compiled.emit")
        return {"tensor": name} if name is not None else {"value": value}

    leaves: list[Any] = [_Leaf(shown(index, name)) for index, name in enumerate(program.outputs)]
    return _structure(pytree.tree_unflatten(leaves, program.out_spec))


class _Leaf:
    def __init__(self, content: Any) -> None:
        self.content = content


def _structure(value: Any) -> Any:
    match value:
        case _Leaf():
            return value.content
        case Mapping():
            return {"mapping": {str(key): _structure(item) for key, item in value.items()}}
        case tuple() | list():
            return {type(value).__name__ if type(value) in (tuple, list) else "tuple": [_structure(item) for item in value]}
        case None:
            return {"value": None}
    if is_dataclass(value):
        return {"mapping": {field.name: _structure(getattr(value, field.name)) for field in fields(value)}}
    raise InputError(f"the output holds a {type(value).__name__}, which has no place in a file", at="compiled.emit", fix="return tensors")


def _type(kind: object, what: str) -> dict[str, Any]:
    if not isinstance(kind, TensorType):
        raise InputError(f"{what} is no tensor", at="compiled.emit")
    return {"dtype": str(kind.dtype).removeprefix("torch."), "shape": [encode(size) for size in kind.shape]}


def _parameters(compilation: Compilation, model: nn.Module) -> dict[str, Any]:
    """The whole shape of every parameter, and for one that is cut the dimension and each tensor rank's index ranges of it."""
    pieces, ranks = compilation.pieces(), compilation.mesh.tp
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        found[name] = {"dtype": str(p.dtype).removeprefix("torch."), "shape": list(p.shape), "trained": p.requires_grad}
        if name in pieces:
            dim, bounds = pieces[name]
            size = len(bounds) // ranks
            ranges = [[bounds[i : i + 2] for i in range(size * rank, size * (rank + 1), 2)] for rank in range(ranks)]
            found[name] |= {"dim": dim, "ranges": ranges}
    return found


def _buffers(model: nn.Module) -> dict[str, Any]:
    """The whole shape of every buffer, and whether it is in the state dict."""
    saved = model.state_dict(keep_vars=True)
    return {
        name: {"dtype": str(buffer.dtype).removeprefix("torch."), "shape": list(buffer.shape), "saved": name in saved}
        for name, buffer in model.named_buffers()
    }


def _twins(model: nn.Module) -> dict[str, str]:
    """Further names of parameters and buffers, with the first."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first[id(tensor)] for name, tensor in named if first.setdefault(id(tensor), name) != name}


def _stage(compilation: Compilation, stage: Stage) -> dict[str, Any]:
    messages = compilation.step.messages[stage.index]
    return {
        "file": f"stage_{stage.index}.py",
        "receives": [_boundary(boundary, compilation.mesh.tp) for boundary in stage.receives],
        "sends": [_boundary(boundary, compilation.mesh.tp) for boundary in stage.sends],
        "inputs": list(stage.inputs),
        "parameters": dict(stage.parameters),
        "buffers": dict(stage.buffers),
        "layers": list(stage.layers),
        "units": list(stage.units),
        "updates": list(stage.updates),
        "collectives": {
            direction: [{"value": sent.value, "call": sent.call, "axis": sent.axis, "bytes": str(sent.bytes)} for sent in calls]
            for direction, calls in (("forward", messages.forward), ("backward", messages.backward))
        },
        "summed_later": list(summed_later(stage)),
        "unhalved": stage.unhalved,
    }


def _boundary(boundary: Boundary, ranks: int) -> dict[str, Any]:
    """A value that crosses stages, with its local shape on every tensor rank."""
    return {
        "name": boundary.name,
        "dtype": str(boundary.type.dtype).removeprefix("torch."),
        "requires_grad": boundary.requires_grad,
        "layout": str(boundary.layout),
        "shapes": [[encode(size) for size in boundary.shape(rank)] for rank in range(ranks)],
    }


def element_type(name: str) -> torch.dtype:
    """float32 → torch.float32"""
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise InputError(f"{name!r} is no element type", at=MANIFEST, fix="emit the program again")
    return kind
