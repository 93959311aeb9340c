"""A rank's forward as ONNX: collectives are `AllReduce` and `AllGather` of the domain com.microsoft.

Our operators become ATen operations and these two (`tpcompile.export.spelled`); a maximum over ranks is an all-gather and a maximum.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from tpcompile.collectives import place
from tpcompile.errors import InputError, Refused, caller
from tpcompile.export.spelled import Calls, decompositions
from tpcompile.export.traced import trace
from tpcompile.ir import Program, Stage
from tpcompile.passes._reasons import reason_of

AT = 'compiled.emit(formats=["onnx"])'
DOMAIN, VERSION = "com.microsoft", 1


def write_onnx(module: nn.Module, program: Program, stage: Stage, sizes: Mapping[sympy.Symbol, int], coordinate: int, file: Path) -> None:
    """Write a stage's forward of one tensor rank. Sizes that the capture left open are open in the file.

    Raises InputError where the packages onnx and onnxscript are missing, and Refused with the reason for what ONNX has no operator for.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401 (torch.onnx imports it)
    except ImportError as error:
        what = f"writing ONNX needs the package {error.name}"
        raise InputError(what, at=AT, source=caller(), fix='pip install "tpcompile[onnx]"') from error
    exported = trace(module, program, stage, sizes, coordinate).run_decompositions(_decompositions())
    outputs = [boundary.name for boundary in stage.sends] or list(program.returned())
    try:
        made = torch.onnx.export(exported, (), dynamo=True, optimize=False, verbose=False, output_names=outputs)
    except torch.onnx.OnnxExporterError as error:
        what = f"ONNX cannot hold stage {stage.index}: {_first_cause(error)}"
        raise Refused(what, at=AT, source=caller(), fix="leave onnx out of formats") from error
    assert made is not None
    made.save(file, external_data=_is_large(module))
    onnx.checker.check_model(str(file), full_check=True)


def _first_cause(error: BaseException) -> str:
    """A line of the error that others were raised from: the exporter's own are of pages, for its developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return reason_of(error)


def _is_large(module: nn.Module) -> bool:
    """Whether the weights do not fit into one file of protobuf's, of 2 GiB."""
    return sum(p.nbytes for p in module.parameters()) > 1 << 30


# ------------------------------------------------------------------------------------------ the calls, and what torch leaves out


def _all_reduce(x: Tensor, axis: str) -> Tensor:
    return _call("AllReduce", x, {}, list(x.shape))


def _all_gather(rows: Tensor, axis: str) -> Tensor:
    parts = place(axis)[1]
    return _call("AllGather", rows, {"group_size": parts}, [rows.shape[0] * parts, *rows.shape[1:]])


def _largest(x: Tensor, axis: str) -> Tensor:
    return _all_gather(x.unsqueeze(0), axis).amax(0)


def _call(name: str, x: Tensor, attributes: dict[str, Any], shape: list[int]) -> Tensor:
    """An operator of ONNX that torch does not have."""
    return torch.onnx.ops.symbolic(f"{DOMAIN}::{name}", [x], attributes, dtype=x.dtype, shape=shape, version=VERSION)


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
    ours = decompositions(Calls(_all_reduce, _all_gather, _largest))
    ours |= {torch.ops.aten.slice_scatter.default: _slice_scatter, torch.ops.aten.copy.default: _copy}
    for operator, work in ours.items():
        table[operator] = work
    return table
