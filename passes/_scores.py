"""Private to rewrite: what is computed along the cut dimension of scores, as it is on pieces.

    softmax, log softmax    exp(x - max) / Σ exp, x - max - log Σ exp    two reductions of a number for each row: max, Σ exp
    logsumexp               max + log Σ exp(x - max)                     the same two
    largest                 max, and where it is                         one, and one for the place
    entries, means          the own ones                                 one sum

What is computed from a row's sum on pieces enters there: one more reduction of a number for each row, backward. Gradients are those of
the whole operation: of a largest value, to where it is, or shared by all that are as large.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tpcompile.collectives import ops
from tpcompile.layout import Layout, size_of
from tpcompile.passes._ends import Likelihood, LookUp, Loss, Probable
from tpcompile.passes._written import HALF, Writer, Written
from tpcompile.rules import argument, op_name

aten = torch.ops.aten


def write_end(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[fx.Node, fx.Node]:
    """An operation in which a cut ends, given its operands on this rank; the whole value, or each of several."""
    wants = [want for want in writer.sharded.rows[node.name] if want.is_cut]
    end = ENDED[op_name(node)]
    if op_name(node) == "aten.cross_entropy_loss.default" and len(wants) > 1:
        end = Probable
    written = end(writer, node, _named(node, args, kwargs), wants[0], writer.sharded.layouts[node.name])
    made = written.write()
    return made if isinstance(made, dict) else {node: made}


def write_along(writer: Writer, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
    """An operation along a dimension that is cut, and stays so."""
    layout = writer.sharded.layouts[node.name]
    assert isinstance(layout, Layout)
    made = THROUGH[op_name(node)](writer, node, _named(node, args, kwargs), layout, layout).write()
    assert isinstance(made, fx.Node)
    return made


def _named(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [declared.name for declared in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, args, strict=False)), **kwargs}


class Reduced(Written):
    """An operation that reduces dimensions, the cut one among them."""

    @property
    def dims(self) -> list[int]:
        """The dimensions that are reduced, counted from the front."""
        given, rank = argument(self.node, "dim"), len(self.given.dims)
        listed = [given] if isinstance(given, int) else list(given if given is not None else [])
        return [dim % rank for dim in listed] or list(range(rank))

    @property
    def kept(self) -> bool:
        return bool(argument(self.node, "keepdim", False))


class LogSumExp(Reduced):
    def write(self) -> fx.Node:
        """Where the largest is infinite, the sum of exponentials is left to say so."""
        scores, each = self.operands["self"], self.single(self.dims)
        largest = self.largest(self.fixed(scores), self.dims)
        infinite = self.call(aten.isinf.default, largest, name="_infinite", layout=each)
        largest = self.call(aten.masked_fill.Scalar, largest, infinite, 0.0, name="_finite", layout=each)
        shifted = self.call(aten.sub.Tensor, scores, largest, name="_shifted", layout=self.given)
        powers = self.call(aten.exp.default, shifted, name="_powers", layout=self.given)
        total = self.call(aten.sum.dim_IntList, powers, self.dims, True, name="_total_partial", layout=self.part(each))
        log = self.call(aten.log.default, self.reduced(total, "_total", each), name="_log", layout=each)
        if self.kept:
            return self.last(aten.add.Tensor, log, largest)
        return self.last(aten.squeeze.dims, self.call(aten.add.Tensor, log, largest, name="_added", layout=each), self.dims)


class Highest(Reduced):
    """The largest value; its gradient is shared by all elements that are as large."""

    def write(self) -> fx.Node:
        scores, each = self.operands["self"], self.single(self.dims)
        fixed = self.fixed(scores)
        largest = self.largest(fixed, self.dims)
        if not self.flows:
            return self.last(aten.alias.default, largest) if self.kept else self.last(aten.squeeze.dims, largest, self.dims)
        lower = self.call(aten.ne.Tensor, fixed, largest, name="_lower", layout=self.given)
        equal = self.call(aten.logical_not.default, lower, name="_equal", layout=self.given)
        count = self.call(aten.sum.dim_IntList, equal, self.dims, True, name="_count_partial", layout=self.part(each))
        count = self.reduced(count, "_count", each)
        held = self.call(aten.masked_fill.Scalar, scores, lower, 0.0, name="_held", layout=self.given)
        held = self.call(aten.sum.dim_IntList, held, self.dims, True, name="_sum", layout=self.part(each))
        if self.kept:
            return self.ended(aten.div.Tensor, held, count)
        return self.ended(aten.squeeze.dims, self.call(aten.div.Tensor, held, count, name="_share", layout=self.part(each)), self.dims)


class _Places(Reduced):
    def place(self, fixed: fx.Node, largest: fx.Node) -> fx.Node:
        """Minus its index, since the largest of these is the first."""
        places = self.given.dims[self.dim]
        args = (fixed, largest, self.dim, self.start(places), size_of(places))
        each = self.single([self.dim])
        own = self.call(ops.own_place.default, *args, name="_place_partial", layout=Layout(each.dims, (), (self.axis,)))
        return self.reduced(own, "_place", each, how=ops.reduce_max.default)


class Placed(_Places):
    """Where the largest value is: at the first of several."""

    def write(self) -> fx.Node:
        fixed = self.fixed(self.operands["self"])
        place = self.place(fixed, self.largest(fixed, [self.dim]))
        if self.kept:
            return self.last(aten.neg.default, place)
        index = self.call(aten.neg.default, place, name="_index", layout=self.single([self.dim]))
        return self.last(aten.squeeze.dims, index, [self.dim])


class HighestPlaced(_Places):
    """The largest value and where it is, which has all of its gradient."""

    def write(self) -> dict[fx.Node, fx.Node]:
        scores, each = self.operands["self"], self.single([self.dim])
        fixed = self.fixed(scores)
        largest = self.largest(fixed, [self.dim])
        index = self.call(aten.neg.default, self.place(fixed, largest), name="_index", layout=each)
        value = largest
        if self.flows:
            places = self.given.dims[self.dim]
            args = (scores, self.dim, index, self.start(places), size_of(places), None)
            own = self.call(ops.own_entries.default, *args, name="_value_partial", layout=self.part(each))
            value = self.reduced(own, "_value", each)
        made: dict[fx.Node, fx.Node] = {}
        for item in self.node.users:
            layout, found = self.writer.sharded.layouts[item.name], (value, index)[int(item.args[1])]  # type: ignore[arg-type]
            way = (aten.alias.default, found) if self.kept else (aten.squeeze.dims, found, [self.dim])
            made[item] = self.writer.add("call_function", way[0], way[1:], {}, item.name, layout, item.name)
        return made


class Entries(Written):
    def write(self) -> fx.Node:
        places = self.given.dims[self.dim]
        args = (self.operands["self"], self.dim, self.operands["index"], self.start(places), size_of(places), None)
        return self.ended(ops.own_entries.default, *args)


class Mean(Reduced):
    """A share of the sum over the cut dimension, then the mean over the others."""

    def write(self) -> fx.Node:
        value, dtype = self.operands["self"], argument(self.node, "dtype")
        if dtype is not None and dtype != self.type_of(self.node.all_input_nodes[0]).dtype:
            value = self.call(aten.to.dtype, value, dtype, name="_to", layout=self.given)
        part = self.part(self.single([self.dim]))
        total = self.call(aten.sum.dim_IntList, value, [self.dim], True, name="_sum", layout=part)
        share = self.call(aten.div.Tensor, total, int(size_of(self.given.dims[self.dim])), name="_share", layout=part)
        if op_name(self.node) == "aten.mean.default":
            return self.ended(aten.mean.default, share)
        return self.ended(aten.mean.dim, share, self.dims, self.kept)


class Elements(Written):
    """A loss of elements: of the own ones, then as a mean or a sum of all."""

    def write(self) -> fx.Node:
        declared, reduction = self.node.target._schema.arguments, argument(self.node, "reduction")  # type: ignore[union-attr]
        given = {one.name: self.operands.get(one.name, argument(self.node, one.name)) for one in declared} | {"reduction": 0}
        args = [given[one.name] for one in declared if not one.kwarg_only]
        kwargs = {one.name: given[one.name] for one in declared if one.kwarg_only}
        each = self.call(self.node.target, *args, name="_each", layout=self.given, **kwargs)
        part = self.part(self.single([self.dim]))
        total = self.call(aten.sum.dim_IntList, each, [self.dim], True, name="_sum", layout=part)
        if reduction != 1:
            return self.ended(aten.sum.default, total)
        share = self.call(aten.div.Tensor, total, int(size_of(self.given.dims[self.dim])), name="_share", layout=part)
        return self.ended(aten.mean.default, share)


class Softmax(Written):
    def write(self) -> fx.Node:
        scores, each = self.exact(self.operands["self"], "_float", argument(self.node, "dtype")), self.single([self.dim])
        _, powers, total = self.normalizer(scores, [self.dim])
        args = (powers, self.entered(total, "_total_enter", each))
        if self.type_of(self.node).dtype not in HALF:
            return self.last(aten.div.Tensor, *args)
        return self.last(aten.to.dtype, self.call(aten.div.Tensor, *args, name="_odds", layout=self.given), self.type_of(self.node).dtype)


class LogSoftmax(Written):
    def write(self) -> fx.Node:
        scores, each = self.exact(self.operands["self"], "_float", argument(self.node, "dtype")), self.single([self.dim])
        shifted, log = self.shifted(scores, [self.dim])
        if self.type_of(self.node).dtype not in HALF:
            return self.last(aten.sub.Tensor, shifted, self.entered(log, "_log_enter", each))
        return self.last(aten.to.dtype, self.logs(shifted, log, each), self.type_of(self.node).dtype)


class Scattered(Written):
    def write(self) -> fx.Node:
        places = self.given.dims[self.dim]
        args = (self.operands["self"], self.dim, self.operands["index"], self.operands["value"], self.start(places), size_of(places))
        return self.last(ops.own_scatter.default, *args)


ENDED: Mapping[str, type[Written]] = {
    "aten.amax.default": Highest,
    "aten.argmax.default": Placed,
    "aten.cross_entropy_loss.default": Loss,
    "aten.embedding.default": LookUp,
    "aten.gather.default": Entries,
    "aten.kl_div.default": Elements,
    "aten.logsumexp.default": LogSumExp,
    "aten.max.dim": HighestPlaced,
    "aten.mean.default": Mean,
    "aten.mean.dim": Mean,
    "aten.mse_loss.default": Elements,
    "aten.nll_loss_nd.default": Likelihood,
}

THROUGH: Mapping[str, type[Written]] = {
    "aten._log_softmax.default": LogSoftmax,
    "aten._softmax.default": Softmax,
    "aten.log_softmax.int": LogSoftmax,
    "aten.scatter.value": Scattered,
    "aten.softmax.int": Softmax,
}
