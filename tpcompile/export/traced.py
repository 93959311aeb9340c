"""A rank's modules through torch.export: what .pt2 and ONNX files are made of."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tpcompile.cost import evaluate
from tpcompile.ir import Program, Stage
from tpcompile.layout import TensorType

LARGEST = 2
"""Whole numbers of examples are below this, so that they are indices of any table."""


def taken(program: Program, stage: Stage, coordinate: int) -> dict[str, TensorType]:
    """What a stage's module takes in one micro-batch, by the names of its arguments: what it receives, then its inputs."""
    received = {b.name: TensorType(b.type.dtype, b.shape(coordinate)) for b in stage.receives}
    return received | {name: kind for name in stage.inputs if isinstance(kind := program.types[name], TensorType)}


def trace(module: nn.Module, program: Program, stage: Stage, sizes: Mapping[sympy.Symbol, int], coordinate: int) -> ExportedProgram:
    """A stage's forward as torch.export sees it. Sizes that the capture left open stay open where the stage's operations allow it."""
    kinds = taken(program, stage, coordinate)
    arguments = {name: _example(kind, sizes) for name, kind in kinds.items()}
    shapes = {name: {dim: Dim.AUTO for dim, size in enumerate(kind.shape) if not isinstance(size, int)} for name, kind in kinds.items()}
    with torch.no_grad():
        return torch.export.export(module, (), arguments, dynamic_shapes=shapes, strict=False)


def _example(kind: TensorType, sizes: Mapping[sympy.Symbol, int]) -> Tensor:
    lengths = torch.Size(evaluate(size, sizes) for size in kind.shape)
    if kind.dtype.is_floating_point or kind.dtype.is_complex:
        return torch.ones(lengths, dtype=kind.dtype)
    return torch.arange(lengths.numel()).remainder(LARGEST).view(lengths).to(kind.dtype)
