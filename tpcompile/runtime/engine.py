"""What runs on one rank: its parameters, torch's engines around them, and the captures that use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile import collectives
from tpcompile.driver import Options
from tpcompile.errors import InputError, Refused, caller
from tpcompile.ir import Program, Stage
from tpcompile.layout import TensorType
from tpcompile.runtime import outputs, step
from tpcompile.runtime.compiling import compile_module
from tpcompile.runtime.data_parallel import Engine as DataParallel
from tpcompile.runtime.data_parallel import (
    average_rest,
    check_gradients,
    distribute,
    gradients_aside,
    reached,
    rest_averaged_once,
    settle,
    share_out,
)
from tpcompile.runtime.groups import Groups
from tpcompile.runtime.mark import Mark
from tpcompile.runtime.recompute import recompute
from tpcompile.runtime.scaling import Scaler
from tpcompile.runtime.schedule import Schedules, Work, sizes_of
from tpcompile.runtime.shared import SharedWeights, follow, join
from tpcompile.runtime.stage import RankRoot, StageRoot, root_of
from tpcompile.runtime.summed import summed_once
from tpcompile.runtime.units import units
from tpcompile.schedules import place_of
from tpcompile.timeline import shared_weights, summed_later


@dataclass(frozen=True)
class Capture:
    """One capture of the model on this rank, which holds some of its stages. `number` says which of the roots' modules runs it."""

    number: int
    program: Program
    stages: tuple[Stage, ...]
    held: tuple[Stage, ...]
    trained: frozenset[str]
    summed: tuple[str, ...]
    """The parameters whose gradients are summed over the tensor ranks at a step's end."""

    @classmethod
    def of(
        cls, number: int, program: Program, stages: Sequence[Stage], held: Sequence[Stage], trained: frozenset[str] | None = None
    ) -> Capture:
        """`trained` are the parameters that get a gradient, where they are known."""
        summed = dict.fromkeys(name for stage in held for name in summed_later(stage))
        return cls(number, program, tuple(stages), tuple(held), reached(program) if trained is None else trained, tuple(summed))


