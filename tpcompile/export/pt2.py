"""A rank's forward as torch.export writes it, and such a file as a module over this process's groups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx, nn

from tpcompile.collectives.groups import bound
from tpcompile.export.traced import trace
from tpcompile.ir import Program, Stage


def write_pt2(module: nn.Module, program: Program, stage: Stage, sizes: Mapping[sympy.Symbol, int], coordinate: int, file: Path) -> None:
    """Write a stage's forward of one tensor rank with `torch.export.save`. It names no process group."""
    torch.export.save(trace(module, program, stage, sizes, coordinate), file)


def load_pt2(file: Path | str, groups: Mapping[str, str]) -> nn.Module:
    """The module of a .pt2 file; its collectives go over `groups`, process group names by axis: `{"tp": group.group_name}`.

    It takes what the stage receives and its inputs by name, as the emitted source does. Forward only.
    """
    module = torch.export.load(file).module()
    assert isinstance(module, fx.GraphModule)
    for node in module.graph.nodes:
        if getattr(node.target, "namespace", "") == "tpcompile":
            node.args = fx.node.map_aggregate(node.args, lambda leaf: _bound(leaf, groups))
            node.kwargs = fx.node.map_aggregate(node.kwargs, lambda leaf: _bound(leaf, groups))
    module.recompile()
    return module


def _bound(leaf: Any, groups: Mapping[str, str]) -> Any:
    if isinstance(leaf, str) and (axis := leaf.split(":")[0]) in groups:
        return bound(leaf, groups[axis])
    return leaf
