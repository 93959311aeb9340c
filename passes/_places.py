"""Private to split: where a graph is cut into stages, between layers or anywhere.

Layers come first. A model without a list of them, or with fewer than stages, is cut where few values cross:

    %a = linear(%x)          ── %a crosses
    %b = relu(%a)            ── %b crosses
    %c = add(%b, %a)         ── between %b and %c, %a and %b cross
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from torch import fx

from tpcompile.collectives.table import LINEARS
from tpcompile.ir import Local, results
from tpcompile.layout import Layout, TensorType
from tpcompile.passes._aside import aside
from tpcompile.rules import aten_names, op_name

CONVERSIONS = ("enter", "enter_later", "local_slice", "seq_gather", "seq_whole", "shared")
LATE = (*(f"tpcompile.{name}.default" for name in CONVERSIONS), *LINEARS)
"""Conversions stand where their users are: what they convert crosses once, before them."""

PRODUCTS = frozenset(LINEARS) | aten_names(
    """
    addmm.default baddbmm.default bmm.default conv1d.default conv1d.padding conv2d.default conv2d.padding einsum.default linear.default
    matmul.default mm.default scaled_dot_product_attention.default
    """
)

SLACK = 1.25
"""How much slower than the best the slowest stage may be for fewer values to cross."""


def by_layers(local: Local, stages: int, costs: Mapping[str, int]) -> dict[fx.Node, int]:
    """The stage of every node: a layer's by balance, others with what they need and what needs them."""
    layers = local.program.layers
    layer_of = {node: layer_index(local, node) for node in local.graph.nodes}
    loads = [0] * len(layers)
    last = 0
    for node in local.graph.nodes:
        index = layer_of[node]
        last = max(last, index) if index is not None else last
        loads[last if index is None else index] += cost(local, node, costs)
    stage_of_layer = [stage for stage, (start, stop) in enumerate(balance(loads, stages)) for _ in range(start, stop)]
    return settled(local, {node: stage_of_layer[index] for node, index in layer_of.items() if index is not None}, stages)


def by_cost(local: Local, stages: int, costs: Mapping[str, int]) -> dict[fx.Node, int] | None:
    """The stage of every node, in the graph's order: as balanced as can be where as few values cross as can be.

    None where whole values alone cross in too few places.
    """
    nodes, crossing = _crossing(local)
    found = [_divided(local, nodes, crossing, most, stages, costs) for most in sorted({count for count in crossing if count is not None})]
    ways = [way for way in found if way is not None]
    if not ways:
        return None
    best = min(worst for worst, _ in ways)
    starts = next(starts for worst, starts in ways if worst <= SLACK * best)
    return settled(local, {node: sum(place >= start for start in starts) for place, node in enumerate(nodes)}, stages)


def most_parts(local: Local) -> int:
    """Into how many parts a graph can be cut where whole tensors alone cross."""
    _, crossing = _crossing(local)
    return 1 + sum(count is not None for count in crossing)


def _divided(
    local: Local, nodes: Sequence[fx.Node], crossing: Sequence[int | None], most: int, stages: int, costs: Mapping[str, int]
) -> tuple[int, list[int]] | None:
    """The load of the slowest stage, and the places where stages but the first start, if no more than `most` values may cross."""
    starts = [0, *(place + 1 for place, count in enumerate(crossing) if count is not None and count <= most)]
    if len(starts) < stages:
        return None
    bounds = [*starts, len(nodes)]
    loads = [sum(cost(local, node, costs) for node in nodes[a:z]) for a, z in zip(bounds, bounds[1:], strict=False)]
    ranges = balance(loads, stages)
    return max(sum(loads[a:z]) for a, z in ranges), [starts[a] for a, _ in ranges[1:]]


def _crossing(local: Local) -> tuple[list[fx.Node], list[int | None]]:
    """The nodes that belong to one stage, in order, and how many values cross behind each; None where one cannot.

    What a conversion takes is needed where the converted value first is.
    """
    free, kept = set(free_nodes(local)), set(results(local.graph, local.program.updates)[0])
    updates = aside(local.graph, local.program.updates)
    skipped = {*free, *updates}
    nodes = [node for node in local.graph.nodes if node.op == "call_function" and node not in skipped and op_name(node) not in LATE]
    place = {node: index for index, node in enumerate(nodes)}
    needed: dict[fx.Node, int] = {}  # where a value is used first
    last: dict[fx.Node, int] = {}
    for node in reversed(local.graph.nodes):
        if node.op == "output" or node in updates:
            continue
        uses = [needed[user] for user in node.users if user in needed] + [len(nodes)] * (node in kept)
        needed[node] = place.get(node, min(uses, default=len(nodes)))
        last[node] = max(uses, default=needed[node])
    heavy = _heavy(local)
    change: list[int] = [0] * (len(nodes) + 1)
    barred: list[int] = [0] * (len(nodes) + 1)
    for node in local.graph.nodes:
        start = needed.get(node, 0)
        if node.op != "call_function" or node in skipped or last[node] <= start:
            continue
        again = is_cut(local, node) and node not in heavy
        counts = barred if refusal(local, node) and not again else change
        counts[start] += 0 if again else 1
        counts[last[node]] -= 0 if again else 1
    crossing = zip(accumulate(change), accumulate(barred), strict=True)
    return nodes, [None if closed else count for count, closed in list(crossing)[: len(nodes) - 1]]


