"""Whether a traced backward is linear in the gradients that it is given.

All of parallel training rests on that: gradients arrive in parts, which are added up later, and scaled, by the number of replicas. A
backward that clips its gradient is exact on whole values alone.

A value is a constant, as all that forward made; linear in the gradients; or zero, which is both. Operations are known to keep that by the
operands in which they are linear; of one that is not known, and is given something linear, nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from tpcompile.factors import LayoutError
from tpcompile.rules import RESHAPES, argument, aten_names, op_name


class Degree(Enum):
    CONSTANT = 0
    LINEAR = 1
    ZERO = 2


TOGETHER = RESHAPES | aten_names(
    """
    _to_copy.default add.Tensor alias.default cat.default clone.default constant_pad_nd.default contiguous.default copy.default
    cumsum.default detach.default diagonal.default diagonal_scatter.default expand.default flip.default index_put.default
    index_select.default index.Tensor gather.default masked_fill.Scalar mean.default mean.dim neg.default permute.default repeat.default
    roll.default scatter_add.default scatter.src select.int select_scatter.default slice.Tensor slice_scatter.default
    split.Tensor split_with_sizes.default squeeze.dim squeeze.dims stack.default sub.Tensor sum.default sum.dim_IntList t.default
    transpose.int tril.default triu.default unbind.int unfold.default view_as_complex.default view_as_real.default where.self
    """
)
"""Linear in all operands of floating point together: a constant among them, beside something linear, breaks it."""

BY_ITSELF = aten_names("bmm.default dot.default matmul.default mm.default mul.Tensor mul.Scalar mv.default outer.default")
"""Linear in each operand by itself."""

IN_FIRST = aten_names("div.Scalar div.Tensor")
"""Linear in the first operand."""

FILLS = {"aten.full.default": "fill_value", "aten.full_like.default": "fill_value", "aten.scalar_tensor.default": "s"}
ZEROS = aten_names("new_zeros.default zeros.default zeros_like.default")


def check_linear(graph: fx.Graph, outputs: int, gradients: int) -> None:
    """Raises LayoutError if what a joint graph makes behind its outputs is not linear in its last placeholders, the gradients."""
    placeholders = graph.find_nodes(op="placeholder")
    given = set(placeholders[len(placeholders) - gradients :])
    degrees: dict[fx.Node, Degree] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            degrees[node] = _degree(node, degrees)
        else:
            degrees[node] = Degree.LINEAR if node in given else Degree.CONSTANT
    results: Any = graph.output_node().args[0]
    if any(isinstance(value, fx.Node) and degrees[value] is Degree.CONSTANT for value in results[outputs:]):
        raise LayoutError("its backward makes a gradient that does not depend on the one it is given")


def _degree(node: fx.Node, degrees: dict[fx.Node, Degree]) -> Degree:
    name, operands = op_name(node), [operand for operand in node.all_input_nodes if _is_tensor(operand)]
    if name in ZEROS or (name in FILLS and argument(node, FILLS[name]) == 0):
        return Degree.ZERO
    found = [degrees[operand] for operand in operands]
    if name == "getitem":
        return found[0]
    if Degree.LINEAR in found and not _keeps(node, name, operands, degrees):
        raise LayoutError(f"its backward is not known to be linear in the gradient: {name}")
    if Degree.LINEAR in found:
        return Degree.LINEAR
    kept = name in TOGETHER and _adds_nothing(node, name) and _all(_floats(operands), degrees, Degree.ZERO)
    return Degree.ZERO if kept else Degree.CONSTANT


def _keeps(node: fx.Node, name: str, operands: list[fx.Node], degrees: dict[fx.Node, Degree]) -> bool:
    linear = [operand for operand in operands if degrees[operand] is Degree.LINEAR]
    if not all(map(_is_float, linear)) or not _is_float(node):
        return False
    if name in TOGETHER:
        return _adds_nothing(node, name) and _all(_floats(operands), degrees, Degree.LINEAR, Degree.ZERO)
    if name in BY_ITSELF:
        return len(linear) == 1 and list(node.args).count(linear[0]) == 1
    if name in IN_FIRST:
        return linear == [node.args[0]] and list(node.args).count(linear[0]) == 1
    if name in ("aten.addmm.default", "aten.baddbmm.default"):
        added, *factors = (degrees[operand] for operand in node.args[:3])  # type: ignore[index]
        return added is not Degree.CONSTANT and factors.count(Degree.LINEAR) == 1 and factors.count(Degree.CONSTANT) == 1
    return _is_derivative(node) and linear == [node.args[0]] and list(node.args).count(linear[0]) == 1


def _is_derivative(node: fx.Node) -> bool:
    """Whether an operation is one of torch's own backward formulas, linear in the one gradient that it takes, its first operand."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    gradients: list[str] = [argument.name for argument in schema.arguments if argument.name.startswith("grad")]
    return str(schema.name).removesuffix("_data").endswith("_backward") and gradients == [str(schema.arguments[0].name)]


def _adds_nothing(node: fx.Node, name: str) -> bool:
    """Whether no number is put beside what is linear."""
    match name:
        case "aten.add.Tensor" | "aten.sub.Tensor":
            return isinstance(node.args[1], fx.Node) and _is_tensor(node.args[1])
        case "aten.masked_fill.Scalar" | "aten.constant_pad_nd.default":
            return bool(argument(node, "value") == 0)
    return True


def _all(operands: Iterable[fx.Node], degrees: dict[fx.Node, Degree], *allowed: Degree) -> bool:
    found = [degrees[operand] for operand in operands]
    return bool(found) and all(degree in allowed for degree in found)


def _floats(operands: Iterable[fx.Node]) -> list[fx.Node]:
    return [operand for operand in operands if _is_float(operand)]


def _is_tensor(node: fx.Node) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(node.meta.get("val")))


def _is_float(node: fx.Node) -> bool:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()) for leaf in leaves)
