"""Tiny models for the tests of passes, and the passes up to each one, so that a test says only what it is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcompile.driver import costs
from tpcompile.ir import Cone, Local, Plan, Program, Region, Sharded, Stage
from tpcompile.passes.capture import capture
from tpcompile.passes.detect import detect
from tpcompile.passes.divide_loss import divide_loss
from tpcompile.passes.normalize import normalize
from tpcompile.passes.optimize import optimize
from tpcompile.passes.plan import plan
from tpcompile.passes.propagate import propagate
from tpcompile.passes.rewrite import rewrite
from tpcompile.passes.split import split
from tpcompile.text import text
from tpcompile.verify import verify

Value = TypeVar("Value")
Made = TypeVar("Made")


class Block(nn.Module):
    """Attention over stacked queries, keys and values, and an MLP."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        out: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        return x + self.down(F.relu(self.up(x)))  # type: ignore[no-any-return]


class Parallel(Block):
    """Attention and MLP side by side."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attend(y) + self.down(F.relu(self.up(y)))  # type: ignore[no-any-return]


class TwoNorms(Block):
    """Attention and MLP side by side, each behind a norm of its own, whose weights nothing else reads."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__(hidden, heads, inner)
        self.second = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(self.norm(x)) + self.down(torch.relu(self.up(self.second(x))))


class Tiny(nn.Module):
    """Embedding, blocks, a head with the embedding's weight, a mean cross-entropy."""

    def __init__(self, layers: int = 1, hidden: int = 6, heads: int = 3, inner: int = 5, block: type[Block] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, hidden)
        self.layers = nn.ModuleList(block(hidden, heads, inner) for _ in range(layers))
        self.head = nn.Linear(hidden, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def tiny(**sizes: Any) -> tuple[Program, dict[str, Tensor]]:
    """The tiny model up to divide_loss, and its batch."""
    batch = {"ids": torch.tensor([[0, 1, 4], [2, 2, 3]]), "labels": torch.tensor([[1, 4, 2], [2, 3, -100]])}
    return captured(Tiny(**sizes), batch), batch


def captured(model: nn.Module, batch: Mapping[str, Any], *, loss: Callable[..., Tensor] | None = None) -> Program:
    """A model up to divide_loss, in float64."""
    torch.manual_seed(0)
    return verify(divide_loss(verify(normalize(verify(capture(model.double(), batch, loss=loss))))))


class Rows(nn.Module):
    """A model of one input of [rows, 4, size], for the tests of regions; the loss is the sum of what `body` makes."""

    body: Callable[[Tensor], Tensor]

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).sum()


def program_of(model: Rows, size: int) -> Program:
    return captured(model, {"x": torch.randn(2, 4, size, dtype=torch.float64)})


def planned(program: Program, parts: int, *, vocab_parallel: bool = True, **overrides: str) -> Plan:
    return plan(program, detect(program), "tp", parts, overrides, vocab_parallel=vocab_parallel)


def sharded(program: Program, parts: int, **options: Any) -> Sharded:
    return verify(propagate(program, planned(program, parts, **options), "tp", parts))


def local(program: Program, parts: int, **options: Any) -> Local:
    return verify(rewrite(sharded(program, parts, **options)))


def stages(program: Program, batch: Mapping[str, Any], parts: int, count: int) -> tuple[Stage, ...]:
    made = split(verify(optimize(local(program, parts))), count, costs(program, batch))
    return tuple(verify(stage) for stage in made)


def before_and_after(work: Callable[[Value], Made], value: Value) -> str:
    """The text of what a pass takes and of what it makes. It leaves what it takes as it was."""
    before = text(value)
    made = work(value)
    assert text(value) == before, "the pass changed its input"
    return f"before\n{before}\n\nafter\n{text(made)}"


def region(found: Plan, kind: str) -> Region:
    (only,) = (region for region in found.regions if region.kind == kind)
    return only


def reasons(found: Plan) -> dict[str, str]:
    """Why linears are left whole, by name."""
    return {left.name: left.reason for left in found.whole}


def cone(cones: tuple[Cone, ...], seed: str) -> Cone:
    (only,) = (cone for cone in cones if cone.seed == seed)
    return only
