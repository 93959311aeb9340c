"""Private to optimize: whole values enter a region where that costs least, be it some whole operations before it.

A gradient's way back is linear whatever the operation was; so partial gradients may be summed before or after it. Two norms of one
value, each read by a region of its own, need one all-reduce behind both instead of one each; and rows that are looked up several
times are summed before the look-up. What else the moved operations read (a norm's weight) enters with them. A parameter that nothing
reads whole has its gradient summed once a step; so what parameters alone make (1 + weight) does not enter: they do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from tpcompile.ir import Local
from tpcompile.layout import Layout, Size, TensorType, product, size_of
from tpcompile.passes._lengths import usual
from tpcompile.rules import op_name

ENTER = "tpcompile.enter.default"


@dataclass
class Move:
    """An `enter`, and the whole operations before it that nothing else reads."""

    enter: fx.Node
    inside: list[fx.Node]  # from the last to the first
    frontier: list[fx.Node]  # the values with a gradient that they read


class Hoister:
    """Finds and makes moves in a graph that is being built."""

    def __init__(self, local: Local, graph: fx.Graph, layouts: dict[str, Layout | tuple[Layout, ...]], origins: dict[str, str]) -> None:
        self.local, self.graph, self.layouts, self.origins = local, graph, layouts, origins
        self.flowing = self._flowing()
        self.order = {node: position for position, node in enumerate(graph.nodes)}

    def run(self) -> None:
        enters = [node for node in self.graph.nodes if op_name(node) == ENTER and node.all_input_nodes[0].op == "call_function"]
        moves = {node: self.cheapest(node) for node in enters}
        for group in self.groups(moves.values()):
            own = {move.enter for move in group}
            frontier = {value for move in group for value in move.frontier}
            inside = own.union(*(move.inside for move in group))
            fixed = all(isinstance(self.elements(enter), int) for enter in own)
            sizes = (0 if fixed and self.later(value, inside) else self.size(value, own) for value in frontier)
            if sum(sizes) < sum(self.size(enter, own) for enter in own):
                self.move(group)

    def cheapest(self, enter: fx.Node) -> Move:
        """As far back as its operations are read by nothing else, and what they read of any size gets no larger."""
        inside: set[fx.Node] = set()
        frontier = set(enter.all_input_nodes)
        best, least = Move(enter, [], list(frontier)), self.large(frontier, enter)
        while candidates := [node for node in frontier if self.movable(node, inside | {enter})]:
            node = max(candidates, key=self.order.__getitem__)
            inside.add(node)
            frontier = (frontier | {o for o in node.all_input_nodes if o in self.flowing}) - inside
            if self.large(frontier, enter) <= least:
                least = self.large(frontier, enter)
                ordered = sorted(inside, key=self.order.__getitem__, reverse=True)
                best = Move(enter, ordered, sorted(frontier, key=self.order.__getitem__))
        return best

    def movable(self, node: fx.Node, readers: Collection[fx.Node]) -> bool:
        if node.op != "call_function" or op_name(node).startswith("tpcompile.") or not all(user in readers for user in node.users):
            return False
        states = [self.layouts.get(value.name) for value in (node, *node.all_input_nodes) if value.name in self.layouts]
        return all(isinstance(state, Layout) and state.is_whole for state in states) and node.name in self.layouts

    def large(self, values: Iterable[fx.Node], enter: fx.Node) -> int:
        """Elements of the values whose sizes are not all known: what grows with the batch."""
        return sum(self.size(value, {enter}) for value in values if not isinstance(self.elements(value), int))

    def size(self, value: fx.Node, own: Collection[fx.Node]) -> int:
        """Elements that an all-reduce of this value's gradient would move: none if it enters already, by another `enter` than these."""
        if value.op != "placeholder" and any(op_name(user) == ENTER and user not in own for user in value.users):
            return 0
        count = self.elements(value)
        return usual(count)

    def later(self, value: fx.Node, inside: Collection[fx.Node]) -> bool:
        """Whether a value is a parameter of which every rank will see a part of the gradient only, whoever reads it."""
        return value.op == "placeholder" and all(user in inside or op_name(user) == ENTER for user in value.users)

    def elements(self, value: fx.Node) -> Size:
        """How many a value has; it is whole."""
        layout = self.layouts[value.name]
        assert isinstance(layout, Layout)
        return product(size_of(dim) for dim in layout.dims)

    def groups(self, moves: Iterable[Move]) -> list[list[Move]]:
        """Moves that share what they read; those that lead nowhere are left out."""
        found: list[list[Move]] = []
        for move in moves:
            if not move.inside:
                continue
            shared = next((g for g in found if any(v in m.frontier and v.op != "placeholder" for m in g for v in move.frontier)), None)
            if shared is None:
                found.append([move])
            else:
                shared.append(move)
        return found

    def move(self, group: list[Move]) -> None:
        entered: dict[fx.Node, fx.Node] = {}
        for move in group:
            for value in move.frontier:
                if value not in entered:
                    entered[value] = self.entered(value)
            for node in move.inside:
                for value in move.frontier:
                    if value in node.all_input_nodes:
                        node.replace_input_with(value, entered[value])
            made = move.enter.args[0]
            assert isinstance(made, fx.Node)
            move.enter.replace_all_uses_with(made)
            self.drop(move.enter)

    def entered(self, value: fx.Node) -> fx.Node:
        """The value as it enters: an `enter` that is there already serves, from where the value is made on."""
        for user in value.users:
            if op_name(user) == ENTER and value.op != "placeholder":
                value.append(user)  # it may have stood behind what reads it now
                self.order[user] = self.order[value]
                return user
        last = max((node for node in self.graph.nodes if node.op == "placeholder"), key=self.order.__getitem__)
        with self.graph.inserting_after(last if value.op == "placeholder" else value):
            made = self.graph.create_node(
                "call_function", torch.ops.tpcompile.enter.default, (value, self.local.axis), {}, f"{value.name}_enter"
            )
        self.layouts[made.name] = self.layouts[value.name]
        self.origins[made.name] = self.origins.get(value.name, value.name)
        self.order[made] = self.order[value]
        return made

    def drop(self, node: fx.Node) -> None:
        self.graph.erase_node(node)
        self.layouts.pop(node.name, None)
        self.origins.pop(node.name, None)

    def _flowing(self) -> frozenset[fx.Node]:
        """The tensors that have a gradient. A size that is read off one has none."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            kind = self.local.program.types.get(self.origins.get(node.name, node.name))
            real = kind is None or isinstance(kind, tuple)
            if isinstance(kind, TensorType):
                real = kind.dtype.is_floating_point or kind.dtype.is_complex
            made = node.op == "call_function" and op_name(node) != "aten.detach.default" and any(o in found for o in node.all_input_nodes)
            if real and (made or node.name in self.local.program.parameters):
                found.add(node)
        return frozenset(found)


def hoist(local: Local, graph: fx.Graph, layouts: dict[str, Layout | tuple[Layout, ...]], origins: dict[str, str]) -> None:
    """Move the `enter`s of a graph to where they cost least."""
    Hoister(local, graph, layouts, origins).run()
