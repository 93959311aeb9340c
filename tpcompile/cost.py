"""What operations cost, as expressions in the sizes of the batch."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.ir import Program, Type
from tpcompile.layout import Size, TensorType, product
from tpcompile.rules import RESHAPES, bind_rule, has_rule, op_name, opened, view_op


def all_flops(program: Program) -> dict[str, Size]:
    """Floating-point operations of every call, forward: 2 per multiply-add of a contraction, 1 per element otherwise, 0 for views."""
    return {n.name: node_flops(n, program.types) for n in program.graph.nodes if n.op == "call_function"}


def flops_at(program: Program, sizes: Mapping[sympy.Symbol, int]) -> dict[str, int]:
    """The same at these sizes."""
    found = all_flops(program)
    values = {size: evaluate(size, sizes) for size in set(found.values())}  # layers have the same few
    return {name: values[size] for name, size in found.items()}


def node_flops(node: fx.Node, types: Mapping[str, Type]) -> Size:
    """Those of one call whose operands and result have these types."""
    kind = types.get(node.name)
    if not isinstance(kind, TensorType) or op_name(node) in RESHAPES or not kind.dtype.is_floating_point:
        return 0
    op = opened(view_op(node, types))
    if not has_rule(op):
        return product(kind.shape)
    try:
        bound = bind_rule(op)
    except LayoutError:
        return product(kind.shape)
    if "attention" in op.name:
        return 2 * product([*op.ins[0].shape, op.ins[1].shape[-2]]) + 2 * product([*kind.shape, op.ins[1].shape[-2]])
    kept = {token.letter for tokens in bound.outs for token in tokens}
    contracted = [letter for letter in bound.sizes if letter not in kept and letter not in bound.never and letter != "*"]
    if len(op.ins) > 1 and contracted:
        return 2 * product([*kind.shape, *(bound.sizes[letter] for letter in contracted)])
    return product(kind.shape)


def evaluate(size: Size, sizes: Mapping[sympy.Symbol, int]) -> int:
    """An expression's value where its symbols have these values; symbols that are not given count as 1."""
    if isinstance(size, int):
        return size
    return int(size.subs({symbol: sizes.get(symbol, 1) for symbol in size.free_symbols if isinstance(symbol, sympy.Symbol)}))
