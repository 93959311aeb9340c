"""The module that holds this rank's parameters, and runs whichever capture is asked for with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
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
        self.sends = False  # whether the outputs cross to another stage, which takes them from contiguous memory
        self.loss_only = False  # while a schedule runs: it handles nothing else of the last stage
        self.collected: list[tuple[Tensor, ...]] | None = None  # the last stage's outputs, while somebody wants them
        self._aliases = dict(aliases)
        self._others: list[tuple[nn.Module]] = []  # in tuples, lest they count as submodules

    def named_own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their names in the user's model."""
        return ((self._aliases.get(name, name), p) for name, p in self.program.named_parameters())

    def begin(self, updates: Sequence[str]) -> None:
        """A step of a capture begins, whose forward gives these buffers new values."""
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
        outputs: tuple[Tensor, ...] = self._run(*received, **{name.removeprefix(INPUT): value for name, value in inputs.items()})
        if self.collected is not None:
            self.collected.append(tuple(output.detach() for output in outputs))
        if self.loss_only:
            return outputs[:1]
        return tuple(output.contiguous() for output in outputs) if self.sends else outputs

    def _run(self, *received: Tensor, **inputs: Tensor) -> Any:
        module = self.running
        for name, value in self._begun.items():
            self._put(module, name, value)
        if module is self.program:
            made = module(*received, **inputs)
        else:
            own = dict(self.named_own_parameters())
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


def _drop_values(module: nn.Module) -> None:
    """Free the values of a module's parameters; what is tied stays tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, p in part.named_parameters(recurse=False, remove_duplicate=False):
            made.setdefault(p, nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad))
            part.register_parameter(name, made[p])