def _heavy(local: Local) -> set[fx.Node]:
    """What is, or depends on, a product with a weight: too much to compute again."""
    found: set[fx.Node] = set()
    for node in local.graph.nodes:
        if op_name(node) in PRODUCTS or any(operand in found for operand in node.all_input_nodes):
            found.add(node)
    return found


def settled(local: Local, own: Mapping[fx.Node, int], stages: int) -> dict[fx.Node, int]:
    """The stage of every node, given some nodes' own: what needs them follows, what they need alone stands with them."""
    free = set(free_nodes(local))
    places: dict[fx.Node, int] = {}
    anchored: set[fx.Node] = set()
    for node in local.graph.nodes:
        needed = [places[operand] for operand in node.all_input_nodes if operand in anchored]
        mine = [own[node]] if node in own and node not in free else []
        places[node] = max([*needed, *mine], default=0)
        if needed or mine:
            anchored.add(node)
    for node in reversed(local.graph.nodes):
        if node.users and (node not in anchored or op_name(node) in LATE):
            places[node] = min(places[user] for user in node.users)
    for node in aside(local.graph, local.program.updates):  # outside of layers, it stays where its operands are
        needed = [places[operand] for operand in node.all_input_nodes if operand.op == "call_function" and operand not in free]
        if node not in anchored and node not in free and needed:
            places[node] = max(needed)
    places[local.graph.output_node()] = stages - 1
    return places


def cost(local: Local, node: fx.Node, costs: Mapping[str, int]) -> int:
    return costs.get(local.origins.get(node.name, node.name), 0)


def is_cut(local: Local, node: fx.Node) -> bool:
    layout = local.layouts.get(node.name)
    return isinstance(layout, Layout) and layout.is_cut


def refusal(local: Local, node: fx.Node) -> str:
    """Why a value cannot cross from one stage to the next; "" if it can."""
    kind, layout = local.program.types.get(local.origins.get(node.name, node.name)), local.layouts.get(node.name)
    if not isinstance(kind, TensorType) or not isinstance(layout, Layout):
        return "is no tensor"
    return "is a complex tensor" if kind.dtype.is_complex else ""


def free_nodes(local: Local) -> Iterable[fx.Node]:
    """What any stage can compute by itself: from the user's inputs and state that is not trained, or from parameters alone."""
    inputs: set[fx.Node] = set()
    weights: set[fx.Node] = set()
    for node in local.graph.nodes:
        if node.op == "placeholder":
            (weights if node.name in local.program.parameters else inputs).add(node)
        elif node.op == "call_function":
            operands = set(node.all_input_nodes)
            if operands <= inputs:
                inputs.add(node)
            elif operands <= weights:
                weights.add(node)
    return [*inputs, *weights]


def layer_index(local: Local, node: fx.Node) -> int | None:
    source = local.program.sources.get(local.origins.get(node.name, node.name))
    path = f"{source.path}." if source else ""
    return next((index for index, layer in enumerate(local.program.layers) if path.startswith(f"{layer}.")), None)


def balance(loads: Sequence[int], stages: int) -> list[tuple[int, int]]:
    """Consecutive ranges of layers, one per stage and none empty, whose greatest sum is least; later stages take what they can."""
    sums = [0, *accumulate(loads)]
    ranges: list[tuple[int, int]] = []
    stop = len(loads)
    for stage in range(stages, 0, -1):
        start = max(stage - 1, bisect_left(sums, sums[stop] - _least(sums[: stop + 1], stage))) if stage > 1 else 0
        ranges.insert(0, (start, stop))
        stop = start
    return ranges


def _least(sums: Sequence[int], stages: int) -> int:
    """The least greatest sum: the lowest limit under which enough is taken at every turn."""
    low, high = max(b - a for a, b in zip(sums, sums[1:], strict=False)), sums[-1]
    while low < high:
        limit = (low + high) // 2
        if _turns(sums, limit) <= stages:
            high = limit
        else:
            low = limit + 1
    return low


def _turns(sums: Sequence[int], limit: int) -> int:
    """How many stages a row of loads takes where each takes as many as the limit allows."""
    turns, start = 0, 0
    while start < len(sums) - 1:
        start = bisect_right(sums, sums[start] + limit) - 1
        turns += 1
    return turns
