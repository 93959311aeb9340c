"""divide_loss: write a mean loss as a sum over rows divided by a count of the whole batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.ir import Count, Draft, Program
from tpcompile.layout import TensorType, product
from tpcompile.passes._lengths import symbol_nodes
from tpcompile.passes._renewed import update_reason
from tpcompile.passes._rows import Rows
from tpcompile.rules import argument, aten_names, op_name

aten = torch.ops.aten
MEAN, SUM = 1, 2

LINEAR = (
    "aten.view.default",
    "aten.reshape.default",
    "aten.squeeze.default",
    "aten.clone.default",
    "aten.to.dtype",
    "aten.alias.default",
    "aten.neg.default",
)


def divide_loss(program: Program, witness: Program | None = None) -> Program:
    """Make the loss of a batch the sum of its parts' losses, given the batch's counts; or say why it is not.

    In a program captured for one row, a dimension of the batch cannot be told from others of size one: there a `witness` of the same
    model with more rows has to show that rows are kept apart. The same is said of what forward does to buffers.

    before  %loss = cross_entropy_loss(%logits, %labels, mean)
    after   %sum = cross_entropy_loss(%logits, %labels, sum)
            %loss = div(%sum, %loss_count_0)                  count: the labels that are not ignored
    """
    program = replace(program, update_reason=update_reason(witness or program))
    if program.loss is None:
        return program
    if witness is not None and (reason := divide_loss(witness).loss_reason):
        return Draft(program).freeze(loss_reason=reason)
    rows, draft = Rows.of(program) if witness is None else Rows.trusted(program), Draft(program)
    divider = _Divider(program, rows, draft)
    try:
        divider.term(program.nodes()[program.loss], [])
    except LayoutError as error:
        return Draft(program).freeze(loss_reason=str(error))
    loss = divider.renamed.get(program.loss, program.loss)
    outputs = tuple(divider.renamed.get(name, name) if name else name for name in program.outputs)
    return draft.freeze(counts=tuple(divider.counts), loss=loss, outputs=outputs)


class _Divider:
    """Walks the sum of terms that a loss is, and gives each its divisor."""

    def __init__(self, program: Program, rows: Rows, draft: Draft) -> None:
        self.program, self.rows, self.draft = program, rows, draft
        self.counts: list[Count] = []
        self.renamed: dict[str, str] = {}

    def term(self, node: fx.Node, seen: list[fx.Node]) -> None:
        """Rewrite one term. Raises LayoutError with the reason when it is no sum over rows by a count."""
        if len(seen) and len(node.users) > 1 and not all(user.op == "output" or user in seen for user in node.users):
            raise LayoutError(f"{self.at(node)} is used by more than the loss")
        match op_name(node):
            case name if name in LINEAR:
                self.term(node.args[0], [*seen, node])  # type: ignore[arg-type]
            case "aten.add.Tensor" | "aten.sub.Tensor" if all(isinstance(arg, fx.Node) for arg in node.args[:2]):
                for operand in node.args[:2]:
                    self.term(operand, [*seen, node])  # type: ignore[arg-type]
            case "aten.mul.Tensor" | "aten.div.Tensor" if not isinstance(node.args[1], fx.Node):
                self.term(node.args[0], [*seen, node])  # type: ignore[arg-type]
            case "aten.div.Tensor" if self.counts_rows(node.args[1]):
                self.sum(node.args[0])  # type: ignore[arg-type]
                self.divide(node, self.target(node).args[0], self.extracted(node.args[1]))  # type: ignore[arg-type]
            case _ if op_name(node) in REDUCING and argument(node, "reduction", MEAN) == MEAN:
                self.reduced(node)
            case "aten.mean.default":
                self.sum(node)
                kind = self.program.types[node.all_input_nodes[0].name]
                with self.draft.graph.inserting_before(self.target(node)):
                    source = self.target(node).args[0]
                    total = self.draft.call(aten.sum.default, source, type=self.program.types[node.name], like=node)
                self.divide(node, total, self.size_count(kind))  # type: ignore[arg-type]
            case _:
                self.sum(node)
                self.divide(node, None, None)

    def sum(self, node: fx.Node) -> None:
        """Check that a value is a sum, or a mean, over values that keep rows apart."""
        while op_name(node) in LINEAR or (
            op_name(node) in ("aten.mul.Tensor", "aten.div.Tensor") and not isinstance(node.args[1], fx.Node)
        ):
            node = node.args[0]  # type: ignore[assignment]
        if op_name(node) in ("aten.sum.default", "aten.mean.default") or argument_or(node, "reduction") == SUM:
            self.apart(node.all_input_nodes, node)
            return
        if op_name(node) == "aten.add.Tensor":
            for operand in node.all_input_nodes:
                self.sum(operand)
            return
        raise LayoutError(f"{self.at(node)} is no sum or mean over the batch's rows")

    def apart(self, operands: Iterable[fx.Node], node: fx.Node) -> None:
        for operand in operands:
            if reason := self.rows.reason(operand):
                raise LayoutError(reason)
        if not any(self.rows.depends(operand) for operand in operands):
            raise LayoutError(f"{self.at(node)} does not depend on the batch's rows")

    def reduced(self, node: fx.Node) -> None:
        """A loss function with a mean inside: its sum, by its count."""
        self.apart(node.all_input_nodes, node)
        if op_name(node) == "aten.cross_entropy_loss.default" and self.rows.depends_along(node.all_input_nodes[0], 1):
            raise LayoutError(f"{self.at(node)} has rows for classes")
        copy = self.target(node)
        with self.draft.graph.inserting_before(copy):
            total = self.draft.call(node.target, *_with(copy, "reduction", SUM), type=self.program.types[node.name], like=node)
        if op_name(node) == "aten.cross_entropy_loss.default":
            self.divide(node, total, self.label_count(node))
        else:
            self.divide(node, total, self.size_count(self.program.types[node.all_input_nodes[0].name]))  # type: ignore[arg-type]

    # --- counts

    def counts_rows(self, value: Any) -> bool:
        """Whether a divisor is a sum over rows of something that the inputs alone decide."""
        if not isinstance(value, fx.Node) or not self.from_inputs(value):
            return False
        try:
            self.sum(value)
        except LayoutError:
            return False
        return True

    def from_inputs(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            learned = node.name in self.program.parameters or self.program.buffers.get(node.name) in self.program.updates
            return not learned and node.name != "rng_key"
        return all(self.from_inputs(operand) for operand in node.all_input_nodes)

    def extracted(self, *roots: fx.Node) -> fx.Graph:
        """The part of the graph that computes values from inputs; its output is the first of them, or all as a tuple."""
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        needed: set[fx.Node] = set()
        todo = list(roots)
        while todo:
            if (value := todo.pop()) not in needed:
                needed.add(value)
                todo += value.all_input_nodes
        for value in self.program.graph.nodes:
            if value in needed:
                made[value] = graph.node_copy(value, made.__getitem__)
        graph.output(made[roots[0]] if len(roots) == 1 else tuple(made[root] for root in roots))
        return graph

    def label_count(self, node: fx.Node) -> fx.Graph:
        """The labels that are not ignored, each with its class weight."""
        labels, weight, ignored = argument(node, "target"), argument(node, "weight"), argument(node, "ignore_index")
        kind = self.program.types[labels.name]
        if not isinstance(kind, TensorType) or kind.dtype.is_floating_point:
            raise LayoutError(f"{self.at(node)} has probabilities for labels")
        if not self.from_inputs(labels) or (weight is not None and not self.from_inputs(weight)):
            raise LayoutError(f"{self.at(node)} has labels that depend on parameters")
        graph = self.extracted(labels) if weight is None else self.extracted(labels, weight)
        output = graph.output_node()
        held, weights = (output.args[0], None) if weight is None else output.args[0]  # type: ignore[misc]
        with graph.inserting_before(output):
            counted = graph.call_function(aten.ne.Scalar, (held, ignored))
            if weights is not None:
                safe = graph.call_function(aten.masked_fill.Scalar, (held, graph.call_function(aten.eq.Scalar, (held, ignored)), 0))
                counted = graph.call_function(aten.mul.Tensor, (counted, graph.call_function(aten.index.Tensor, (weights, [safe]))))
            total = graph.call_function(aten.sum.default, (counted,))
        output.args = (total,)
        return graph

    def size_count(self, kind: TensorType) -> fx.Graph:
        """The number of elements."""
        graph = fx.Graph()
        size = product(kind.shape)
        names = sorted({self.program.symbols[symbol][0] for symbol in getattr(size, "free_symbols", ())})
        made = {name: graph.placeholder(name) for name in names}
        graph.output(
            graph.call_function(aten.scalar_tensor.default, (symbol_nodes(graph, self.program, size, made),), {"dtype": torch.float64})
        )
        return graph

    # --- the new graph

    def target(self, node: fx.Node) -> fx.Node:
        return self.draft.nodes[self.renamed.get(node.name, node.name)]

    def divide(self, node: fx.Node, total: fx.Node | None, count: fx.Graph | None) -> None:
        """Put `total / count` in a term's place; without a graph the count is one for the whole batch."""
        old, graph = self.target(node), self.draft.graph
        name = f"loss_count_{len(self.counts)}"
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            divisor = graph.placeholder(name)
        self.draft.types[name] = TensorType(self.program.types[node.name].dtype, ())  # type: ignore[union-attr]
        with graph.inserting_after(old):
            made = self.draft.call(aten.div.Tensor, total or old, divisor, type=self.program.types[node.name], like=node)
        old.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        self.draft.nodes[made.name] = made
        self.renamed[node.name] = made.name
        self.counts.append(Count(name, count))

    def at(self, node: fx.Node) -> str:
        source = self.program.sources.get(node.name)
        return f"{op_name(node)}{f' at {source}' if source else ''}"


REDUCING = aten_names(
    """
    binary_cross_entropy.default binary_cross_entropy_with_logits.default cross_entropy_loss.default huber_loss.default
    l1_loss.default mse_loss.default smooth_l1_loss.default soft_margin_loss.default
    """
)
"""Loss functions that are sums over elements, or their mean."""


def argument_or(node: fx.Node, name: str) -> Any:
    return argument(node, name, None) if node.op == "call_function" and op_name(node) in REDUCING else None


def _with(node: fx.Node, name: str, value: Any) -> list[Any]:
    """A call's arguments, all positional, with one replaced."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return [value if declared.name == name else argument(node, declared.name) for declared in node.target._schema.arguments]
