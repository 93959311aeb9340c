"""Which nodes of a stage run in which layer's submodule, in an order that can be executed."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from tpcompile.errors import VerifyError
from tpcompile.ir import Stage

_BEFORE_USE = ("enter", "enter_later", "enter_linear", "kept_linear", "local_slice", "seq_linear", "shared")
"""What belongs to the layer that uses it, rather than to the one that made its input."""


@dataclass(frozen=True)
class Part:
    """Nodes that run one after another: those of a layer, or a single one of the stage's root (layer "")."""

    layer: str
    nodes: tuple[fx.Node, ...]


def live(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that the outputs need, without placeholders, in the graph's order."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in needed and node.op != "placeholder"]


def layer_of(path: str, layers: Collection[str]) -> str:
    """The outermost layer that a module path lies in, or ""."""
    words = path.split(".")
    above = (".".join(words[:depth]) for depth in range(1, len(words) + 1))
    return next((layer for layer in above if layer in layers), "")


def arrange(stage: Stage, paths: Mapping[str, str], layers: Sequence[str]) -> tuple[Part, ...]:
    """Gather each layer's nodes into one part; a layer whose nodes cannot run in one go stays in the root, node by node.

    What depends on inputs alone stays in the root too, if more than one layer needs it (a size, or a mask that the first layer made),
    or if it is all that a layer does here.
    """
    nodes = live(stage.graph)
    for node in stage.graph.nodes:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable and node.target is not torch.ops.aten.detach_.default:
            raise VerifyError(f"{node.name} changes its input in place, so the order of operations is not free", at=str(node.target))
    place = {node: index for index, node in enumerate(nodes)}
    home = _homes(nodes, place, paths, layers)
    learned = _learned(stage, nodes)
    for node in reversed(nodes):
        if node not in learned and any(home.get(user, "") != home[node] for user in node.users):
            home[node] = ""
    first, own = dict(home), defaultdict[str, list[fx.Node]](list)
    for node in nodes:
        own[home[node]].append(node)
    for layer in layers:
        members = own[layer]
        between = _between(nodes, place, members)
        if not any(node in learned for node in members) or any(first[node] or home[node] for node in between):
            home.update(dict.fromkeys(members, ""))
        else:
            home.update(dict.fromkeys(between, layer))
    while True:
        parts, stuck = _order(nodes, place, home)
        if not stuck:
            return parts
        home.update({node: "" for node in nodes if home[node] == stuck})


def _homes(nodes: Sequence[fx.Node], place: Mapping[fx.Node, int], paths: Mapping[str, str], layers: Sequence[str]) -> dict[fx.Node, str]:
    """Every node's layer. A node that a pass added goes where the latest of its inputs comes from, or where its users are.

    Where both are layers, what prepares a value goes to its users, anything else stays with its input.
    """
    listed = frozenset(layers)
    known = {node: layer_of(paths[node.name], listed) for node in nodes if node.name in paths}
    using = dict(known)
    for node in reversed(nodes):
        users = {using[user] for user in node.users if user in using}
        using.setdefault(node, users.pop() if len(users) == 1 else "")
    home: dict[fx.Node, str] = {}
    for node in nodes:
        sources = [source for source in node.all_input_nodes if source in home]
        made = home[max(sources, key=place.__getitem__)] if sources else ""
        first, second = (using[node], made) if getattr(node.target, "_opname", "") in _BEFORE_USE else (made, using[node])
        home[node] = known.get(node, first or second)
    return home


def _learned(stage: Stage, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes whose values depend on a parameter, or on what the stage receives."""
    origins = {*stage.parameters, *(boundary.name for boundary in stage.receives)}
    found: set[fx.Node] = set()
    for node in nodes:
        if any(source in found or (source.op == "placeholder" and source.name in origins) for source in node.all_input_nodes):
            found.add(node)
    return found


def _between(nodes: Sequence[fx.Node], place: Mapping[fx.Node, int], members: Sequence[fx.Node]) -> list[fx.Node]:
    """The other nodes on a way from one member to another."""
    if not members:
        return []
    window = nodes[place[members[0]] : place[members[-1]] + 1]
    inside, after, before = set(members), set(members), set(members)
    for node in window:
        if any(source in after for source in node.all_input_nodes):
            after.add(node)
    for node in reversed(window):
        if any(user in before for user in node.users):
            before.add(node)
    return [node for node in window if node not in inside and node in after and node in before]


def _order(nodes: Sequence[fx.Node], place: Mapping[fx.Node, int], home: Mapping[fx.Node, str]) -> tuple[tuple[Part, ...], str]:
    """The parts in an executable order, as near to the graph's as can be; or the layer that stands in the way of one."""
    groups: dict[str | fx.Node, list[fx.Node]] = {}
    for node in nodes:
        groups.setdefault(home[node] or node, []).append(node)
    key = {node: home[node] or node for node in nodes}
    waits = {name: {key[s] for node in members for s in node.all_input_nodes if s in key} - {name} for name, members in groups.items()}
    users: dict[str | fx.Node, list[str | fx.Node]] = {}
    for name, sources in waits.items():
        for source in sources:
            users.setdefault(source, []).append(name)
    ready = [(place[groups[name][0]], len(groups[name])) for name in groups if not waits[name]]
    heapq.heapify(ready)
    parts: list[Part] = []
    while ready:
        name = key[nodes[heapq.heappop(ready)[0]]]
        parts.append(Part(name if isinstance(name, str) else "", tuple(groups.pop(name))))
        for user in users.get(name, ()):
            waits[user].discard(name)
            if not waits[user]:
                heapq.heappush(ready, (place[groups[user][0]], len(groups[user])))
    return tuple(parts), next((name for name in reversed(groups) if isinstance(name, str)), "")
