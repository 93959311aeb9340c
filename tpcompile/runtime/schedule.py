"""Pipeline schedules: torch.distributed.pipelining's, with what the compiler knows of every stage's shapes.

`tpcompile.schedules` draws them.
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
from tpcompile.runtime.stage import INPUT, StageRoot

SCHEDULES: Mapping[str, type[PipelineScheduleSingle]] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}

_KEPT = 8  # shapes whose schedules, with their receive buffers, are kept


def check_schedule(name: str, microbatches: int, pp: int) -> None:
    """Raise InputError for an unknown schedule, or one that these numbers do not allow."""
    if name not in SCHEDULES:
        at, fix = f"compile(schedule={name!r})", f"use {' or '.join(SCHEDULES)}"
        raise InputError(f"unknown schedule {name!r}", at=at, source=caller(), fix=fix)
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
class Work:
    """One stage's part of a batch: its inputs for all micro-batches, and how they are divided."""

    capture: int
    stage: Stage
    microbatches: int
    inputs: Mapping[str, Tensor]
    dims: Mapping[str, int | None]  # the dimension along which an input is divided; None: every micro-batch takes it whole
    sizes: Mapping[sympy.Symbol, int]  # in one micro-batch

    @property
    def key(self) -> tuple[object, ...]:
        """What a schedule is made for: shapes cannot change after its first step."""
        return self.capture, self.microbatches, tuple(sorted((str(symbol), size) for symbol, size in self.sizes.items()))


class Schedules:
    """The schedules of this rank's stage, made when a shape first appears. All ranks of a pipeline make them in the same order."""

    def __init__(self, root: StageRoot, groups: Groups, name: str) -> None:
        self._root, self._groups, self._kind = root, groups, SCHEDULES[name]
        self._is_last = groups.coordinates["pp"] == groups.mesh.pp - 1
        self._made: dict[tuple[object, ...], PipelineScheduleSingle] = {}

    def train(self, work: Work) -> list[Tensor]:
        """Forward and backward of all micro-batches; the losses of each on the last stage, nothing elsewhere."""
        schedule, inputs = self._schedule(work, train=True), self._keywords(work.inputs)
        losses: list[Tensor] = []
        # torch wants a target for every micro-batch, though the loss function does not look at it
        target = torch.zeros(work.microbatches, device=self._groups.device) if self._is_last else None
        self._root.loss_only = self._is_last
        try:
            schedule.step(target=target, losses=losses if self._is_last else None, return_outputs=False, **inputs)
        finally:
            self._root.loss_only = False
        return [loss.detach() for loss in losses]

    def evaluate(self, work: Work) -> list[tuple[Tensor, ...]]:
        """Forward of all micro-batches; the outputs of each on the last stage, nothing elsewhere."""
        schedule, inputs = self._schedule(work, train=False), self._keywords(work.inputs)
        self._root.loss_only = self._is_last
        self._root.collected = [] if self._is_last else None
        try:
            with torch.no_grad():
                schedule.eval(return_outputs=False, **inputs)
            return self._root.collected or []
        finally:
            self._root.loss_only, self._root.collected = False, None

    @staticmethod
    def _keywords(inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs under names that the schedule's own keywords (target, losses) cannot have."""
        return {INPUT + name: value for name, value in inputs.items()}

    def _schedule(self, work: Work, *, train: bool) -> PipelineScheduleSingle:
        key = (*work.key, train)
        if key not in self._made:
            while len(self._made) >= _KEPT:
                del self._made[next(iter(self._made))]
            self._made[key] = self._make(work, train)
        return self._made[key]

    def _make(self, work: Work, train: bool) -> PipelineScheduleSingle:
        loss = (torch.empty((), device="meta"),)
        piped = PipelineStage(
            self._root,
            work.stage.index,
            self._groups.mesh.pp,
            self._groups.device,
            input_args=_examples(work.stage.receives, work.sizes, self._groups.coordinates["tp"]),
            output_args=loss if self._is_last else _examples(work.stage.sends, work.sizes, self._groups.coordinates["tp"]),
            group=self._groups.group("pp"),
        )
        chunks = self._keywords({name: _Replicate() if dim is None else TensorChunkSpec(dim) for name, dim in work.dims.items()})  # type: ignore[no-untyped-call]
        loss_fn = _first if train else None
        return self._kind(piped, work.microbatches, loss_fn=loss_fn, kwargs_chunk_spec=chunks, scale_grads=False)


def _first(outputs: Any, target: Tensor) -> Tensor:
    """The loss that the program itself computes; there is no target to compare with."""
    loss: Tensor = outputs[0]
    return loss


def _examples(boundaries: Sequence[Boundary], sizes: Mapping[sympy.Symbol, int], coordinate: int) -> tuple[Tensor, ...]:
    """Tensors without data, of the shapes that cross a boundary in one micro-batch."""
    found = []
    for boundary in boundaries:
        shape = [_size(size, sizes) for size in boundary.shape(coordinate)]
        found.append(torch.empty(shape, dtype=boundary.type.dtype, device="meta", requires_grad=boundary.requires_grad))
    return tuple(found)


def _size(size: Size, sizes: Mapping[sympy.Symbol, int]) -> int:
    return size if isinstance(size, int) else int(size.subs(list(sizes.items())))
