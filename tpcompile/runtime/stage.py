"""The module that holds this rank's parameters, and runs whichever capture is asked for with them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call

from tpcompile.errors import Refused

INPUT = "input."
"""Stands before the name of an input that comes through a schedule."""


class StageRoot(nn.Module):
    """One pipeline stage. The first capture's module owns the parameters; later captures borrow them by name at every call.

    Data-parallel engines go around this module, once: they may replace its parameters, and later captures still find them.
    `aliases` maps the name of a tied twin to the name that counts.

    A forward may put new tensors in the place of buffers. The captures share them; and every micro-batch of a step finds them as they
    were when the step began, as the one forward of one device does.
    """

    def __init__(self, module: nn.Module, aliases: Mapping[str, str]) -> None:
        super().__init__()
        self.program = module
        self._begun: dict[str, Tensor] = {}  # the buffers that this step's forward updates, as they were before
        self._updated: dict[str, Tensor] = {}  # those that any step has updated, as they are now
        self.capture = 0
        self.inputs: frozenset[str] | None = None  # those of the rank's inputs that this stage takes; None: all
        self.sends = False  # whether the outputs cross to another stage, which takes them from contiguous memory
        self.loss_only = False  # while a schedule runs: it handles nothing else of the last stage
        self.collected: list[tuple[Tensor, ...]] | None = None  # the last stage's outputs, while somebody wants them
        self.averages = True  # whether the next backward averages over replicas what torch's engine leaves out
        self.gathered: tuple[Any, ...] = ()  # what torch's engine gathers once in a step, first the root; in a tuple, as below
        self._aliases = dict(aliases)
        self._others: list[tuple[nn.Module]] = []  # in tuples, lest they count as submodules

    @property
    def stages(self) -> tuple[StageRoot, ...]:
        return (self,)

    def named_own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their names in the user's model, in the form that optimizers know, whatever is gathered just now."""
        held = self._held()
        return ((self._aliases.get(name, name), held.get(id(p), p)) for name, p in self.program.named_parameters())

    def _held(self) -> dict[int, nn.Parameter]:
        """What torch's engine holds in place of the parameters that it has gathered, by these."""
        if not isinstance(self, FSDPModule):  # the root is one where anything below it is
            return {}
        states = (module._get_fsdp_state() for module in self.modules() if isinstance(module, FSDPModule))
        every = (p for state in states for group in state._fsdp_param_groups for p in group.fsdp_params)
        return {id(p._unsharded_param): p.sharded_param for p in every if hasattr(p, "_unsharded_param")}

    def named_state(self, saved: Container[str]) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this stage that are state: those named in `saved`, and those that forward has updated."""
        return ((name, value) for name, value in self.program.named_buffers() if name in saved or name in self._updated)

    def restore(self, name: str, value: Tensor) -> None:
        """Another value for a buffer, in all captures, those made later too."""
        self._updated[name] = value
        for module in (self.program, *(other for (other,) in self._others)):
            self._put(module, name, value)

    def begin(self, updates: Sequence[str], inputs: Sequence[str] | None = None) -> None:
        """A step of a capture begins, whose forward takes these inputs, of those that it is given, and gives these buffers new values."""
        self.inputs = None if inputs is None else frozenset(inputs)
        self._begun = {name: self.running.get_buffer(name) for name in updates}

    @property
    def running(self) -> nn.Module:
        """The module of the capture that runs."""
        if self.capture == 0:
            return self.program
        (module,) = self._others[self.capture - 1]
        return module

    def adopt(self, module: nn.Module) -> int:
        """Take in another capture of the same stage; returns its number. Raises Refused if it holds other parameters."""
        own = {name: list(p.shape) for name, p in self.named_own_parameters()}
        for name, p in module.named_parameters():
            before = own.get(self._aliases.get(name, name))
            if before != list(p.shape):
                raise Refused(
                    f"parameter {name} has local shape {list(p.shape)} here, and "
                    + (f"{before} in the first capture of the model" if before else "was not used in the first capture of the model"),
                    fix="compile with example_inputs that use it, or compile a second object for these inputs",
                )
        _drop_values(module)
        for name, value in self._updated.items():
            self._put(module, name, value)
        self._others.append((module,))
        return len(self._others)

    def forward(self, *received: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        named = {name.removeprefix(INPUT): value for name, value in inputs.items()}
        outputs: tuple[Tensor, ...] = self._run(*received, **{n: v for n, v in named.items() if self.inputs is None or n in self.inputs})
        if self.collected is not None:
            self.collected.append(tuple(output.detach() for output in outputs))
        if self.loss_only:
            return tuple(map(_own, outputs[:1]))
        return tuple(_own(output.contiguous()) for output in outputs) if self.sends else outputs

    def _run(self, *received: Tensor, **inputs: Tensor) -> Any:
        module = self.running
        for name, value in self._begun.items():
            self._put(module, name, value)
        if module is self.program:
            made = module(*received, **inputs)
        else:
            for part in self.program.modules():
                if isinstance(part, FSDPModule):  # this capture's own modules gather nothing
                    part.unshard()
            own = {self._aliases.get(name, name): p for name, p in self.program.named_parameters()}
            borrowed: dict[str, Tensor] = {name: own[self._aliases.get(name, name)] for name, _ in module.named_parameters()}
            made = functional_call(module, borrowed, received, inputs)
        self._share(module)
        return made

    def _share(self, module: nn.Module) -> None:
        """Let all captures see the buffers that one has updated."""
        for name in self._begun:
            self._updated[name] = value = module.get_buffer(name)
            for other in (self.program, *(other for (other,) in self._others)):
                self._put(other, name, value)

    def _put(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Another tensor in a buffer's place, under all of its names, where a capture's module has it."""
        for held in (name, *(twin for twin, first in self._aliases.items() if first == name)):
            owner, _, own = held.rpartition(".")
            place = dict(module.named_modules()).get(owner)
            if place is not None and own in place._buffers:
                place._buffers[own] = value


