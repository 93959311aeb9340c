"""Private to plan: when it pays to cut a vocabulary, the rows of a table of embeddings and the classes of a head.

A row-cut linear of the model's hidden size h has h·h weights, and costs one reduction of a hidden vector for each token. The rows of a
table cost the same: the look-up ends in such a reduction, and so does the gradient of what a head reads. So a table is cut where its
rows are at least as many as its columns: where the same reduction spares a rank as many weights. What the model looks up for itself
(positions, their distances) is not counted by tokens, and stays whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from tpcompile.ir import Program
from tpcompile.layout import Layout, TensorType, cut_factors, pieces, product, size_of
from tpcompile.rules import RESHAPES, argument, aten_names, op_name

MOVES = RESHAPES | aten_names(
    """
    cat.default clone.default contiguous.default copy.default expand.default expand_as.default gather.default index.Tensor
    index_select.default masked_fill.Scalar masked_fill.Tensor pad.default permute.default repeat.default roll.default select.int
    select_scatter.default slice.Tensor slice_scatter.default stack.default to.dtype to.dtype_layout transpose.int where.ScalarOther
    where.ScalarSelf where.self
    """
)
"""Operations that take tokens from one place to another, or put some for others."""

Layouts = Mapping[str, Layout | tuple[Layout, ...]]


def objection(program: Program, nodes: Mapping[str, fx.Node], rows: Iterable[str], layouts: Layouts) -> str:
    """Why a vocabulary is not worth cutting, or "". `rows` are the look-ups and losses that its cut ends in, `layouts` what is cut."""
    for row in rows:
        if op_name(nodes[row]) == "aten.embedding.default" and not tokens(program, argument(nodes[row], "indices")):
            return "a table that is not looked up by the inputs' tokens"
    sizes = [_size(program, name, layout) for name, layout in layouts.items() if name in program.parameters]
    count, columns = max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))
    if count < columns:
        return f"its rows are fewer than its columns, {count} of {columns}: they save less than their reduction costs"
    return ""


def _size(program: Program, name: str, layout: Layout | tuple[Layout, ...]) -> tuple[int, int]:
    """How many rows a weight is cut along, and the elements of each."""
    kind = program.types[name]
    assert isinstance(kind, TensorType) and isinstance(layout, Layout)
    (rows,) = (int(size_of(dim)) for dim in layout.dims if cut_factors(dim))
    return rows, int(product(kind.shape)) // rows


def tokens(program: Program, node: fx.Node) -> bool:
    """Whether the numbers of a value are those of the user's inputs, moved at most."""
    seen: set[fx.Node] = set()
    while node not in seen:
        seen.add(node)
        if node.name in program.inputs:
            return True
        if node.op != "call_function" or op_name(node) not in MOVES:
            return False
        given = [operand for operand in node.all_input_nodes if operand.name in program.types]
        node = next((operand for operand in given if _depends(program, operand)), node)
    return False


def _depends(program: Program, node: fx.Node) -> bool:
    """Whether a value's numbers come from an input, and not its size alone."""
    todo, seen = [node], set[fx.Node]()
    while todo:
        value = todo.pop()
        if value in seen or not isinstance(program.types.get(value.name), (TensorType, tuple)) or "empty" in op_name(value):
            continue
        if value.name in program.inputs:
            return True
        seen.add(value)
        if not (value.op == "call_function" and (op_name(value).startswith("aten.new_") or "_like" in op_name(value))):
            todo += value.all_input_nodes
    return False


def in_one_piece(layout: Layout, parts: int) -> bool:
    """Whether every rank holds consecutive indices of what is cut, and some."""
    held = [pieces(dim, coordinate) for dim in layout.dims if cut_factors(dim) for coordinate in range(parts)]
    return all(len(ranges) == 1 and ranges[0][0] < ranges[0][1] for ranges in held)
