"""Which operations a partial sum may pass through: those that are linear in it.

f is linear in some of its operands when f(Σ x) = Σ f(x) for every sum of all of them at once. A product is linear in each of its factors
alone; an addition, a concatenation, a write into another value in both together. So a sum that waits for its reduction over an axis may
wait until behind f; the other operands are whole, and their gradients are then partial sums themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from tpcompile.operation import Op, argument, aten_names, op_name

IN_FIRST = aten_names(
    """
    _unsafe_view.default alias.default clone.default contiguous.default div.Scalar expand.default flatten.using_ints flip.default
    index.Tensor index_select.default mean.default mean.dim movedim.int mT.default mul.Scalar neg.default permute.default
    reshape.default roll.default select.int slice.Tensor squeeze.dims sum.default sum.dim_IntList swapaxes.default t.default
    transpose.int unflatten.int unsqueeze.default view.default
    """
)
"""Linear in the first operand; others are indices or sizes."""

QUOTIENTS = aten_names("div.Tensor")
"""Linear in the first operand, and in no other."""

PRODUCTS = aten_names("bmm.default matmul.default mm.default mul.Tensor")
"""Linear in either operand, the other whole."""

TOGETHER: Mapping[str, tuple[int, ...]] = {
    "aten.add.Tensor": (0, 1),
    "aten.index_add.default": (0, -1),
    "aten.index_put.default": (0, -1),
    "aten.scatter_add.default": (0, -1),
    "aten.select_scatter.default": (0, 1),
    "aten.slice_scatter.default": (0, 1),
    "aten.sub.Tensor": (0, 1),
    "aten.where.self": (1, 2),
}
"""Linear in these operands together: each is a partial sum, or zero."""

ALL_TOGETHER = aten_names("cat.default concat.default concatenate.default stack.default")

ZEROS = aten_names("new_zeros.default zeros.default zeros_like.default")


def is_linear(op: Op, partial: Collection[int]) -> bool:
    """Whether an operation is linear in the operands at these positions, the others being what they are."""
    held = set(partial)
    if op.name in IN_FIRST | QUOTIENTS:
        return held == {0}
    if op.name in PRODUCTS:
        return len(held) == 1
    if op.name == "aten.masked_fill.Scalar":
        return held == {0} and argument(op.node, "value") == 0
    if op.name in ALL_TOGETHER:
        together = set(range(len(op.operands)))
    elif op.name in TOGETHER:
        together = {position % len(op.operands) for position in TOGETHER[op.name]}
        if len(op.operands) < 2 or len(together) < len(TOGETHER[op.name]) or (op.name == "aten.where.self" and len(op.operands) < 3):
            return False
    else:
        return False
    return held <= together and all(is_zero(op.operands[position]) for position in together - held)


def is_zero(value: Any) -> bool:
    """Whether every element of a value is certainly zero."""
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return False
    if op_name(value) in ZEROS:
        return True
    if op_name(value) in ("aten.full.default", "aten.full_like.default", "aten.new_full.default"):
        return bool(argument(value, "fill_value") == 0)
    return op_name(value) in IN_FIRST and is_zero(value.args[0])
