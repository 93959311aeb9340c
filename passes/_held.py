"""Private to plan: parameters that an earlier capture of the model cut, where this one has no region for them.

A model captured for training has its head cut with its loss; captured again without labels, it has no loss. The head's weight is on the
ranks in pieces all the same, so the head works on pieces and its scores are gathered. What cannot work on pieces gathers the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.ir import Program, Region
from tpcompile.layout import Dim, Layout, TensorType, cut_factors, whole_dim
from tpcompile.rules import ENDS, Token, backward, bind_rule, forward, op_name, view_op

Rows = dict[str, tuple[Layout, ...]]


def held_regions(program: Program, axis: str, held: Mapping[str, Layout], taken: frozenset[str]) -> Iterator[Region]:
    """A region for every call that works on pieces of `held` parameters, by placeholder, and one for what is left; none touches `taken`."""
    left, nodes = dict(held), program.nodes()
    for node in dict.fromkeys(user for name in held for user in nodes[name].users if user.op == "call_function"):
        rows, columns = on_pieces(program, node, held)
        if (rows or columns) and node.name not in taken:
            own = {operand.name: left.pop(operand.name) for operand in node.all_input_nodes if operand.name in left}
            yield _region(program, "row" if rows else "column", axis, rows, columns, own)
    for name, layout in left.items():
        yield _region(program, "column", axis, {}, {}, {name: layout})


def _region(program: Program, kind: str, axis: str, rows: Rows, columns: dict[str, Layout], own: dict[str, Layout]) -> Region:
    weights = {program.parameters[name]: str(layout) for name, layout in own.items()}
    first = next(iter((*rows, *columns)), "")
    source = program.sources.get(first)
    name = source.path if source and source.path else next(iter(weights), first)
    return Region(name, "row" if kind == "row" else "column", axis, rows, tuple(columns), {**own, **columns}, weights)


def on_pieces(program: Program, node: fx.Node, held: Mapping[str, Layout]) -> tuple[Rows, dict[str, Layout]]:
    """A call that has parameters in these layouts: as a row-cut one, as a column-cut one, or neither."""
    if not isinstance(program.types.get(node.name), TensorType):
        return {}, {}
    op = view_op(node, program.types)
    try:
        bound = bind_rule(op, end=op_name(node) in ENDS)
        cut: dict[str, Dim] = {}
        for operand, tokens in zip(op.operands, bound.ins, strict=True):
            if operand.name in held:
                cut |= {token.letter: dim for token, dim in zip(tokens, held[operand.name].dims, strict=True) if cut_factors(dim)}
        kept = cut.keys() & {token.letter for token in bound.outs[0]}
        if not kept:
            wants = tuple(_placed(tokens, kind, cut) for tokens, kind in zip(bound.ins, op.ins, strict=True))
            forward(op, wants, end=True)
            return {node.name: wants}, {}
        out = _placed(bound.outs[0], op.outs[0], cut)
        forward(op, backward(op, [out]), [out])
    except LayoutError:
        return {}, {}
    return ({}, {node.name: out}) if len(kept) == len(cut) else ({}, {})


def _placed(tokens: tuple[Token, ...], kind: TensorType, cut: Mapping[str, Dim]) -> Layout:
    return Layout(
        tuple(cut[token.letter] if token.letter in cut else whole_dim(size) for token, size in zip(tokens, kind.shape, strict=True))
    )
