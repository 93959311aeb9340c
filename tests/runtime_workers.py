"""What the runtime's tests run in real processes. Everything is float64, and compared with the untouched model on one device."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import handmade
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.mesh import Mesh
from tpcompile.runtime.compiled import Compiled
from tpcompile.runtime.data_parallel import distribute, local
from tpcompile.runtime.groups import connect
from tpcompile.runtime.stage import StageRoot

Grads = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    mesh: str
    schedule: str = "1f1b"
    microbatches: int = 2
    static: bool = False
    split: bool = True

    def __str__(self) -> str:
        return f"{self.mesh} {self.schedule} m={self.microbatches}" + ("" if self.split else " own rows")


def make(case: Case, example: Any = None, model: handmade.Tied | None = None) -> Compiled:
    settings = {"schedule": case.schedule, "microbatches": case.microbatches, "split_batches": case.split, "static": case.static}
    return handmade.compiled(model or handmade.Tied(), case.mesh, example, **settings)


def gradients(compiled: Compiled) -> Grads:
    return {name: local(p.grad).clone() for name, p in compiled.named_parameters() if p.grad is not None}


def own(case: Case, compiled: Compiled, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole batch, or the replica's rows where every rank passes its own."""
    if case.split:
        return batch
    replicas, replica = compiled.mesh.dp, compiled.mesh.coordinates(dist.get_rank())["dp"]
    return {name: tensor.chunk(replicas)[replica] for name, tensor in batch.items()}


def one_step(case: Case) -> tuple[float, Grads]:
    compiled = make(case, handmade.batch())
    loss = compiled.train_step(**own(case, compiled, handmade.batch()))
    assert not loss.requires_grad
    return loss.item(), gradients(compiled)


def several_steps(case: Case) -> tuple[float, Grads]:
    """Three batches of two lengths before one optimizer step: gradients add up."""
    compiled = make(case, handmade.batch())
    losses = [compiled.train_step(**handmade.batch(length=length)).item() for length in (5, 7, 5)]
    return sum(losses), gradients(compiled)


def frozen(case: Case) -> tuple[float, Grads]:
    """A parameter that is not trained."""
    model = handmade.Tied()
    model.mix.bias.requires_grad_(False)
    compiled = make(case, handmade.batch(), model)
    loss = compiled.train_step(**handmade.batch())
    return loss.item(), gradients(compiled)


def own_loss() -> list[Tensor]:
    """A loss of the user's own, from an output that the model's loss does not reach."""
    groups = connect(Mesh(dp=2), None, "")

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return (self.used * x).sum(), self.other * x

    root = StageRoot(Two(), {})
    engine = distribute(root, groups, frozenset({"used"}))
    for _ in range(2):
        loss, other = engine(torch.tensor([1.0, 3.0]) * (1 + dist.get_rank()))
        (loss + 2 * other.sum()).backward()
    engine(torch.ones(2))[0].backward()
    return [p.grad for _, p in root.named_own_parameters() if p.grad is not None]


def order(case: Case) -> str:
    """The order in which a stage ran its micro-batches."""
    compiled = make(case, handmade.batch())
    events: list[str] = []

    def note(kind: str) -> None:
        events.append(f"{kind}{sum(event[0] == kind for event in events)}")

    compiled.module.register_forward_hook(lambda *_: note("F"))
    next(iter(compiled.parameters())).register_hook(lambda _: note("B"))
    compiled.train_step(**handmade.batch())
    return " ".join(events)


def training(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """AdamW over three batches of different lengths, with an evaluation between gradients and optimizer."""
    compiled = make(case, handmade.batch())
    optimizer = compiled.optimizer(torch.optim.AdamW, lr=1e-2)
    losses = []
    for length in (5, 7, 5):
        losses.append(compiled.train_step(**handmade.batch(length=length)).item())
        with torch.no_grad():
            losses.append(compiled(**handmade.batch(length=length))["loss"].item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: local(p.detach()).clone() for name, p in compiled.named_parameters()}


def calls(case: Case) -> tuple[float, Tensor, Grads]:
    """The compiled model as an ordinary module."""
    compiled = make(case)
    output = compiled(**handmade.batch())
    if case.mesh.startswith("dp") and "pp" not in case.mesh:
        output["loss"].backward()
    return output["loss"].item(), output["logits"].detach(), gradients(compiled)


def device_mesh() -> tuple[float, dict[str, int]]:
    """The user's own DeviceMesh, pipeline outermost."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    compiled = handmade.compiled(handmade.Tied(), mesh, handmade.batch())
    loss = compiled.train_step(**handmade.batch()).item()
    return loss, compiled.program().coordinates


def other_seed() -> str:
    """Rank 1 has other weights, and one rank's batch is shuffled."""
    model = handmade.Tied()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.mix.weight += 1e-9
    try:
        make(Case("dp=2"), handmade.batch(), model).train_step(**handmade.batch())
    except Exception as error:
        return str(error)
    return ""


def other_batch(length: int, split: bool) -> str:
    case = Case("pp=2", split=split)
    compiled = make(case, handmade.batch())
    try:
        compiled.train_step(**handmade.batch(seed=dist.get_rank(), length=length + (length - 5) * dist.get_rank()))
    except Exception as error:
        return str(error)
    return ""


def wrong_world(mesh: str) -> str:
    try:
        make(Case(mesh), handmade.batch()).train_step(**handmade.batch())
    except Exception as error:
        return str(error)
    return ""


def place(word: str) -> tuple[str, int, int, int, str | None]:
    return word, dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


def fail(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("a bad day")
    dist.barrier()


def vanish(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def big(size: int) -> Tensor:
    return torch.full((size,), float(dist.get_rank()))
