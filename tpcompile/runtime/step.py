"""One step of training: the loss and the gradients of the whole batch, as one device would have them.

before the first forward   N of every mean in the loss, over the replica's rows, summed over dp
a micro-batch's loss       dp · s / N         (the program takes N and dp as inputs)
gradients                  summed over micro-batches, averaged over dp
the reported loss          summed over micro-batches, averaged over dp, sent to every stage
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tpcompile.collectives import mix
from tpcompile.ir import Count, Program
from tpcompile.layout import TensorType
from tpcompile.runtime.batch import part
from tpcompile.runtime.data_parallel import Engine, reduce_now
from tpcompile.runtime.groups import Groups
from tpcompile.runtime.schedule import Work

RNG_KEY = "rng_key"


def counts(program: Program, model: nn.Module, tensors: Mapping[str, Tensor], microbatches: int, groups: Groups) -> dict[str, Tensor]:
    """What the program's loss needs to know of the whole batch. Collective over dp.

    It is computed micro-batch by micro-batch, since the program may hold for these shapes alone, added up in float64, in which whole
    numbers are exact up to 2^53, and rounded once.
    """
    found, known = {}, dict[str, Tensor]()
    for count in program.counts:
        if count.graph is None:
            known[count.name] = torch.tensor(groups.mesh.dp, dtype=torch.float64, device=groups.device)
        else:
            found[count.name] = _of_replica(count, program, model, tensors, microbatches, groups)
    if (group := groups.group("dp")) is not None and found:
        together = torch.cat([n.flatten() for n in found.values()])
        dist.all_reduce(together, group=group)
        pieces = torch.split(together, [n.numel() for n in found.values()])
        found = {name: piece.view(n.shape) for (name, n), piece in zip(found.items(), pieces, strict=True)}
    return {name: value.to(_dtype(program, name)) for name, value in {**found, **known}.items()}


def _of_replica(
    count: Count, program: Program, model: nn.Module, tensors: Mapping[str, Tensor], microbatches: int, groups: Groups
) -> Tensor:
    dims = {name: i.batch_dim for name, i in program.inputs.items()}
    parts = []
    with torch.no_grad():
        for index in range(microbatches):
            rows = part(tensors, dims, index, microbatches)
            made = count.module(*(_value(name, program, model, rows, groups) for name in count.operands))
            parts.append(torch.as_tensor(made, device=groups.device).double())
    return torch.stack(parts).sum(0)


def _dtype(program: Program, name: str) -> torch.dtype:
    """The type in which the loss takes a number: another could change the loss's own."""
    kind = program.types[name]
    assert isinstance(kind, TensorType)
    return kind.dtype


def _value(name: str, program: Program, model: nn.Module, tensors: Mapping[str, Tensor], groups: Groups) -> Tensor:
    if name in tensors:
        return tensors[name]
    if name in program.constants:
        return program.constants[name].to(groups.device)
    return model.get_buffer(program.buffers[name]).to(groups.device)


def rng_keys(seed: int, step: int, microbatches: int, groups: Groups) -> Tensor:
    """One row per micro-batch, int64[microbatches, 3]: mixed seed and step, the part of the whole batch's rows that it is, of how many."""
    first, parts = groups.coordinates["dp"] * microbatches, groups.mesh.dp * microbatches
    return torch.tensor([[mix(seed, step), first + index, parts] for index in range(microbatches)], device=groups.device)


def accumulate(engine: Engine, work: Work, scale: Tensor | None = None) -> list[Tensor]:
    """Forward and backward of every micro-batch without a pipeline; replicas reduce with the last one.

    Gradients are those of the loss multiplied with `scale`, if there is one.
    """
    losses = []
    for index in range(work.microbatches):
        last = index == work.microbatches - 1
        quiet: Any = engine.no_sync() if isinstance(engine, DistributedDataParallel) and not last else nullcontext()
        reduce_now(engine, last)
        with quiet:
            loss = engine(**part(work.inputs, work.dims, index, work.microbatches))[0]
            (loss if scale is None else loss.float() * scale).backward()
        losses.append(loss.detach())
    return losses


def report(losses: list[Tensor], dtype: torch.dtype, groups: Groups, last: int) -> Tensor:
    """The loss of the whole batch, on every rank, rounded once: parts are added up in float64. Collective over dp and pp.

    `last` is the place along the pipeline of the last stage's rank.
    """
    total = torch.stack(losses).double().sum(0) if losses else torch.zeros((), dtype=torch.float64, device=groups.device)
    if groups.coordinates["pp"] == last:
        total = mean_over_replicas(total, groups)
    if (pipeline := groups.group("pp")) is not None:
        dist.broadcast(total, src=groups.at_place(last), group=pipeline)
    return total.to(dtype)


def mean_over_replicas(value: Tensor, groups: Groups) -> Tensor:
    """The mean over dp of a detached tensor. Collective over dp."""
    value = value.detach().clone()
    if (group := groups.group("dp")) is not None:
        dist.all_reduce(value, group=group)
        value /= groups.mesh.dp
    return value
