"""The ways to run a training step that benchmarks/step.py compares: each makes of the same model a function that runs one.

A step is forward and backward of a batch; gradients add up in `.grad`, and are dropped between steps.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel

import tpcompile

Batch = Mapping[str, Tensor]
Step = Callable[[], Any]
COLUMN, ROW = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


class Enter(torch.autograd.Function):
    """Identity; the gradient is summed over the ranks (Megatron-LM's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    """The sum over the ranks; the gradient is handed on (Megatron-LM's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Column(nn.Module):
    """A rank's columns of a linear, of a value that has entered."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(dist.get_world_size())[dist.get_rank()].clone())

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Row(nn.Module):
    """A rank's rows of a linear, summed."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(dist.get_world_size(), 1)[dist.get_rank()].clone())

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Sum.apply(linear(x, self.weight))
        return made


class Entering(nn.Module):
    """A norm whose result enters a cut block."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Enter.apply(self.norm(x))
        return made


def by_hand(model: nn.Module, batch: Batch, mesh: str) -> Step:
    """Column and row modules in place of a block's linears, and one all-reduce where Megatron-LM has one."""
    model = copy.deepcopy(model)
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        kind: Any = Column if name in COLUMN else Row if name in ROW else Entering if name.endswith("layernorm") else None
        if kind is not None:
            setattr(model.get_submodule(parent), name, kind(module))
    return partial(forward_backward, model, batch)


def by_dtensor(model: nn.Module, batch: Batch, mesh: str) -> Step:
    """torch's parallelize_module, with a plan by hand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = copy.deepcopy(model)
    devices = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for path, module in list(model.named_modules()):
        if (name := path.rpartition(".")[2]) in COLUMN + ROW:
            parallelize_module(module, devices, ColwiseParallel() if name in COLUMN else RowwiseParallel())
    return partial(forward_backward, model, batch)


def by_tp_plan(model: nn.Module, batch: Batch, mesh: str) -> Step:
    """transformers' own plan for the model."""
    saved: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    if dist.get_rank() == 0:
        model.save_pretrained(saved[0])  # type: ignore[operator]
    dist.barrier()
    planned = type(model).from_pretrained(Path(saved[0]), tp_plan="auto").train()  # type: ignore[attr-defined]
    return partial(forward_backward, planned, batch)


def by_replicas(model: nn.Module, batch: Batch, mesh: str) -> Step:
    """DistributedDataParallel of the model, each rank with its own rows."""
    rows = {name: value.chunk(dist.get_world_size())[dist.get_rank()] for name, value in batch.items()}
    return partial(forward_backward, DistributedDataParallel(copy.deepcopy(model)), rows)


class Part(nn.Module):
    """Half of a decoder, cut by hand: embedding and first layers, or the last layers, norm and head."""

    def __init__(self, model: Any, place: int, places: int) -> None:
        super().__init__()
        each = len(model.model.layers) // places
        self.tokens = model.model.embed_tokens if place == 0 else None
        self.rotary = model.model.rotary_emb
        self.layers = nn.ModuleList(model.model.layers[place * each : (place + 1) * each])
        self.head = nn.Sequential(model.model.norm, model.lm_head) if place == places - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tokens is None else self.tokens(x)
        at = self.rotary(x, torch.arange(x.shape[1], device=x.device)[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=at)
        return x if self.head is None else self.head(x)


def by_stages(model: nn.Module, batch: Batch, mesh: str) -> Step:
    """torch's pipelining of stages that were cut by hand, 1F1B with as many micro-batches as ranks."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    place, places = dist.get_rank(), dist.get_world_size()
    part = Part(copy.deepcopy(model), place, places)
    stage = PipelineStage(part, place, places, batch["input_ids"].device)

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return model.loss_function(scores, labels, scores.shape[-1])  # type: ignore[operator, no-any-return]

    schedule = Schedule1F1B(stage, places, loss)

    def step() -> None:
        part.zero_grad()
        if place == 0:
            schedule.step(batch["input_ids"])
        else:
            schedule.step(target=batch["labels"])

    return step


def by_tpcompile(model: nn.Module, batch: Batch, mesh: str, **options: Any) -> Step:
    compiled = tpcompile.compile(model, mesh, batch, **options)

    def step() -> None:
        for parameter in compiled.parameters():
            parameter.grad = None
        compiled.train_step(**batch)

    return step


def eager(model: nn.Module, batch: Batch, mesh: str) -> Step:
    return partial(forward_backward, copy.deepcopy(model), batch)


def inductor(model: nn.Module, batch: Batch, mesh: str) -> Step:
    return partial(forward_backward, torch.compile(copy.deepcopy(model)), batch)


def forward_backward(model: Any, batch: Batch) -> None:
    model.zero_grad()
    model(**batch).loss.backward()


ALIKE = {"sequence_parallel": False, "vocab_parallel": False}
"""What the peers do: blocks are cut, and nothing else."""

WAYS: dict[str, dict[str, Callable[[nn.Module, Batch, str], Step]]] = {
    "tp": {
        "hand-written": by_hand,
        "DTensor": by_dtensor,
        "tp_plan": by_tp_plan,
        "tpcompile, as these": partial(by_tpcompile, **ALIKE),
        "tpcompile, as these, no overlap": partial(by_tpcompile, overlap=False, **ALIKE),
        "tpcompile": by_tpcompile,
        "tpcompile, no overlap": partial(by_tpcompile, overlap=False),
        "tpcompile, loss alone": partial(by_tpcompile, outputs="loss"),
        "tpcompile, inductor, as these": partial(by_tpcompile, backend="inductor", **ALIKE),
    },
    "pp": {"hand-written": by_stages, "tpcompile": by_tpcompile},
    "dp": {"hand-written": by_replicas, "tpcompile": by_tpcompile},
    "": {
        "eager": eager,
        "torch.compile": inductor,
        "tpcompile": by_tpcompile,
        "tpcompile, inductor": partial(by_tpcompile, backend="inductor"),
    },
}
"""By the axis that has ranks; the first is what the others are compared with."""
