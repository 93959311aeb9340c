"""Private to divide_loss: which operations are linear in a sum over the batch's rows.

A part of the batch has a summand of it. What is linear may be done to the summands: the results add up to what it gives of the sum.
What the operation adds to the sum, and is the same in every part, is shared out: each part adds its share.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.layout import TensorType
from tpcompile.rules import RESHAPES, SPLITS, Op, addend, aten_names

ALONE = (
    RESHAPES
    | SPLITS
    | aten_names(
        """
        alias.default clone.default contiguous.default cumsum.default detach.default diff.default expand.default expand_as.default
        flip.default gather.default index.Tensor index_select.default mean.default mean.dim movedim.int mT.default neg.default
        negative.default numpy_T.default permute.default repeat.default repeat_interleave.self_int roll.default select.int slice.Tensor
        squeeze.default squeeze.dim sum.default sum.dim_IntList swapaxes.default t.default to.device to.dtype to.dtype_layout
        transpose.int tril.default triu.default unbind.int
        """
    )
)
"""Linear in the first operand; others are places, or serve for their sizes."""

PRODUCTS = aten_names(
    """
    bmm.default dot.default einsum.default linear.default matmul.default mm.default mul.Tensor multiply.Tensor mv.default outer.default
    """
)
"""Linear in each operand."""

QUOTIENTS = aten_names("div.Tensor divide.Tensor true_divide.Tensor")

SUMS = aten_names(
    "add.Tensor cat.default concat.default concatenate.default rsub.Scalar rsub.Tensor stack.default sub.Tensor subtract.Tensor where.self"
)
"""Linear in all operands together; a condition chooses among them."""

ZEROED = {"aten.masked_fill.Scalar": "value", "aten.where.ScalarOther": "other", "aten.where.ScalarSelf": "self"}
"""Linear if what they put in is zero."""


def check_linear(op: Op, sums: Collection[fx.Node], apart: Collection[fx.Node]) -> None:
    """Raise LayoutError unless an operation is linear in those of its operands that are sums over rows; `apart` differ by row."""
    found = [operand for operand in op.operands if operand in sums]
    if any(operand in apart for operand in op.operands):
        raise LayoutError("it brings a sum over the rows back to the rows")
    match op.name:
        case "aten.to.dtype" | "aten.to.dtype_layout" if not _keeps_fractions(op):
            raise LayoutError("it rounds a sum over the rows")
        case name if name in ALONE:
            fits = found == [op.operands[0]]
        case name if name in PRODUCTS:
            fits = len(found) == 1 and addend(op.node) is None
        case name if name in QUOTIENTS:
            fits = found == [op.operands[0]]
        case name if name in ZEROED:
            fits = op.argument(ZEROED[name]) == 0 and not any(kind.dtype.is_floating_point for kind in _conditions(op, found))
        case "aten.where.self":
            fits = op.operands[0] not in sums
            _check_shares(op, op.operands[1:], sums)
        case name if name in SUMS:
            fits = True
            _check_shares(op, op.operands, sums)
        case _:
            fits = False
    if not fits:
        raise LayoutError("it is not linear in a sum over the batch's rows")


def _keeps_fractions(op: Op) -> bool:
    """A cast that changes no fraction: to a floating type, or from whole numbers to whole numbers."""
    before, after = op.ins[0].dtype, op.outs[0].dtype
    return after.is_floating_point or not (before.is_floating_point or after.itemsize < 4)


def _conditions(op: Op, sums: Collection[fx.Node]) -> list[TensorType]:
    return [kind for operand, kind in zip(op.operands, op.ins, strict=True) if operand not in sums]


def _check_shares(op: Op, operands: Collection[fx.Node], sums: Collection[fx.Node]) -> None:
    """What is the same in all parts must be divisible among them."""
    numbers = [value for value in (op.argument("other"),) if value is not None and not isinstance(value, fx.Node) and value != 0]
    if (numbers or any(operand not in sums for operand in operands)) and not op.outs[0].dtype.is_floating_point:
        raise LayoutError("it adds to a whole number what cannot be shared out")
