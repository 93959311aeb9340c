"""Private to emit: the cores of attention in a layer, which may run again in backward as functions of their own.

%q, %k, %v = linear(…)                              core(%q, %k, %v, %mask):
%scores = matmul(%q, transpose(%k))                     everything between the projections and
%p = softmax(%scores / 8 + %mask)            →          the sum of values, weighted by scores
%o = matmul(%p, %v)                                     return %o
%y = linear(reshape(%o), %w)

A core ends in a product that a softmax leads to, or in a fused attention, and has all that leads there from products with weights and
from collectives: of these it keeps what they make, and of itself nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import fx

from tpcompile.collectives import COLLECTIVES
from tpcompile.ir import Stage
from tpcompile.operation import attends, op_name
from tpcompile.passes._places import PRODUCTS


def cores_of(stage: Stage, nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]]:
    """The cores among the nodes of a layer, each in order. One whose parts do not run in one go is left out."""
    stops = set(_stops(nodes, {*stage.parameters, *stage.buffers, *stage.constants}))
    inside, found, taken = set(nodes), list[tuple[fx.Node, ...]](), set[fx.Node]()
    for node in nodes:
        if not attends(op_name(node)):
            continue
        ends = _products(node, inside, stops) if "softmax" in op_name(node) else [node]
        reached = _before(ends, inside, stops)
        core = tuple(each for each in nodes if each in reached)
        if core and taken.isdisjoint(core) and sum(map(len, arranged(nodes, [*found, core]))) == len(nodes):
            taken |= reached
            found.append(core)
    return found


def arranged(nodes: Sequence[fx.Node], cores: Sequence[tuple[fx.Node, ...]]) -> list[tuple[fx.Node, ...]]:
    """The nodes of a layer in an order in which every core runs in one go: a core, or one other node, at a time.

    Nodes are missing where there is no such order: something that a core makes comes back to it from outside.
    """
    place = {node: index for index, node in enumerate(nodes)}
    group: dict[fx.Node, tuple[fx.Node, ...]] = {node: core for core in cores for node in core}
    steps = list(dict.fromkeys(group.get(node, (node,)) for node in nodes))
    needs = {step: {group.get(s, (s,)) for node in step for s in node.all_input_nodes if s in place} - {step} for step in steps}
    users: dict[tuple[fx.Node, ...], list[tuple[fx.Node, ...]]] = {step: [] for step in steps}
    for step, sources in needs.items():
        for source in sources:
            users[source].append(step)
    left = {step: len(sources) for step, sources in needs.items()}
    ready = [(place[step[0]], step) for step in steps if not left[step]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, step = heapq.heappop(ready)
        order.append(step)
        for user in users[step]:
            left[user] -= 1
            if not left[user]:
                heapq.heappush(ready, (place[user[0]], user))
    return order


def _stops(nodes: Sequence[fx.Node], held: Collection[str]) -> Iterator[fx.Node]:
    """What a core does not reach beyond: products with weights, and collectives."""
    constant: dict[fx.Node, bool] = {}

    def is_constant(node: fx.Node) -> bool:
        if node not in constant:
            constant[node] = (
                node.name in held if node.op == "placeholder" else node in members and all(map(is_constant, node.all_input_nodes))
            )
        return constant[node]

    members = set(nodes)
    for node in nodes:
        name = op_name(node)
        ours = COLLECTIVES.get(name.split(".")[1]) if name.startswith("tpcompile.") else None
        if (ours is not None and (ours.forward or ours.backward)) or (_multiplies(name) and any(map(is_constant, node.all_input_nodes))):
            yield node


def _multiplies(name: str) -> bool:
    return name in PRODUCTS and not attends(name)


def _products(node: fx.Node, inside: Collection[fx.Node], stops: Collection[fx.Node]) -> list[fx.Node]:
    """The first products that a softmax leads to."""
    found, todo, seen = dict[fx.Node, None](), [node], {node}
    while todo:
        for user in todo.pop().users:
            if user in seen or user not in inside or user in stops:
                continue
            seen.add(user)
            if _multiplies(op_name(user)):
                found[user] = None
            else:
                todo.append(user)
    return list(found)


def _before(ends: Iterable[fx.Node], inside: Collection[fx.Node], stops: Collection[fx.Node]) -> set[fx.Node]:
    """These nodes and all that lead to them, up to where a core begins."""
    core, todo = set[fx.Node](), list(ends)
    while todo:
        node = todo.pop()
        if node in inside and node not in stops and node not in core:
            core.add(node)
            todo += node.all_input_nodes
    return core
