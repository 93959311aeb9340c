"""An optimizer whose state the replicas share out: each steps its own rows of every parameter, and gathers the others' after.

    whole parameter [5, 3]     dp 0: rows 0 1 2      dp 1: rows 3 4       as torch's `fully_shard` cuts it
    gradient                   whole, averaged, in `.grad` of the whole parameter
    the optimizer's parameter  a DTensor over these rows: the same memory as the whole parameter's

A parameter without dimensions is stepped by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.optimizer import Optimizer

from tpcompile.runtime import optimizer as optimizers
from tpcompile.runtime.data_parallel import local

BUCKET = 25 << 20
"""Bytes of parameters that are gathered at once: the size of a bucket in torch's DistributedDataParallel."""


class Own:
    """This rank's rows of a parameter."""

    def __init__(self, parameter: nn.Parameter, along: DeviceMesh) -> None:
        self.whole, self._along = parameter, along
        value = local(parameter.detach())
        rows = value.shape[0] if value.ndim else 0
        self.most = -(-rows // along.size())
        self.start = min(along.get_local_rank() * self.most, rows)
        self.count = min(self.most, rows - self.start)
        self.part = nn.Parameter(self._placed(value))

    def _placed(self, value: Tensor) -> DTensor:
        """The rank's rows of a whole value, in the same memory."""
        if not value.ndim:
            return DTensor.from_local(value, self._along, [Replicate()], run_check=False)
        own, settings = value.narrow(0, self.start, self.count), {"shape": value.shape, "stride": value.stride()}
        return DTensor.from_local(own, self._along, [Shard(0)], run_check=False, **settings)  # type: ignore[arg-type]

    def take_gradient(self) -> None:
        self.part.grad = None if self.whole.grad is None else self._placed(local(self.whole.grad))


class _Shared:
    """What a class of optimizers does differently when its state is shared out. It stands before that class."""

    param_groups: list[dict[str, Any]]
    _owned: list[Own]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        if closure is not None:
            raise TypeError("an optimizer whose state is shared out takes no closure: call train_step before step")
        for own in self._owned:
            own.take_gradient()
        found: float | None = optimizers.inner(super().step, self)  # type: ignore[misc]
        for own in self._owned:
            own.part.grad = None
        gather(self._owned)
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        for own in self._owned:
            if set_to_none:
                own.whole.grad = None
            elif own.whole.grad is not None:
                own.whole.grad.zero_()


def made(
    kind: type[Optimizer], groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], along: DeviceMesh, call: str
) -> Optimizer:
    """An optimizer of this kind over the rank's rows. Its `step` is collective over dp."""
    owned = [[Own(p, along) for p in group["params"]] for group in groups]
    parts = [{**group, "params": [own.part for own in held]} for group, held in zip(groups, owned, strict=True)]
    shared = type(kind.__name__, (_Shared, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__})
    optimizer: Any = optimizers.made(shared, parts, settings, call)
    optimizer._owned = [own for held in owned for own in held]
    return optimizer  # type: ignore[no-any-return]


@torch.no_grad()
def gather(owned: Sequence[Own]) -> None:
    """Give every rank the rows that the others have stepped. Collective over dp."""
    for bucket in _buckets([own for own in owned if own.most]):
        along, values = bucket[0]._along, [local(own.whole.detach()) for own in bucket]
        sizes = [own.most * value[0].numel() for own, value in zip(bucket, values, strict=True)]
        given = values[0].new_zeros(sum(sizes))
        for own, value, piece in zip(bucket, values, torch.split(given, sizes), strict=True):
            mine = value.narrow(0, own.start, own.count)
            piece[: mine.numel()].copy_(mine.flatten())
        everyone = [torch.empty_like(given) for _ in range(along.size())]
        dist.all_gather(everyone, given, group=along.get_group())
        for rank, theirs in enumerate(everyone):
            for own, value, piece in zip(bucket, values, torch.split(theirs, sizes), strict=True):
                start = min(rank * own.most, value.shape[0])
                rows = value.narrow(0, start, min(own.most, value.shape[0] - start))
                rows.copy_(piece[: rows.numel()].view_as(rows))


def _buckets(owned: Sequence[Own]) -> Iterator[list[Own]]:
    """Parameters of one type, as many as are gathered at once."""
    by_type: dict[torch.dtype, list[Own]] = {}
    for own in owned:
        held = by_type.setdefault(own.part.dtype, [])
        if held and sum(other.whole.nbytes for other in held) + own.whole.nbytes > BUCKET:
            yield by_type.pop(own.part.dtype)
            held = by_type.setdefault(own.part.dtype, [])
        held.append(own)
    yield from by_type.values()
