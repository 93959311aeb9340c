"""What the tests of schedules with several stages on a rank run in real processes, beside the untouched model in every process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import captured_once
import torch
from parity_models import made as parity
from state_models import made as stateful
from torch import Tensor, nn
from torch.nn import functional as F
from training_workers import VOCABULARY, Batch, batch, plain

import tpcompile
from tpcompile.runtime.compiled import Compiled

Model = Callable[[], tuple[nn.Module, Callable[[int], Batch]]]


class Reusing(nn.Module):
    """Weights whose gradients a halved backward would count twice or lose; the first table is also the head.

    With `scaled` one vector scales every block, and stages have two blocks. Else a second table is looked up in the middle, and what it
    gives crosses to the stages behind without meeting what its own stage receives.
    """

    def __init__(self, scaled: bool, hidden: int = 12, blocks: int = 8) -> None:
        super().__init__()
        self.first = nn.Embedding(VOCABULARY, hidden)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, hidden)) if scaled else None
        self.second = None if scaled else nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(hidden, 31), "down": nn.Linear(31, hidden)}) for _ in range(blocks))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, side = self.first(input_ids), 0.0
        for index, block in enumerate(self.blocks):
            if index == 2 and self.second is not None:
                side = self.second(input_ids)
            y = block["down"](F.gelu(block["up"](x)))
            x = x + (y if self.scale is None else self.scale * y)
            x = x if index < 5 else x + side
        logits = F.linear(x, self.first.weight)
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def scaled() -> tuple[nn.Module, Callable[[int], Batch]]:
    torch.manual_seed(0)
    return Reusing(True).double(), lambda seed: batch(seed=seed, length=7 + seed)


def sided() -> tuple[nn.Module, Callable[[int], Batch]]:
    torch.manual_seed(0)
    return Reusing(False).double(), lambda seed: batch(seed=seed, length=7 + seed)


def frozen() -> tuple[nn.Module, Callable[[int], Batch]]:
    model, rows, _ = parity("frozen")
    return model, lambda seed: {name: value.roll(seed, 0) for name, value in rows.items()}


def counting() -> tuple[nn.Module, Callable[[int], Batch]]:
    return stateful("counting")[0], lambda seed: stateful("counting", seed)[1]


@dataclass(frozen=True)
class Case:
    make: Model
    mesh: str
    schedule: str
    microbatches: int | None = None

    def __str__(self) -> str:
        return f"{self.make.__name__} {self.mesh} {self.schedule}"


@dataclass
class Found:
    """The worst differences from one device on a rank: gradients as parts of the model's largest, all else as they are."""

    loss: float = 0.0
    gradient: float = 0.0
    evaluation: float = 0.0  # of all outputs, in eval mode, between two steps of training
    buffers: float = 0.0
    names: frozenset[str] = frozenset()
    reasons: list[str] = field(default_factory=list)  # why stages do not halve their backward
    explained: str = ""


def trained(case: Case) -> Found:
    """Two steps of SGD, and before the second a forward in eval mode on other rows."""
    (model, rows), (alone, _) = case.make(), case.make()
    compiled = tpcompile.compile(model, case.mesh, rows(0), schedule=case.schedule, microbatches=case.microbatches)
    steppers = [compiled.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1)]
    found = Found(names=frozenset(name for name, _ in compiled.named_parameters()))
    found.reasons = [stage.unhalved for stage in compiled.compilation.stages]
    for seed in range(2):
        with compiled.measure():
            loss = compiled.train_step(**rows(seed))
        expected = named(alone(**rows(seed)))["loss"]
        expected.backward()
        found.loss = max(found.loss, abs(loss.item() - expected.item()))
        found.gradient = max(found.gradient, gradient_error(compiled, alone))
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        if seed == 0:
            found.evaluation = evaluated(compiled, model, alone, rows(2))
    found.buffers = buffer_error(compiled, alone)
    found.explained = compiled.explain()
    return found


def evaluated(compiled: Compiled, model: nn.Module, alone: nn.Module, rows: Batch) -> float:
    for either in (model, alone):
        either.eval()
    with torch.no_grad():
        made, expected = named(compiled(**rows)), named(alone(**rows))
    for either in (model, alone):
        either.train()
    replicas, replica = compiled.mesh.dp, compiled.program().coordinates["dp"]
    own = {name: value.chunk(replicas)[replica] if value.ndim else value for name, value in expected.items()}
    return max((made[name] - value).abs().max().item() for name, value in own.items())


def named(output: Any) -> dict[str, Tensor]:
    """A model's output by name; a scalar is the loss."""
    return {"loss": output} if isinstance(output, Tensor) else output


def gradient_error(compiled: Compiled, alone: nn.Module) -> float:
    pieces, whole = compiled.program().parameters, dict(alone.named_parameters())
    scale = max(p.grad.abs().max().item() for p in whole.values() if p.grad is not None)
    errors = [0.0]
    for name, p in compiled.named_parameters():
        expected = whole[name].grad
        assert (p.grad is None) == (expected is None), name
        if p.grad is not None and expected is not None:
            errors.append((plain(p.grad) - pieces[name].of(expected)).abs().max().item())
    return max(errors) / scale


def buffer_error(compiled: Compiled, alone: nn.Module) -> float:
    theirs: Mapping[str, Any] = dict(alone.named_buffers(remove_duplicate=False))
    held = (item for module in compiled.modules for item in module.named_buffers(remove_duplicate=False))
    return max([0.0, *((value - theirs[name]).abs().max().item() for name, value in held if name in theirs)])


def run(cases: tuple[Case, ...]) -> list[Found]:
    """Several cases of one mesh, in the same processes."""
    captured_once.begin()
    return [trained(case) for case in cases]
