"""The element types of a local graph's values, which the passes do not write down for what they add."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from tpcompile.ir import Local
from tpcompile.layout import TensorType
from tpcompile.operation import argument, op_name

WIDENED: Mapping[str, tuple[torch.dtype, ...]] = {"tpcompile.exp_sum.default": (torch.float32,)}
"""Operators that make a wider type than their operands have, where these are narrower than that."""


def dtypes(local: Local, graph: fx.Graph) -> dict[str, torch.dtype]:
    """The element type of every tensor; of one that stands for no value of the program, what its operands' make."""
    found: dict[str, torch.dtype] = {}
    for node in graph.nodes:
        kind = local.program.types.get(local.origins.get(node.name, node.name))
        if isinstance(kind, TensorType):
            found[node.name] = kind.dtype
        elif made := [found[operand.name] for operand in node.all_input_nodes if operand.name in found]:
            found[node.name] = made[0]
            for dtype in (*made[1:], *WIDENED.get(op_name(node), ())):
                found[node.name] = torch.promote_types(found[node.name], dtype)
            if op_name(node) == "aten.to.dtype":
                found[node.name] = argument(node, "dtype")
    return found
