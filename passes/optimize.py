"""optimize: fewer collectives for the same numbers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from tpcompile.graphs import copy_graph
from tpcompile.ir import Local
from tpcompile.layout import Layout
from tpcompile.passes._hoist import hoist
from tpcompile.passes._joined import join
from tpcompile.passes._later import sum_later
from tpcompile.rules import op_name

REDUCTIONS, ADD = ("tpcompile.reduce.default", "tpcompile.seq_scatter.default"), "aten.add.Tensor"


def optimize(local: Local, *, overlap: bool = True, gather_again: bool = False) -> Local:
    """Add partial sums first, then reduce once; and let what two regions read by way of two norms enter once, before the norms.

    before  %a = reduce(%p, tp), %b = reduce(%q, tp), %y = add(%a, %b)
    after   %y_partial = add(%p, %q) : +tp, %y = reduce(%y_partial, tp)

    before  %m = norm(%x, %v), %a = enter(%m, tp);  %n = norm(%x, %w), %b = enter(%n, tp)
    after   %e = enter(%x, tp);  %a = norm(%e, enter_later(%v)), %b = norm(%e, enter_later(%w))

    A parameter that only `enter`s read needs its gradient summed once a step, with all others of its kind: `enter_later`.

    With `overlap`, linear layers are joined with the collective whose result they alone read: it then runs beside products in backward.
    With `gather_again`, they are joined with gathers of positions, which they do again in backward instead of keeping what was gathered.

    before  %e = enter(%x, tp), %q = linear(%e, %wq), %k = linear(%e, %wk)
    after   %q, %k = enter_linear(%x, tp, [%wq, %wk])
    """
    graph, _ = copy_graph(local.graph)
    layouts, origins = dict(local.layouts), dict(local.origins)
    for node in list(graph.nodes):
        if op_name(node) == ADD and not node.kwargs and all(isinstance(arg, fx.Node) for arg in node.args):
            add_before_reduce(graph, node, layouts, origins)
    hoist(local, graph, layouts, origins)
    sum_later(local, graph)
    join(local, graph, layouts, overlap=overlap, gather_again=gather_again)
    return replace(local, graph=graph, layouts=layouts, origins=origins)


def add_before_reduce(graph: fx.Graph, node: fx.Node, layouts: dict[str, Layout | tuple[Layout, ...]], origins: dict[str, str]) -> None:
    """Push an addition above the reductions of its operands, whatever whole values stand between as further addends."""
    left, right = _pending(node.args[0]), _pending(node.args[1])
    if left is None or right is None or left[0] is right[0] or left[0].args[1:] != right[0].args[1:]:
        return
    reduction, how = left[0].target, left[0].args[1:]
    (first,), (second,) = left[0].all_input_nodes[:1], right[0].all_input_nodes[:1]
    name = node.name
    with graph.inserting_before(node):
        partial = graph.create_node("call_function", torch.ops.aten.add.Tensor, (first, second), {}, f"{name}_partial")
        total = graph.create_node("call_function", reduction, (partial, *how), {}, f"{name}_sum")
        layouts[partial.name], layouts[total.name] = layouts[first.name], layouts[name]
        made = total
        for addend in (*left[1], *right[1]):
            made = graph.create_node("call_function", torch.ops.aten.add.Tensor, (made, addend), {}, f"{name}_with_{addend.name}")
            layouts[made.name] = layouts[name]
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
    if op_name(value) in REDUCTIONS:
        return value, [], [value]
    if op_name(value) != ADD or value.kwargs or not all(isinstance(arg, fx.Node) for arg in value.args) or value.args[0] is value.args[1]:
        return None
    for operand, other in (value.args, value.args[::-1]):
        if (found := _pending(operand)) is not None:
            reduced, addends, gone = found
            return reduced, [*addends, other], [value, *gone]  # type: ignore[list-item]
    return None
