"""Collectives of a rank's program, counted from its graph."""

from __future__ import annotations

from collections import Counter

from torch import fx

from tpcompile.collectives import COLLECTIVES


def forward(graph: fx.Graph) -> Counter[str]:
    """all_reduce and all_gather, by name, that a forward runs."""
    return Counter(message.call for name in _used(graph) for message in COLLECTIVES[name].forward)


def backward(graph: fx.Graph) -> Counter[str]:
    """The same for backward. What enters a region without a gradient has no `enter`."""
    return Counter(message.call for name in _used(graph) for message in COLLECTIVES[name].backward)


def _used(graph: fx.Graph) -> list[str]:
    calls = [node for node in graph.nodes if node.op == "call_function" and node.users]
    return [str(node.target).split(".")[1] for node in calls if str(node.target).startswith("tpcompile.")]
