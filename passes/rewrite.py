"""rewrite: from the global graph and its layouts to the graph that one rank runs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from tpcompile.collectives import ops
from tpcompile.factors import LayoutError, in_steps, reshape
from tpcompile.graphs import add_node
from tpcompile.ir import Local, PerRank, Sharded
from tpcompile.layout import Cut, Dim, Even, Layout, Size, bounds, cut_factors, local_size, pieces, same, size_of, whole
from tpcompile.passes._entering import along_positions, differentiable
from tpcompile.passes._lengths import symbol_nodes
from tpcompile.passes._scores import write_along, write_end
from tpcompile.rules import ADDENDS, ALONG, ENDS, Op, addend, argument, backward, op_name, opened, view_op, wants_of


def rewrite(sharded: Sharded) -> Local:
    """Make every operation local to one rank and insert the collectives it needs.

    before  %y = linear(%x, %w, %b) : f32[8, 64] +tp
    after   %y_partial = linear(%x, %w) : f32[8, 64] +tp
            %y_sum = reduce(%y_partial, tp) : f32[8, 64]
            %y = add(%y_sum, %b) : f32[8, 64]
    """
    writer = _Writer(sharded)
    for node in sharded.program.graph.nodes:
        writer.write(node)
    return Local(sharded.program, sharded.plan, sharded.axis, sharded.parts, writer.graph, writer.layouts, writer.origins)


class _Writer:
    """The local graph as it grows. `values` maps a global node to its local one; conversions are made once per value and layer."""

    def __init__(self, sharded: Sharded) -> None:
        self.sharded, self.program = sharded, sharded.program
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.layouts: dict[str, Layout | tuple[Layout, ...]] = {}
        self.origins: dict[str, str] = {}
        self.converted: dict[tuple[str, str, str], fx.Node] = {}
        self.lengths: dict[Size, fx.Node | int] = {}
        self.flowing = differentiable(sharded.program)

    # --- nodes

    def write(self, node: fx.Node) -> None:
        if op_name(node) == "aten.sym_size.int" and self.cut_at(node):
            self.values[node] = self.length(self.program.types[node.name])  # type: ignore[assignment,arg-type]
            return
        if node.op == "output":
            self.graph.output(fx.map_arg(node.args[0], lambda n: self.whole_value(n, node)))
            return
        if node in self.values:
            return
        wants = dict(wants_of(node, self.program.types, self.sharded.layouts, self.sharded.rows))

        def take(operand: fx.Node) -> fx.Node:
            if operand in wants:
                return self.piece(operand, wants[operand], node)
            return self.values[operand] if op_name(node) == "getitem" else self.whole_value(operand, node)

        args, kwargs = fx.map_arg(node.args, take), fx.map_arg(node.kwargs, take)
        if op_name(node) in ENDS and any(want.is_cut for want in self.sharded.rows.get(node.name, ())):
            self.values |= write_end(self, node, args, kwargs)
            return
        if op_name(node) in ALONG and self.cut_along(node):
            self.values[node] = write_along(self, node, args, kwargs)
            return
        if node.name in self.sharded.rows:
            self.write_row(node, args, kwargs)
            return
        target = node.target
        if wants:
            target, args, kwargs = localize(view_op(node, self.program.types), self, wants, args, kwargs)
        self.values[node] = self.add(
            node.op, VIEWS.get(op_name(node), target), args, kwargs, node.name, self.sharded.layouts.get(node.name), node.name
        )

    def cut_at(self, node: fx.Node) -> bool:
        """Whether the size that is read is one of which a rank's piece has a share only."""
        source, dim = node.args[0], node.args[1]
        layout = self.sharded.layouts.get(source.name) if isinstance(source, fx.Node) else None
        return isinstance(layout, Layout) and bool(cut_factors(layout.dims[dim]))  # type: ignore[index]

    def cut_along(self, node: fx.Node) -> bool:
        """Whether an operation works along a dimension that is cut."""
        layout = self.sharded.layouts[node.name]
        try:
            backward(view_op(node, self.program.types), [layout])  # type: ignore[list-item]
        except LayoutError:
            return True
        return False

    def has_gradient(self, node: fx.Node) -> bool:
        return node.name in self.flowing

    def write_row(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A partial sum, reduced unless it is to wait; what a contraction adds to it (a bias) comes after, once."""
        reduced = self.sharded.layouts[node.name]
        assert isinstance(reduced, Layout)
        partial = Layout(_uncut(reduced).dims, (self.sharded.axis,))
        target, args, kwargs, addend = split_addend(node, args, kwargs)
        target, name, origin = VIEWS.get(op_name(node), target), node.name, "" if addend is not None else node.name
        if reduced.partial:
            self.values[node] = self.add("call_function", target, args, kwargs, name, reduced, name)
            return
        made = self.add("call_function", target, args, kwargs, f"{name}_partial", partial, origin)
        made = self.reduced(made, reduced, f"{name}_sum" if addend is not None else name, origin)
        if addend is not None:
            if along_positions(reduced):
                value = next(n for n in node.all_input_nodes if self.values.get(n) is addend)
                addend = self.piece(value, _uncut(self.layout_of(value)), node)
            if places := CHANNELS.get(op_name(node), 0):
                shape = whole(size_of(reduced.dims[1]), *[1] * places)
                view = (addend, [-1] + [1] * places)
                addend = self.add("call_function", torch.ops.aten.view.default, view, {}, f"{name}_addend", shape)
            made = self.add("call_function", torch.ops.aten.add.Tensor, (made, addend), {}, name, reduced, name)
        self.values[node] = made

    def add(
        self, op: str, target: Any, args: Any, kwargs: Any, name: str, layout: Layout | tuple[Layout, ...] | None, origin: str = ""
    ) -> fx.Node:
        node = add_node(self.graph, op, target, args, kwargs, name)
        if layout is not None:
            self.layouts[node.name] = layout
        if origin:
            self.origins[node.name] = origin
        return node

    def reduced(self, partial: fx.Node, layout: Layout, name: str, origin: str) -> fx.Node:
        """A partial sum, summed: whole, or this rank's positions of it."""
        if along_positions(layout):
            return self.positions("seq_scatter", partial, name, layout, layout, origin)
        return self.add("call_function", ops.reduce.default, (partial, self.sharded.axis), {}, name, layout, origin)

    # --- values in the layouts that their uses need

    def whole_value(self, value: fx.Node, user: fx.Node) -> fx.Node:
        """A value entire, for an operation that works on whole values."""
        have = self.sharded.layouts.get(value.name)
        if isinstance(have, Layout) and have.is_cut:
            return self.gathered(value, have)
        return self.values[value]

    def piece(self, value: fx.Node, want: Layout, user: fx.Node) -> fx.Node:
        """A value in the layout that an operation on pieces needs. Its gradient there is a partial sum, unless it is cut."""
        have = self.sharded.layouts[value.name]
        assert isinstance(have, Layout)
        if have.partial and same(have, want):
            return self.values[value]
        if have.is_cut and same(have, want):
            return self.owned(value, have)
        if along_positions(want):
            return self.once(
                "positions",
                value,
                user,
                str(want),
                lambda: self.positions("seq_slice", self.values[value], f"{value.name}_slice", want, want, value.name),
            )
        node = self.entered(value, have, user)
        for dim, places in enumerate(want.dims):
            if cut_factors(places):
                node = self.once("slice", value, user, f"{dim}{places}", lambda n=node, d=dim, p=places: self.sliced(n, value, d, p, want))  # type: ignore[misc]
        return node

    def entered(self, value: fx.Node, have: Layout, user: fx.Node) -> fx.Node:
        """A whole value where it is used in a region: its gradient there is a partial sum."""
        if along_positions(have) and value.name not in self.sharded.gathering:
            return self.once(
                "positions",
                value,
                None,
                "",
                lambda: self.positions("seq_gather", self.values[value], f"{value.name}_gather", have, _uncut(have), value.name),
            )
        node = self.gathered(value, have) if have.is_cut else self.values[value]
        if value.name not in self.sharded.entering:
            return node
        return self.once(
            "enter",
            value,
            user,
            "",
            lambda: self.collective("enter", node, f"{value.name}_enter", have=_uncut(have), origin=value.name),
        )

    def owned(self, value: fx.Node, have: Layout) -> fx.Node:
        """A cut value; a parameter of which several ranks hold the same piece sums its gradient over them."""
        if value.op != "placeholder" or not any(isinstance(f.cut, Cut) and f.cut.overlaps for dim in have.dims for f in cut_factors(dim)):
            return self.values[value]
        dim, places = next((d, p) for d, p in enumerate(have.dims) if cut_factors(p))
        return self.once(
            "shared",
            value,
            None,
            "",
            lambda: self.collective("shared", self.values[value], f"{value.name}_shared", dim, places, have=have, origin=value.name),
        )

    def gathered(self, value: fx.Node, have: Layout) -> fx.Node:
        if along_positions(have):
            return self.once(
                "gather",
                value,
                None,
                "",
                lambda: self.positions("seq_whole", self.values[value], f"{value.name}_whole", have, _uncut(have), value.name),
            )
        dim, places = next((d, p) for d, p in enumerate(have.dims) if cut_factors(p))
        return self.once(
            "gather",
            value,
            None,
            "",
            lambda: self.collective(
                "gather", self.values[value], f"{value.name}_gather", dim, places, have=_uncut(have), origin=value.name
            ),
        )

    def sliced(self, node: fx.Node, value: fx.Node, dim: int, places: Dim, want: Layout) -> fx.Node:
        return self.collective("local_slice", node, f"{value.name}_slice", dim, places, have=want, origin=value.name)

    def collective(self, kind: str, node: fx.Node, name: str, dim: int = 0, places: Dim = (), *, have: Layout, origin: str) -> fx.Node:
        where = (dim, bounds(places, self.sharded.parts)) if places else ()
        return self.add("call_function", getattr(ops, kind).default, (node, self.sharded.axis, *where), {}, name, have, origin)

    def positions(self, kind: str, node: fx.Node, name: str, cut: Layout, have: Layout, origin: str) -> fx.Node:
        """A conversion to or from a value that is cut along its positions."""
        dim, places = next((d, p) for d, p in enumerate(cut.dims) if cut_factors(p))
        length = self.length(size_of(places))
        return self.add("call_function", getattr(ops, kind).default, (node, self.sharded.axis, dim, length), {}, name, have, origin)

    def length(self, size: Size) -> fx.Node | int:
        """A size of the global program, in this graph."""
        if size not in self.lengths:
            placeholders = {node.name: made for node, made in self.values.items() if node.op == "placeholder"}
            self.lengths[size] = symbol_nodes(self.graph, self.program, size, placeholders, "length")
        return self.lengths[size]

    def first_position(self, size: Size) -> fx.Node:
        """Where this rank's positions of a sequence begin: as many pieces before as its coordinate, some of them longer by one."""
        length, parts = self.length(size), self.sharded.parts

        def call(target: Any, *args: Any) -> fx.Node:
            return self.graph.create_node("call_function", target, args, {}, "position")

        own = self.number(lambda coordinate: coordinate)
        pieces = call(operator.mul, call(operator.floordiv, length, parts), own)
        return call(operator.add, pieces, call(torch.sym_min, own, call(operator.mod, length, parts)))

    def once(self, kind: str, value: fx.Node, user: fx.Node | None, detail: str, make: Callable[[], fx.Node]) -> fx.Node:
        """One conversion serves all uses of a value; of a parameter, all uses in one layer, so that layers stay apart."""
        layer = self.layer(user) if user is not None and value.op == "placeholder" else ""
        key = (f"{kind}{detail}", value.name, layer)
        if key not in self.converted:
            self.converted[key] = make()
        return self.converted[key]

    def layout_of(self, value: fx.Node) -> Layout:
        layout = self.sharded.layouts[value.name]
        assert isinstance(layout, Layout)
        return layout

    def layer(self, node: fx.Node) -> str:
        source = self.program.sources.get(node.name)
        path = f"{source.path}." if source else ""
        return next((layer for layer in self.program.layers if path.startswith(f"{layer}.")), "")

    def number(self, of: Callable[[int], Any]) -> Any:
        """A number for every coordinate: itself where all agree."""
        values = tuple(of(coordinate) for coordinate in range(self.sharded.parts))
        return values[0] if all(value == values[0] for value in values) else PerRank(values)


def _uncut(layout: Layout) -> Layout:
    return whole(*(size_of(dim) for dim in layout.dims))


def split_addend(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    """A contraction without what it adds (a bias), and that; None when it adds nothing."""
    added = addend(node)
    if added is None:
        return node.target, args, kwargs, None
    names = [declared.name for declared in node.target._schema.arguments]  # type: ignore[union-attr]
    position = names.index(ADDENDS[op_name(node)])
    local = args[position] if position < len(args) else kwargs[names[position]]
    match op_name(node):
        case "aten.addmm.default":
            return torch.ops.aten.mm.default, args[1:3], {}, local
        case "aten.baddbmm.default":
            return torch.ops.aten.bmm.default, args[1:3], {}, local
    kept = {name: value for name, value in kwargs.items() if name != names[position]}
    return node.target, (*args[:position], *((None, *args[position + 1 :]) if len(args) > position + 1 else ())), kept, local


CHANNELS: Mapping[str, int] = {"aten.conv1d.default": 1, "aten.conv1d.padding": 1, "aten.conv2d.default": 2, "aten.conv2d.padding": 2}
"""How many dimensions come after the one that a convolution's bias is added along."""


# --- arguments that are sizes ----------------------------------------------------------------------------------------

VIEWS: Mapping[str, Any] = {"aten.view.default": torch.ops.aten.reshape.default}
"""A view of what was laid out in one way when it was captured need not be one of a rank's piece, or on another device."""

SHAPE_ARGUMENT: Mapping[str, str] = {
    "aten._unsafe_view.default": "size",
    "aten.expand.default": "size",
    "aten.reshape.default": "shape",
    "aten.view.default": "size",
}


def localize(
    op: Op, writer: _Writer, wants: Mapping[fx.Node, Layout], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """The call with its sizes, offsets and repeats as this rank has them."""
    layout = writer.sharded.layouts[op.node.name]
    if isinstance(layout, tuple):
        if op.name == "aten.split_with_sizes.default":
            dim = op.dims("dim")[0]
            sizes = [_size(writer, part.dims[dim]) for part in layout]
            return op.node.target, *_set(op, args, kwargs, "split_sizes", sizes)
        return op.node.target, args, kwargs
    if op.name in SHAPE_ARGUMENT:
        given = list(argument(op.node, SHAPE_ARGUMENT[op.name]))
        shape = [_local_dim(writer, size, dim) for size, dim in zip(_own(given, args, op), layout.dims, strict=True)]
        return op.node.target, *_set(op, args, kwargs, SHAPE_ARGUMENT[op.name], shape)
    match op.name:
        case "aten.unflatten.int":
            dim, count = op.dims("dim")[0], len(argument(op.node, "sizes"))
            sizes = [
                _local_dim(writer, size, places)
                for size, places in zip(_own(list(argument(op.node, "sizes")), args, op), layout.dims[dim : dim + count], strict=True)
            ]
            return op.node.target, *_set(op, args, kwargs, "sizes", sizes)
        case "aten.repeat_interleave.self_int":
            return _repeat(op, writer, wants[op.operands[0]], layout, args, kwargs)
        case "aten.scaled_dot_product_attention.default":
            return _attend(op, writer, wants, args, kwargs)
        case "aten.one_hot.default" if cut_factors(layout.dims[-1]):
            starts = writer.number(lambda c: pieces(layout.dims[-1], c)[0][0])
            return ops.own_one_hot.default, (args[0], starts, _size(writer, layout.dims[-1]), size_of(layout.dims[-1])), {}
        case "tpcompile.dropout.default":
            return op.node.target, (*args[:4], writer.number(lambda coordinate: 1 + coordinate)), kwargs
        case "tpcompile.dropout_at.default":
            return _drop_at(op, writer, layout, args)
        case name if name in CHANNELS and argument(op.node, "groups") != 1:
            return op.node.target, *_set(
                op, args, kwargs, "groups", writer.number(lambda c: local_size(reshape(layout, opened(op).outs[0].shape).dims[1], c))
            )
    return op.node.target, args, kwargs


def _drop_at(op: Op, writer: _Writer, layout: Layout, args: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Dropout by global index, told which piece this is. A dimension of which a rank holds several ranges is taken apart for it."""
    value, rows, cuts, apart = args[0], int(argument(op.node, "rows")), list[Any](), None
    for dim, places in enumerate(layout.dims):
        if cut_factors(places):
            steps, factor = in_steps(places)
            even = isinstance(factor.cut, Even)
            if steps != 1 or dim == rows:
                apart = dim
                known = [steps if isinstance(steps, int) else -1, _size(writer, ((factor,),))]
                sizes = [writer.length(steps), -1] if even else known
                value = writer.add("call_function", torch.ops.aten.unflatten.int, (value, dim, sizes), {}, f"{op.node.name}_apart", None)
            if isinstance(factor.cut, Cut):
                starts = [start for start, _ in factor.cut.ranges]
                where = [writer.number(starts.__getitem__), factor.size]
            else:
                where = [writer.first_position(factor.size), writer.length(factor.size)]
            cuts += [dim + (apart is not None), *where]
    if apart is None:
        return op.node.target, (value, *args[1:4], rows, cuts), {}
    called = (value, *args[1:4], rows + (rows > apart), cuts)
    dropped = writer.add("call_function", op.node.target, called, {}, f"{op.node.name}_dropped", None)
    return torch.ops.aten.flatten.using_ints, (dropped, apart, apart + 1), {}


def _size(writer: _Writer, dim: Dim) -> Any:
    return writer.number(lambda coordinate: local_size(dim, coordinate))


def _own(given: list[Any], args: tuple[Any, ...], op: Op) -> list[Any]:
    """A list argument as it stands in the local call, where symbolic sizes are local nodes already."""
    mapped = [arg for arg in args if isinstance(arg, (list, tuple)) and len(arg) == len(given)]
    return list(mapped[0]) if mapped else given


def _local_dim(writer: _Writer, size: Any, dim: Dim) -> Any:
    """A size in a shape: this rank's share of it, where the dimension is cut. A size that is known only at run time is shared there."""
    if not cut_factors(dim) or (size == -1 and not isinstance(size_of(dim), int)):
        return size
    if isinstance(size_of(dim), int):
        return _size(writer, dim)
    if any(isinstance(factor.cut, Even) for factor in cut_factors(dim)):
        parts = writer.sharded.parts
        more = writer.graph.create_node("call_function", operator.add, (size, writer.number(lambda c: parts - 1 - c)), name="held_most")
        return writer.graph.create_node("call_function", operator.floordiv, (more, parts), name="held_size")
    shares = [sympy.Rational(sympy.sympify(local_size(dim, c)) / size_of(dim)) for c in range(writer.sharded.parts)]
    whole = math.lcm(*(int(share.q) for share in shares))
    held = writer.number(lambda c: int(shares[c] * whole))
    times = writer.graph.create_node("call_function", operator.mul, (size, held), name="held_times")
    return writer.graph.create_node("call_function", operator.floordiv, (times, whole), name="held_size")


def _set(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with one of them, by its schema's name, replaced."""
    names = [declared.name for declared in op.node.target._schema.arguments]  # type: ignore[union-attr]
    position = names.index(name)
    if position < len(args):
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: value}


def _picks(heads: Dim, groups: Dim, parts: int) -> tuple[int, list[list[int]]]:
    """For each coordinate, which of its key/value heads each of its query heads uses; and how many share one."""
    step = int(size_of(heads)) // int(size_of(groups))
    picks: list[list[int]] = []
    for coordinate in range(parts):
        held = [index for start, stop in pieces(groups, coordinate) for index in range(start, stop)]
        needed = [index // step for start, stop in pieces(heads, coordinate) for index in range(start, stop)]
        picks.append([held.index(group) for group in needed])
    return step, picks


def _regular(picks: list[int]) -> int | None:
    """How often each key/value head is repeated in a row; None where they differ."""
    counts = {picks.count(group) for group in set(picks)}
    return counts.pop() if len(counts) == 1 and picks == sorted(picks) else (0 if not picks else None)


def _repeat(op: Op, writer: _Writer, source: Layout, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    dim = op.dims("dim")[0]
    if not cut_factors(layout.dims[dim]):
        return op.node.target, args, kwargs
    _, picks = _picks(layout.dims[dim], source.dims[dim], writer.sharded.parts)
    times = [_regular(pick) for pick in picks]
    if None in times:
        return ops.pick.default, (args[0], dim, writer.number(lambda c: picks[c])), {}
    return op.node.target, *_set(op, args, kwargs, "repeats", writer.number(lambda c: times[c]))


def _attend(
    op: Op, writer: _Writer, wants: Mapping[fx.Node, Layout], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """Attention that shares key/value heads itself; where a rank's heads do not share evenly, they are picked before."""
    head = op.rank(0) - 3
    query, key = wants[op.operands[0]], wants[op.operands[1]]
    if (
        head < 0
        or not argument(op.node, "enable_gqa")
        or op.ins[0].shape[head] == op.ins[1].shape[head]
        or not cut_factors(query.dims[head])
    ):
        return op.node.target, args, kwargs
    _, picks = _picks(query.dims[head], key.dims[head], writer.sharded.parts)
    if all(_regular(pick) is not None for pick in picks):
        return op.node.target, args, kwargs
    chosen = writer.number(lambda c: picks[c])
    picked = [
        writer.add("call_function", ops.pick.default, (args[i], head, chosen), {}, f"{op.operands[i].name}_pick", None) for i in (1, 2)
    ]
    return op.node.target, (args[0], *picked, *args[3:]), kwargs
