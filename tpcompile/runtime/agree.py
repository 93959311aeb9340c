"""Before a step: whether all ranks run the same capture, on the rows that they should share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.errors import InputError, caller
from tpcompile.runtime.fingerprint import bits
from tpcompile.runtime.groups import Groups

_FIX_ALL = "pass the same batch on every rank (same seed and order of the data), or compile with split_batches=False"
_FIX_REPLICA = "pass the same rows on all ranks of a replica, and rows of one shape on all replicas"


def agree(groups: Groups, capture: int, call: str, tensors: Mapping[str, Tensor], *, everywhere: bool) -> None:
    """Raise InputError on every rank that sees another rank at odds with itself. Collective over all processes.

    `capture` is the number of the capture that this rank would run, `call` shows the batch's shapes. The batch must be equal on all
    ranks (`everywhere`), or on all ranks of a replica.
    """
    if groups.devices is None:
        return
    shapes = str([(path, list(tensor.shape), tensor.dtype) for path, tensor in sorted(tensors.items())])
    code = int(hashlib.sha256(shapes.encode()).hexdigest()[:15], 16)
    codes = torch.tensor([capture, code, 0], device=groups.device)
    for place, (_, tensor) in enumerate(sorted(tensors.items())):
        codes[2] += _code(tensor).to(groups.device) * (place + 1)
    everyone = [torch.empty_like(codes) for _ in range(groups.mesh.size)]
    dist.all_gather(everyone, codes)
    rows = torch.stack(everyone).tolist()
    own = rows[groups.rank]
    for rank, (its_capture, its_shapes, its_values) in enumerate(rows):
        peer = everywhere or groups.mesh.coordinates(rank)["dp"] == groups.coordinates["dp"]
        if its_capture != own[0] or (peer and its_shapes != own[1]):
            differ = "batches of different shapes"
        elif peer and its_values != own[2]:
            differ = "different batches of the same shape"
        else:
            continue
        raise InputError(
            f"ranks {min(rank, groups.rank)} and {max(rank, groups.rank)} were given {differ}",
            at=f"rank {groups.rank}: {call}",
            source=caller(),
            fix=_FIX_ALL if everywhere else _FIX_REPLICA,
        )


def _code(tensor: Tensor) -> Tensor:
    """A whole number that depends on every element and its place."""
    numbers = bits(tensor).long()
    return (numbers * torch.arange(1, numbers.numel() + 1, device=numbers.device)).sum()
