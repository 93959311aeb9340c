"""split: pipeline stages, in layer order, balanced by cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from tpcompile.errors import InputError, Refused
from tpcompile.ir import Boundary, Local, Stage
from tpcompile.layout import Layout, TensorType
from tpcompile.passes._aside import aside
from tpcompile.passes._homes import homes_of_updates
from tpcompile.passes._reasons import user_line
from tpcompile.rules import aten_names, op_name

LATE = ("tpcompile.enter.default", "tpcompile.local_slice.default", "tpcompile.shared.default")
"""Conversions stand where their users are: what they convert crosses once, before them."""


PRODUCTS = aten_names(
    """
    addmm.default baddbmm.default bmm.default conv1d.default conv1d.padding conv2d.default conv2d.padding einsum.default linear.default
    matmul.default mm.default scaled_dot_product_attention.default
    """
)


def split(local: Local, stages: int, costs: Mapping[str, int]) -> tuple[Stage, ...]:
    """Cut a graph into stages so that the most expensive one is as cheap as can be; only what cannot be computed again crosses.

    before  %h1 = layer 0, %h2 = layer 1 (%h1, %cos), %h3 = layer 2 (%h2, %cos)
    after   stage 0: ids → %h1, %h2;  stage 1: %h2, ids → %cos again, %h3
    """
    places = place(local, stages, costs) if stages > 1 else dict.fromkeys(local.graph.nodes, 0)
    cutter = _Cutter(local, places, stages)
    return tuple(cutter.stage(index) for index in range(stages))


def place(local: Local, stages: int, costs: Mapping[str, int]) -> dict[fx.Node, int]:
    """The stage of every node: a layer's by balance, others with what they need and what needs them."""
    layers = local.program.layers
    if len(layers) < stages:
        raise InputError(
            f"{stages} pipeline stages for {len(layers)} layer{'s' * (len(layers) != 1)}",
            at=f"compile(mesh pp={stages})",
            source=user_line(),
            fix=f"use pp={len(layers)} or less" if layers else "use pp=1: no repeated layers were found",
        )
    layer_of = {node: _layer(local, node) for node in local.graph.nodes}
    loads = [0] * len(layers)
    last = 0
    for node in local.graph.nodes:
        index = layer_of[node]
        last = max(last, index) if index is not None else last
        loads[last if index is None else index] += costs.get(local.origins.get(node.name, node.name), 0)
    stage_of_layer = [stage for stage, (start, stop) in enumerate(balance(loads, stages)) for _ in range(start, stop)]
    free = set(_free(local))
    places: dict[fx.Node, int] = {}
    anchored: set[fx.Node] = set()
    for node in local.graph.nodes:
        needed = [places[operand] for operand in node.all_input_nodes if operand in anchored]
        index = layer_of[node]
        own = [stage_of_layer[index]] if index is not None and node not in free else []
        places[node] = max([*needed, *own], default=0)
        if needed or own:
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


def _layer(local: Local, node: fx.Node) -> int | None:
    source = local.program.sources.get(local.origins.get(node.name, node.name))
    path = f"{source.path}." if source else ""
    return next((index for index, layer in enumerate(local.program.layers) if path.startswith(f"{layer}.")), None)


def balance(loads: Sequence[int], stages: int) -> list[tuple[int, int]]:
    """Consecutive ranges of layers, one per stage and none empty, whose greatest sum is least; earlier stages take no more than needed.

    Exact dynamic programming: best[k][n] is the least greatest sum of the first n layers on k stages.
    """
    count = len(loads)
    sums = [0]
    for load in loads:
        sums.append(sums[-1] + load)
    best: dict[tuple[int, int], tuple[int, int]] = {(0, 0): (0, 0)}
    for stage in range(1, stages + 1):
        for stop in range(stage, count - (stages - stage) + 1):
            options = [
                (max(best[stage - 1, start][0], sums[stop] - sums[start]), start)
                for start in range(stage - 1, stop)
                if (stage - 1, start) in best
            ]
            best[stage, stop] = min(options, key=lambda option: (option[0], option[1]))
    ranges: list[tuple[int, int]] = []
    stop = count
    for stage in range(stages, 0, -1):
        start = best[stage, stop][1]
        ranges.insert(0, (start, stop))
        stop = start
    return ranges


