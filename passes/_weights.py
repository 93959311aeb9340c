"""Private to detect and plan: which values are computed from parameters alone, and which operations are products with them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.ir import Program
from tpcompile.layout import TensorType
from tpcompile.rules import PARTED, Bound, Op, bind_rule, has_rule, op_name, opened, view_op


def weight_values(program: Program) -> frozenset[fx.Node]:
    """The values computed from parameters alone."""
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.name in program.parameters or (
            node.op == "call_function" and node.all_input_nodes and found.issuperset(node.all_input_nodes)
        ):
            found.add(node)
    return frozenset(found)


def seeds(program: Program, node: fx.Node, weights: frozenset[fx.Node]) -> Iterable[tuple[Op, str, Bound]]:
    """The operation with each letter that it contracts between a weight and another value."""
    if node.op != "call_function" or not isinstance(program.types.get(node.name), TensorType) or op_name(node) in PARTED:
        return
    op = opened(view_op(node, program.types))
    if not any(operand in weights for operand in op.operands) or all(operand in weights for operand in op.operands) or not has_rule(op):
        return
    try:
        bound = bind_rule(op)
    except LayoutError:
        return
    kept = {token.letter for tokens in bound.outs for token in tokens}
    for letter in bound.sizes:
        holders = [operand for operand, tokens in zip(op.operands, bound.ins, strict=True) if letter in {t.letter for t in tokens}]
        contracted = letter not in kept and letter not in bound.never and bound.sizes[letter] != 1
        if contracted and len({holder in weights for holder in holders}) == 2:
            yield op, letter, bound


def contracts(op: Op) -> bool:
    """Whether the operation is a product over some letter, as a linear layer is."""
    if op.name in PARTED or len(op.ins) < 2:
        return False
    bound = bind_rule(opened(op))
    kept = {token.letter for tokens in bound.outs for token in tokens}
    return any(letter not in kept and letter not in bound.never for letter in bound.sizes)