class Engine:
    """One rank at work. Making one is collective, and so is every call."""

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[nn.Module],
        first: Capture,
        groups: Groups,
        seed: int,
        options: Options,
    ) -> None:
        self._model, self.groups = model, groups
        self._options = options
        for module, stage in zip(modules, first.held, strict=True):
            self._bind(module, stage, borrows=False)
        self.root = root_of(modules, first.program.aliases)
        for stage, root in zip(first.held, self.root.stages, strict=True):
            root.sends = bool(stage.sends)
        if isinstance(self.root, RankRoot) and groups.mesh.dp == 1:
            self.root.tie()
        for stage, root in zip(first.held, self.root.stages, strict=True):
            share_out(root, groups, options.data_parallel, options.schedule, units(root.program, stage))
        self._schedules = Schedules(self.root, groups, options.schedule)
        self.scaler = Scaler(groups) if options.precision == "fp16" else None
        self._seed, self._steps = seed, 0
        self.mark = Mark()
        self._engine: DataParallel | None = None
        self._trained: frozenset[str] = frozenset()
        self.held = shared_weights(first.stages)
        at = partial(place_of, options.schedule, pp=groups.mesh.pp)
        self.shared = SharedWeights(self.held, groups, at)
        self.homes = {name: at(min(held)) for name, held in self.held.items()}

    @property
    def clock(self) -> tuple[int, int]:
        """The seed and the number of the next step: what masks of dropout depend on."""
        return self._seed, self._steps

    @clock.setter
    def clock(self, value: tuple[int, int]) -> None:
        self._seed, self._steps = value

    def adopt(self, modules: Sequence[nn.Module], stages: Sequence[Stage]) -> int:
        """Another capture's modules; returns its number."""
        for module, stage in zip(modules, stages, strict=True):
            self._bind(module, stage, borrows=True)
        numbers = [root.adopt(module) for root, module in zip(self.root.stages, modules, strict=True)]
        return numbers[0]

    def _bind(self, module: nn.Module, stage: Stage, *, borrows: bool) -> None:
        """Give an emitted module its process groups, let it run through the backend, and its layers again in backward, if they are to."""
        collectives.bind(module, self.groups.names)
        compile_module(module, stage, self._options, self.groups.mesh)
        draws = self._options.dropout == "fast"
        recompute(module, stage.layers, self._options.recompute, borrows=borrows, draws=draws)

    def _prepare(self, capture: Capture, *, gradients: bool) -> DataParallel:
        """The module to call. With gradients, it averages them over dp; that is set up once, for the parameters trained then."""
        settle(self.root)  # a forward without backward may have left gathered what an optimizer has changed since
        for stage, root in zip(capture.held, self.root.stages, strict=True):
            root.capture = capture.number
            root.begin(stage.updates, stage.inputs)
        follow(self.root)
        if shared_weights(capture.stages) != self.held:
            what = "other weights are shared by several stages than in the first capture of the model"
            raise Refused(what, fix="compile a second object for these inputs")
        if not gradients:
            return self.root
        if self._engine is None:
            self._engine, self._trained = distribute(self.root, self.groups, capture.trained), capture.trained
        if changed := capture.trained ^ self._trained:
            what = f"trained by one capture of the model and not by another: {', '.join(sorted(changed))}"
            raise Refused(what, fix="compile a second object for these inputs")
        return self._engine

    def train(self, capture: Capture, tensors: Mapping[str, Tensor], microbatches: int) -> Tensor:
        """Forward and backward of the replica's rows; the loss of the whole batch."""
        engine = self._prepare(capture, gradients=True)
        work = self._work(capture, tensors, microbatches)
        scale = self.scaler.scale if self.scaler else None
        with torch.enable_grad(), gradients_aside(self.root) if self.groups.mesh.pp > 1 or self.scaler else nullcontext():
            if self.groups.mesh.pp > 1:
                self._schedules.scale = scale
                with summed_once(self.root, capture.summed, self.groups):
                    losses = self._schedules.train(work)
                    average_rest(self.root, self.groups, capture.trained)
                    join(self.root)
                self.shared.sum_gradients(self.root)
            else:
                assert isinstance(self.root, StageRoot)
                with summed_once(self.root, capture.summed, self.groups), rest_averaged_once(self.root, self.groups, capture.trained):
                    losses = step.accumulate(engine, work, scale)
            check_gradients(self.root, capture.trained)
            if self.scaler:
                self.scaler.unscale(list(self.root.parameters()))
        return step.report(losses, _loss_type(capture.program), self.groups, self._schedules.last)

    def forward(self, capture: Capture, tensors: Mapping[str, Tensor], microbatches: int) -> Any:
        """The output for the replica's rows, in the model's own type; without a pipeline it can be differentiated."""
        return outputs.rebuild(capture.program, self._values(capture, tensors, microbatches))

    def evaluate(self, capture: Capture, tensors: Mapping[str, Tensor], microbatches: int) -> tuple[Tensor, Any]:
        """The loss of the whole batch and the output for the replica's rows, without gradients."""
        with torch.no_grad():
            values = self._values(capture, tensors, microbatches)
            return values[0].detach().clone(), outputs.rebuild(capture.program, values)

    def _values(self, capture: Capture, tensors: Mapping[str, Tensor], microbatches: int) -> tuple[Tensor, ...]:
        """What the program returns, on every stage; the loss is the whole batch's."""
        if self.groups.mesh.pp > 1:
            self._prepare(capture, gradients=False)
            with gradients_aside(self.root):
                chunks = self._schedules.evaluate(self._work(capture, tensors, microbatches))
                settle(self.root)
            values = outputs.to_every_rank(outputs.merge(capture.program, chunks) if chunks else (), self.groups, self._schedules.last)
        else:
            engine = self._prepare(capture, gradients=torch.is_grad_enabled())
            values = engine(**self._work(capture, tensors, 1).inputs)
            if not torch.is_grad_enabled():
                settle(self.root)
        return outputs.whole_loss(capture.program, values, self.groups)

    @contextmanager
    def measure(self) -> Iterator[list[tuple[float, float]]]:
        """Around steps: the seconds that each rank of this pipeline works in them, and that they take. Collective over pp, at its end."""
        found: list[tuple[float, float]] = []
        self._schedules.timer.start()
        try:
            yield found
        finally:
            own = self._schedules.timer.stop()
        found += [own] * self.groups.mesh.pp
        if (pipeline := self.groups.group("pp")) is not None:
            dist.all_gather_object(found, own, group=pipeline)

    def _work(self, capture: Capture, tensors: Mapping[str, Tensor], microbatches: int) -> Work:
        """What the rank's stages take for all micro-batches. Every call is a step for the masks of dropout."""
        program = capture.program
        given: dict[str, Tensor] = dict(tensors)
        dims: dict[str, int | None] = {name: i.batch_dim for name, i in program.inputs.items()}
        for name, value in step.counts(program, self._model, tensors, microbatches, self.groups).items():
            given[name], dims[name] = value, None
        if program.random:
            given[step.RNG_KEY], dims[step.RNG_KEY] = step.rng_keys(self._seed, self._steps, microbatches, self.groups), 0
        self._steps += 1
        wanted = dict.fromkeys(name for stage in capture.held for name in stage.inputs)
        return Work(
            capture.number,
            capture.held,
            microbatches,
            {name: given[name] for name in wanted},
            {name: dims[name] for name in wanted},
            sizes_of(program, tensors, microbatches),
        )


def check_values(module: nn.Module, call: str) -> None:
    """Raise InputError for a model on the meta device: it can be compiled and read, not run."""
    for name, p in module.named_parameters():
        if p.is_meta:
            raise InputError(
                f"parameter {name} is on the meta device: it has no values",
                at=call,
                source=caller(),
                fix="pass weights= to compile: a directory of safetensors, or tpcompile.Initial(seed)",
            )


def _loss_type(program: Program) -> torch.dtype:
    assert program.loss is not None
    kind = program.types[program.loss]
    assert isinstance(kind, TensorType)
    return kind.dtype
