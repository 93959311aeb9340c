"""Private to divide_loss: rows that lie one after the other in one dimension, and places in them counted from each row's start.

%start = mul(arange(rows), k)          where each row's k places start
%place = add(%start, %v)               of each row one of its own, if 0 <= %v < k
%y = gather(flatten(%x), 0, %place)    each row looks into itself
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import sympy
import torch
from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.layout import Factor, Layout, Size, TensorType, same_dim
from tpcompile.passes._orders import ROWS
from tpcompile.passes._spans import SAME, within
from tpcompile.rules import Op, argument

if TYPE_CHECKING:
    from tpcompile.passes._rows import Rows

WRITES = ("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default", "aten.scatter_reduce.two")
INDICES = (torch.int64, torch.int32)
"""Types that hold any place."""

READS = ("aten.gather.default", "aten.index.Tensor", "aten.index_select.default")


@dataclass(frozen=True)
class Blocks:
    """So many rows, or parts of them, of so many places each."""

    rows: Size
    places: Size


@dataclass
class Offsets:
    """The values that are the starts of blocks, and those that are places in them."""

    starts: dict[fx.Node, Blocks] = field(default_factory=dict)
    places: dict[fx.Node, Blocks] = field(default_factory=dict)

    def call(self, op: Op, rows: Rows) -> tuple[Layout, ...] | None:
        """The layouts of an operation that makes or uses starts and places; None for any other. Raises LayoutError for a misuse."""
        node, first = op.node, op.operands[0]
        if op.name == "aten.mul.Tensor" and first in rows.counting and (count := self.count(op, rows)) is not None:
            self.starts[node] = Blocks(self.numbered(first, rows), count)
            return (rows.layouts[first][0],)
        if op.name == "aten.add.Tensor" and argument(node, "alpha") == 1 and len(op.operands) == 2:
            start, other = sorted(op.operands, key=lambda operand: operand not in self.starts)
            if start in self.starts and within(other, self.starts[start].places, rows.program.types):
                self.places[node] = self.starts[start]
                return None
        if op.name in READS and op.operands[-1] in self.places and first not in self.places:
            return self.read(op, rows)
        if op.name in WRITES and argument(node, "index") in self.places:
            return self.write(op, rows)
        for table in (self.starts, self.places):
            if any(operand in table for operand in op.operands):
                if op.name not in SAME or op.outs[0].dtype not in INDICES:
                    raise LayoutError("it computes with the number of a row")
                table[node] = table[first]
        return None

    def count(self, op: Op, rows: Rows) -> Size | None:
        """What a row's number is multiplied by, if that is the same for all."""
        by = argument(op.node, "other")
        found = rows.program.types.get(by.name) if isinstance(by, fx.Node) else by
        return found if isinstance(found, (int, sympy.Expr)) and not isinstance(found, bool) and op.outs[0].dtype in INDICES else None

    def numbered(self, node: fx.Node, rows: Rows) -> Size:
        """How many rows there are where these numbers of rows were made."""
        while node.all_input_nodes and node.all_input_nodes[0] in rows.counting:
            node = node.all_input_nodes[0]
        kind = rows.program.types[node.name]
        assert isinstance(kind, TensorType)
        return kind.shape[0]

    def read(self, op: Op, rows: Rows) -> tuple[Layout, ...]:
        """Each row some of its own places."""
        source, index = rows.layouts[op.operands[0]][0], rows.layouts[op.operands[-1]][0]
        several = op.name == "aten.index.Tensor" and len(list(argument(op.node, "indices"))) > 1
        several |= op.name == "aten.gather.default" and op.rank(0) > 1
        if several or not self.apart(op, source, op.operands[-1]):
            raise LayoutError("rows look into other rows")
        return (Layout((*index.dims, *source.dims[1:])),)

    def write(self, op: Op, rows: Rows) -> tuple[Layout, ...]:
        """Each row to some of its own places."""
        index = argument(op.node, "index")
        source, *others = (rows.layouts[operand][0] for operand in op.operands)
        alike = all(kind.shape == op.ins[1].shape for kind in op.ins[1:])
        same = all(same_dim(*pair) for other in others for pair in zip(other.dims, others[0].dims, strict=True)) if alike else False
        if op.rank(0) > 1 or not same or not self.apart(op, source, index):
            raise LayoutError("rows look into other rows")
        return (source,)

    def apart(self, op: Op, source: Layout, index: fx.Node) -> bool:
        """Whether the first dimension of what is looked up is just these blocks, and it is the one."""
        blocks = self.places[index]
        made = ((Factor(blocks.rows * blocks.places, ROWS),),)
        first = op.name == "aten.index.Tensor" or argument(op.node, "dim") % len(source.dims) == 0
        return first and same_dim(source.dims[0], made)
