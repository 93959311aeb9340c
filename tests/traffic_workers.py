"""What a real step asks of the process group, beside the timeline that the compiler derives from the graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import captured_once
import parity_models
import torch
import torch.distributed as dist
from sockets import sent

import tpcompile
from tpcompile.collectives import RING
from tpcompile.collectives.table import RANKS
from tpcompile.cost import evaluate
from tpcompile.driver import Compilation
from tpcompile.inspect.load import Load
from tpcompile.mesh import Mesh
from tpcompile.messages import Sent
from tpcompile.runtime import recorded
from tpcompile.runtime.recorded import Call
from tpcompile.timeline import Posted


@dataclass(frozen=True)
class Case:
    model: str  # of parity_models
    mesh: str
    schedule: str = "1f1b"
    microbatches: int | None = None
    data_parallel: str = "ddp"
    recompute: str = "none"
    sequence_parallel: bool = True
    vocab_parallel: bool = True

    def __str__(self) -> str:
        mode = (f" {self.data_parallel}" if self.data_parallel != "ddp" else "") + " again" * (self.recompute == "full")
        mode += " whole stream" * (not self.sequence_parallel) + " whole vocabulary" * (not self.vocab_parallel)
        return f"{self.model} {self.mesh} {self.schedule}" + (f" m={self.microbatches}" if self.microbatches else "") + mode

    @property
    def settings(self) -> dict[str, Any]:
        """What `tpcompile.compile` is told besides the model, the mesh and the batch."""
        own = ("schedule", "microbatches", "data_parallel", "recompute", "sequence_parallel", "vocab_parallel")
        return {name: getattr(self, name) for name in own}


@dataclass(frozen=True)
class Total:
    """All calls of one kind over one group that a rank makes in a step."""

    count: int = 0
    bytes: int = 0
    ring: int = 0  # sent by the rank, where the group runs a ring

    def __add__(self, other: Total) -> Total:
        return Total(self.count + other.count, self.bytes + other.bytes, self.ring + other.ring)


Totals = dict[tuple[str, str, str], Total]
"""By the axis that the group lies along, the call, and what comes after the step of training, "" for what is in it."""
AFTER = ("clipping", "update")


@dataclass(frozen=True)
class Traffic:
    """What one rank of the mesh should say in a step, and what it said."""

    mesh: Mesh
    rank: int
    expected: list[Call]
    ran: list[Call]
    clipped: list[Call]  # by clipping the norm of gradients after it
    updated: list[Call]  # by the optimizer's step after that
    stated: Totals  # by `explain()`, of the first tensor rank at this place along the pipeline
    wire: int = 0  # bytes that the process has sent in the step over TCP


def step(case: Case) -> Traffic:
    """The third step: what torch's engines set up in the first two is done."""
    model, batch, loss = parity_models.made(case.model)
    compiled = tpcompile.compile(model, case.mesh, batch, loss=loss, **case.settings)
    optimizer = compiled.optimizer(torch.optim.SGD, lr=1e-3)
    for _ in range(2):
        compiled.train_step(**batch)
    calls, rank = recorded.calls(), dist.get_rank()
    calls.clear()
    dist.barrier()
    before = sent()
    compiled.train_step(**batch)
    wire, ran = sent() - before, calls[1:]
    calls.clear()
    compiled.clip_grad_norm_(1.0)
    clipped = list(calls)
    calls.clear()
    optimizer.step()
    made = compiled.compilation
    return Traffic(made.mesh, rank, expected(made, rank), ran, clipped, list(calls), stated(made, rank), wire)


def stated(compilation: Compilation, rank: int) -> Totals:
    """What `explain()` says of the calls of this rank's stages, were it the first tensor rank; receives stand where they are sent."""
    mesh, found, load = compilation.mesh, Totals(), Load(compilation)
    for stage in compilation.step.stages_at(mesh.coordinates(rank)["pp"]):
        for one, *numbers in load.calls[stage.index]:
            axis = axis_of(mesh, rank, range(mesh.size)) if one.axis == "all" else one.axis
            key = axis, one.call, one.direction if one.direction in AFTER else ""
            found[key] = found.get(key, Total()) + Total(*numbers)
    return found


def totals(one: Traffic) -> Totals:
    """The same of what a rank has said, but what it received."""
    found = Totals()
    for part, calls in (("", one.ran), ("clipping", one.clipped), ("update", one.updated)):
        for call in calls:
            if call.call != "recv":
                key = axis_of(one.mesh, one.rank, call.ranks), call.call, part
                ring = int(call.bytes * RING[call.call](len(call.ranks))) if call.call in RING else 0
                found[key] = found.get(key, Total()) + Total(1, call.bytes, ring)
    return found


def axis_of(mesh: Mesh, rank: int, ranks: Iterable[int]) -> str:
    """The axis that a group lies along; of a mesh with one axis all ranks do."""
    place = mesh.coordinates(rank)
    return next((axis for axis in ("tp", "pp", "dp") if set(ranks) <= set(mesh.group(axis, place))), "all")


def expected(compilation: Compilation, rank: int) -> list[Call]:
    """A rank's timeline as calls of process groups."""
    place = compilation.mesh.coordinates(rank)
    found = list[Call]()
    for event in compilation.step.timeline(place["pp"], place["tp"]):
        match event:
            case Sent():
                found.append(call(compilation, event, rank))
            case Posted(transfers):
                found += [call(compilation, sent, rank) for sent in transfers]
    return found


def call(compilation: Compilation, sent: Sent, rank: int) -> Call:
    mesh = compilation.mesh
    group = members(mesh, sent, rank)
    elements = evaluate(sent.elements, {**compilation.sizes, RANKS: mesh.tp})
    peer = sent.places[0] if sent.call in ("send", "recv") else None
    return Call(group, sent.call, sent.dtype, elements, peer)


def members(mesh: Mesh, sent: Sent, rank: int) -> tuple[int, ...]:
    """The ranks of the group that a call goes through."""
    place = mesh.coordinates(rank)
    if sent.axis == "all":
        return tuple(range(mesh.size))
    if sent.axis == "pp" and sent.call == "all_reduce":
        return tuple(mesh.rank({**place, "pp": other}) for other in sent.places)
    return mesh.group(sent.axis, place)


def steps(cases: tuple[Case, ...]) -> list[Traffic]:
    """Several cases of one mesh, in the same processes."""
    captured_once.begin()
    torch.manual_seed(0)
    return [step(case) for case in cases]
