"""One step of training: the loss and the gradients of the whole batch, as one device would have them.

before the first forward   N of every mean loss, over the replica's rows, summed over dp
a micro-batch's loss       dp · s / N         (the program divides by its input N / dp)
gradients                  summed over micro-batches, averaged over dp
the reported loss          summed over micro-batches, averaged over dp, sent to every stage
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

from tpcompile.collectives import mix
from tpcompile.ir import Program
from tpcompile.layout import TensorType
from tpcompile.runtime.batch import part
from tpcompile.runtime.data_parallel import Engine
from tpcompile.runtime.groups import Groups
from tpcompile.runtime.schedule import Work

RNG_KEY = "rng_key"


def counts(program: Program, model: nn.Module, tensors: Mapping[str, Tensor], microbatches: int, groups: Groups) -> dict[str, Tensor]:
    """N / dp for every mean loss of the program. Collective over dp.

    N is computed micro-batch by micro-batch, since the program may hold for these shapes alone.
    """
    found = {}
    dims = {name: i.batch_dim for name, i in program.inputs.items()}
    for count in program.counts:
        if count.graph is None:
            found[count.name] = torch.tensor(1 / groups.mesh.dp, dtype=_dtype(program, count.name), device=groups.device)
            continue
        run = fx.Interpreter(fx.GraphModule({}, count.graph))
        names = [node.name for node in count.graph.nodes if node.op == "placeholder"]
        with torch.no_grad():
            parts = []
            for index in range(microbatches):
                rows = part(tensors, dims, index, microbatches)
                parts.append(run.run(*(_value(name, program, model, rows, groups) for name in names)))
            total = torch.stack([torch.as_tensor(n, device=groups.device) for n in parts]).double().sum(0)
        if (group := groups.group("dp")) is not None:
            dist.all_reduce(total, group=group)
        found[count.name] = (total / groups.mesh.dp).to(_dtype(program, count.name))
    return found


def _dtype(program: Program, name: str) -> torch.dtype:
    """The loss's own type: a count must not promote it."""
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


def accumulate(engine: Engine, work: Work) -> list[Tensor]:
    """Forward and backward of every micro-batch without a pipeline; replicas reduce with the last one."""
    losses = []
    for index in range(work.microbatches):
        last = index == work.microbatches - 1
        quiet: Any = engine.no_sync() if isinstance(engine, DistributedDataParallel) and not last else nullcontext()
        with quiet:
            loss = engine(**part(work.inputs, work.dims, index, work.microbatches))[0]
            loss.backward()
        losses.append(loss.detach())
    return losses


def report(losses: list[Tensor], dtype: torch.dtype, groups: Groups) -> Tensor:
    """The loss of the whole batch, on every rank, rounded once: parts are added up in float64. Collective over dp and pp."""
    total = torch.stack(losses).double().sum(0) if losses else torch.zeros((), dtype=torch.float64, device=groups.device)
    last = groups.mesh.pp - 1
    if groups.coordinates["pp"] == last:
        total = mean_over_replicas(total, groups)
    if (pipeline := groups.group("pp")) is not None:
        dist.broadcast(total, src=groups.at_stage(last), group=pipeline)
    return total.to(dtype)


def mean_over_replicas(value: Tensor, groups: Groups) -> Tensor:
    """The mean over dp of a detached tensor. Collective over dp."""
    value = value.detach().clone()
    if (group := groups.group("dp")) is not None:
        dist.all_reduce(value, group=group)
        value /= groups.mesh.dp
    return value