class _Cutter:
    """Builds the graph of each stage, and knows what crosses."""

    def __init__(self, local: Local, places: Mapping[fx.Node, int], stages: int) -> None:
        self.local, self.places, self.stages = local, places, stages
        self.order = {node: position for position, node in enumerate(local.graph.nodes)}
        self.free = set(_free(local))
        returned = local.program.returned()
        output = local.graph.output_node().all_input_nodes
        by_origin = {local.origins.get(node.name, node.name): node for node in output}
        self.returned = [by_origin[name] for name in returned]
        self.free |= self._again()
        self.crossing = [self._crossing(index) for index in range(stages - 1)]
        reads = [self._needed(index, self._sent(index)) for index in range(stages)]
        self.updates = homes_of_updates(local, places, self.free, reads, lambda index, node: self._needed(index, [node]))

    def _again(self) -> set[fx.Node]:
        """What would cross and cannot, being cut, but needs only parameters and inputs, and no product with a weight: biases of scores.

        It is computed again on each stage, which then share the parameter.
        """
        found: set[fx.Node] = set()
        for node in {node for index in range(self.stages - 1) for node in self._crossing(index)}:
            layout = self.local.layouts.get(node.name)
            if isinstance(layout, Layout) and layout.is_cut:
                needed = self._ancestors(node)
                if not any(op_name(value) in PRODUCTS for value in needed):
                    found |= needed
        return found

    def _ancestors(self, node: fx.Node) -> set[fx.Node]:
        seen: set[fx.Node] = set()
        todo = [node]
        while todo:
            if (value := todo.pop()) not in seen:
                seen.add(value)
                todo += value.all_input_nodes
        return {value for value in seen if value.op == "call_function"}

    def _crossing(self, boundary: int) -> list[fx.Node]:
        """What is made up to a boundary and used behind it, unless it can be computed there again."""
        late = [node for node in self.local.graph.nodes if self.places[node] > boundary and node.op not in ("placeholder", "output")]
        wanted = {operand for node in late for operand in node.all_input_nodes} | set(self.returned)
        found = [
            node for node in self._closed(wanted) if self.places[node] <= boundary and node not in self.free and node.op != "placeholder"
        ]
        return sorted(found, key=self.order.__getitem__)

    def _closed(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Nodes, and whatever is needed to compute those again that can be."""
        seen: set[fx.Node] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += node.all_input_nodes if node in self.free else []
        return seen

    def stage(self, index: int) -> Stage:
        received, sent = self._received(index), self._sent(index)
        renewed = self.updates[index]
        sent = [*sent, *renewed.values()]
        body = {node for node in self.local.graph.nodes if self.places[node] == index and node.op not in ("placeholder", "output")}
        body = (self._closed(body | set(sent)) | {o for node in body for o in node.all_input_nodes}) - set(received)
        body |= self._closed({o for node in body for o in node.all_input_nodes} - set(received))
        nodes = sorted(body - set(received), key=self.order.__getitem__)
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in received:
            made[node] = graph.placeholder(node.name)
        states = [node for node in nodes if node.op == "placeholder"]
        for node in sorted(states, key=self._kind):
            made[node] = graph.node_copy(node, made.__getitem__)
        for node in nodes:
            if node.op != "placeholder":
                made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(tuple(made[node] for node in sent))
        graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        for node in [made[state] for state in states if not made[state].users and state not in sent]:
            graph.erase_node(node)
        program, held = self.local.program, [node.name for node in graph.find_nodes(op="placeholder")]
        return Stage(
            index=index,
            graph=graph,
            receives=tuple(self._boundary(node) for node in received),
            sends=tuple(self._boundary(node) for node in self._sent(index)) if index < self.stages - 1 else (),
            inputs=tuple(name for name in held if self._is_input(name)),
            parameters={name: program.parameters[name] for name in held if name in program.parameters},
            buffers={name: program.buffers[name] for name in held if name in program.buffers},
            constants=tuple(name for name in held if name in program.constants),
            updates=tuple(renewed),
        )

    def _received(self, index: int) -> list[fx.Node]:
        return self.crossing[index - 1] if index else []

    def _sent(self, index: int) -> list[fx.Node]:
        return self.crossing[index] if index < self.stages - 1 else self.returned

    def _needed(self, index: int, values: Iterable[fx.Node]) -> set[fx.Node]:
        """What a stage computes, or takes, to make some values."""
        seen = set(self._received(index))
        todo = list(values)
        found: set[fx.Node] = set()
        while todo:
            if (node := todo.pop()) not in seen:
                seen.add(node)
                found.add(node)
                todo += node.all_input_nodes
        return found

    def _is_input(self, name: str) -> bool:
        program = self.local.program
        return name in program.inputs or name == "rng_key" or any(name == count.name for count in program.counts)

    def _kind(self, node: fx.Node) -> int:
        program = self.local.program
        tables = (program.parameters, program.buffers, program.constants, program.inputs)
        return next((position for position, table in enumerate(tables) if node.name in table), len(tables))

    def _boundary(self, node: fx.Node) -> Boundary:
        origin = self.local.origins.get(node.name, node.name)
        kind, layout = self.local.program.types.get(origin), self.local.layouts.get(node.name)
        if not isinstance(kind, TensorType) or not kind.dtype.is_floating_point or not isinstance(layout, Layout):
            source, what = str(self.local.program.sources.get(origin, "")), "is no floating-point tensor"
            raise Refused(f"{origin} would cross from one pipeline stage to the next, and {what}", source=source, fix="use pp=1")
        return Boundary(node.name, kind, True, layout)


def _free(local: Local) -> Iterable[fx.Node]:
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
