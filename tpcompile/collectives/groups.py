"""How an operator names the ranks that it communicates with.

    "tp:1/4"      coordinate 1 of 4, without a process group: enough for tracing
    "tp:1/4=7"    the same, over the process group named "7"
    "7"           a process group; coordinate and size are asked of it

The coordinate is in the name because shapes depend on it: torch's compile caches, which ranks share, compare programs by their
text, and would give one rank the code of another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _resolve_process_group

from tpcompile.errors import TpcompileError

LATER = "_later"
"""Ends the name of a module's attribute that spells the axis over which gradients of whole parameters are summed."""

_SPELLING = re.compile(r"(\w+):(\d+)/(\d+)(?:=(.*))?")


def unbound(axis: str, coordinate: int, size: int) -> str:
    """The spelling of an axis that has no process group yet."""
    return f"{axis}:{coordinate}/{size}"


def place(axis: str) -> tuple[int, int]:
    """This process's coordinate along an axis, and the axis's size."""
    if (spelled := _spelled(axis)) is not None:
        return spelled[0]
    group = _resolve_process_group(axis)  # type: ignore[arg-type]
    return group.rank(), group.size()


def group_of(axis: str) -> str:
    """The name of an axis's process group."""
    spelled = _spelled(axis)
    return axis if spelled is None else spelled[1]


@lru_cache(256)
def _spelled(axis: str) -> tuple[tuple[int, int], str] | None:
    """What an axis says by its text: coordinate and size, and the group's name; None for a group's name alone."""
    match = _SPELLING.fullmatch(axis)
    return None if match is None else ((int(match[2]), int(match[3])), match[4] or "")


def bind(module: nn.Module, groups: Mapping[str, str]) -> None:
    """Set the process groups of an emitted module, by axis: `bind(module, {"tp": group.group_name})`."""
    for part in module.modules():
        for axis, name in groups.items():
            for attribute in (axis, axis + LATER):
                if isinstance(spelled := vars(part).get(attribute), str):
                    setattr(part, attribute, bound(spelled, name))


@contextmanager
def postponed(module: nn.Module, axis: str) -> Iterator[None]:
    """Within, forwards of an emitted module leave the gradients of `enter_later` as they are: each rank's own part of a sum over `axis`.

    Whoever enters it sums them, once, after the last backward of what was run within.
    """
    spelled = {part: value for part in module.modules() if (value := vars(part).get(axis + LATER)) is not None}
    try:
        for part in spelled:
            setattr(part, axis + LATER, unbound(axis, 0, 1))
        yield
    finally:
        for part, value in spelled.items():
            setattr(part, axis + LATER, value)


def bound(axis: str, name: str) -> str:
    match = _SPELLING.fullmatch(axis)
    if match is None:
        return name
    if dist.is_initialized() and place(name) != place(axis):
        raise TpcompileError(
            f"process group {name} has this process as rank {place(name)[0]} of {place(name)[1]}",
            at=f"a program for {match[1]} coordinate {match[2]} of {match[3]}",
            fix="run the program of this process's rank, and give it the group along its axis, in the mesh's order",
        )
    return f"{match[1]}:{match[2]}/{match[3]}={name}"


def check_bound(axis: str) -> None:
    if place(axis)[1] > 1 and not group_of(axis):
        raise TpcompileError(
            "the program has no process group to communicate over",
            at=f"a collective over {axis.split(':')[0]}, of {place(axis)[1]} ranks",
            fix='call tpcompile.collectives.bind(module, {"tp": group.group_name})',
        )
