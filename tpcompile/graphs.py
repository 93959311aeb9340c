"""What all passes do to fx graphs, in time that does not grow with what they have seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.node import map_arg


def add_node(graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str | None = None, kind: Any = None) -> fx.Node:
    """`graph.create_node`, which takes half of the time if it is not asked to look for torch's symbolic numbers in the arguments."""
    made = graph.create_node(op, target, (), {}, name, kind)
    if args:
        made.args = args
    if kwargs:
        made.kwargs = kwargs
    return made


def copy_node(graph: fx.Graph, node: fx.Node, take: Callable[[fx.Node], Any]) -> fx.Node:
    """`graph.node_copy`: the node with what `take` says for each of its operands, and the same meta."""
    made = add_node(graph, node.op, node.target, map_arg(node.args, take), map_arg(node.kwargs, take), node.name, node.type)
    made.meta.update(node.meta)
    return made


def copy_graph(graph: fx.Graph, change: Callable[[Any], Any] | None = None) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """An equal graph with the same names, and its nodes by name. `change` is asked for every argument that is no node."""
    copy = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    if change is None:
        for node in graph.nodes:
            made[node] = copy_node(copy, node, made.__getitem__)
        return copy, {node.name: node for node in copy.nodes}

    def take(leaf: Any) -> Any:
        return made[leaf] if isinstance(leaf, fx.Node) else change(leaf)

    for node in graph.nodes:
        args, kwargs = (fx.node.map_aggregate(given, take) for given in (node.args, node.kwargs))
        made[node] = add_node(copy, node.op, node.target, args, kwargs, node.name, node.type)
        made[node].meta.update(node.meta)
    return copy, {node.name: node for node in copy.nodes}


def drop_dead(graph: fx.Graph) -> None:
    """Erase what nothing uses, but for placeholders and the output. Operations of a program have no other effect than their results."""
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


def ancestors(node: fx.Node) -> set[fx.Node]:
    """A node, and all that it is computed from."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        if (value := todo.pop()) not in seen:
            seen.add(value)
            todo += value.all_input_nodes
    return seen
