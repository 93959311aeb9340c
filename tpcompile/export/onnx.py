"""A rank's forward as ONNX: collectives are `AllReduce` and `AllGather` of the domain com.microsoft.

Our operators become ATen operations and these two, for any length of the sequence: a reduce-scatter is an all-reduce and a slice, a
maximum over ranks an all-gather and a maximum. That moves more bytes than training does, and computes the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from tpcompile.collectives import held_by, holders, length, ops, place, take
from tpcompile.errors import InputError, Refused, caller
from tpcompile.export.traced import trace
from tpcompile.ir import Program, Stage

DOMAIN, VERSION = "com.microsoft", 1


def write_onnx(module: nn.Module, program: Program, stage: Stage, sizes: Mapping[sympy.Symbol, int], coordinate: int, file: Path) -> None:
    """Write a stage's forward of one tensor rank. Sizes that the capture left open are open in the file.

    Raises Refused for a program that draws random numbers, and InputError where the packages onnx and onnxscript are missing.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401 (torch.onnx imports it)
    except ImportError as error:
        what = f"writing ONNX needs the package {error.name}"
        raise InputError(what, at='compiled.emit(formats=["onnx"])', source=caller(), fix='pip install "tpcompile[onnx]"') from error
    if program.random:
        what = "the program draws random numbers, which ONNX does not repeat"
        raise Refused(what, at='compiled.emit(formats=["onnx"])', source=caller(), fix="compile the model in eval mode")
    exported = trace(module, program, stage, sizes, coordinate).run_decompositions(_decompositions())
    outputs = [boundary.name for boundary in stage.sends] or list(program.returned())
    made = torch.onnx.export(exported, (), dynamo=True, optimize=False, verbose=False, output_names=outputs)
    assert made is not None
    made.save(file, external_data=_is_large(module))
    onnx.checker.check_model(str(file), full_check=True)


def _is_large(module: nn.Module) -> bool:
    """Whether the weights do not fit into one file of protobuf's, of 2 GiB."""
    return sum(p.nbytes for p in module.parameters()) > 1 << 30


# ------------------------------------------------------------------------------------------ our operators, in torch's


def _all_reduce(x: Tensor, axis: str) -> Tensor:
    return x.clone() if place(axis)[1] == 1 else _call("AllReduce", x, {}, list(x.shape))


def _all_gather(rows: Tensor, axis: str) -> Tensor:
    """All ranks' tensors one after another along the first dimension."""
    parts = place(axis)[1]
    return _call("AllGather", rows, {"group_size": parts}, [rows.shape[0] * parts, *rows.shape[1:]])


def _call(name: str, x: Tensor, attributes: dict[str, Any], shape: list[int]) -> Tensor:
    """An operator of ONNX that torch does not have."""
    return torch.onnx.ops.symbolic(f"{DOMAIN}::{name}", [x.contiguous()], attributes, dtype=x.dtype, shape=shape, version=VERSION)


def _gather(x: Tensor, axis: str, dim: int, bounds: Sequence[int]) -> Tensor:
    """Pieces are filled up to the longest with zeros, and cut after."""
    parts = place(axis)[1]
    longest = max(length(held_by(bounds, c, parts)) for c in range(parts))
    rows = x.movedim(dim, 0)
    if rows.shape[0] < longest:
        rows = torch.cat([rows, rows.new_zeros([longest - rows.shape[0], *rows.shape[1:]])])
    gathered = _all_gather(rows, axis) if parts > 1 else rows
    taken = [gathered.narrow(0, holder * longest + at, stop - start) for start, stop, holder, at in holders(bounds, parts)]
    return torch.cat(taken).movedim(0, dim).contiguous()


def _local_slice(x: Tensor, axis: str, dim: int, bounds: Sequence[int]) -> Tensor:
    return take(x, dim, held_by(bounds, *place(axis)))


def _largest(x: Tensor, axis: str) -> Tensor:
    return x.clone() if place(axis)[1] == 1 else _all_gather(x.unsqueeze(0), axis).amax(0)


def _gather_positions(x: Tensor, axis: str, dim: int, length: int) -> Tensor:
    """Pieces are filled up to the longest with their last position, and cut after."""
    parts = place(axis)[1]
    if parts == 1:
        return x.clone()
    longest = (length + parts - 1) // parts
    rows = x.movedim(dim, 0)
    filled = rows.index_select(0, torch.arange(longest, device=x.device).clamp(max=rows.shape[0] - 1))
    gathered = _all_gather(filled, axis)
    pieces = [gathered.narrow(0, c * longest, _piece(length, c, parts)[1]) for c in range(parts)]
    return torch.cat(pieces).movedim(0, dim).contiguous()


def _scatter_positions(x: Tensor, axis: str, dim: int, length: int) -> Tensor:
    return _own_positions(_all_reduce(x, axis), axis, dim, length)


def _own_positions(x: Tensor, axis: str, dim: int, length: int) -> Tensor:
    return x.narrow(dim, *_piece(length, *place(axis))).contiguous().clone()


def _piece(length: int, coordinate: int, parts: int) -> tuple[int, int]:
    """As `tpcompile.collectives.piece`, for a length that is open: without a choice between two sizes, which tracing would settle."""
    lengths = [(length + parts - 1 - c) // parts for c in range(coordinate + 1)]
    return sum(lengths[:-1]), lengths[-1]


def _linears(x: Tensor, axis: str, dim: int, length: int, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    whole = _gather_positions(x, axis, dim, length)
    return [torch.nn.functional.linear(whole, weight, biases[i] if biases else None) for i, weight in enumerate(weights)]


def _slice_scatter(x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """Spelled out: the whole is cut around what is put in."""
    first, last, size = start or 0, torch.iinfo(torch.int64).max if end is None else end, x.shape[dim]
    if step == 1:
        pieces = [torch.ops.aten.slice.Tensor(x, dim, 0, first), source, torch.ops.aten.slice.Tensor(x, dim, last)]
        return torch.cat(pieces, dim) if first >= 0 else torch.cat([x.narrow(dim, 0, size + first), *pieces[1:]], dim)
    at = torch.arange(size, device=x.device)
    first, last = (first + size if first < 0 else first), (last + size if last < 0 else last)
    inside = (at >= first) & (at < last) & ((at - first) % step == 0)
    places = ((at - first) // step).clamp(0, source.shape[dim] - 1)
    return torch.where(inside.view([-1 if d == dim % x.dim() else 1 for d in range(x.dim())]), source.index_select(dim, places), x)


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """With its broadcast, which torch's translation leaves out."""
    return source.to(x.dtype).expand(x.shape).clone()


def _decompositions() -> Any:
    table = torch.export.default_decompositions()
    ours: dict[Any, Callable[..., Any]] = {
        ops.enter.default: lambda x, *rest: x.clone(),
        ops.shared.default: lambda x, *rest: x.clone(),
        ops.reduce.default: _all_reduce,
        ops.reduce_max.default: _largest,
        ops.gather.default: _gather,
        ops.local_slice.default: _local_slice,
        ops.seq_gather.default: _gather_positions,
        ops.seq_whole.default: _gather_positions,
        ops.seq_scatter.default: _scatter_positions,
        ops.seq_slice.default: _own_positions,
        ops.seq_linear.default: _linears,
        torch.ops.aten.slice_scatter.default: _slice_scatter,
        torch.ops.aten.copy.default: _copy,
    }
    for operator, work in ours.items():
        table[operator] = work
    return table
