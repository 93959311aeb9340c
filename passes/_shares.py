"""Private to divide_loss: the graph of a part of the batch, whose loss is its share of the batch's.

    %mean = cross_entropy_loss(%x, %y)    →  %sum = cross_entropy_loss(%x, %y, sum), %share = div(%sum, %loss_count_0)
    %n = sum(%mask)                       →  %loss_count_1                                of the whole batch
    %y = add(%mean, %penalty)             →  add(%share, div(%penalty, %loss_count_2))    count: the parts

A count is rounded once, to the type of what it divides, and at least to float32: means of half precision are added up, and divided, in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tpcompile.graphs import ancestors
from tpcompile.ir import Count, Draft, Program
from tpcompile.layout import Size, TensorType
from tpcompile.operation import argument, op_name, view_op
from tpcompile.passes._additive import SUMS
from tpcompile.passes._counts import label_count, part_count, size_count, total_count
from tpcompile.passes._losses import LOSSES, MEAN, MEANS, NONE, SUM, labelled, loss_shape, mean_size
from tpcompile.passes._pairs import Study

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)


class Shares:
    """Rewrites what leads to the loss."""

    def __init__(self, original: Program, study: Study) -> None:
        self.original, self.study, self.draft = original, study, Draft(original)
        self.counts: list[Count] = []
        self.known: dict[tuple[str, torch.dtype], fx.Node] = {}  # a count's graph, as text, and its type → its placeholder
        self.current: dict[fx.Node, fx.Node] = {}  # a node of the original → what stands for it, where that is another one
        self.shares: dict[fx.Node, fx.Node] = {}  # a sum → what a part gives of it

    def program(self) -> Program:
        loss = self.original.nodes()[self.original.loss or ""]
        needed = ancestors(loss)
        for node in self.original.graph.nodes:
            if node not in needed or node.op != "call_function":
                continue
            if node in self.study.totals:
                self.total(node)
            elif node in self.study.numbers:
                self.with_numbers(node)
            if node in self.study.sums:
                self.shares[self.now(node)] = self.share(node)
        made, output = self.finished(loss), self.draft.graph.output_node()
        output.replace_input_with(self.draft.nodes[loss.name], made)
        outputs = tuple(made.name if name == loss.name else name for name in self.original.outputs)
        return self.draft.freeze(counts=tuple(self.counts), loss=made.name, outputs=outputs)

    def now(self, node: fx.Node) -> fx.Node:
        return self.current.get(node) or self.draft.nodes[node.name]

    def finished(self, loss: fx.Node) -> fx.Node:
        """The part's share of the loss, times the replicas over which the engine averages."""
        kind, old = self.kind(loss), self.now(loss)
        with self.draft.graph.inserting_before(self.draft.graph.output_node()):
            share = self.shares[old] if loss in self.study.sums else self.divided(old, kind, loss)
            return self.settled(self.call(aten.mul.Tensor, share, self.replicas(_exact(kind.dtype)), kind=kind, like=loss), kind, loss)

    # --- what is known of the whole batch

    def total(self, node: fx.Node) -> None:
        """A sum that is known before takes the place of the part's own, everywhere but in the model's output."""
        kind, old, graph = self.kind(node), self.now(node), total_count(self.original, node)
        if op_name(node) in MEANS:
            exact = TensorType(_exact(kind.dtype), kind.shape)
            size = self.count(self.sized(mean_size(view_op(node, self.original.types))), exact.dtype)
            with self.draft.graph.inserting_before(old):
                made = self.call(aten.div.Tensor, self.count(graph, exact.dtype, exact), size, kind=exact, like=node)
                made = self.cast(made, exact, kind, node)
        else:
            made = self.count(graph, kind.dtype, kind)
        self.replace(node, old, made)

    def with_numbers(self, node: fx.Node) -> None:
        """The same call, with the whole batch's numbers."""
        kind, old = self.kind(node), self.now(node)
        with self.draft.graph.inserting_before(old):
            numbers = {name: self.number(value, kind.dtype) for name, value in self.study.numbers[node].items()}
            if op_name(node) == "aten.scalar_tensor.default":
                made = self.call(aten.to.dtype, numbers["s"], kind.dtype, kind=kind, like=node)
            else:
                assert isinstance(node.target, torch._ops.OpOverload)
                names = [spec.name for spec in node.target._schema.arguments]
                args = [numbers.get(name, argument) for name, argument in zip(names, old.args, strict=False)]
                rest = {name: numbers.get(name, argument) for name, argument in old.kwargs.items()}
                made = self.settled(self.call(node.target, *args, kind=kind, like=node, **rest), kind, node)
        self.replace(node, old, made)

    def number(self, value: fx.Node | Size, dtype: torch.dtype) -> fx.Node:
        if isinstance(value, fx.Node):
            return self.now(value)
        return self.count(size_count(self.original, value, self.study.source), _exact(dtype) if dtype.is_floating_point else torch.int64)

    def replace(self, node: fx.Node, old: fx.Node, made: fx.Node) -> None:
        self.current[node] = made
        old.replace_all_uses_with(made, delete_user_cb=lambda user: user.op != "output" and user is not made)

    # --- shares

    def share(self, node: fx.Node) -> fx.Node:
        """What a part gives of a sum."""
        old = self.now(node)
        with self.draft.graph.inserting_before(old):
            if any(operand in self.shares for operand in old.all_input_nodes):
                return self.passed_on(node, old)
            if op_name(node) in MEANS:
                return self.mean(node, old)
            if op_name(node) in LOSSES and argument(node, "reduction", MEAN) == MEAN:
                return self.loss(node, old)
        return old

    def mean(self, node: fx.Node, old: fx.Node) -> fx.Node:
        """The mean of rows: their sum, by how many the whole batch has."""
        kind, source = self.kind(node), self.kind(node.all_input_nodes[0])
        exact = TensorType(_exact(kind.dtype), kind.shape)
        args: tuple[Any, ...] = (old.args[0],)
        if op_name(node) == "aten.mean.dim":
            args = (*args, argument(node, "dim"), argument(node, "keepdim"))
        added = aten.sum.default if len(args) == 1 else aten.sum.dim_IntList
        widened: Mapping[str, Any] = {} if source.dtype == exact.dtype else {"dtype": exact.dtype}
        total = self.call(added, *args, kind=exact, like=node, **widened)
        return self.quotient(node, total, self.sized(mean_size(view_op(node, self.original.types))))

    def loss(self, node: fx.Node, old: fx.Node) -> fx.Node:
        """A loss function with a mean inside: its sum, by the whole batch's count."""
        op, kind = view_op(node, self.original.types), self.kind(node)
        if kind.dtype in HALF:
            args, named = _with(old, "reduction", NONE)
            each = self.call(node.target, *args, kind=TensorType(kind.dtype, loss_shape(op)), like=node, **named)
            total = self.call(aten.sum.default, each, kind=TensorType(torch.float32, ()), like=node, dtype=torch.float32)
        else:
            args, named = _with(old, "reduction", SUM)
            total = self.call(node.target, *args, kind=kind, like=node, **named)
        count = label_count(self.original, op) if labelled(op) else self.sized(mean_size(op))
        return self.quotient(node, total, count)

    def quotient(self, node: fx.Node, total: fx.Node, count: fx.Graph) -> fx.Node:
        kind = self.kind(node)
        exact = TensorType(_exact(kind.dtype), kind.shape)
        return self.cast(self.call(aten.div.Tensor, total, self.count(count, exact.dtype), kind=exact, like=node), exact, kind, node)

    def passed_on(self, node: fx.Node, old: fx.Node) -> fx.Node:
        """The same of the shares; what an addition adds that is no sum is divided among the parts."""
        kind, adds, condition = self.kind(node), op_name(node) in SUMS, op_name(node) == "aten.where.self"

        def own(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(own(item) for item in value)
            if isinstance(value, fx.Node) and value in self.shares:
                return self.shares[value]
            addend = adds and value is not None and not (isinstance(value, (int, float)) and value == 0)
            return self.divided(value, kind, node) if addend else value

        first, place = ([old.args[0]], 1) if condition else ([], 0)
        count = place + 1 if op_name(node).startswith(("aten.cat", "aten.concat", "aten.stack")) else place + 2
        args = [*first, *(own(value) if index + place < count else value for index, value in enumerate(old.args[place:], place))]
        if not adds:
            args = [own(value) for value in old.args]
        kwargs = {name: own(value) if name == "other" or not adds else value for name, value in old.kwargs.items()}
        target: Any = aten.rsub.Tensor if op_name(node) == "aten.rsub.Scalar" else node.target
        made = self.call(target, *args, kind=kind, like=node, **kwargs)
        return self.settled(made, kind, node) if adds else made

    def divided(self, value: fx.Node | float, like: TensorType, node: fx.Node) -> fx.Node:
        """The share of what is the same in all parts."""
        exact = _exact(like.dtype)
        parts = self.count(part_count(), exact)
        if isinstance(value, fx.Node) and isinstance(kind := self.draft.types[value.name], TensorType):
            share = self.call(aten.div.Tensor, value, parts, kind=kind, like=node)
            self.draft.types[share.name] = TensorType(self.promoted(share), kind.shape)
            return share
        one = self.call(aten.reciprocal.default, parts, kind=TensorType(exact, ()), like=node)
        return self.call(aten.mul.Tensor, one, value, kind=TensorType(exact, ()), like=node)

    def sized(self, size: Size) -> fx.Graph:
        return size_count(self.original, size, self.original)

    # --- the new graph

    def kind(self, node: fx.Node) -> TensorType:
        kind = self.original.types[node.name]
        assert isinstance(kind, TensorType)
        return kind

    def call(self, target: Any, *args: Any, kind: TensorType, like: fx.Node, **kwargs: Any) -> fx.Node:
        return self.draft.call(target, *args, type=kind, like=like, **kwargs)

    def settled(self, node: fx.Node, kind: TensorType, like: fx.Node) -> fx.Node:
        """A value in its own type again, where a count of another type has changed it."""
        made = self.promoted(node)
        return self.cast(node, TensorType(made, kind.shape), kind, like) if kind.dtype.is_floating_point else node

    def promoted(self, node: fx.Node) -> torch.dtype:
        """The type that an operation on these tensors makes, where it is a floating one. Numbers change none."""
        samples = []
        for operand in node.all_input_nodes:
            if isinstance(held := self.draft.types[operand.name], TensorType):
                samples.append(torch.empty((1,) * len(held.shape), dtype=held.dtype))
        while len(samples) > 1:
            first, second, *rest = samples
            rank = max(first.dim(), second.dim())
            samples = [torch.empty((1,) * rank, dtype=torch.result_type(first, second)), *rest]
        return samples[0].dtype if samples[0].is_floating_point() else torch.get_default_dtype()

    def cast(self, node: fx.Node, made: TensorType, kind: TensorType, like: fx.Node) -> fx.Node:
        self.draft.types[node.name] = made
        return node if made == kind else self.call(aten.to.dtype, node, kind.dtype, kind=kind, like=like)

    def count(self, graph: fx.Graph, dtype: torch.dtype, kind: TensorType | None = None) -> fx.Node:
        """A number of the whole batch as an input; equal ones are one."""
        key = str(graph), dtype
        if key not in self.known:
            self.known[key] = self.placeholder(f"loss_count_{len(self.counts)}", kind or TensorType(dtype, ()), graph)
        return self.known[key]

    def replicas(self, dtype: torch.dtype) -> fx.Node:
        return self.placeholder("replicas", TensorType(dtype, ()), None)

    def placeholder(self, name: str, kind: TensorType, graph: fx.Graph | None) -> fx.Node:
        with self.draft.graph.inserting_before(next(node for node in self.draft.graph.nodes if node.op != "placeholder")):
            made = self.draft.graph.placeholder(name)
        self.draft.types[made.name] = kind
        self.counts.append(Count(made.name, graph))
        return made


def _exact(dtype: torch.dtype) -> torch.dtype:
    """The type in which counts divide values of a type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _with(node: fx.Node, name: str, value: Any) -> tuple[list[Any], dict[str, Any]]:
    """A call's arguments, positional where they may be, with one replaced."""
    assert isinstance(node.target, torch._ops.OpOverload)
    given = {spec.name: value if spec.name == name else argument(node, spec.name) for spec in node.target._schema.arguments}
    named = {spec.name for spec in node.target._schema.arguments if spec.kwarg_only}
    return [v for n, v in given.items() if n not in named], {n: v for n, v in given.items() if n in named}
