"""Private to optimize: whole parameters with cut uses alone, whose gradients are summed once a step instead of once in every backward."""

from __future__ import annotations

import torch
from torch import fx

from tpcompile.ir import Local
from tpcompile.rules import op_name

ENTER = "tpcompile.enter.default"


def sum_later(local: Local, graph: fx.Graph) -> None:
    """Where all that reads a parameter is `enter`, it becomes `enter_later`. Elsewhere its gradient is whole by some of its ways."""
    for node in graph.find_nodes(op="placeholder"):
        if node.name in local.program.parameters and deferrable(node):
            for enter in node.users:
                enter.target = torch.ops.tpcompile.enter_later.default


def deferrable(parameter: fx.Node) -> bool:
    return bool(parameter.users) and all(op_name(user) == ENTER for user in parameter.users)
