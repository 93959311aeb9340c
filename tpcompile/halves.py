"""Backward in halves, as the zero-bubble schedules run it: the gradients of what a stage receives, and later those of its weights.

    received ─ enter ─ linear ─ gelu ─ linear ─ reduce ─ sent      what the received values flow through: the first half
                         │               │
               weight ─ enter          weight                      what stands between a weight and that: the second half

Torch finds both in autograd's graph (torch/distributed/pipelining/_backward.py, 2.13). Where the second half begins in one place for each
weight, nothing runs twice, and collectives have one order on all ranks. Elsewhere it would run parts of the first half again, count some
weights twice, or leave weights without a gradient: there backward stays whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from tpcompile.collectives.table import LINEARS
from tpcompile.gradients import differentiable
from tpcompile.operation import op_name


def first_half(graph: fx.Graph, received: Iterable[str], asked: Collection[str]) -> frozenset[str]:
    """The values, among those `asked` for, that depend on what a stage receives with a gradient."""
    found = set(received) & set(asked)
    for node in graph.nodes:
        if node.name in asked and any(operand.name in found for operand in differentiable(node)):
            found.add(node.name)
    return frozenset(found)


def why_whole(graph: fx.Graph, names: Mapping[str, str], first: Collection[str], roots: Collection[str], asked: Collection[str]) -> str:
    """Why backward must not be halved; "" where it can be. `names` are those of the weights, by placeholder."""
    if not first:
        return "nothing that it receives has a gradient"
    for node in graph.nodes:
        if node.name in asked and op_name(node) in LINEARS:
            again = op_name(node) == "tpcompile.seq_linear.default"
            return "linear layers gather their inputs again" if again else "linear layers make the gradients of inputs and weights together"
    for way in _ways(graph, names, first, asked):
        if len(way.ends) > 1:
            return f"{names[way.weight]} is used in several places"
        if not way.ends or way.passed & set(roots):
            return f"{names[way.weight]} does not meet what is received"
    return ""


def second_half(graph: fx.Graph, names: Mapping[str, str], first: Collection[str], asked: Collection[str]) -> tuple[frozenset[str], ...]:
    """The values that only weights' gradients pass through: one set for all weights that meet the first half in the same place."""
    groups: dict[frozenset[str], set[str]] = {}
    for way in _ways(graph, names, first, asked):
        groups.setdefault(way.ends, set()).update(way.passed)
    return tuple(frozenset(values) for values in groups.values())


@dataclass(frozen=True)
class _Way:
    """A weight, what is made from it alone, and the values of the first half that take that."""

    weight: str
    passed: frozenset[str]
    ends: frozenset[str]


def _ways(graph: fx.Graph, names: Mapping[str, str], first: Collection[str], asked: Collection[str]) -> Iterator[_Way]:
    """Those of all weights that get a gradient, in order."""
    places = {node.name: node for node in graph.find_nodes(op="placeholder")}
    for name in names:
        if name not in asked:
            continue
        passed, ends, todo = {name}, set[str](), [places[name]]
        while todo:
            node = todo.pop()
            for user in node.users:
                if user.name not in asked or user.name in passed or node not in differentiable(user):
                    continue
                if user.name in first:
                    ends.add(user.name)
                else:
                    passed.add(user.name)
                    todo.append(user)
        yield _Way(name, frozenset(passed), frozenset(ends))
