"""The process groups of a program's axes, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn
from torch._C._distributed_c10d import _resolve_process_group

from tpcompile.errors import TpcompileError


def unbound(axis: str, coordinate: int, size: int) -> str:
    """The spelling of an axis that has no process group yet."""
    return f"{axis}:{coordinate}/{size}"


def place(axis: str) -> tuple[int, int]:
    """This process's coordinate along an axis, and the axis's size."""
    if match := re.fullmatch(r"\w+:(\d+)/(\d+)", axis):
        return int(match[1]), int(match[2])
    group = _resolve_process_group(axis)  # type: ignore[arg-type]
    return group.rank(), group.size()


def bind(module: nn.Module, groups: Mapping[str, str]) -> None:
    """Set the process groups of an emitted module, by axis: `bind(module, {"tp": group.group_name})`."""
    for part in module.modules():
        for axis, name in groups.items():
            if isinstance(vars(part).get(axis), str):
                setattr(part, axis, name)


def check_bound(axis: str) -> None:
    if ":" in axis and place(axis)[1] > 1:
        raise TpcompileError(
            "the program has no process group to communicate over",
            at=f"a collective over {axis.split(':')[0]}, of {place(axis)[1]} ranks",
            fix='call tpcompile.collectives.bind(module, {"tp": group.group_name})',
        )
