"""Private to detect: contractions of values that a region may end in, as one that ends in a linear does.

    scores[b, s, t] = Σ_h weights[b, s, h] · relu(Σ_d q[b, s, h, d] · k[b, t, d])

The sum over heads leaves a partial sum where heads are cut. It is worth a reduction only if something is computed for each head by itself:
a product of values within.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.ir import Program
from tpcompile.layout import TensorType
from tpcompile.rules import PARTED, Bound, Op, bind_rule, has_rule, op_name, view_op


def sums_after(program: Program, linears: Collection[str], products: Collection[str]) -> Iterator[tuple[Op, str, Bound]]:
    """What follows linears that no region has as columns, up to the next product with a weight: sums over a factor of theirs."""
    nodes = program.nodes()
    stack = [user for name in linears for user in nodes[name].users]
    seen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in seen or node.name in products or node.op != "call_function":
            continue
        seen.add(node)
        stack += node.users
        yield from _sums(program, node)


def _sums(program: Program, node: fx.Node) -> Iterator[tuple[Op, str, Bound]]:
    kind = program.types.get(node.name)
    if op_name(node) in PARTED or not isinstance(kind, TensorType) or not kind.dtype.is_floating_point:
        return
    op = view_op(node, program.types)
    if op.operands and has_rule(op):
        try:
            bound = bind_rule(op)
        except LayoutError:
            return
        kept = {token.letter for tokens in bound.outs for token in tokens}
        for letter, size in bound.sizes.items():
            if letter not in kept and letter not in bound.never and letter not in "*_" and isinstance(size, int) and size != 1:
                yield op, letter, bound
