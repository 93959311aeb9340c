"""Private to attend: which numbers a mask may hold, where it depends on data: finite ones, or -inf.

%m : bool[b, s] of the batch                     False, True
%a = where(%m, 0.0, -3.4e+38)                    0.0, -3.4e+38
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import fx

from tpcompile.ir import Program
from tpcompile.layout import TensorType
from tpcompile.operation import op_name
from tpcompile.passes._masks import CASTS, KEPT, POINTWISE, Masks, Number, cases_of
from tpcompile.passes._moves import MOVES

MOST = 16
"""Numbers that are followed, at most."""

Numbers = frozenset[Number]


def numbers_of(program: Program, masks: Masks) -> Mapping[str, Numbers]:
    """All numbers that a value may hold, by name, for values that hold few."""
    found: dict[str, Numbers] = {}
    for node in program.graph.nodes:
        kind = program.types.get(node.name)
        if not isinstance(kind, TensorType):
            continue
        if (cases := cases_of(masks.values.get(node.name))) is not None:
            found[node.name] = frozenset(number for number, _ in cases)
        elif kind.dtype == torch.bool:
            found[node.name] = frozenset([False, True])
        elif node.op == "call_function" and (made := _made(node, kind, program.types, found)) is not None:
            found[node.name] = made
    return found


def _made(node: fx.Node, kind: TensorType, types: Mapping[str, Any], found: Mapping[str, Numbers]) -> Numbers | None:
    operands, name = node.all_input_nodes, op_name(node)
    if not operands or any(operand.name not in found for operand in operands[: 1 if name in MOVES else None]):
        return None
    first = found[operands[0].name]
    if name in MOVES or name in KEPT:
        return first
    if name in CASTS:
        before = types[operands[0].name].dtype
        return frozenset(torch.tensor(number, dtype=before).to(kind.dtype).item() for number in first)
    if name not in POINTWISE:
        return None
    made: set[Number] = set()
    for chosen in product(*(found[operand.name] for operand in operands)):
        pairs = zip(operands, chosen, strict=True)
        tensors = {o: torch.full([1] * len(types[o.name].shape), number, dtype=types[o.name].dtype) for o, number in pairs}
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), tensors.__getitem__)
        made.add(node.target(*args, **kwargs).to(kind.dtype).item())  # type: ignore[operator]
        if len(made) > MOST:
            return None
    return frozenset(made)
