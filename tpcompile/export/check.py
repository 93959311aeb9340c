"""Whether the other formats of a program on disk compute what its sources do, on a made batch.

sources   under processes, one for each rank, as they train
onnx      all ranks of a stage in lockstep, stage after stage, by ONNX's reference evaluator
pt2       in the same processes as the sources, stage after stage
aoti      likewise, over groups of their own
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from tpcompile.errors import InputError, caller
from tpcompile.export.batches import made_batch, nested
from tpcompile.export.load import load
from tpcompile.export.outline import program_of, stages_of
from tpcompile.export.read import Saved
from tpcompile.export.write import FORMATS
from tpcompile.ir import Program, Stage
from tpcompile.mesh import Mesh
from tpcompile.runtime.groups import connect
from tpcompile.runtime.outputs import row_dim

TOLERANCE = 1e-5
"""Of the largest difference, beside the largest value or 1."""


def check_formats(directory: Path) -> dict[str, float]:
    """The largest difference of every format that the program has. Starts local processes.

    Raises InputError for a program without other formats, and for one that draws random numbers.
    """
    from tpcompile.runtime.launch import launch

    saved, at = Saved.open(directory, "tpcompile check"), f"tpcompile check {directory}"
    formats = [name for name in FORMATS if any(name in rank for rank in saved.content["ranks"])]
    if not formats:
        fix = f"emit it with formats={list(FORMATS)}"
        raise InputError("the program has its sources alone", at=at, source=caller(), fix=fix)
    if saved.content["program"]["random"]:
        what = "the program draws random numbers: its formats are given the key of a step, which is not compared"
        raise InputError(what, at=at, source=caller(), fix="compile the model in eval mode")
    in_processes = [name for name in formats if name != "onnx"]
    ran = launch(_in_processes, saved.mesh, str(directory), in_processes)
    found = {name: max(difference(values[name], reference) for reference, values in ran) for name in in_processes}
    if "onnx" in formats:
        found["onnx"] = max(difference(values, ran[0][0]) for values in run_onnx(saved, whole_inputs(saved)))
    return found


def difference(values: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The largest difference of any output of the reference, beside its largest value or 1."""
    if not values.keys() >= reference.keys():
        return float("inf")
    worst = [
        (values[name].double() - value.double()).abs().max() / value.double().abs().max().clamp(min=1) for name, value in reference.items()
    ]
    return float(torch.stack(worst).max())


def whole_inputs(saved: Saved, batch: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """A batch by placeholder name, all rows as one micro-batch, with what its loss needs to know of it; by default the made one."""
    program = program_of(saved)
    batch = made_batch(saved) if batch is None else batch
    given = {name: batch[entry.path] for name, entry in program.inputs.items()}
    for count in saved.content["program"]["counts"]:
        kind = program.types[count["name"]]
        value = torch.ones(())
        if count["computed"]:
            function = saved.namespace("counts.py")[count["name"]]
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            value = torch.as_tensor(function(*({**program.constants, **given}[name] for name in names)))
        given[count["name"]] = value.to(kind.dtype)  # type: ignore[union-attr]
    return given


def run_onnx(saved: Saved, given: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The program's outputs on every tensor rank, by the first replica's ONNX files."""
    from tpcompile.export.lockstep import run_ranks

    program, stages, mesh = program_of(saved), stages_of(saved), saved.mesh
    crossing: list[dict[str, Tensor]] = [{} for _ in range(mesh.tp)]
    for stage in stages:
        files = [saved.directory / _file(saved, mesh, stage, tp, "onnx") for tp in range(mesh.tp)]
        inputs = [{name: {**given, **held}[name].numpy() for name in _taken(stage)} for held in crossing]
        for held, made in zip(crossing, run_ranks(files, inputs), strict=True):
            held.update({name: torch.as_tensor(value) for name, value in made.items()})
    return [_returned(program, held) for held in crossing]


def _file(saved: Saved, mesh: Mesh, stage: Stage, tp: int, name: str) -> str:
    for entry in saved.content["ranks"]:
        if entry["dp"] == 0 and entry["tp"] == tp and stage.index in entry["stages"]:
            return str(entry[name][entry["stages"].index(stage.index)])
    raise InputError(f"no rank of {mesh} holds stage {stage.index}", at=str(saved.directory), fix="emit the program again")


def _taken(stage: Stage) -> list[str]:
    return [*(boundary.name for boundary in stage.receives), *stage.inputs]


def _returned(program: Program, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: held[name] for name in program.returned()}


def _in_processes(directory: str, formats: list[str]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """On one rank: what the sources return for the whole batch, by the program's names, and what the files of each format do."""
    from tpcompile.export.aoti import own_groups, registered

    loaded = load(directory)
    saved, program = loaded._saved, program_of(loaded._saved)
    with torch.no_grad():
        leaves = pytree.tree_leaves(loaded(**nested(made_batch(saved))))
    named = {name: leaf for name, leaf in zip(program.outputs, leaves, strict=True) if name is not None}
    rank = dist.get_rank() if dist.is_initialized() else 0
    names = connect(saved.mesh, None, "tpcompile check").names
    with registered(own_groups(saved, rank) if "aoti" in formats else {}):
        found = {name: run_stages(saved, rank, name, names, whole_inputs(saved)) for name in formats}
    return _all_rows(saved, program, named), found


def _all_rows(saved: Saved, program: Program, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs whose rows are those of all replicas."""
    if saved.mesh.dp == 1:
        return dict(values)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(values))
    mesh = saved.mesh
    first = [everyone[mesh.rank({"dp": dp})] for dp in range(mesh.dp)]
    dims = {name: None if name == program.loss else row_dim(program, name) for name in values}
    return {name: first[0][name] if dim is None else torch.cat([held[name] for held in first], dim) for name, dim in dims.items()}


def run_stages(saved: Saved, rank: int, name: str, groups: Mapping[str, str], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The program's outputs by its files of a format, .pt2 or AOTInductor's. Collective.

    Stage after stage: the ranks that hold one run it, and all others are given what it made on their tensor coordinate.
    """
    from tpcompile.export.aoti import load_aoti
    from tpcompile.export.pt2 import load_pt2

    mesh, entry = saved.mesh, saved.content["ranks"][rank]
    held = dict(given)
    for stage in stages_of(saved):
        made: dict[str, Tensor] = {}
        if stage.index in entry["stages"]:
            file = entry[name][entry["stages"].index(stage.index)]
            module = load_aoti(saved, file) if name == "aoti" else load_pt2(saved.directory / file, groups)
            with torch.no_grad():
                values = module(**{taken: held[taken] for taken in _taken(stage)})
            names = [boundary.name for boundary in stage.sends] or list(program_of(saved).returned())
            made = dict(zip(names, values, strict=False))
        everyone: list[Any] = [made]
        if dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, made)
        for other, theirs in enumerate(everyone):
            if theirs and mesh.coordinates(other)["tp"] == mesh.coordinates(rank)["tp"]:
                held.update(theirs)
    return _returned(program_of(saved), held)
