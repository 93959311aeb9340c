"""A rank's forward as a package of AOTInductor: native code for this kind of machine, the rank's weights, and torch's all-reduce.

A package names the group that it communicates over by the axis's spelling, "tp:0/2" for coordinate 0 of 2: a process registers one under
this name before it runs the package. Ranks sum, or take the largest; what they gather is summed too, every rank's piece among zeros, which
moves more bytes than a gather and computes the same numbers. For torch runs a package while it holds Python's lock, and gloo's threads drop
a tensor that Python has seen under a lock of theirs, for which they need Python's: a process that enters a collective meanwhile waits
forever (torch 2.13). The gradient of torch's all-gather is written in Python, and is shown its tensors; an all-reduce, in place, has none.
For the same reason a package returns no tensor that was itself reduced, and its group should be one that nothing in Python uses.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _unregister_process_group

from tpcompile.collectives import place, unbound
from tpcompile.errors import InputError, Refused, caller
from tpcompile.export.read import Saved
from tpcompile.export.spelled import Calls, decompositions
from tpcompile.export.traced import trace
from tpcompile.ir import Program, Stage

AT = 'compiled.emit(formats=["aoti"])'

Package = Callable[..., tuple[Tensor, ...]]


def write_aoti(module: nn.Module, program: Program, stage: Stage, sizes: Mapping[sympy.Symbol, int], coordinate: int, file: Path) -> None:
    """Compile a stage's forward of one tensor rank into a package. Needs a C++ compiler, and no process group.

    Raises Refused with AOTInductor's reason for what it cannot compile.
    """
    exported = trace(module, program, stage, sizes, coordinate).run_decompositions(
        decompositions(Calls(_all_reduce, _all_gather, _largest))
    )
    axes = {name for node in exported.graph.nodes for name in node.args if _names_group(node, name)}
    absent = {name: ProcessGroup(*place(name)) for name in axes}  # type: ignore[arg-type,call-arg] # asked for its rank and size alone
    try:
        with torch.no_grad(), registered(absent):
            torch._inductor.aoti_compile_and_package(exported, package_path=str(file))
    except Exception as error:  # AOTInductor's own have no common class
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        what = f"AOTInductor cannot package stage {stage.index}: {reason}"
        raise Refused(what, at=AT, source=caller(), fix="leave aoti out of formats") from error


def check_aoti() -> None:
    """Raises InputError where there is no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        what, fix = "AOTInductor finds no C++ compiler", "install g++ or clang, or name one in the environment variable CXX"
        raise InputError(what, at=AT, source=caller(), fix=fix) from error


def load_aoti(saved: Saved, file: str) -> Package:
    """A package of a program on disk, which takes what the stage receives and its inputs by name. Forward only.

    It is native code: what is loaded are the bytes that the manifest vouches for, or InputError is raised. `registered` says over
    which group it communicates.
    """
    package: Package = torch._inductor.aoti_load_package(io.BytesIO(saved._bytes(file)))
    return package


def own_groups(saved: Saved, rank: int) -> dict[str, ProcessGroup]:
    """A group of the ranks along the tensor axis that nothing else uses, by the name that this rank's packages have for it. Collective."""
    if saved.mesh.tp == 1:
        return {}
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in saved.mesh.groups("tp")}
    mine = next(group for ranks, group in groups.items() if rank in ranks)
    return {unbound("tp", saved.mesh.coordinates(rank)["tp"], saved.mesh.tp): mine}


@contextmanager
def registered(groups: Mapping[str, ProcessGroup]) -> Iterator[None]:
    """Within, torch knows process groups by these names too. Raises InputError for a name that it knows already."""
    done: list[str] = []
    try:
        for name, group in groups.items():
            try:
                _register_process_group(name, group)  # type: ignore[arg-type]
            except RuntimeError as error:
                what = f"a process group named {name} is registered already"
                raise InputError(what, at="tpcompile.export.aoti.registered", source=caller(), fix="leave the other block first") from error
            done.append(name)
        yield
    finally:
        for name in done:
            _unregister_process_group(name)  # type: ignore[arg-type]


def _names_group(node: Any, argument: object) -> bool:
    return getattr(node.target, "namespace", "") == "_c10d_functional" and isinstance(argument, str) and ":" in argument


def _all_reduce(x: Tensor, axis: str, how: str = "sum") -> Tensor:
    """Of a longer shape, so that what is returned is a view of what was reduced."""
    functional = torch.ops._c10d_functional
    made: Tensor = functional.wait_tensor.default(functional.all_reduce.default(x.unsqueeze(0), how, axis))
    return made.squeeze(0)


def _largest(x: Tensor, axis: str) -> Tensor:
    return _all_reduce(x, axis, "max")


def _all_gather(rows: Tensor, axis: str) -> Tensor:
    """Truth values travel as numbers."""
    (coordinate, parts), rest = place(axis), rows.shape[1:]
    numbers = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
    before = [numbers.new_zeros([rows.shape[0] * coordinate, *rest])] if coordinate else []
    after = [numbers.new_zeros([rows.shape[0] * (parts - 1 - coordinate), *rest])] if coordinate < parts - 1 else []
    return _all_reduce(torch.cat([*before, numbers, *after]), axis).to(rows.dtype)
