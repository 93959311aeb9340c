"""Pipeline schedules: torch.distributed.pipelining's, with what the compiler knows of every stage's shapes.

`tpcompile.schedules` draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.distributed.pipelining import schedules as torchs
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from tpcompile.ir import Boundary, Program, Stage
from tpcompile.layout import Size
from tpcompile.runtime.groups import Groups
from tpcompile.runtime.piece import Piece, Timer
from tpcompile.runtime.stage import INPUT, Root, StageRoot
from tpcompile.schedules import SCHEDULES, place_of

_KEPT = 8  # shapes whose schedules, with their receive buffers, are kept

Made = torchs.PipelineScheduleSingle | torchs.PipelineScheduleMulti


def sizes_of(program: Program, tensors: Mapping[str, Tensor], microbatches: int) -> dict[sympy.Symbol, int]:
    """The values of the program's symbols in one micro-batch of the replica's rows."""
    found = {}
    for symbol, (name, dim) in program.symbols.items():
        size = tensors[name].shape[dim]
        found[symbol] = size // microbatches if dim == program.inputs[name].batch_dim else size
    return found


@dataclass(frozen=True)
class Work:
    """One rank's part of a batch: the inputs of its stages for all micro-batches, and how they are divided."""

    capture: int
    stages: tuple[Stage, ...]
    microbatches: int
    inputs: Mapping[str, Tensor]
    dims: Mapping[str, int | None]  # the dimension along which an input is divided; None: every micro-batch takes it whole
    sizes: Mapping[sympy.Symbol, int]  # in one micro-batch

    @property
    def key(self) -> tuple[object, ...]:
        """What a schedule is made for: shapes cannot change after its first step."""
        return self.capture, self.microbatches, tuple(sorted((str(symbol), size) for symbol, size in self.sizes.items()))


class Schedules:
    """The schedules of this rank's stages, made when a shape first appears. All ranks of a pipeline make them in the same order."""

    def __init__(self, root: Root, groups: Groups, name: str) -> None:
        self._root, self._groups, self._schedule = root, groups, SCHEDULES[name]
        self._stages = groups.mesh.pp * len(root.stages)
        self.last = place_of(name, self._stages - 1, groups.mesh.pp)
        here = groups.coordinates["pp"] == self.last and groups.mesh.pp > 1
        self._end: StageRoot | None = root.stages[-1] if here else None  # the last stage, where it is this rank's
        self.timer = Timer(groups.device)
        self._made: dict[tuple[object, ...], Made] = {}
        self.scale: Tensor | None = None  # what losses are multiplied with, for backward

    def train(self, work: Work) -> list[Tensor]:
        """Forward and backward of all micro-batches; the losses of each where the last stage is, nothing elsewhere."""
        schedule, inputs = self._kept(work, train=True), self._keywords(work.inputs)
        losses: list[Tensor] = []
        # torch wants a target for every micro-batch, though the loss function does not look at it
        target = torch.zeros(work.microbatches, device=self._groups.device) if self._end else None
        with self._loss_alone(), self.timer.step():
            schedule.step(target=target, losses=losses if self._end else None, return_outputs=False, **inputs)
        return [loss.detach() if self.scale is None else loss.detach() / self.scale for loss in losses]

    def evaluate(self, work: Work) -> list[tuple[Tensor, ...]]:
        """Forward of all micro-batches; the outputs of each where the last stage is, nothing elsewhere."""
        schedule, inputs = self._kept(work, train=False), self._keywords(work.inputs)
        with self._loss_alone(), torch.no_grad():
            if self._end:
                self._end.collected = []
            schedule.eval(return_outputs=False, **inputs)
            return (self._end.collected if self._end else None) or []

    @contextmanager
    def _loss_alone(self) -> Iterator[None]:
        """The last stage gives nothing but its loss to the schedule."""
        try:
            if self._end:
                self._end.loss_only = True
            yield
        finally:
            if self._end:
                self._end.loss_only, self._end.collected = False, None

    def _loss(self, outputs: Any, target: Tensor) -> Tensor:
        """The loss that the program itself computes; there is no target to compare with."""
        loss: Tensor = outputs[0]
        return loss if self.scale is None else loss.float() * self.scale

    @staticmethod
    def _keywords(inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs under names that the schedule's own keywords (target, losses) cannot have."""
        return {INPUT + name: value for name, value in inputs.items()}

    def _kept(self, work: Work, *, train: bool) -> Made:
        key = (*work.key, train)
        if key not in self._made:
            while len(self._made) >= _KEPT:
                del self._made[next(iter(self._made))]
            self._made[key] = self._make(work, train)
        return self._made[key]

    def _make(self, work: Work, train: bool) -> Made:
        pieces = [self._piece(work, stage, root) for stage, root in zip(work.stages, self._root.stages, strict=True)]
        chunks = self._keywords({name: _Replicate() if dim is None else TensorChunkSpec(dim) for name, dim in work.dims.items()})  # type: ignore[no-untyped-call]
        kind: Any = getattr(torchs, self._schedule.kind)
        several = issubclass(kind, torchs.PipelineScheduleMulti)
        loss_fn = self._loss if train else None
        made: Made = kind(pieces if several else pieces[0], work.microbatches, loss_fn=loss_fn, scale_grads=False)
        made._kwargs_chunk_spec = chunks  # not every class has the argument
        if isinstance(made, torchs._PipelineScheduleRuntime) and not train:
            orders = made.pipeline_order_with_comms
            made.pipeline_order_with_comms = {place: list(_forward_only(order)) for place, order in orders.items()}
        return made

    def _piece(self, work: Work, stage: Stage, root: StageRoot) -> Piece:
        loss, tp = (torch.empty((), device="meta"),), self._groups.coordinates["tp"]
        last = stage.index == self._stages - 1
        return Piece(
            root,
            stage.index,
            self._stages,
            self._groups.device,
            input_args=_examples(stage.receives, work.sizes, tp),
            output_args=loss if last else _examples(stage.sends, work.sizes, tp),
            group=self._groups.group("pp"),
            timer=self.timer,
            whole=bool(stage.unhalved),
        )


def _forward_only(order: Sequence[torchs._Action]) -> Iterator[torchs._Action]:
    """What is left of a rank's table when there is no backward: torch's own `eval` would wait for gradients."""
    kept = (torchs.FORWARD, torchs.SEND_F, torchs.RECV_F, torchs.UNSHARD, torchs.RESHARD)
    for action in order:
        yield from (part for part in action.sub_actions or (action,) if part.computation_type in kept)


def _examples(boundaries: Sequence[Boundary], sizes: Mapping[sympy.Symbol, int], coordinate: int) -> tuple[Tensor, ...]:
    """Tensors without data, of the shapes that cross a boundary in one micro-batch."""
    found = []
    for boundary in boundaries:
        shape = [_size(size, sizes) for size in boundary.shape(coordinate)]
        found.append(torch.empty(shape, dtype=boundary.type.dtype, device="meta", requires_grad=boundary.requires_grad))
    return tuple(found)


def _size(size: Size, sizes: Mapping[sympy.Symbol, int]) -> int:
    return size if isinstance(size, int) else int(size.subs(list(sizes.items())))
