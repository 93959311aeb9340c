"""What runs on one rank: its parameters, torch's engines around them, and the captures that use them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile import collectives
from tpcompile.errors import InputError, Refused
from tpcompile.ir import Program, Stage, TensorType
from tpcompile.runtime import outputs, step
from tpcompile.runtime.batch import part
from tpcompile.runtime.data_parallel import Engine as DataParallel
from tpcompile.runtime.data_parallel import check_gradients, parallelize, reached
from tpcompile.runtime.groups import Groups
from tpcompile.runtime.schedule import Schedules, Shape, sizes_of
from tpcompile.runtime.shared import SharedWeights, shared_weights
from tpcompile.runtime.stage import StageRoot


@dataclass(frozen=True)
class Capture:
    """One capture of the model on this rank. `number` says which of the root's modules runs it."""

    number: int
    program: Program
    stages: tuple[Stage, ...]
    stage: Stage
    trained: frozenset[str]

    @classmethod
    def of(cls, number: int, program: Program, stages: Sequence[Stage], stage: Stage) -> Capture:
        return cls(number, program, tuple(stages), stage, reached(program))


class Engine:
    """One rank at work. Making one is collective, and so is every call."""

    def __init__(self, model: nn.Module, module: nn.Module, groups: Groups, schedule: str, seed: int) -> None:
        meta = [name for name, p in module.named_parameters() if p.is_meta]
        if meta:
            raise InputError(
                f"parameter {meta[0]} is on the meta device: it has no values",
                at="compiled.train_step",
                fix="initialise the model (model.to_empty(device=...), then its weights) before it is compiled",
            )
        self._model, self.groups = model, groups
        collectives.bind(module, groups.names)
        self.root = StageRoot(module)
        self._schedules = Schedules(self.root, groups, schedule)
        self._seed, self._steps = seed, 0
        self._engine: DataParallel | None = None
        self._trained: frozenset[str] = frozenset()
        self._shared: SharedWeights | None = None
        self._held: Mapping[str, tuple[int, ...]] = {}

    def adopt(self, module: nn.Module) -> int:
        """Another capture's module; returns its number."""
        collectives.bind(module, self.groups.names)
        return self.root.adopt(module)

    def agree(self, capture: Capture, shapes: str, same: str) -> None:
        """Raise on every rank unless all run the same capture, and equal `shapes` among the ranks that share rows ("dp" or "all")."""
        if not dist.is_initialized():
            return
        codes = [capture.number, int(hashlib.sha256(shapes.encode()).hexdigest()[:15], 16)]
        mine = torch.tensor(codes, device=self.groups.device)
        everyone = [torch.empty_like(mine) for _ in range(self.groups.mesh.size)]
        dist.all_gather(everyone, mine)
        rows = torch.stack(everyone).tolist()
        for rank, (number, code) in enumerate(rows):
            peer = same == "all" or self.groups.mesh.coordinates(rank)["dp"] == self.groups.coordinates["dp"]
            if number != codes[0] or (peer and code != codes[1]):
                raise InputError(
                    f"ranks {self.groups.rank} and {rank} were given batches of different shapes",
                    at=f"rank {self.groups.rank}: {shapes}",
                    fix="pass the same batch on every rank" if same == "all" else "pass the same rows on all ranks of a replica, of one shape on all replicas",
                )

    def _prepare(self, capture: Capture, *, gradients: bool) -> DataParallel:
        """The module to call; with gradients, the data-parallel engine, which is made once and for the same parameters."""
        self.root.capture = capture.number
        if self._engine is None:
            self._engine, self._trained = parallelize(self.root, self.groups, capture.trained), capture.trained
            self._shared, self._held = SharedWeights(capture.stages, self.groups), shared_weights(capture.stages)
        if gradients and capture.trained != self._trained:
            changed = sorted(capture.trained ^ self._trained)
            raise Refused(
                f"{', '.join(changed)}: trained by one capture of the model and not by another",
                fix="compile a second object for these inputs",
            )
        if shared_weights(capture.stages) != self._held:
            raise Refused("a weight is shared by other stages than when the model was first captured", fix="compile a second object for these inputs")
        return self._engine

    def train(self, capture: Capture, tensors: Mapping[str, Tensor], microbatches: int) -> Tensor:
        """Forward and backward of the replica's rows; the loss of the whole batch."""
        engine = self._prepare(capture, gradients=True)
        inputs, dims = self._inputs(capture, tensors, microbatches)
        assert self._shared is not None
        self._shared.set_aside(self.root)
        with torch.enable_grad():
            if self.groups.mesh.pp > 1:
                sizes = sizes_of(capture.program, tensors, microbatches)
                losses = self._schedules.train(capture.stage, _shape(capture, sizes, microbatches), inputs, dims, sizes)
            else:
                losses = step.accumulate(engine, [part(inputs, dims, index, microbatches) for index in range(microbatches)])
        self._shared.sum_gradients(self.root)
        check_gradients(self.root, capture.trained)
        self._steps += 1
        return step.report(losses, _loss_type(capture.program), self.groups)

    def forward(self, capture: Capture, tensors: Mapping[str, Tensor], microbatches: int) -> Any:
        """The output for the replica's rows, in the model's own type; without a pipeline it can be differentiated."""
        pipelined = self.groups.mesh.pp > 1
        gradients = torch.is_grad_enabled() and not pipelined
        engine = self._prepare(capture, gradients=gradients and any(p.requires_grad for p in self.root.parameters()))
        count = microbatches if pipelined else 1
        inputs, dims = self._inputs(capture, tensors, count)
        self._steps += 1
        if not pipelined:
            with nullcontext() if gradients else torch.no_grad():
                values = engine(**inputs)
            return outputs.rebuild(capture.program, outputs.whole_loss(capture.program, values, self.groups))
        sizes = sizes_of(capture.program, tensors, count)
        chunks = self._schedules.evaluate(capture.stage, _shape(capture, sizes, count), inputs, dims, sizes)
        values = outputs.merge(capture.program, chunks) if chunks else ()
        values = outputs.to_every_stage(values, self.groups)
        return outputs.rebuild(capture.program, outputs.whole_loss(capture.program, values, self.groups))

    def _inputs(self, capture: Capture, tensors: Mapping[str, Tensor], microbatches: int) -> tuple[dict[str, Tensor], dict[str, int | None]]:
        """What the stage takes, for all micro-batches, and the dimension along which each is divided."""
        given: dict[str, Tensor] = dict(tensors)
        dims: dict[str, int | None] = {name: i.batch_dim for name, i in capture.program.inputs.items()}
        for name, value in step.counts(capture.program, self._model, tensors, microbatches, self.groups).items():
            given[name], dims[name] = value, None
        if capture.program.random:
            given[step.RNG_KEY], dims[step.RNG_KEY] = step.rng_keys(self._seed, self._steps, microbatches, self.groups), 0
        wanted = capture.stage.inputs
        return {name: given[name] for name in wanted}, {name: dims[name] for name in wanted}


def _shape(capture: Capture, sizes: Mapping[sympy.Symbol, int], microbatches: int) -> Shape:
    return Shape(capture.number, tuple(sorted((str(symbol), size) for symbol, size in sizes.items())), microbatches)


def _loss_type(program: Program) -> torch.dtype:
    assert program.loss is not None
    kind = program.types[program.loss]
    assert isinstance(kind, TensorType)
    return kind.dtype
