"""A process group that notes what it is asked for, whoever asks: operators, autograd, torch's data-parallel and pipeline engines.

It is a backend for torch.distributed, `tpcompile.launch(fn, mesh, backend="recorded")` or, after `register()`,
`torch.distributed.init_process_group("recorded")`, and hands everything on to gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from tpcompile.errors import TpcompileError

BACKEND = "recorded"


@dataclass(frozen=True)
class Call:
    """One call of a process group on this rank, and what the rank gave to it; for "recv", where the tensor goes."""

    ranks: tuple[int, ...]  # of the group
    call: str  # as in collectives.RING, or "recv", "barrier", …
    dtype: torch.dtype | None
    elements: int
    peer: int | None = None  # of a send or a receive: the other rank's place in the group

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize if self.dtype is not None else 0


CALLS: Mapping[str, tuple[str, int | None]] = {
    "_allgather_base": ("all_gather", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "all_gather_single": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "all_to_all_single": ("all_to_all", 1),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "barrier": ("barrier", None),
    "broadcast": ("broadcast", 0),
    "gather": ("gather", 1),
    "recv": ("recv", 0),
    "reduce": ("reduce", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "scatter": ("scatter", 1),
    "send": ("send", 0),
}
"""The methods of torch's ProcessGroup: the call that each makes, and which argument is what this rank gives to it."""


class Recorded(dist.ProcessGroup):
    """A gloo group that notes every call in a list, which all groups of this process share."""

    calls: list[Call]

    def __init__(self, store: Any, ranks: tuple[int, ...], rank: int, timeout: Any, calls: list[Call]) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.ranks, self.calls, self._name = ranks, calls, ""
        gloo, cpu = dist.ProcessGroup.BackendType.GLOO, torch.device("cpu")
        self._group = dist.ProcessGroup(store, rank, len(ranks))
        self._group._register_backend(cpu, gloo, dist.ProcessGroupGloo(store, rank, len(ranks), timeout=timeout))
        self._group._set_default_backend(gloo)

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: Any) -> None:
        self._name = name
        self._group._set_group_name(name)

    @property
    def group_name(self) -> Any:
        return self._name

    def note(self, method: str, arguments: tuple[Any, ...]) -> None:
        call, given = CALLS[method]
        tensors = [leaf for leaf in pytree.tree_leaves(arguments[given]) if isinstance(leaf, Tensor)] if given is not None else []
        peer = arguments[1] if call in ("send", "recv") else None
        dtype = tensors[0].dtype if tensors else None
        self.calls.append(Call(self.ranks, call, dtype, sum(tensor.numel() for tensor in tensors), peer))


def _noted(method: str) -> Callable[..., Any]:
    def call(self: Recorded, *args: Any, **kwargs: Any) -> Any:
        self.note(method, args)
        return getattr(self._group, method)(*args, **kwargs)

    return call


for _method in CALLS:
    if hasattr(dist.ProcessGroup, _method):
        setattr(Recorded, _method, _noted(_method))


def register() -> None:
    """Make the backend known to torch.distributed, for tensors on the CPU."""
    calls: list[Call] = []

    def create(options: Any, _: Any) -> Recorded:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        return Recorded(options.store, ranks, options.group_rank, options.timeout, calls)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


def calls() -> list[Call]:
    """What all groups of this process were asked for so far, in order. Clear it to begin anew."""
    world = dist.group.WORLD
    if not isinstance(world, Recorded):
        raise TpcompileError(
            "the process group keeps no record", at="recorded.calls()", fix='start with tpcompile.launch(fn, mesh, backend="recorded")'
        )
    return world.calls
