"""The norm of all gradients, as one device has it: every element of every parameter counted once, on whichever ranks it lies.

    along tp   a cut parameter: its pieces follow each other; where they overlap, the lowest rank counts
               a parameter that is whole on all tensor ranks: the first counts
    along pp   a weight that several stages hold: the lowest of them counts
    along dp   equal gradients of replicas: the first counts; gradients that are themselves cut over dp (ZeRO): every rank its part

Each rank adds up its own, and one number is all-reduced over the mesh: every rank has the same norm, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tpcompile.collectives import holders
from tpcompile.errors import InputError, TpcompileError, caller
from tpcompile.runtime.data_parallel import local
from tpcompile.runtime.groups import Groups

Cut = tuple[int, Sequence[int]]
"""How a parameter is cut over tp: the dimension, and `bounds` as collectives understands them."""


@dataclass(frozen=True)
class Counting:
    """What this rank counts of the parameters that it holds. `pieces` has an entry for every parameter that is cut over tp."""

    groups: Groups
    pieces: Mapping[str, Cut]
    homes: Mapping[str, int]  # weight that several stages hold → the place along pp of the lowest of them

    def counted(self, name: str, grad: Tensor) -> Iterator[Tensor]:
        """The parts of a gradient that no other rank counts, as plain tensors."""
        place = self.groups.coordinates
        if self.homes.get(name, place["pp"]) != place["pp"]:
            return
        shards = [p for p in grad.placements if isinstance(p, Shard)] if isinstance(grad, DTensor) else []
        if not shards and place["dp"]:
            return
        own = local(grad)
        if name not in self.pieces:
            if place["tp"] == 0:
                yield own
            return
        dim, bounds = self.pieces[name]
        first = _offset(grad, dim)
        for start, stop, holder, at in holders(bounds, self.groups.mesh.tp):
            low, high = max(at - first, 0), min(at + stop - start - first, own.shape[dim])
            if holder == place["tp"] and high > low:
                yield own.narrow(dim, low, high - low)


def _offset(grad: Tensor, dim: int) -> int:
    """Where this rank's shard of a tensor-parallel piece begins, along a dimension."""
    if not isinstance(grad, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(grad.shape, grad.device_mesh, grad.placements)
    return offset[dim]


def norm(parameters: Mapping[str, nn.Parameter], counting: Counting, dtype: torch.dtype, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients of the model, the same on every rank, in `dtype`. Collective over all processes.

    With p = `norm_type`: (Σ |g|^p)^(1/p) over the elements of all gradients, the largest |g| for infinity. Parts are taken in float32 or
    in their own type if that is wider, and added up in float64. Parameters without a gradient count nothing.
    """
    if not norm_type > 0:
        raise InputError(f"norm_type={norm_type!r}", at="compiled.clip_grad_norm_", source=caller(), fix="use a number above 0, or inf")
    device = counting.groups.device
    grads = ((name, p.grad) for name, p in parameters.items() if p.grad is not None)
    parts = [part for name, grad in grads for part in counting.counted(name, grad) if part.numel()]
    norms = [torch.linalg.vector_norm(part.detach(), norm_type, dtype=_wide(part.dtype)).double() for part in parts]
    own = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
    if math.isinf(norm_type):
        return _largest(own, counting.groups).to(dtype)
    total = own.pow(norm_type).sum()
    if counting.groups.devices is not None:
        dist.all_reduce(total)
    return total.pow(1 / norm_type).to(dtype)


def _largest(own: Tensor, groups: Groups) -> Tensor:
    """The largest number of all ranks, or NaN if any of them has one: a process group's own maximum may lose it."""
    nan = own.isnan()
    both = torch.stack([own.masked_fill(nan, 0.0).max(), nan.any().double()])
    if groups.devices is not None:
        dist.all_reduce(both, dist.ReduceOp.MAX)
    return both[0].masked_fill(both[1] > 0, math.nan)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def clip(parameters: Mapping[str, nn.Parameter], total: Tensor, max_norm: float) -> None:
    """Scale all gradients of this rank by max_norm / (total + 1e-6), if that is below 1: `torch.nn.utils.clip_grads_with_norm_`."""
    grads = [local(p.grad) for p in parameters.values() if p.grad is not None]
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.dtype))


def refuse_nonfinite(total: Tensor, norm_type: float) -> None:
    """Raises TpcompileError for a norm that is no number; the same on every rank."""
    if not torch.isfinite(total):
        raise TpcompileError(
            f"the gradients' norm of order {norm_type} is {total.item()}",
            at="compiled.clip_grad_norm_(error_if_nonfinite=True)",
            source=caller(),
            fix="look for the step whose loss is not finite, or leave error_if_nonfinite out to scale by it all the same",
        )
