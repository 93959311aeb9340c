"""split: pipeline stages, in the graph's order, balanced by cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import fx

from tpcompile.errors import InputError, Refused
from tpcompile.gradients import trained, with_gradient
from tpcompile.graphs import ancestors, copy_node, drop_dead
from tpcompile.ir import Boundary, Local, Stage
from tpcompile.layout import Layout, TensorType
from tpcompile.messages import why_unhalved
from tpcompile.passes._homes import homes_of_updates
from tpcompile.passes._places import PRODUCTS, by_cost, by_layers, cost, free_nodes, is_cut, most_parts, refusal
from tpcompile.passes._reasons import user_line
from tpcompile.rules import op_name
from tpcompile.text import origin_types


def split(local: Local, pp: int, costs: Mapping[str, int], per_rank: int = 1) -> tuple[Stage, ...]:
    """Cut a graph into stages so that the most expensive one is as cheap as can be; only what cannot be computed again crosses.

    There are `per_rank` of them for each of `pp` ranks.

    before  %h1 = layer 0, %h2 = layer 1 (%h1, %cos), %h3 = layer 2 (%h2, %cos)
    after   stage 0: ids → %h1, %h2;  stage 1: %h2, ids → %cos again, %h3
    """
    stages = pp * per_rank
    cutter = _Cutter(local, dict.fromkeys(local.graph.nodes, 0), 1) if stages == 1 else _chosen(local, pp, per_rank, costs)
    made = (cutter.stage(index) for index in range(stages))
    return tuple(replace(stage, unhalved=why_unhalved(local, stage)) for stage in made)


def _chosen(local: Local, pp: int, per_rank: int, costs: Mapping[str, int]) -> _Cutter:
    """Between layers, if there are enough; unless elsewhere fewer values cross and the slowest stage is faster, or nothing is refused."""
    stages = pp * per_rank
    layers = _Cutter(local, by_layers(local, stages, costs), stages) if len(local.program.layers) >= stages else None
    places = by_cost(local, stages, costs)
    if places is None and layers is None:
        parts = most_parts(local)
        fix = f"use pp={parts // per_rank}" + " or less" * (parts // per_rank > 1)
        if per_rank > 1 and parts // per_rank < 2:
            fix = 'use schedule="1f1b", with one stage on a rank'
        raise InputError(
            f"{stages} pipeline stages for a model that can be cut into {parts} part{'s' * (parts != 1)}",
            at=f"compile(mesh pp={pp}" + (f", stages_per_rank={per_rank})" if per_rank > 1 else ")"),
            source=user_line(),
            fix=fix,
        )
    anywhere = _Cutter(local, places, stages) if places is not None else None
    if layers is None or anywhere is None:
        return layers or anywhere  # type: ignore[return-value]
    better = all(there < here for here, there in zip(layers.measures(costs), anywhere.measures(costs), strict=True))
    return anywhere if better or layers.refuses() else layers


class _Cutter:
    """Builds the graph of each stage, and knows what crosses."""

    def __init__(self, local: Local, places: Mapping[fx.Node, int], stages: int) -> None:
        self.local, self.places, self.stages = local, places, stages
        self.order = {node: position for position, node in enumerate(local.graph.nodes)}
        self.free = set(free_nodes(local))
        self.having = with_gradient(local.graph, trained(local.program), origin_types(local))
        returned = local.program.returned()
        output = local.graph.output_node().all_input_nodes
        by_origin = {local.origins.get(node.name, node.name): node for node in output}
        self.returned = [by_origin[name] for name in returned]
        self.free |= self._again()
        self.crossing = [self._crossing(index) for index in range(stages - 1)]
        reads = [self._needed(index, self._sent(index)) for index in range(stages)]
        self.updates = homes_of_updates(local, places, self.free, reads, lambda index, node: self._needed(index, [node]))

    def measures(self, costs: Mapping[str, int]) -> tuple[int, int]:
        """The cost of the slowest stage, and how many values cross where most do."""
        loads = [0] * self.stages
        for node, stage in self.places.items():
            loads[stage] += cost(self.local, node, costs)
        return max(loads), max(len(values) for values in self.crossing)

    def refuses(self) -> bool:
        """Whether something would cross that cannot."""
        return any(refusal(self.local, node) for values in self.crossing for node in values)

    def _again(self) -> set[fx.Node]:
        """What would cross and cannot, being cut, but needs only parameters and inputs, and no product with a weight: biases of scores.

        It is computed again on each stage, which then share the parameter.
        """
        found: set[fx.Node] = set()
        for node in {node for index in range(self.stages - 1) for node in self._crossing(index)}:
            if is_cut(self.local, node):
                needed = {value for value in ancestors(node) if value.op == "call_function"}
                if not any(op_name(value) in PRODUCTS for value in needed):
                    found |= needed
        return found

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
            made[node] = copy_node(graph, node, made.__getitem__)
        for node in nodes:
            if node.op != "placeholder":
                made[node] = copy_node(graph, node, made.__getitem__)
        graph.output(tuple(made[node] for node in sent))
        drop_dead(graph)
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
        if what := refusal(self.local, node):
            source: object = self.local.program.sources.get(origin, "")
            raise Refused(f"{origin} would cross from one pipeline stage to the next, and {what}", source=str(source), fix="use pp=1")
        kind, layout = self.local.program.types[origin], self.local.layouts[node.name]
        assert isinstance(kind, TensorType) and isinstance(layout, Layout)
        return Boundary(node.name, kind, kind.dtype.is_floating_point and node.name in self.having, layout)
