"""Private to divide_loss: rows that are sorted, worked on group by group, and put back.

A mixture of experts sorts its tokens by expert, multiplies each group with its expert's weight, and undoes the sort. Between, the rows of
all sequences are mixed up; each still depends on itself alone. An order is a key of its own for the rows' dimension: values in the same
order fit each other, others do not, and only the inverse of the order brings the batch's rows back.

    %values, %places = sort(%experts)      the order k; %places says where each row comes from
    %x = index(%tokens, [%places // 2])    tokens in order k, each as often as it has experts
    %ends = cumsum(histc(%values))         where each group of order k ends
    %y = grouped_mm(%x, %weights, %ends)   in order k
    %back = index_put(%, [%places], arange)    the inverse of k
    %z = index(%y, [%back])                the batch's rows again

What a mask chooses, such as the rows of one language, has a key of its own too; it is put back at the same mask.

    %x = index(%tokens, [%mask])           the chosen ones, one after the other
    %z = index_put(%zeros, [%mask], %y)    each at its place
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import fx

from tpcompile.factors import LayoutError, divides
from tpcompile.layout import Factor, Layout, Open, Size, cut_factors, product, same_dim, size_of, tidy
from tpcompile.rule_texts import masked
from tpcompile.rules import RESHAPES, Op, argument, forward, op_name

if TYPE_CHECKING:
    from tpcompile.passes._rows import Rows

ROWS = Open(0)

GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
CASTS = ("aten.to.dtype", "aten.to.dtype_layout", "aten.clone.default", "aten.contiguous.default")


@dataclass
class Orders:
    """What is known of the orders met so far, by the key of their rows."""

    values: dict[fx.Node, int] = field(default_factory=dict)  # the sorted values
    places: dict[fx.Node, tuple[int, int]] = field(default_factory=dict)  # where rows come from, and how many stand for one
    ends: dict[fx.Node, int] = field(default_factory=dict)  # how many rows each group has, or where it ends
    inverses: dict[fx.Node, int] = field(default_factory=dict)
    chosen: dict[fx.Node, int] = field(default_factory=dict)  # by mask
    sizes: dict[int, Size] = field(default_factory=dict)  # how many stand one after the other, by key

    def key(self, size: Size) -> int:
        """A new order's, of so many."""
        key = 1 + len(self.sizes)
        self.sizes[key] = size
        return key

    def item(self, node: fx.Node, parent: fx.Node, index: int) -> None:
        if op_name(parent) == "aten.sort.default" and parent in self.values:
            if index == 0:
                self.values[node] = self.values[parent]
            else:
                self.places[node] = (self.values[parent], 1)

    def call(self, op: Op, rows: Rows) -> tuple[Layout, ...] | None:
        """The layouts of an operation that starts, uses or ends an order; None for any other. Raises LayoutError for a misuse."""
        node, first = op.node, op.operands[0]
        match op.name:
            case "aten.sort.default" | "aten.argsort.default" if op.rank(0) == 1 and rows.depends(first):
                key = self.key(op.ins[0].shape[0])
                self.values[node] = key
                if op.name == "aten.argsort.default":
                    self.places[node] = (self.values.pop(node), 1)
                return (_ordered(op, key),) * len(op.outs)
            case "aten.floor_divide.default" if first in self.places and isinstance(argument(node, "other"), int):
                self.places[node] = (self.places[first][0], self.places[first][1] * argument(node, "other"))
                return (rows.layouts[first][0],)
            case name if name in CASTS and first in self.values:
                self.values[node] = self.values[first]
                return None
            case "aten.histc.default" | "aten.bincount.default" if first in self.values:
                self.ends[node] = self.values[first]
                return (_whole(op),)
            case name if first in self.ends and name in (*CASTS, "aten.cumsum.default"):
                self.ends[node] = self.ends[first]
                return (_whole(op),)
            case "aten.index.Tensor" if op.ins[1].dtype == torch.bool:
                return self.choose(op, rows)
            case "aten.index.Tensor":
                return self.index(op, rows)
            case "aten.index_put.default" if op.ins[1].dtype == torch.bool:
                return self.put_back(op, rows)
            case "aten.index_put.default":
                return self.invert(op, rows)
            case name if name in GROUPED:
                return self.multiply(op, rows)
            case name if name in RESHAPES:
                self.view(op, rows)
        known = {*self.ends, *self.inverses, *self.places}
        if any(operand in known for operand in op.operands) and not op.name.removesuffix(".default").endswith("_like"):
            raise LayoutError("it computes with the places of rows")
        return None

    def view(self, op: Op, rows: Rows) -> None:
        """Neighbours in an order may be of different rows: none are put together."""
        for dim in forward(op, [rows.layouts[op.operands[0]][0]])[0].dims:
            for factor in cut_factors(dim):
                if isinstance(factor.cut, Open) and factor.cut != ROWS and not divides(self.sizes[factor.cut.key], factor.size):
                    raise LayoutError("a view puts neighbours of an order together")

    def index(self, op: Op, rows: Rows) -> tuple[Layout, ...] | None:
        """Rows into an order, or back."""
        indices = list(argument(op.node, "indices"))
        source = rows.layouts[op.operands[0]][0]
        if len(indices) != 1 or (indices[0] not in self.places and indices[0] not in self.inverses):
            return None
        (factor, *others) = cut_factors(source.dims[0]) or [Factor(0)]
        if others or any(cut_factors(dim) for dim in source.dims[1:]):
            raise LayoutError("rows look into other rows")
        count = op.outs[0].shape[0]
        if indices[0] in self.inverses:
            if factor.cut != Open(self.inverses[indices[0]]):
                raise LayoutError("rows of one order are put back by another")
            return (Layout((((Factor(count, ROWS),),), *source.dims[1:])),)
        key, times = self.places[indices[0]]
        if factor.cut != ROWS or size_of(source.dims[0]) * times != count:
            raise LayoutError("rows look into other rows")
        return (Layout((((Factor(count, Open(key)),),), *source.dims[1:])),)

    def invert(self, op: Op, rows: Rows) -> tuple[Layout, ...] | None:
        """x[places] = 0, 1, 2, …: where each row went."""
        indices, values = list(argument(op.node, "indices")), argument(op.node, "values")
        if len(indices) != 1 or self.places.get(indices[0], (0, 0))[1] != 1 or argument(op.node, "accumulate"):
            return None
        if op_name(values) != "aten.arange.default" or rows.program.types[values.name] != op.outs[0]:
            return None
        self.inverses[op.node] = self.places[indices[0]][0]
        return (Layout((((Factor(op.outs[0].shape[0], ROWS),),),)),)

    def choose(self, op: Op, rows: Rows) -> tuple[Layout, ...] | None:
        """x[mask], where the mask says it of each row."""
        mask, (source, where) = op.operands[1], (rows.layouts[operand][0] for operand in op.operands)
        first, _ = masked(op)
        if not where.is_cut or not _chooses(source, where, first):
            return None
        key = self.chosen[mask] = self.chosen.get(mask) or self.key(op.outs[0].shape[first])
        dims = [((Factor(size, Open(key) if d == first else None),),) for d, size in enumerate(op.outs[0].shape)]
        return (Layout(tuple(dims)),)

    def put_back(self, op: Op, rows: Rows) -> tuple[Layout, ...] | None:
        """x[mask] = y, where y is of those that this mask chose."""
        source, where, values = (rows.layouts[operand][0] for operand in op.operands)
        first, _ = masked(op)
        at = len(values.dims) - (op.rank(0) - op.rank(1) + 1 - first)
        if at < 0 or not cut_factors(values.dims[at]):
            return None
        keys = [factor.cut for dim in values.dims for factor in cut_factors(dim)]
        if keys != [Open(self.chosen.get(op.operands[1], -1))] or not _chooses(source, where, first):
            raise LayoutError("what one mask chose is put back by another")
        return (source,)

    def multiply(self, op: Op, rows: Rows) -> tuple[Layout, ...]:
        """Each group of rows by its own weight."""
        source, ends = rows.layouts[op.operands[0]][0], self.ends.get(op.operands[2], -1)
        factors = cut_factors(source.dims[0])
        if not factors or factors[0].cut != Open(ends):
            raise LayoutError("groups of rows that are not those of their order")
        return (Layout((source.dims[0], ((Factor(op.outs[0].shape[1]),),))),)


def _chooses(source: Layout, where: Layout, first: int) -> bool:
    """Whether a mask says of each row what it chooses, all of one row before the next, and nothing else is cut."""
    chosen, others = source.dims[first : first + len(where.dims)], [*source.dims[:first], *source.dims[first + len(where.dims) :]]
    (leading, *_), *more = tidy(where.dims[0])
    return leading.cut == ROWS and not more and all(map(same_dim, chosen, where.dims)) and not any(cut_factors(dim) for dim in others)


def _ordered(op: Op, key: int) -> Layout:
    return Layout((((Factor(product(op.ins[0].shape), Open(key)),),),))


def _whole(op: Op) -> Layout:
    return Layout(tuple(((Factor(size),),) for size in op.outs[0].shape))
