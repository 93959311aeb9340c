"""place_dropout: where the rows of the batch are in what is dropped, or drawn, by global index."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from tpcompile.collectives import ops
from tpcompile.errors import Refused
from tpcompile.factors import LayoutError, in_steps, quotient
from tpcompile.ir import Draft, Program
from tpcompile.layout import Size, TensorType, cut_factors
from tpcompile.passes._lengths import size_node
from tpcompile.passes._orders import ROWS
from tpcompile.passes._rows import Rows
from tpcompile.rules import argument, op_name

aten = torch.ops.aten


def place_dropout(program: Program, parts: int, witness: Program | None = None) -> Program:
    """Tell each dropout by global index which dimension counts rows: a part of a batch that is divided in `parts` begins behind others.

    In a program captured for one row, the rows cannot be told from other dimensions of size one; a `witness` of the same model with
    more rows shows them. Raises Refused for a value in which the rows of the batch have no place of their own.

    before  %y = dropout_at(%x, 0.1, %rng_key, 0) : f32[b, s, 64]        after  %y = dropout_at(%x, 0.1, %rng_key, 0, 0)
    before  %y = dropout_at(%x, 0.1, %rng_key, 0) : f32[s·b, 64]         after  %u = unflatten(%x, 0, [s, -1])
                                                                               %v = dropout_at(%u, 0.1, %rng_key, 0, 1)
                                                                               %y = flatten(%v, 0, 1)
    """
    places = list(_places(program))
    if parts == 1 or not places:
        return program
    draft = Draft(program)
    rows = Rows.of(witness or program)
    shown = {argument(node, "site"): node for node in _places(witness or program)}
    for node in places:
        try:
            found = _found(rows, shown[argument(node, "site")])
            if found is not None:
                _place(draft, draft.nodes[node.name], *found)
        except (LayoutError, KeyError) as error:
            raise Refused(
                f"dropout of a value in which the rows of the batch have no place: {error}",
                at='compile(dropout="exact")',
                source=str(program.sources.get(node.name, "")),
                fix='use dropout="local", or dp=1 and microbatches=1',
            ) from None
    return draft.freeze()


def _places(program: Program) -> Iterable[fx.Node]:
    """What is drawn by global index, and has not yet been told of rows."""
    named = ("tpcompile.dropout_at.default", "tpcompile.uniform.default")
    return (node for node in program.graph.nodes if node.op == "call_function" and op_name(node) in named and argument(node, "rows") == -1)


def _found(rows: Rows, node: fx.Node) -> tuple[int, Size] | None:
    """The dimension that counts rows, and how many elements of it stand before each row's next one; None where all rows share a value."""
    if reason := rows.reason(node):
        raise LayoutError(reason)
    dims = rows.layouts[node][0].dims
    cut = [dim for dim, places in enumerate(dims) if cut_factors(places)]
    counts = (size for dim, size in enumerate(rows.program.types[node.name].shape) if dim not in cut)  # type: ignore[union-attr]
    if any(not isinstance(size, int) and size.free_symbols & rows.symbols for size in counts):
        raise LayoutError("a size depends on their number")
    if not cut:
        _check_shared(rows, node)
        return None
    before, factor = in_steps(dims[cut[0]])
    if len(cut) > 1 or factor.cut != ROWS:
        raise LayoutError("they are in several places" if len(cut) > 1 else "they are in an order of their own")
    return cut[0], before


def _check_shared(rows: Rows, node: fx.Node) -> None:
    """Without a symbol for the number of rows, a new tensor of as many entries cannot be told from one that all rows share."""
    if rows.symbols:
        return
    needed, todo = set[fx.Node](), [node]
    while todo:
        if (value := todo.pop()) not in needed:
            needed.add(value)
            todo += value.all_input_nodes
    leaves = [value for value in needed if not value.all_input_nodes and value.name != "rng_key"]
    if not leaves or any(leaf.name not in rows.program.parameters for leaf in leaves):
        raise LayoutError("it was captured for a fixed number of rows")


def _place(draft: Draft, node: fx.Node, dim: int, before: Size) -> None:
    if before == 1:
        node.args = (*node.args[: 3 if op_name(node) == "tpcompile.uniform.default" else 4], dim)
        return
    kind = draft.types[node.name]
    assert isinstance(kind, TensorType) and isinstance(node.args[0], fx.Node)
    wide = TensorType(kind.dtype, (*kind.shape[:dim], before, quotient(kind.shape[dim], before), *kind.shape[dim + 1 :]))
    with draft.graph.inserting_before(node):
        count = size_node(draft, before)
        apart = draft.call(aten.unflatten.int, node.args[0], dim, [count, -1], type=wide, like=node)
        dropped = draft.call(ops.dropout_at.default, apart, *node.args[1:4], dim + 1, type=wide, like=node)
        draft.replace(node, draft.call(aten.flatten.using_ints, dropped, dim, dim + 1, type=kind, like=node))
