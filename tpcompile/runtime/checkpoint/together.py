"""Work that all ranks do, and that fails on all of them if it fails on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from tpcompile.errors import InputError, TpcompileError

Made = TypeVar("Made")
Group = dist.ProcessGroup | None


def alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


def rank() -> int:
    return 0 if alone() else dist.get_rank()


def together(work: Callable[[], Made], group: Group = None) -> Made:
    """Do the work on this rank, and return what it made here. If any rank fails, all raise the lowest one's error. Collective."""
    made, failure = None, None
    try:
        made = work()
    except Exception as error:
        failure = error
    if alone():
        if failure is not None:
            raise failure
        return made  # type: ignore[return-value]
    texts: list[tuple[bool, str] | None] = [None] * dist.get_world_size(group)
    own = None if failure is None else (isinstance(failure, InputError), str(failure) or type(failure).__name__)
    dist.all_gather_object(texts, own, group=group)
    if failure is not None:
        raise failure
    for peer, text in enumerate(texts):
        if text is not None:
            raise (InputError if text[0] else TpcompileError)(f"on rank {peer}: {text[1]}")
    return made  # type: ignore[return-value]


def on_first(work: Callable[[], Made], group: Group = None) -> Made:
    """Do the work on rank 0, and return what it made there on all ranks. Collective."""
    made = together(lambda: work() if rank() == 0 else None, group)
    if alone():
        return made  # type: ignore[return-value]
    box = [made]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]  # type: ignore[return-value]
