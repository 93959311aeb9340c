"""A process group that notes what it is asked for, whoever asks: operators, autograd, torch's data-parallel and pipeline engines.

It is a backend for torch.distributed, `tpcompile.launch(fn, mesh, backend="recorded")` or, after `register()`,
`torch.distributed.init_process_group("recorded")`, and hands everything on to gloo; with `device="cuda"`, what is on GPUs to NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
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
    """A group of gloo, and NCCL for tensors on GPUs, that notes every call in a list, which all groups of this process share."""

    calls: list[Call]

    def __init__(self, store: Any, ranks: tuple[int, ...], rank: int, timeout: Any, calls: list[Call], device: str) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.ranks, self.calls, self._name = ranks, calls, ""
        gloo, cpu = dist.ProcessGroup.BackendType.GLOO, torch.device("cpu")
        self._group = dist.ProcessGroup(store, rank, len(ranks))
        self._group._register_backend(cpu, gloo, dist.ProcessGroupGloo(store, rank, len(ranks), timeout=timeout))
        self._group._set_default_backend(gloo)
        if device == "cuda":
            self._group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, _nccl(store, ranks, rank, timeout))

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


def _nccl(store: Any, ranks: tuple[int, ...], rank: int, timeout: Any) -> Any:
    kind: Any = vars(dist)["ProcessGroupNCCL"]  # torch has it where it is built for GPUs
    options = kind.Options()
    options._timeout = timeout
    return kind(PrefixStore("cuda/", store), rank, len(ranks), options)


def register(device: str = "cpu") -> None:
    """Make the backend known to torch.distributed, for tensors on the CPU, and with "cuda" for those on GPUs too."""
    calls: list[Call] = []

    def create(options: Any, _: Any) -> Recorded:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        return Recorded(options.store, ranks, options.group_rank, options.timeout, calls, device)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", device] if device != "cpu" else ["cpu"])
    if device == "cuda":
        setattr(dist, dist.batch_isend_irecv.__name__, _together(dist.batch_isend_irecv))


def _together(one_by_one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Sends and receives that NCCL begins at once, as for its own groups: one by one, two ranks that both send first would wait."""

    def batch(ops: Any) -> Any:
        group, device = ops[0].group or dist.group.WORLD, ops[0].tensor.device
        if not isinstance(group, Recorded) or device.type != "cuda":
            return one_by_one(ops)
        group._group._start_coalescing(device)
        for op in ops:
            method, arguments = "send" if op.op is dist.isend else "recv", ([op.tensor], op.group_peer, op.tag)
            group.note(method, arguments)
            getattr(group._group, method)(*arguments)
        return [group._group._end_coalescing(device)]

    return batch


def calls() -> list[Call]:
    """What all groups of this process were asked for so far, in order. Clear it to begin anew."""
    world = dist.group.WORLD
    if not isinstance(world, Recorded):
        raise TpcompileError(
            "the process group keeps no record", at="recorded.calls()", fix='start with tpcompile.launch(fn, mesh, backend="recorded")'
        )
    return world.calls
