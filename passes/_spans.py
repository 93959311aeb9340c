"""Private to divide_loss: between which whole numbers a value lies, for what is made of sizes and constants, or serves as an index.

%i = arange(%s)              0 … s - 1
%j = add(mul(%i, 4), 3)      3 … 4·s - 1
%e = embedding(%w, %ids)     %ids: 0 … 90, since the table has 91 rows: anything else is an error of the model
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sympy
import torch
from torch import fx

from tpcompile.ir import Type
from tpcompile.layout import Size, TensorType
from tpcompile.rules import RESHAPES, argument, aten_names, op_name

Span = tuple[Size, Size]
"""The least and the greatest number that a value may be."""

SAME = RESHAPES | aten_names(
    "clone.default contiguous.default expand.default permute.default to.device to.dtype to.dtype_layout transpose.int"
)
"""Operations that leave every number what it is."""

PARTS = aten_names("flip.default index.Tensor index_select.default gather.default repeat_interleave.self_int select.int slice.Tensor")
"""Operations that give some of their first operand's numbers."""

INDEXED = {"aten.gather.default": "index", "aten.index_select.default": "index", "aten.embedding.default": "indices"}
INDEXED |= dict.fromkeys(("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default", "aten.scatter_reduce.two"), "index")
"""The argument that is an index, which may be neither negative nor too great."""

CHOSEN = aten_names("argmax.default argmin.default argsort.default")
"""Operations that give places along a dimension."""


def within(node: fx.Node, limit: Size, types: Mapping[str, Type]) -> bool:
    """Whether a value is 0, 1, … limit - 1 wherever the model works at all."""
    spans = (made(node, types), used(node, types))
    return any(span is not None and not_negative(span[0]) and not_negative(limit - 1 - span[1]) for span in spans)


def counts_up(node: fx.Node) -> bool:
    """Whether a new tensor is 0, 1, 2, …"""
    if op_name(node) == "aten.arange.default":
        return True
    return op_name(node).startswith("aten.arange") and argument(node, "start") == 0 and argument(node, "step", 1) == 1


def not_negative(size: Size) -> bool:
    return bool(size >= 0) if isinstance(size, int) else sympy.sympify(size).is_nonnegative is True


def used(node: fx.Node, types: Mapping[str, Type]) -> Span | None:
    """What the uses of a value as an index leave it to be."""
    for user in node.users:
        if user.op != "call_function":
            continue
        name = op_name(user)
        if name in INDEXED and argument(user, INDEXED[name]) is node:
            source = user.all_input_nodes[0]
            dim = 0 if name == "aten.embedding.default" else argument(user, "dim")
            return 0, _size(types[source.name], dim) - 1
        if name in SAME and _whole(types.get(user.name)) and (span := used(user, types)) is not None:
            return span
    return None


def made(node: fx.Node, types: Mapping[str, Type]) -> Span | None:
    """What a value can be by how it was made, or by the uses of what it was made of."""
    kind = types.get(node.name)
    if node.op != "call_function":
        return used(node, types)
    if isinstance(kind, (int, sympy.Expr)):
        return kind, kind
    if op_name(node) == "getitem":
        return _item(node, types)
    if not _whole(kind):
        return (0, 1) if isinstance(kind, TensorType) and kind.dtype == torch.bool else None
    rule = MADE.get(op_name(node))
    return (rule(node, types) if rule else None) or used(node, types)


def _whole(kind: Type | None) -> bool:
    """Whether a value holds whole numbers large enough for any size."""
    return isinstance(kind, TensorType) and kind.dtype in (torch.int64, torch.int32)


def _number(value: object, types: Mapping[str, Type]) -> Span | None:
    """The span of an argument: a number, a size, or a tensor."""
    if isinstance(value, fx.Node):
        return made(value, types)
    return (value, value) if isinstance(value, int) and not isinstance(value, bool) else None


def _size(kind: Type, dim: int) -> Size:
    assert isinstance(kind, TensorType)
    return kind.shape[dim]


def _item(node: fx.Node, types: Mapping[str, Type]) -> Span | None:
    """The places that topk, sort, max and min give beside the values."""
    parent, index = node.args
    assert isinstance(parent, fx.Node)
    if index == 1 and op_name(parent) in ("aten.topk.default", "aten.sort.default", "aten.max.dim", "aten.min.dim"):
        return 0, _size(types[parent.all_input_nodes[0].name], argument(parent, "dim")) - 1
    return None


def _places(node: fx.Node, types: Mapping[str, Type]) -> Span | None:
    dim = argument(node, "dim")
    return None if dim is None else (0, _size(types[node.all_input_nodes[0].name], dim) - 1)


def _counted(node: fx.Node, types: Mapping[str, Type]) -> Span | None:
    if argument(node, "step", 1) != 1:
        return None
    start, end = _number(argument(node, "start", 0), types), _number(argument(node, "end"), types)
    return (start[0], end[1] - 1) if start and end else None


def _filled(node: fx.Node, types: Mapping[str, Type]) -> Span | None:
    return _number(argument(node, "fill_value"), types)


def _first(node: fx.Node, types: Mapping[str, Type]) -> Span | None:
    return made(node.all_input_nodes[0], types)


def _sum(node: fx.Node, types: Mapping[str, Type]) -> Span | None:
    one, other = (_number(argument(node, name), types) for name in ("self", "other"))
    return (one[0] + other[0], one[1] + other[1]) if one and other and argument(node, "alpha") == 1 else None


def _product(node: fx.Node, types: Mapping[str, Type]) -> Span | None:
    one, other = (_number(argument(node, name), types) for name in ("self", "other"))
    if one is None or other is None or not not_negative(one[0]) or not not_negative(other[0]):
        return None
    return one[0] * other[0], one[1] * other[1]


def _rest(node: fx.Node, types: Mapping[str, Type]) -> Span | None:
    by = argument(node, "other")
    return (0, by - 1) if isinstance(by, int) and by > 0 else None


def _between(node: fx.Node, types: Mapping[str, Type]) -> Span | None:
    low, high = (_number(argument(node, name), types) for name in ("min", "max"))
    return (low[0], high[1]) if low and high else None


MADE: Mapping[str, Callable[[fx.Node, Mapping[str, Type]], Span | None]] = {
    "aten.add.Tensor": _sum,
    "aten.arange.default": _counted,
    "aten.arange.start": _counted,
    "aten.clamp.default": _between,
    "aten.full.default": _filled,
    "aten.full_like.default": _filled,
    "aten.mul.Tensor": _product,
    "aten.remainder.Scalar": _rest,
    **dict.fromkeys(aten_names("new_ones.default ones.default ones_like.default"), lambda node, types: (1, 1)),
    **dict.fromkeys(aten_names("new_zeros.default zeros.default zeros_like.default"), lambda node, types: (0, 0)),
    **dict.fromkeys(CHOSEN, _places),
    **dict.fromkeys(SAME | PARTS, _first),
}