class RankRoot(nn.Module):
    """All stages of a rank that holds several, in order. It is never called: a schedule calls the stages.

    A weight that several of them hold counts once, as the first one's.
    """

    def __init__(self, stages: Sequence[StageRoot]) -> None:
        super().__init__()
        self._stages = nn.ModuleList(stages)

    @property
    def stages(self) -> tuple[StageRoot, ...]:
        return tuple(stage for stage in self._stages if isinstance(stage, StageRoot))

    def named_own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their names in the user's model, each name once."""
        seen = set[str]()
        for stage in self.stages:
            for name, p in stage.named_own_parameters():
                if name not in seen:
                    seen.add(name)
                    yield name, p

    def named_state(self, saved: Container[str]) -> Iterator[tuple[str, Tensor]]:
        """The buffers of all stages that are state, each name once."""
        seen = set[str]()
        for stage in self.stages:
            for name, value in stage.named_state(saved):
                if name not in seen:
                    seen.add(name)
                    yield name, value

    def restore(self, name: str, value: Tensor) -> None:
        """Another value for a buffer, in all stages that hold it."""
        for stage in self.stages:
            if name in dict(stage.program.named_buffers()):
                stage.restore(name, value)

    def tie(self) -> None:
        """Let all stages of this rank hold the same tensor for what several of them use."""
        first = dict(self.named_own_parameters())
        for stage in self.stages:
            others = {p: first[name] for name, p in stage.named_own_parameters() if first[name] is not p}
            for part in stage.program.modules():
                for name, p in part.named_parameters(recurse=False, remove_duplicate=False):
                    if p in others:
                        part.register_parameter(name, others[p])

    def twins(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """The tensors that later stages hold for what is an earlier one's: (its own, theirs). None once they are tied."""
        first = dict(self.named_own_parameters())
        for stage in self.stages:
            for name, p in stage.named_own_parameters():
                if p is not first[name]:
                    yield first[name], p


Root = StageRoot | RankRoot
"""What a rank holds."""


def root_of(modules: Sequence[nn.Module], aliases: Mapping[str, str]) -> Root:
    """The root of a rank with these stages."""
    made = [StageRoot(module, aliases) for module in modules]
    return made[0] if len(made) == 1 else RankRoot(made)


class _Handed(torch.autograd.Function):
    """The same values as a tensor of their own, which a schedule may detach in place: a view, or what backward needs again, it may not."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _own(value: Tensor) -> Tensor:
    made: Tensor = _Handed.apply(value) if value.requires_grad else value  # type: ignore[no-untyped-call]
    return made


def _drop_values(module: nn.Module) -> None:
    """Free the values of a module's parameters; what is tied stays tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, p in part.named_parameters(recurse=False, remove_duplicate=False):
            made.setdefault(p, nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad))
            part.register_parameter(name, made[p])
