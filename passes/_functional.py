"""In-place operations as functional ones: every later reader of the memory gets the new value.

    before  %v = slice(%x, 1, 0, 2)          after  %v = slice(%x, 1, 0, 2)
            %_ = add_(%v, 1)                        %w = add(%v, 1)
            %y = mul(%x, 3)                         %x_1 = slice_scatter(%x, %w, 1, 0, 2)
                                                    %y = mul(%x_1, 3)

A tensor that shares memory with one of its operands is a view of it. Writing to a view writes back through the chain of views to
the first one, its root; other views are made anew where they are read next.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from tpcompile.passes._origin import source_of
from tpcompile.passes._reasons import refuse
from tpcompile.passes._views import copied, like, schema_name, typed, undo

aten = torch.ops.aten

COPIES = frozenset({"aten::clone", "aten::lift_fresh_copy"})
"""Never views, though export's example of a constant may share its memory."""

FUNCTIONAL = {
    "aten.bernoulli_.float": aten.bernoulli.p,
    "aten.normal_.default": aten.normal_functional.default,
    "aten.fill_.Scalar": aten.full_like.default,
    "aten.zero_.default": aten.zeros_like.default,
}
"""Of operations whose functional form has another name."""


def functionalize(graph: fx.Graph, fixed: Mapping[fx.Node, str], connected: Set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Rewrite all in-place operations of a graph; returns the last values of the placeholders that it writes to.

    Raises CaptureError for a write to one of `fixed`, placeholders by their names in the model, and for what has no functional form.
    `connected` are the values that gradients flow through.
    """
    if any(written(node) for node in graph.nodes):
        return _Functionalizer(graph, fixed, connected).run()
    return {}


def written(node: fx.Node) -> list[int]:
    """The places of the operands that an operation writes to."""
    return _written_by(node.target) if isinstance(node.target, torch._ops.OpOverload) else []


def _written_by(target: torch._ops.OpOverload) -> list[int]:
    return [i for i, a in enumerate(target._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]


class _Functionalizer:
    def __init__(self, graph: fx.Graph, fixed: Mapping[fx.Node, str], connected: Set[fx.Node]) -> None:
        self.graph, self.fixed, self.connected = graph, fixed, connected
        self.args: dict[fx.Node, tuple[Any, Any]] = {}  # as they were before the rewriting
        self.parent: dict[fx.Node, fx.Node] = {}  # view → what it is a view of
        self.value: dict[fx.Node, fx.Node] = {}  # the newest value of what a node stands for
        self.version: dict[fx.Node, int] = {}  # after how many writes to its root that value was made
        self.writes: dict[fx.Node, int] = {}  # root → number of writes so far
        self.renamed: dict[fx.Node, fx.Node] = {}  # what an in-place view has changed → its result

    def run(self) -> dict[fx.Node, fx.Node]:
        for node in list(self.graph.nodes):
            self._enter(node)
            with self.graph.inserting_before(node):
                node.args, node.kwargs = self._now(node.args), self._now(node.kwargs)
                if written(node):
                    self._rewrite(node)
        with self.graph.inserting_before(self.graph.output_node()):
            placeholders = self.graph.find_nodes(op="placeholder")
            last = {node: self._newest(self._resolve(node)) for node in placeholders if self.writes[node] or node in self.renamed}
        for node in reversed(list(self.graph.nodes)):
            if written(node):
                self.graph.erase_node(node)
        return last

    def _enter(self, node: fx.Node) -> None:
        """Note a node, and what it is a view of: the operand in whose memory it lives."""
        self.args[node] = (node.args, node.kwargs)
        storage = node.meta.get("storage")
        if storage is not None and node.op == "call_function" and schema_name(node) not in COPIES:
            places = [operand for operand in node.all_input_nodes if operand.meta.get("storage") == storage]
            if places and (isinstance(places[0].meta["val"], Tensor) or places[0] in self.parent):  # else values made together, no views
                self.parent[node] = self._resolve(places[0])
        self.value[node] = node
        self.version[node] = self.writes.setdefault(self._root(node), 0)

    def _resolve(self, node: fx.Node) -> fx.Node:
        while node in self.renamed:
            node = self.renamed[node]
        return node

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self.parent:
            node = self.parent[node]
        return node

    def _now(self, arguments: Any) -> Any:
        return fx.node.map_arg(arguments, lambda node: self._newest(self._resolve(node)))

    def _newest(self, node: fx.Node) -> fx.Node:
        """The value that a node's name stands for now; a view is made anew if its memory was written since."""
        writes = self.writes[self._root(node)]
        if self.version[node] != writes:
            self.value[node], self.version[node] = self._anew(node), writes
        return self.value[node]

    def _anew(self, node: fx.Node) -> fx.Node:
        parent = self.parent[node]
        if written(node):
            return self._newest(parent)

        def now(operand: fx.Node) -> fx.Node:
            operand = operand if operand is parent else self._resolve(operand)
            return self._newest(operand)

        args, kwargs = fx.node.map_arg(self.args[node], now)
        return like(self.graph, node, node.target, args, kwargs)

    # ----------------------------------------------------------------------------------------- writing

    def _rewrite(self, node: fx.Node) -> None:
        """Put the functional form in the place of an in-place operation."""
        operand = self._resolve(self.args[node][0][0])
        root = self._root(operand)
        self._check(node, root)
        if schema_name(node) == "aten::copy_":
            new = copied(self.graph, node)
        else:
            new = typed(self.graph, node, like(self.graph, node, self._functional(node), node.args, node.kwargs))
        if torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
            self.args[new], self.parent[new], self.value[new] = self.args[node], operand, new
            self.version[new] = self.writes[root]
            self.renamed[operand] = self.renamed[node] = new
        else:
            self.parent[node] = operand
            self._write(node, operand, new)
            self.value[node], self.version[node] = new, self.writes[root]

    def _write(self, node: fx.Node, view: fx.Node, new: fx.Node) -> None:
        """Give a view a new value, and through it what it is a view of."""
        values = {view: new}
        while view in self.parent:
            above = self.parent[view]
            piece = view
            if not isinstance(above.meta["val"], Tensor):  # a list of views: write through to what was split
                above = self.parent[above]
            if schema_name(piece) == "aten::detach" and above in self.connected:
                self._refuse(node, "writes to a detached value that gradients flow through")
            undone = new if written(piece) else undo(self.graph, piece, self._newest(above), new)
            if undone is None:
                self._refuse(node, f"writes through a view that {schema_name(piece).removeprefix('aten::')} made")
            new = values[above] = undone
            view = above
        self.writes[view] += 1
        for written_to, value in values.items():
            self.value[written_to], self.version[written_to] = value, self.writes[view]

    def _check(self, node: fx.Node, root: fx.Node) -> None:
        if root in self.fixed:
            self._refuse(node, f"writes to {self.fixed[root]}, which belongs to the model")
        if node.meta.get("no_grad") and root in self.connected and not root.meta.get("no_grad"):
            self._refuse(node, "writes under no_grad to a value that gradients flow through")

    def _functional(self, node: fx.Node) -> Any:
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        if str(target) in FUNCTIONAL:
            return FUNCTIONAL[str(target)]
        namespace, name = target._schema.name.split("::")
        packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
        found = getattr(packet, target._overloadname, None)
        if written(node) != [0] or not name.endswith("_") or found is None or _written_by(found):
            self._refuse(node, "writes to its operands and has no functional form")
        return found

    def _refuse(self, node: fx.Node, why: str) -> NoReturn:
        name = schema_name(node).removeprefix("aten::")
        refuse(f"{name} {why}", source_of(node), "write it without changing a tensor in place")
