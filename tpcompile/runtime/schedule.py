"""Pipeline schedules: torch.distributed.pipelining's, with what the compiler knows of every stage's shapes.

    1f1b, pp=2, 4 micro-batches            gpipe
    stage 0   F0 F1 B0 F2 B1 F3 B2 B3      F0 F1 F2 F3          B0 B1 B2 B3
    stage 1      F0 B0 F1 B1 F2 B2 F3 B3      F0 F1 F2 F3 B0 B1 B2 B3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from tpcompile.errors import InputError, caller
from tpcompile.ir import Boundary, Program, Stage
from tpcompile.layout import Size
from tpcompile.runtime.groups import Groups
from tpcompile.runtime.stage import StageRoot

SCHEDULES: Mapping[str, type[PipelineScheduleSingle]] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}

_KEPT = 8  # shapes whose schedules, with their receive buffers, are kept


def check_schedule(name: str, microbatches: int, pp: int) -> None:
    """Raise InputError for an unknown schedule, or one that these numbers do not allow."""
    if name not in SCHEDULES:
        raise InputError(f"unknown schedule {name!r}", at=f"compile(schedule={name!r})", source=caller(), fix=f"use {' or '.join(SCHEDULES)}")
    if microbatches < 1 or (pp > 1 and name == "1f1b" and microbatches < pp):
        raise InputError(
            f"schedule 1f1b over {pp} stages needs {pp} micro-batches or more" if pp > 1 else "a batch has at least one micro-batch",
            at=f"compile(microbatches={microbatches})",
            source=caller(),
            fix=f"use microbatches={pp} or more" + (', or schedule="gpipe"' if microbatches > 0 else ""),
        )


def sizes_of(program: Program, tensors: Mapping[str, Tensor], microbatches: int) -> dict[sympy.Symbol, int]:
    """The values of the program's symbols in one micro-batch of the replica's rows."""
    found = {}
    for symbol, (name, dim) in program.symbols.items():
        size = tensors[name].shape[dim]
        found[symbol] = size // microbatches if dim == program.inputs[name].batch_dim else size
    return found


@dataclass(frozen=True)
class Shape:
    """What a schedule is made for."""

    capture: int
    sizes: tuple[tuple[str, int], ...]
    microbatches: int


class Schedules:
    """The schedules of this rank's stage, made when a shape first appears. All ranks of a pipeline make them in the same order."""

    def __init__(self, root: StageRoot, groups: Groups, name: str) -> None:
        self._root, self._groups, self._kind = root, groups, SCHEDULES[name]
        self._made: dict[tuple[Shape, bool], PipelineScheduleSingle] = {}

    def train(self, stage: Stage, shape: Shape, inputs: Mapping[str, Tensor], dims: Mapping[str, int | None], sizes: Mapping[Any, int]) -> list[Tensor]:
        """Forward and backward of all micro-batches; the losses of each on the last stage, nothing elsewhere."""
        schedule = self._schedule(stage, shape, dims, sizes, train=True)
        losses: list[Tensor] = []
        target = torch.zeros(shape.microbatches, device=self._groups.device) if self._is_last else None
        self._root.first_only = self._is_last
        try:
            schedule.step(target=target, losses=losses if self._is_last else None, return_outputs=False, **inputs)
        finally:
            self._root.first_only = False
        return [loss.detach() for loss in losses]

    def evaluate(self, stage: Stage, shape: Shape, inputs: Mapping[str, Tensor], dims: Mapping[str, int | None], sizes: Mapping[Any, int]) -> list[tuple[Tensor, ...]]:
        """Forward of all micro-batches; the outputs of each on the last stage, nothing elsewhere."""
        schedule = self._schedule(stage, shape, dims, sizes, train=False)
        self._root.first_only = self._is_last
        self._root.collected = [] if self._is_last else None
        try:
            with torch.no_grad():
                schedule.eval(return_outputs=False, **inputs)
            return self._root.collected or []
        finally:
            self._root.first_only, self._root.collected = False, None

    @property
    def _is_last(self) -> bool:
        return self._groups.coordinates["pp"] == self._groups.mesh.pp - 1

    def _schedule(self, stage: Stage, shape: Shape, dims: Mapping[str, int | None], sizes: Mapping[Any, int], *, train: bool) -> PipelineScheduleSingle:
        key = (shape, train)
        if key not in self._made:
            while len(self._made) >= _KEPT:
                del self._made[next(iter(self._made))]
            self._made[key] = self._make(stage, shape, dims, sizes, train)
        return self._made[key]

    def _make(self, stage: Stage, shape: Shape, dims: Mapping[str, int | None], sizes: Mapping[Any, int], train: bool) -> PipelineScheduleSingle:
        outputs = (torch.empty((), device="meta"),) if self._is_last else _examples(stage.sends, sizes)
        piped = PipelineStage(
            self._root,
            stage.index,
            self._groups.mesh.pp,
            self._groups.device,
            input_args=_examples(stage.receives, sizes),
            output_args=outputs,
            group=self._groups.group("pp"),
        )
        return self._kind(
            piped,
            shape.microbatches,
            loss_fn=_first if train else None,
            kwargs_chunk_spec={name: _Replicate() if dim is None else TensorChunkSpec(dim) for name, dim in dims.items()},  # type: ignore[misc]
            scale_grads=False,
        )


def _first(outputs: Any, target: Tensor) -> Tensor:
    """The loss that the program itself computes; there is no target to compare with."""
    loss: Tensor = outputs[0]
    return loss


def _examples(boundaries: Sequence[Boundary], sizes: Mapping[Any, int]) -> tuple[Tensor, ...]:
    """Tensors without data, of the shapes that cross a boundary in one micro-batch."""
    return tuple(
        torch.empty([_size(size, sizes) for size in b.type.shape], dtype=b.type.dtype, device="meta").requires_grad_(b.requires_grad) for b in boundaries
    )


def _size(size: Size, sizes: Mapping[Any, int]) -> int:
    return size if isinstance(size, int) else int(size.subs(dict(sizes)))
