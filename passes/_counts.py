"""Private to divide_loss: graphs that compute, of a part of the batch, its share of a number that a loss divides by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

from tpcompile.graphs import copy_node
from tpcompile.ir import Program
from tpcompile.layout import Size, TensorType
from tpcompile.operation import Op, op_name, view_op
from tpcompile.passes._lengths import symbol_nodes
from tpcompile.passes._losses import MEANS

aten = torch.ops.aten


def size_count(program: Program, size: Size, source: Program) -> fx.Graph:
    """A number that the inputs' sizes decide, and how many elements masks choose. Its symbols are those of `source`, of equal inputs."""
    masks = {symbol: mask for symbol in sympy.sympify(size).atoms(sympy.Symbol) if (mask := mask_of(program, symbol)) is not None}
    known = sympy.sympify(size).subs(dict.fromkeys(masks, 1))
    graph, found = _extracted(program, list(masks.values()), {source.symbols[symbol][0] for symbol in known.atoms(sympy.Symbol)})
    total = graph.call_function(aten.scalar_tensor.default, (_size(graph, known, source),), {"dtype": torch.float64})
    for mask in found:
        chosen = graph.call_function(aten.sum.default, (mask,))
        total = graph.call_function(aten.mul.Tensor, (total, chosen))
    graph.output(total)
    return graph


def mask_of(program: Program, symbol: sympy.Basic) -> fx.Node | None:
    """The mask that chooses so many elements; None for a symbol that stands for a size of the inputs, or for something else."""
    if symbol in program.symbols:
        return None
    for node in program.graph.nodes:
        kind = program.types.get(node.name)
        if node.op == "call_function" and isinstance(kind, TensorType) and symbol in kind.shape:
            op = view_op(node, program.types)
            return op.operands[1] if op.name == "aten.index.Tensor" and op.ins[1].dtype == torch.bool else None
    return None


def part_count() -> fx.Graph:
    """One for each part: their number."""
    graph = fx.Graph()
    graph.output(graph.call_function(aten.scalar_tensor.default, (1,), {"dtype": torch.float64}))
    return graph


def total_count(program: Program, node: fx.Node) -> fx.Graph:
    """A sum that the inputs alone decide; of a mean its sum. Fractions are added up in float64."""
    graph, (made,) = _extracted(program, [node])
    name = op_name(made)
    if name == "aten.mean.default":
        made.target, made.args, made.kwargs = aten.sum.default, made.args[:1], {}
    elif name == "aten.mean.dim":
        made.target, made.kwargs = aten.sum.dim_IntList, {}
    kind = program.types[node.name]
    if isinstance(kind, TensorType) and kind.dtype.is_floating_point and (name in MEANS or name.startswith("aten.sum.")):
        made.kwargs = {**made.kwargs, "dtype": torch.float64}
    graph.output(made)
    return graph


def label_count(program: Program, op: Op) -> fx.Graph:
    """The labels that are not ignored, each with its class weight."""
    labels, weight, ignored = (op.argument(name) for name in ("target", "weight", "ignore_index"))
    graph, (held, *weights) = _extracted(program, [labels] if weight is None else [labels, weight])
    counted = graph.call_function(aten.ne.Scalar, (held, ignored))
    if weights:
        safe = graph.call_function(aten.masked_fill.Scalar, (held, graph.call_function(aten.eq.Scalar, (held, ignored)), 0))
        looked = graph.call_function(aten.index.Tensor, (weights[0], [safe]))
        counted = graph.call_function(aten.mul.Tensor, (counted, looked))
        graph.output(graph.call_function(aten.sum.default, (counted,), {"dtype": torch.float64}))
    else:
        graph.output(graph.call_function(aten.sum.default, (counted,)))
    return graph


def _extracted(program: Program, roots: list[fx.Node], inputs: Iterable[str] = ()) -> tuple[fx.Graph, list[fx.Node]]:
    """The part of the graph that computes values from inputs, with sizes taken from the inputs themselves; and other inputs."""
    graph, made = fx.Graph(), dict[fx.Node, Any]()
    needed: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        if (value := todo.pop()) not in needed:
            needed.add(value)
            todo += [] if _measured(program, value) is not None else value.all_input_nodes
    sizes = [size for value in needed if (size := _measured(program, value)) is not None]
    held = {*inputs, *(node.name for node in needed if node.op == "placeholder")}
    held |= {program.symbols[symbol][0] for size in sizes for symbol in size.atoms(sympy.Symbol)}
    for value in program.graph.find_nodes(op="placeholder"):
        if value.name in held:
            made[value] = graph.placeholder(value.name)
    for value in program.graph.nodes:
        if value in needed and value not in made:
            size = _measured(program, value)
            made[value] = copy_node(graph, value, made.__getitem__) if size is None else _size(graph, size, program)
    return graph, [made[root] for root in roots]


def _measured(program: Program, node: fx.Node) -> sympy.Expr | None:
    """A number that sizes of inputs decide, as such."""
    kind = program.types.get(node.name)
    if node.op != "call_function" or kind is None or isinstance(kind, (TensorType, tuple)):
        return None
    expression = sympy.sympify(kind)
    return expression if expression.free_symbols <= set(program.symbols) else None


def _size(graph: fx.Graph, expression: Size, source: Program) -> fx.Node | int:
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    return symbol_nodes(graph, source, expression, inputs)
