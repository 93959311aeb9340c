"""Private to optimize: linear layers over gathered positions become one operator that does not keep what it gathered."""

from __future__ import annotations

import operator

import torch
from torch import fx

from tpcompile.layout import Layout
from tpcompile.rules import argument, op_name

GATHER, LINEAR = "tpcompile.seq_gather.default", "aten.linear.default"


def regather(graph: fx.Graph, layouts: dict[str, Layout | tuple[Layout, ...]]) -> None:
    """Where linear layers alone read a gathered value: seq_gather, linear, linear → seq_linear."""
    for node in list(graph.nodes):
        if op_name(node) == GATHER and all(_reads(user, node) for user in node.users):
            join(graph, node, layouts)


def _reads(user: fx.Node, gathered: fx.Node) -> bool:
    return op_name(user) == LINEAR and [a for a in user.all_input_nodes if a is gathered] == [user.args[0]]


def join(graph: fx.Graph, gathered: fx.Node, layouts: dict[str, Layout | tuple[Layout, ...]]) -> None:
    order = {node: position for position, node in enumerate(graph.nodes)}
    linears = sorted(gathered.users, key=order.__getitem__)
    weights, biases = ([argument(linear, name) for linear in linears] for name in ("weight", "bias"))
    made_here = [n for n in (*weights, *biases) if n is not None and order[n] > order[gathered]]
    if any((bias is None) != (biases[0] is None) for bias in biases) or not all(map(_of_parameters, made_here)):
        return
    for operand in made_here:
        linears[0].prepend(operand)
    with graph.inserting_before(linears[0]):
        args = (*gathered.args, weights, [] if biases[0] is None else biases)
        made = graph.create_node("call_function", torch.ops.tpcompile.seq_linear.default, args, {}, f"{linears[0].name}_all")
    layouts[made.name] = tuple(layouts[linear.name] for linear in linears)  # type: ignore[misc]
    for index, linear in enumerate(linears):
        linear.target, linear.args, linear.kwargs = operator.getitem, (made, index), {}
    graph.erase_node(gathered)
    layouts.pop(gathered.name, None)


def _of_parameters(node: fx.Node) -> bool:
    return all(operand.op == "placeholder" for operand in node.all_input_nodes)
