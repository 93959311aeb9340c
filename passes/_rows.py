"""Private to divide_loss: which values of a program keep the rows of the batch apart.

The batch's rows are a cut like any other: every input is cut along its batch dimension, and the rules carry that forward. A value so
cut has, for a part of the rows, the part of its whole; an operation that mixes rows has no such layout, and the proof ends there.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, product

import sympy
from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.ir import Program
from tpcompile.layout import Dim, Factor, Layout, Size, TensorType, cut_factors, same_dim, whole
from tpcompile.passes._alike import Alike
from tpcompile.passes._offsets import Offsets
from tpcompile.passes._orders import ROWS, Orders
from tpcompile.passes._spans import counts_up
from tpcompile.passes._sums import Sums
from tpcompile.passes._varying import refuse_counts, refuse_growth
from tpcompile.rules import RESHAPES, Op, argument, aten_names, forward, has_rule, no_rule, op_name, view_op


@dataclass
class Rows:
    """The proof: a layout for every value, or the reason why it has none."""

    program: Program
    alike: Alike
    layouts: dict[fx.Node, tuple[Layout, ...]] = field(default_factory=dict)
    broken: dict[fx.Node, str] = field(default_factory=dict)
    orders: Orders = field(default_factory=Orders)
    offsets: Offsets = field(default_factory=Offsets)
    sums: Sums = field(default_factory=Sums)
    counting: set[fx.Node] = field(default_factory=set)  # 0, 1, 2, … along the rows: the row's own number
    symbols: frozenset[sympy.Symbol] = frozenset()

    @classmethod
    def of(cls, program: Program, accepted: Iterable[str] = ()) -> Rows:
        """Carry the batch dimension forward through the whole graph. `accepted` are patterns of what may mix a micro-batch's rows."""
        symbols: set[sympy.Symbol] = set()
        for name, entry in program.inputs.items():
            kind = program.types[name]
            if entry.batch_dim is not None and isinstance(kind, TensorType):
                symbols |= sympy.sympify(kind.shape[entry.batch_dim]).atoms(sympy.Symbol)
        rows = cls(program, alike=Alike(program), symbols=frozenset(symbols), sums=Sums(tuple(accepted)))
        for node in program.graph.nodes:
            try:
                rows.visit(node)
            except LayoutError as error:
                if rows.sums.accept(node, program):
                    rows.layouts[node] = tuple(whole(*kind.shape) for kind in rows.kinds(node))
                else:
                    rows.broken[node] = str(error)
        return rows

    def kinds(self, node: fx.Node) -> tuple[TensorType, ...]:
        kind = self.program.types.get(node.name)
        return (kind,) if isinstance(kind, TensorType) else kind if isinstance(kind, tuple) else ()

    def visit(self, node: fx.Node) -> None:
        kind = self.program.types.get(node.name)
        if node.op != "output":
            self.sums.look(node, self.program)
        if node.op == "placeholder" and isinstance(kind, TensorType):
            entry = self.program.inputs.get(node.name)
            at = entry.batch_dim if entry else None
            if at is not None and isinstance(size := kind.shape[at], int) and size > 1:
                raise LayoutError(f"the model takes {size} rows for granted")
            self.layouts[node] = (Layout(tuple(_rows(size) if d == at else ((Factor(size),),) for d, size in enumerate(kind.shape))),)
        elif op_name(node) == "getitem" and node.op == "call_function":
            parent, index = node.args
            self.inherit(node, [parent])  # type: ignore[list-item]
            self.layouts[node] = (self.layouts[parent][index],)  # type: ignore[index]
            self.orders.item(node, parent, index)  # type: ignore[arg-type]
            self.sums.item(node, parent)  # type: ignore[arg-type]
        elif node.op == "call_function" and isinstance(kind, (TensorType, tuple)):
            kinds = (kind,) if isinstance(kind, TensorType) else kind
            self.inherit(node, node.all_input_nodes)
            self.layouts[node] = self.call(node, kinds)
            if node not in self.sums.numbers:
                refuse_counts(node, self.program, self.symbols)
            refuse_growth(self.layouts[node], kinds, self.symbols)
        elif node.op == "call_function" and op_name(node) != "aten.sym_size.int":
            self.inherit(node, node.all_input_nodes)

    def inherit(self, node: fx.Node, operands: list[fx.Node]) -> None:
        for operand in operands:
            if operand in self.broken:
                raise LayoutError(self.broken[operand])

    def call(self, node: fx.Node, kinds: tuple[TensorType, ...]) -> tuple[Layout, ...]:
        op = view_op(node, self.program.types)
        if (known := self.sums.call(op, self)) is not None:
            return known
        if not op.operands:
            return self.created(node, kinds)
        if op.name == "aten.index.Tensor" and (layout := self.looked_up(node)) is not None:
            return (layout,)
        if (known := self.orders.call(op, self) or self.offsets.call(op, self)) is not None:
            return known
        counting = [operand for operand in op.operands if operand in self.counting]
        if counting:
            if op.name not in RESHAPES | PLAIN and not (op.name == "aten.add.Tensor" and argument(node, "other") == 0):
                raise LayoutError("it computes with the number of a row")
            self.counting.add(node)
        if not has_rule(op):
            raise LayoutError(no_rule(op))
        made = self.forward(op)
        if any(layout.partial for layout in made):
            if any(layout.is_cut for layout in made):
                raise LayoutError("rows meet other rows")
            return self.sums.start(op, self)
        layouts = tuple(self.spread(layout, kind) if op.name in BROADCASTS else layout for layout, kind in zip(made, kinds, strict=True))
        if any(sum(bool(cut_factors(dim)) for dim in layout.dims) > 1 for layout in layouts):
            raise LayoutError("rows meet other rows")
        return layouts

    def forward(self, op: Op) -> list[Layout]:
        """By the operation's rule; what is the same in all rows is read as the other operands need it."""
        have = [[self.layouts[operand][0]] for operand in op.operands]
        try:
            return forward(op, [one for (one,) in have])
        except LayoutError:
            for ways, operand, kind in zip(have, op.operands, op.ins, strict=True):
                ways += [self.read(kind, at) for at, size in self.alike.leading(operand) if self.counts_rows(size)]
            for chosen in islice(product(*have), 1, 16):
                with suppress(LayoutError):
                    return forward(op, chosen)
            raise

    @staticmethod
    def read(kind: TensorType, at: int) -> Layout:
        """A tensor with its rows along one dimension."""
        return Layout(tuple(_rows(size) if dim == at else ((Factor(size),),) for dim, size in enumerate(kind.shape)))

    def created(self, node: fx.Node, kinds: tuple[TensorType, ...]) -> tuple[Layout, ...]:
        """A new tensor, equal in all rows; but `arange(rows)` counts them."""
        layouts = tuple(self.spread(whole(*kind.shape), kind) for kind in kinds)
        if layouts[0].is_cut and counts_up(node):
            self.counting.add(node)
        elif layouts[0].is_cut and op_name(node) not in FILLED:
            raise LayoutError(f"{op_name(node)} makes rows that may differ")
        return layouts

    def spread(self, layout: Layout, kind: TensorType) -> Layout:
        """Dimensions that grow with the batch though no operand brought them: the same in all rows."""
        dims: list[Dim] = []
        for dim, size in zip(layout.dims, kind.shape, strict=True):
            dims.append(_rows(size) if self.counts_rows(size) and not cut_factors(dim) else dim)
        return Layout(tuple(dims), layout.partial)

    def counts_rows(self, size: Size) -> bool:
        """Whether a size is proportional to the number of rows."""
        found = self.symbols & size.free_symbols if isinstance(size, sympy.Expr) else frozenset()
        return any(not sympy.cancel(sympy.sympify(size) / rows).has(rows) for rows in found)

    def looked_up(self, node: fx.Node) -> Layout | None:
        """x[row, …] with `row` counting the rows: each row looks into itself."""
        source, indices = node.args[0], list(argument(node, "indices"))
        first = indices[0] if indices else None
        if first not in self.counting or not isinstance(source, fx.Node):
            return None
        have, kind = self.layouts[source][0], self.program.types[node.name]
        assert isinstance(kind, TensorType)
        place = [d for d, dim in enumerate(self.layouts[first][0].dims) if cut_factors(dim)]
        depth = len(self.layouts[first][0].dims) - place[0]
        width = max(len(self.layouts[i][0].dims) for i in indices if i is not None)
        for index in indices[1:]:
            cuts = (
                [len(self.layouts[index][0].dims) - d for d, dim in enumerate(self.layouts[index][0].dims) if cut_factors(dim)]
                if index
                else []
            )
            if cuts not in ([], [depth]):
                raise LayoutError("rows look into other rows")
        rows = self.layouts[first][0].dims[place[0]]
        if not same_dim(have.dims[0], rows) or any(cut_factors(dim) for dim in have.dims[1:]) or None in indices:
            raise LayoutError("rows look into other rows")
        at = width - depth
        return Layout(tuple(_rows(size) if d == at else ((Factor(size),),) for d, size in enumerate(kind.shape)))

    def depends(self, node: fx.Node) -> bool:
        """Whether a value has something for each row."""
        return any(layout.is_cut for layout in self.layouts.get(node, ()))

    def depends_along(self, node: fx.Node, dim: int) -> bool:
        """Whether a dimension of a value counts rows; of one that has not so many, none does."""
        return any(dim < len(layout.dims) and bool(cut_factors(layout.dims[dim])) for layout in self.layouts.get(node, ()))

    def reason(self, node: fx.Node) -> str:
        """Why rows are not kept apart at a value, with the user's line; "" when they are."""
        if node not in self.broken:
            return ""
        first = node
        while any(operand in self.broken for operand in first.all_input_nodes):
            first = next(operand for operand in first.all_input_nodes if operand in self.broken)
        return f"{self.at(first)}: {self.broken[first]}"

    def at(self, node: fx.Node) -> str:
        """An operation and the user's line."""
        source = self.program.sources.get(node.name)
        return f"{op_name(node)}{f' at {source}' if source else ''}"


PLAIN = aten_names("expand.default to.dtype to.dtype_layout to.device slice.Tensor contiguous.default clone.default")
"""Operations that leave the number of a row what it is."""

BROADCASTS = aten_names("expand.default new_empty.default new_full.default new_ones.default new_zeros.default repeat.default")
BROADCASTS |= {"tpcompile.uniform.default"}
"""Operations that make rows where there are none: the same everywhere, or each with random numbers of its own."""

FILLED = aten_names("full.default zeros.default ones.default empty.memory_format scalar_tensor.default")
"""New tensors that are the same in every row."""


def _rows(size: Size) -> Dim:
    return ((Factor(size, ROWS),),)
