"""What a real step asks of the process group, beside the timeline that the compiler derives from the graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from parity_models import made

import tpcompile
from tpcompile.collectives.table import RANKS
from tpcompile.cost import evaluate
from tpcompile.driver import Compilation
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

    def __str__(self) -> str:
        mode = (f" {self.data_parallel}" if self.data_parallel != "ddp" else "") + " again" * (self.recompute == "full")
        return f"{self.model} {self.mesh} {self.schedule}" + (f" m={self.microbatches}" if self.microbatches else "") + mode


@dataclass(frozen=True)
class Traffic:
    """What one rank of the mesh should say in a step, and what it said."""

    rank: int
    expected: list[Call]
    ran: list[Call]


def step(case: Case) -> Traffic:
    """The third step: what torch's engines set up in the first two is done."""
    model, batch, loss = made(case.model)
    settings: dict[str, Any] = {"microbatches": case.microbatches, "data_parallel": case.data_parallel, "recompute": case.recompute}
    compiled = tpcompile.compile(model, case.mesh, batch, loss=loss, schedule=case.schedule, **settings)
    for _ in range(2):
        compiled.train_step(**batch)
    calls, rank = recorded.calls(), dist.get_rank()
    calls.clear()
    compiled.train_step(**batch)
    return Traffic(rank, expected(compiled.compilation, rank), list(calls))


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
    torch.manual_seed(0)
    return [step(case) for case in cases]
