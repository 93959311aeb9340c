"""Private to rewrite: operations that a cut ends in, as they are on pieces, with the reductions that make the value whole.

    look-up     the own rows, zeros for others'            one sum of the rows
    loss        log Σ exp(x - max) - (x_target - max)      three reductions of a number for each row: max, Σ exp, x_target

The largest score stands in for a constant: no gradient goes through it, as none would come out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from tpcompile.collectives import ops
from tpcompile.ir import Sharded
from tpcompile.layout import Dim, Layout, TensorType, bounds, pieces, size_of, whole, whole_dim
from tpcompile.rules import argument, op_name

aten = torch.ops.aten
NONE, MEAN = 0, 1


class Writer(Protocol):
    """The local graph as it grows."""

    sharded: Sharded

    def add(
        self, op: str, target: Any, args: Any, kwargs: Any, name: str, layout: Layout | tuple[Layout, ...] | None, origin: str = ""
    ) -> fx.Node: ...

    def number(self, of: Callable[[int], Any]) -> Any: ...

    def reduced(self, partial: fx.Node, layout: Layout, name: str, origin: str) -> fx.Node: ...


def write_end(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
    """An operation in which a cut ends, given its operands on this rank; the whole value."""
    names = [declared.name for declared in node.target._schema.arguments]  # type: ignore[union-attr]
    end = _End(writer, node, {**dict(zip(names, args, strict=False)), **kwargs})
    match op_name(node):
        case "aten.embedding.default":
            return end.look_up()
        case "aten.cross_entropy_loss.default":
            return end.loss()
    raise AssertionError(node)


@dataclass(frozen=True)
class _End:
    """One operation being written: its operands by name, and where its cut dimension is."""

    writer: Writer
    node: fx.Node
    operands: Mapping[str, Any]

    @property
    def axis(self) -> str:
        return self.writer.sharded.axis

    @property
    def made(self) -> Layout:
        """The layout of what is made: whole, but for a sum that waits or that is scattered."""
        layout = self.writer.sharded.layouts[self.node.name]
        assert isinstance(layout, Layout)
        return layout

    @property
    def given(self) -> Layout:
        """The layout of the first operand, which is cut."""
        return self.writer.sharded.rows[self.node.name][0]

    def start(self, dim: Dim) -> Any:
        """The first index that a rank holds."""
        return self.writer.number(lambda coordinate: pieces(dim, coordinate)[0][0])

    def call(self, target: Any, *args: Any, name: str, layout: Layout, origin: str = "", **kwargs: Any) -> fx.Node:
        return self.writer.add("call_function", target, args, kwargs, f"{self.node.name}{name}", layout, origin)

    def reduced(self, partial: fx.Node, name: str, layout: Layout, origin: str = "", how: Any = ops.reduce.default) -> fx.Node:
        return self.call(how, partial, self.axis, name=name, layout=layout, origin=origin)

    def look_up(self) -> fx.Node:
        rows, origin = self.given.dims[0], self.node.name
        args = (self.operands["weight"], self.operands["indices"], self.start(rows), size_of(rows), argument(self.node, "padding_idx"))
        if self.made.partial:
            return self.call(ops.look_up.default, *args, name="", layout=self.made, origin=origin)
        partial = Layout(whole(*(size_of(dim) for dim in self.made.dims)).dims, (self.axis,))
        return self.writer.reduced(
            self.call(ops.look_up.default, *args, name="_partial", layout=partial, origin=origin), self.made, origin, origin
        )

    # --- the loss: scores [n, classes, …] of which this rank has some classes; row values are [n, 1, …]

    def loss(self) -> fx.Node:
        scores, target, weight = self.operands["self"], self.operands["target"], self.operands.get("weight")
        each = Layout((self.given.dims[0], whole_dim(1), *self.given.dims[2:]))
        part, highest = Layout(each.dims, (self.axis,)), Layout(each.dims, (), (self.axis,))
        held = self.call(aten.detach.default, scores, name="_scores", layout=self.given)
        held = self.call(aten.amax.default, held, [1], True, name="_max_partial", layout=highest)
        largest = self.reduced(held, "_max", each, how=ops.reduce_max.default)
        total = self.call(ops.exp_sum.default, scores, largest, 1, name="_exp_partial", layout=part)
        total = self.reduced(total, "_exp", each)
        log = self.call(aten.log.default, total, name="_log", layout=each)
        label = self.call(aten.unsqueeze.default, target, 1, name="_target", layout=each)
        ignored = self.call(aten.eq.Scalar, label, argument(self.node, "ignore_index"), name="_ignored", layout=each)
        own = self.weights(weight, label, ignored, each)
        if smoothing := argument(self.node, "label_smoothing"):
            rows = self.smoothed(scores, largest, log, label, weight, own, smoothing, part, each)
        else:
            picked = self.picked(scores, label, part)
            picked = self.reduced(picked, "_picked", each)
            picked = self.call(aten.sub.Tensor, picked, largest, name="_shifted", layout=each)
            rows = self.call(aten.sub.Tensor, log, picked, name="_rows", layout=each)
            rows = rows if own is None else self.call(aten.mul.Tensor, rows, own, name="_weighed", layout=each)
        rows = self.call(aten.masked_fill.Scalar, rows, ignored, 0.0, name="_kept", layout=each)
        return self.summed(rows, own, ignored, each)

    def picked(self, scores: fx.Node, label: fx.Node, part: Layout) -> fx.Node:
        """The labels' own scores, where this rank has them."""
        classes, ignore = self.given.dims[1], argument(self.node, "ignore_index")
        args = (scores, 1, label, self.start(classes), size_of(classes), ignore)
        return self.call(ops.own_entries.default, *args, name="_picked_partial", layout=part)

    def weights(self, weight: fx.Node | None, label: fx.Node, ignored: fx.Node, each: Layout) -> fx.Node | None:
        """The weight of each label's class; zero for what is ignored."""
        if weight is None:
            return None
        known = self.call(aten.masked_fill.Scalar, label, ignored, 0, name="_known", layout=each)
        own = self.call(aten.index.Tensor, weight, [known], name="_weights", layout=each)
        return self.call(aten.masked_fill.Scalar, own, ignored, 0.0, name="_own", layout=each)

    def smoothed(
        self,
        scores: fx.Node,
        largest: fx.Node,
        log: fx.Node,
        label: fx.Node,
        weight: fx.Node | None,
        own: fx.Node | None,
        smoothing: float,
        part: Layout,
        each: Layout,
    ) -> fx.Node:
        """A share of the target is spread evenly over all classes: one sum serves both shares, since both are linear in the scores."""
        share = smoothing / float(size_of(self.given.dims[1]))
        shifted = self.call(aten.sub.Tensor, scores, largest, name="_shifted", layout=self.given)
        factor = log
        if weight is not None:
            shifted = self.call(aten.mul.Tensor, shifted, self.cut_weight(weight), name="_weighed", layout=self.given)
            everything = self.call(aten.sum.default, weight, name="_weight", layout=Layout(()))
            everything = self.call(aten.mul.Tensor, everything, share, name="_weight_share", layout=Layout(()))
            mixed = self.call(aten.mul.Tensor, own, 1 - smoothing, name="_own_share", layout=each)
            mixed = self.call(aten.add.Tensor, mixed, everything, name="_shares", layout=each)
            factor = self.call(aten.mul.Tensor, log, mixed, name="_weighed_log", layout=each)
        mine = self.call(aten.mul.Tensor, shifted, 1 - smoothing, name="_sharp", layout=self.given)
        spread = self.call(aten.mul.Tensor, shifted, share, name="_spread", layout=self.given)
        spread = self.call(aten.sum.dim_IntList, spread, [1], True, name="_spread_partial", layout=part)
        both = self.call(aten.add.Tensor, self.picked(mine, label, part), spread, name="_both_partial", layout=part)
        return self.call(aten.sub.Tensor, factor, self.reduced(both, "_both", each), name="_rows", layout=each)

    def cut_weight(self, weight: fx.Node) -> fx.Node:
        """The weights of the classes that this rank has, to be broadcast along the scores' other dimensions."""
        classes, after = self.given.dims[1], len(self.given.dims) - 2
        where = (self.axis, 0, bounds(classes, self.writer.sharded.parts))
        held = self.call(ops.local_slice.default, weight, *where, name="_weight_slice", layout=Layout((classes,)))
        if not after:
            return held
        spread = Layout((classes, *[whole_dim(1)] * after))
        return self.call(aten.view.default, held, [-1, *[1] * after], name="_weight_view", layout=spread)

    def summed(self, rows: fx.Node, own: fx.Node | None, ignored: fx.Node, each: Layout) -> fx.Node:
        """The rows' losses as the call wants them, in the type that it has."""
        kind, given = self.writer.sharded.program.types[self.node.name], self.node.all_input_nodes[0]
        scores, reduction, origin = self.writer.sharded.program.types[given.name], argument(self.node, "reduction"), self.node.name
        assert isinstance(kind, TensorType) and isinstance(scores, TensorType)
        if scores.dtype in (torch.float16, torch.bfloat16):
            rows = self.call(aten.to.dtype, rows, kind.dtype, name="_rounded", layout=each)
        if reduction == NONE:
            return self.call(aten.squeeze.dims, rows, [1], name="", layout=self.made, origin=origin)
        if reduction != MEAN:
            return self.call(aten.sum.default, rows, name="", layout=self.made, origin=origin)
        total = self.call(aten.sum.default, rows, name="_sum", layout=self.made)
        counted = own if own is not None else self.call(aten.logical_not.default, ignored, name="_counted", layout=each)
        count = self.call(aten.sum.default, counted, name="_count", layout=self.made)
        return self.call(aten.div.Tensor, total, count, name="", layout=self.made, origin=origin)
