"""Private to rewrite: operations that a cut ends in, as they are on pieces, with the reductions that make the value whole.

    look-up     the own rows, zeros for others'            one sum of the rows
    loss        log Σ exp(x - max) - (x_target - max)      three reductions of a number for each row: max, Σ exp, x_target

The largest score stands in for a constant: no gradient goes through it, as none would come out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tpcompile.collectives import ops
from tpcompile.layout import Layout, bounds, size_of, whole_dim
from tpcompile.passes._written import HALF, Written
from tpcompile.rules import argument

aten = torch.ops.aten
NONE, MEAN = 0, 1


class LookUp(Written):
    """Rows of a table of which this rank has some."""

    def write(self) -> fx.Node:
        rows = self.given.dims[0]
        args = (self.operands["weight"], self.operands["indices"], self.start(rows), size_of(rows), argument(self.node, "padding_idx"))
        return self.ended(ops.look_up.default, *args)


class Loss(Written):
    """A cross-entropy of scores [n, classes, …] of which this rank has some classes. Values of rows are [n, 1, …]."""

    def write(self) -> fx.Node:
        scores, target, weight = self.operands["self"], self.operands["target"], self.operands.get("weight")
        each = Layout((self.given.dims[0], whole_dim(1), *self.given.dims[2:]))
        part = self.part(each)
        largest = self.largest(self.fixed(scores), [1])
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
        kind, scores, reduction = self.type_of(self.node), self.type_of(self.node.all_input_nodes[0]), argument(self.node, "reduction")
        if scores.dtype in HALF:
            rows = self.call(aten.to.dtype, rows, kind.dtype, name="_rounded", layout=each)
        if reduction == NONE:
            return self.last(aten.squeeze.dims, rows, [1])
        if reduction != MEAN:
            return self.last(aten.sum.default, rows)
        return self.last(aten.div.Tensor, self.call(aten.sum.default, rows, name="_sum", layout=Layout(())), self.count(own, ignored, each))

    def count(self, own: fx.Node | None, ignored: fx.Node, each: Layout) -> fx.Node:
        """What a mean divides by: the weights of all labels."""
        counted = own if own is not None else self.call(aten.logical_not.default, ignored, name="_counted", layout=each)
        return self.call(aten.sum.default, counted, name="_count", layout=Layout(()))


class Likelihood(Loss):
    """A negative log-likelihood of log-probabilities: a sum of what each rank has of the labels' own."""

    def write(self) -> fx.Node:
        logs, target, reduction = self.operands["self"], self.operands["target"], argument(self.node, "reduction")
        each = self.single([1])
        part = self.part(each)
        label = self.call(aten.unsqueeze.default, target, 1, name="_target", layout=each)
        ignored = self.call(aten.eq.Scalar, label, argument(self.node, "ignore_index"), name="_ignored", layout=each)
        own = self.weights(self.operands.get("weight"), label, ignored, each)
        rows = self.call(aten.neg.default, self.picked(logs, label, part), name="_rows", layout=part)
        rows = rows if own is None else self.call(aten.mul.Tensor, rows, own, name="_weighed", layout=part)
        rows = self.call(aten.masked_fill.Scalar, rows, ignored, 0.0, name="_kept", layout=part)
        if reduction == NONE:
            return self.ended(aten.squeeze.dims, rows, [1])
        if reduction != MEAN:
            return self.ended(aten.sum.default, rows)
        total = self.call(aten.sum.default, rows, name="_sum", layout=self.part(Layout(())))
        return self.ended(aten.div.Tensor, total, self.count(own, ignored, each))


class Probable(Loss):
    """A cross-entropy with probabilities for labels: a sum over classes, of which each rank adds up its own."""

    def write(self) -> fx.Node:
        scores, target, weight = self.operands["self"], self.operands["target"], self.operands.get("weight")
        smoothing, reduction, part = argument(self.node, "label_smoothing"), argument(self.node, "reduction"), self.part(self.single([1]))
        logs = self.logs(*self.shifted(self.exact(scores, "_float"), [1]), self.single([1]))
        if smoothing:
            target = self.call(aten.mul.Tensor, target, 1 - smoothing, name="_sharp", layout=self.given)
            target = self.call(aten.add.Tensor, target, smoothing / float(size_of(self.given.dims[1])), name="_smooth", layout=self.given)
        if weight is not None:
            logs = self.call(aten.mul.Tensor, logs, self.cut_weight(weight), name="_weighed", layout=self.given)
        rows = self.call(aten.mul.Tensor, logs, target, name="_expected", layout=self.given)
        rows = self.call(aten.sum.dim_IntList, rows, [1], True, name="_rows", layout=part)
        rows = self.call(aten.neg.default, rows, name="_loss", layout=part)
        way: tuple[Any, ...] = (aten.squeeze.dims, rows, [1]) if reduction == NONE else (aten.mean.default, rows)
        way = (aten.sum.default, rows) if reduction not in (NONE, MEAN) else way
        made, kind = self.made, self.type_of(self.node)
        assert isinstance(made, Layout)
        if kind.dtype not in HALF:
            return self.ended(*way)
        total = self.reduced(self.call(*way, name="_exact_partial", layout=self.part(made)), "_exact", made)
        return self.last(aten.to.dtype, total, kind.dtype)
