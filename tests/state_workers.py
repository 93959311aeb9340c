"""What the tests of buffers run in real processes: steps of a compiled model and of the untouched one, and the buffers of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import captured_once
import torch
from state_models import made
from torch import Tensor, nn

import tpcompile
from tpcompile.runtime.compiled import Compiled

STEPS = 2


@dataclass(frozen=True)
class Case:
    name: str
    mesh: str
    microbatches: int = 1
    schedule: str = "gpipe"

    def __str__(self) -> str:
        return f"{self.name} {self.mesh} m={self.microbatches}"


@dataclass
class Found:
    """The worst differences from one device on a rank, and the buffers that its stage has."""

    loss: float = 0.0
    gradient: float = 0.0
    evaluation: float = 0.0  # of the loss in eval mode, after the steps
    buffers: dict[str, float] = field(default_factory=dict)
    place: Mapping[str, int] = field(default_factory=dict)


def trained(case: Case) -> Found:
    """Two steps of SGD, then a forward in eval mode, which another capture serves."""
    (model, _), (alone, _) = made(case.name), made(case.name)
    compiled = tpcompile.compile(model, case.mesh, made(case.name)[1], microbatches=case.microbatches, schedule=case.schedule)
    steppers = [compiled.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1)]
    found = Found(place=compiled.program().coordinates)
    for seed in range(STEPS):
        batch = made(case.name, seed)[1]
        loss, expected = compiled.train_step(**batch), alone(**batch)
        expected.backward()
        found.loss = max(found.loss, abs(loss.item() - expected.item()))
        found.gradient = max(found.gradient, _gradient_error(compiled, alone))
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
    found.buffers = compared(compiled.module, alone)
    model.eval()
    alone.eval()
    batch = made(case.name, 3)[1]
    with torch.no_grad():
        loss, expected = compiled(**batch), alone(**batch)
    found.evaluation = abs(loss.item() - expected.item())
    found.buffers = {name: max(error, found.buffers[name]) for name, error in compared(compiled.module, alone).items()}
    return found


def compared(module: nn.Module, alone: nn.Module) -> dict[str, float]:
    theirs = dict(alone.named_buffers(remove_duplicate=False))
    ours = {name: value for name, value in module.named_buffers(remove_duplicate=False) if name in theirs}
    return {name: (value - theirs[name]).abs().max().item() for name, value in ours.items()}


def _gradient_error(compiled: Compiled, alone: nn.Module) -> float:
    pieces, whole = compiled.program().parameters, dict(alone.named_parameters())
    errors: list[Tensor] = [
        (_plain(p.grad) - pieces[name].of(whole[name].grad)).abs().max()  # type: ignore[arg-type]
        for name, p in compiled.named_parameters()
        if p.numel()
    ]
    return max(error.item() for error in errors)


def _plain(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def run(cases: tuple[tuple[Callable[[Case], Found], Case], ...]) -> list[Found]:
    captured_once.begin()
    return [work(case) for work, case in cases]
