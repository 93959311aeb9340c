"""optimize: fewer collectives for the same numbers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from tpcompile.ir import Local, copy_graph
from tpcompile.layout import Layout
from tpcompile.rules import op_name

REDUCE, ADD = "tpcompile.reduce.default", "aten.add.Tensor"


def optimize(local: Local) -> Local:
    """Add partial sums first, then reduce once: attention and MLP side by side need one all-reduce instead of two.

    before  %a = reduce(%p, tp), %b = reduce(%q, tp), %y = add(%a, %b)
    after   %y_partial = add(%p, %q) : +tp, %y = reduce(%y_partial, tp)
    """
    graph, _ = copy_graph(local.graph)
    layouts, origins = dict(local.layouts), dict(local.origins)
    for node in list(graph.nodes):
        if op_name(node) == ADD and not node.kwargs and all(isinstance(arg, fx.Node) for arg in node.args):
            add_before_reduce(graph, node, layouts, origins)
    graph.lint()
    return replace(local, graph=graph, layouts=layouts, origins=origins)


def add_before_reduce(graph: fx.Graph, node: fx.Node, layouts: dict[str, Layout | tuple[Layout, ...]], origins: dict[str, str]) -> None:
    """Push an addition above the reductions of its operands, whatever whole values stand between as further addends."""
    left, right = _pending(node.args[0]), _pending(node.args[1])
    if left is None or right is None or left[0] is right[0]:
        return
    axis = left[0].args[1]
    first, second = left[0].args[0], right[0].args[0]
    name = node.name
    with graph.inserting_before(node):
        partial = graph.create_node("call_function", torch.ops.aten.add.Tensor, (first, second), {}, f"{name}_partial")
        total = graph.create_node("call_function", torch.ops.tpcompile.reduce.default, (partial, axis), {}, f"{name}_sum")
        made = total
        for addend in (*left[1], *right[1]):
            made = graph.create_node("call_function", torch.ops.aten.add.Tensor, (made, addend), {}, f"{name}_with_{addend.name}")
    whole = layouts[name]
    assert isinstance(whole, Layout)
    layouts[partial.name] = Layout(whole.dims, (str(axis),))
    layouts[total.name] = whole
    layouts[made.name] = whole
    origins[made.name] = origins.pop(name, name)
    node.replace_all_uses_with(made)
    for dead in (node, *left[2], *right[2]):
        graph.erase_node(dead)
        layouts.pop(dead.name, None)
        origins.pop(dead.name, None)


def _pending(value: object) -> tuple[fx.Node, list[fx.Node], list[fx.Node]] | None:
    """The reduction under a value that only this addition reads, what has been added to it since, and the nodes that go with it."""
    if not isinstance(value, fx.Node) or len(value.users) != 1:
        return None
    if op_name(value) == REDUCE:
        return value, [], [value]
    if op_name(value) != ADD or value.kwargs or not all(isinstance(arg, fx.Node) for arg in value.args) or value.args[0] is value.args[1]:
        return None
    for operand, other in (value.args, value.args[::-1]):
        if (found := _pending(operand)) is not None:
            reduced, addends, gone = found
            return reduced, [*addends, other], [value, *gone]  # type: ignore[list-item]
    return None
