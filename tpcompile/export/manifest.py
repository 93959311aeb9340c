"""What a program on disk needs beside its sources and weights, as JSON."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tpcompile.driver import Compilation
from tpcompile.errors import InputError
from tpcompile.export.files import MANIFEST
from tpcompile.export.numbers import encode
from tpcompile.ir import Boundary, Program, Stage
from tpcompile.layout import TensorType
from tpcompile.runtime.data_parallel import reached
from tpcompile.timeline import summed_later


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
