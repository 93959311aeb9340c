"""Which collectives each region of a plan runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from torch import fx

from tpcompile.collectives import COLLECTIVES, Collective
from tpcompile.ir import Local, Region

ENTERS = ("enter", "enter_linear")
"""What belongs to the region that it leads into."""


def traffic(local: Local) -> dict[str, tuple[Counter[str], Counter[str]]]:
    """For every region by name, the collectives that it runs forward and backward."""
    owner = {name: region for region in local.plan.regions for name in (*region.rows, *region.columns, *region.layouts)}
    found = {region.name: (Counter[str](), Counter[str]()) for region in local.plan.regions}
    for node in local.graph.nodes:
        if (move := _move(node)) is None:
            continue
        near = _nearest(node, lambda n: n.all_input_nodes, local, owner) if move not in ENTERS else None
        region = near or _nearest(node, lambda n: n.users, local, owner)
        if region is not None:
            for counter, sent in zip(found[region.name], (COLLECTIVES[move].forward, COLLECTIVES[move].backward), strict=True):
                counter.update(message.call.replace("_", "-") for message in sent)
    return found


def _move(node: fx.Node) -> str | None:
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "tpcompile":
        return None
    name = str(node.target).split(".")[1]
    return name if name in COLLECTIVES and COLLECTIVES[name] != Collective() else None


def _nearest(start: fx.Node, around: Callable[[fx.Node], Iterable[fx.Node]], local: Local, owner: Mapping[str, Region]) -> Region | None:
    """The region of the nearest node in one direction."""
    edge, seen = list(around(start)), {start}
    while edge:
        for node in edge:
            if (region := owner.get(local.origins.get(node.name, node.name))) is not None:
                return region
        seen.update(edge)
        edge = [next_node for node in edge for next_node in around(node) if next_node not in seen]
    return None
