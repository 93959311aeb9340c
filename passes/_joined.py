"""Private to optimize: linear layers that alone read what a collective made whole become one operator with it.

    %e = enter(%x), %q = linear(%e, %wq), %k = linear(%e, %wk)         %q, %k = enter_linear(%x, [%wq, %wk])
    %g = seq_gather(%x), %q = linear(%g, %wq), %k = linear(%g, %wk)    %q, %k = kept_linear(%x, [%wq, %wk])

Its backward has the collective under way while the weights' gradients are computed. `seq_linear` in place of `kept_linear` also gathers
again there.
"""

from __future__ import annotations

import operator
import re

import torch
from torch import fx

from tpcompile.ir import Local
from tpcompile.layout import Layout
from tpcompile.passes._places import layer_index
from tpcompile.rules import argument, op_name

ENTER, GATHER, LINEAR = "tpcompile.enter.default", "tpcompile.seq_gather.default", "aten.linear.default"
_OPS = torch.ops.tpcompile


def join(local: Local, graph: fx.Graph, layouts: dict[str, Layout | tuple[Layout, ...]], *, overlap: bool, gather_again: bool) -> None:
    """Join them all; without `overlap` only those that gather again.

    Layers of several blocks stay apart, unless they gather again: the blocks may come to be on several stages.
    """
    ways = {ENTER: _OPS.enter_linear.default, GATHER: _OPS.kept_linear.default} if overlap else {}
    ways |= {GATHER: _OPS.seq_linear.default} if gather_again else {}
    order = {node: float(position) for position, node in enumerate(graph.nodes)}
    for node in list(order):
        if (target := ways.get(op_name(node))) is None or not node.users or not all(_reads(user, node) for user in node.users):
            continue
        if target is _OPS.seq_linear.default or len({layer_index(local, user) for user in node.users}) == 1:
            _join(graph, node, target, layouts, order)


def _reads(user: fx.Node, value: fx.Node) -> bool:
    return op_name(user) == LINEAR and [a for a in user.all_input_nodes if a is value] == [user.args[0]]


def _join(
    graph: fx.Graph, value: fx.Node, target: object, layouts: dict[str, Layout | tuple[Layout, ...]], order: dict[fx.Node, float]
) -> None:
    """`order` is where nodes stand, and stays so."""
    linears = sorted(value.users, key=order.__getitem__)
    weights, biases = ([argument(linear, name) for linear in linears] for name in ("weight", "bias"))
    made_after = [n for n in (*weights, *biases) if n is not None and order[n] > order[linears[0]]]
    if any((bias is None) != (biases[0] is None) for bias in biases) or not all(map(_of_parameters, made_after)):
        return
    for operand in made_after:
        linears[0].prepend(operand)
        order[operand] = order[linears[0]] - 0.5
    name = re.sub(r"_default(?=_\d+$|$)", "", linears[0].name)
    with graph.inserting_before(linears[0]):
        args = (*value.args, weights, [] if biases[0] is None else biases)
        made = graph.create_node("call_function", target, args, {}, f"{name}_all")  # type: ignore[arg-type]
    layouts[made.name] = tuple(layouts[linear.name] for linear in linears)  # type: ignore[misc]
    for index, linear in enumerate(linears):
        linear.target, linear.args, linear.kwargs = operator.getitem, (made, index), {}
    graph.erase_node(value)
    layouts.pop(value.name, None)


def _of_parameters(node: fx.Node) -> bool:
    return all(operand.op == "placeholder" for operand in node.all_input_nodes)
