"""normalize: one spelling per operation, so that later passes need one rule per meaning."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from tpcompile.factors import divides, quotient
from tpcompile.graphs import drop_dead
from tpcompile.ir import Draft, Program
from tpcompile.layout import Size, TensorType
from tpcompile.passes._dropout import key_random
from tpcompile.passes._products import keep_dims
from tpcompile.rules import argument, op_name

aten = torch.ops.aten
END = 2**63 - 1


def normalize(program: Program, dropout: str = "local") -> Program:
    """Spell every operation in one way; `dropout` is how masks are drawn, as in `tpcompile.compile`.

    before  %a, %b = chunk(%x, 2, -1)                     after  %a, %b = split_with_sizes(%x, [64, 64], -1)
    before  %a = slice(%x, 2, 0, 64), %b = slice(…, 128)  after  %a, %b = split_with_sizes(%x, [64, 64], 2)
    before  %y = reshape(expand(unsqueeze(%x, 2)))        after  %y = repeat_interleave(%x, 2, 1)
    before  %y = glu(%x, -1)                              after  %a, %b = split_with_sizes(%x, [64, 64], -1), %y = mul(%a, sigmoid(%b))
    before  %y = repeat(%x, [1, 3])                      after  %y = flatten(expand(unsqueeze(%x, 1), [-1, 3, -1]), 1, 2)
    before  %y = slice(%x, 2, 0, END, 2)                 after  %y = select(unflatten(%x, 2, [64, 2]), 3, 0)
    before  %y = view(addmm(%b, view(%x, [-1, k]), %w))   after  %y = linear(%x, t(%w), %b)
    before  %y = dropout(%x, 0.1)                         after  %y = dropout(%x, 0.1, %rng_key, 0)
    before  %y = to(%x, float32) : f32 from f32           after  %x
    before  %a, %b = broadcast_tensors(%x, %y)            after  %x, %y
    before  %y = index(%x, [arange(b), %i])               after  %y = squeeze(gather(%x, 1, unsqueeze(%i, 1)), [1])
    before  %y = view_as(%x, %z), %u = type_as(%x, %z)    after  %y = view(%x, [4, 16]), %u = to(%x, f32)
    """
    draft = Draft(program)
    first = (name_sizes, drop_identities, keep_dims, spell_tiles, spell_gates, split_evenly, take_strides)
    passes = (*first, slice_constants, name_entries, join_slices, name_repeats)
    for rewrite in passes:
        for node in list(draft.graph.nodes):
            if node.op == "call_function" and node not in draft.erased:
                rewrite(draft, node)
        drop_dead(draft.graph)
    return draft.freeze(random=key_random(draft, dropout))


def name_sizes(draft: Draft, node: fx.Node) -> None:
    """What an operation takes from another tensor, or from its own sizes, written out: a rank's piece has other sizes than the whole."""
    kind, source = draft.types[node.name], node.args[0] if node.args else None
    if op_name(node) == "aten.broadcast_tensors.default":
        expand_each(draft, node)
        return
    if not isinstance(kind, TensorType) or not isinstance(source, fx.Node):
        return
    before = draft.types[source.name]
    with draft.graph.inserting_before(node):
        match op_name(node):
            case "aten.squeeze.default" | "aten.squeeze.dim" | "aten.squeeze.dims" if isinstance(before, TensorType):
                given = argument(node, "dim") if op_name(node) != "aten.squeeze.default" else list(range(len(before.shape)))
                dims = sorted({dim % len(before.shape) for dim in ([given] if isinstance(given, int) else given)}) if before.shape else []
                args: tuple[object, ...] = (source, [dim for dim in dims if before.shape[dim] == 1])
                draft.replace(node, draft.call(aten.squeeze.dims, *args, type=kind, like=node))
            case "aten.type_as.default" | "aten.to.other":
                draft.replace(node, draft.call(aten.to.dtype, source, kind.dtype, type=kind, like=node))
            case "aten.view_as.default" | "aten.reshape_as.default":
                other = node.args[1]
                assert isinstance(other, fx.Node)
                sizes = [
                    size if isinstance(size, int) else draft.call(aten.sym_size.int, other, dim, type=size, like=node)
                    for dim, size in enumerate(kind.shape)
                ]
                draft.replace(node, draft.call(aten.reshape.default, source, sizes, type=kind, like=node))


def expand_each(draft: Draft, node: fx.Node) -> None:
    """Tensors broadcast together, each by itself: to the sizes of one that has them all."""
    kinds, operands = draft.types[node.name], list(node.all_input_nodes)
    assert isinstance(kinds, tuple)
    if len(operands) < len(kinds):
        return
    full = next((operand for operand in operands if _shape(draft, operand) == kinds[0].shape), None)
    for item in list(node.users):
        index = item.args[1]
        if full is None or not isinstance(index, int):
            continue
        operand = operands[index]
        if draft.types[operand.name] == kinds[index]:
            draft.replace(item, operand)
        else:
            with draft.graph.inserting_before(item):
                draft.replace(item, draft.call(aten.expand_as.default, operand, full, type=kinds[index], like=item))


def _covers(node: fx.Node, draft: Draft) -> bool:
    """Whether a value is put in the place of another as a whole."""
    return op_name(node) == "aten.slice_scatter.default" and draft.types[argument(node, "src").name] == draft.types[node.name]


def _shape(draft: Draft, node: fx.Node) -> tuple[Size, ...] | None:
    kind = draft.types[node.name]
    return kind.shape if isinstance(kind, TensorType) else None


def drop_identities(draft: Draft, node: fx.Node) -> None:
    """Remove what leaves its input as it is: casts to the same type, whole slices, dropout that drops nothing."""
    if _covers(node, draft):
        draft.replace(node, argument(node, "src"))
        return
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or draft.types.get(source.name) != draft.types.get(node.name):
        return
    match op_name(node):
        case "aten.to.dtype" | "aten.to.dtype_layout" | "aten.to.device" | "aten.type_as.default" | "aten.alias.default":
            same = not argument(node, "copy", False)
        case (
            "aten.lift_fresh_copy.default"
            | "aten.expand.default"
            | "aten.view.default"
            | "aten.reshape.default"
            | "aten._unsafe_view.default"
        ):
            same = True
        case "aten.squeeze.dims":
            same = True
        case "aten.slice.Tensor":
            same = argument(node, "step") == 1 and argument(node, "start") in (0, None)
        case "aten.dropout.default":
            same = argument(node, "p") == 0.0 or not argument(node, "train")
        case _:
            same = False
    if same:
        draft.replace(node, source)


def split_evenly(draft: Draft, node: fx.Node) -> None:
    """chunk, split and tensor_split by the sizes that they make."""
    if op_name(node) not in ("aten.chunk.default", "aten.split.Tensor", "aten.tensor_split.sections"):
        return
    kinds, dim = draft.types[node.name], argument(node, "dim")
    assert isinstance(kinds, tuple)
    sizes = [kind.shape[dim] for kind in kinds]
    if all(isinstance(size, int) for size in sizes):
        with draft.graph.inserting_before(node):
            draft.replace(node, draft.call(aten.split_with_sizes.default, node.args[0], sizes, dim, type=kinds, like=node))


def spell_tiles(draft: Draft, node: fx.Node) -> None:
    """The whole of a dimension several times over is a new dimension before it, expanded and merged with it: pieces repeat as pieces."""
    times = list(argument(node, "repeats")) if op_name(node) == "aten.repeat.default" else []
    kind = draft.types[node.all_input_nodes[0].name] if times else None
    if not isinstance(kind, TensorType):
        return
    new, sizes, value = len(times) - len(kind.shape), list(kind.shape), node.all_input_nodes[0]

    def call(target: Callable[..., object], *args: object) -> fx.Node:
        return draft.call(target, *args, type=TensorType(kind.dtype, tuple(sizes)), like=node)

    with draft.graph.inserting_before(node):
        for dim, given in reversed(list(enumerate(times))):
            count: Any = draft.types[given.name] if isinstance(given, fx.Node) else given
            if count == 1 and dim >= new:
                continue
            place = max(dim - new, 0)
            sizes.insert(place, 1)
            value = call(aten.unsqueeze.default, value, place)
            sizes[place] = count
            value = call(aten.expand.default, value, [given if d == place else -1 for d in range(len(sizes))])
            if dim >= new:
                sizes[place : place + 2] = [count * sizes[place + 1]]
                value = call(aten.flatten.using_ints, value, place, place + 1)
        draft.replace(node, value)


def spell_gates(draft: Draft, node: fx.Node) -> None:
    """glu: the first half of a dimension times the sigmoid of the second, which are the outputs of two linears stacked."""
    half = draft.types[node.name]
    if op_name(node) != "aten.glu.default" or not isinstance(half, TensorType):
        return
    dim = argument(node, "dim")
    size = half.shape[dim]
    if not isinstance(size, int):
        return
    with draft.graph.inserting_before(node):
        split = draft.call(aten.split_with_sizes.default, node.args[0], [size, size], dim, type=(half, half), like=node)
        value, gate = (draft.call(operator.getitem, split, index, type=half, like=node) for index in (0, 1))
        share = draft.call(aten.sigmoid.default, gate, type=half, like=node)
        draft.replace(node, draft.call(aten.mul.Tensor, value, share, type=half, like=node))


def take_strides(draft: Draft, node: fx.Node) -> None:
    """Every n-th element of a dimension is one index of a dimension of its own: gate and up projections that alternate."""
    if op_name(node) != "aten.slice.Tensor" or argument(node, "step") == 1:
        return
    source = node.all_input_nodes[0]
    kind, made = draft.types[source.name], draft.types[node.name]
    assert isinstance(kind, TensorType) and isinstance(made, TensorType)
    dim, start, step = argument(node, "dim") % len(kind.shape), argument(node, "start") or 0, argument(node, "step")
    size = kind.shape[dim]
    if not isinstance(size, int) or not isinstance(start, int) or not 0 <= start < step or size % step or made.shape[dim] != size // step:
        return
    with draft.graph.inserting_before(node):
        wide = TensorType(kind.dtype, (*kind.shape[:dim], size // step, step, *kind.shape[dim + 1 :]))
        apart = draft.call(aten.unflatten.int, source, dim, [size // step, step], type=wide, like=node)
        draft.replace(node, draft.call(aten.select.int, apart, dim + 1, start, type=made, like=node))


def slice_constants(draft: Draft, node: fx.Node) -> None:
    """A look-up of consecutive indices that are written in the model is a slice."""
    if op_name(node) != "aten.index.Tensor":
        return
    source, indices = node.all_input_nodes[0], list(argument(node, "indices"))
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    values = draft.program.constants.get(_origin(indices[dims[0]]).name) if len(dims) == 1 else None
    kind = draft.types[source.name]
    if values is None or values.dim() != 1 or values.dtype == torch.bool or not isinstance(kind, TensorType):
        return
    size, places = kind.shape[dims[0]], values.tolist()
    if not isinstance(size, int) or not places:
        return
    first = places[0] % size
    if [place % size for place in places] == list(range(first, first + len(places))):
        with draft.graph.inserting_before(node):
            args = (source, dims[0], first, first + len(places))
            draft.replace(node, draft.call(aten.slice.Tensor, *args, type=draft.types[node.name], like=node))


def name_entries(draft: Draft, node: fx.Node) -> None:
    """One entry of every row, with all rows counted, is a gather along the last dimension: each row by itself."""
    if op_name(node) != "aten.index.Tensor":
        return
    source, indices = node.all_input_nodes[0], list(argument(node, "indices"))
    kind, made, last = draft.types[source.name], draft.types[node.name], indices[-1]
    chosen = draft.types[last.name] if isinstance(last, fx.Node) else None
    if not isinstance(kind, TensorType) or not isinstance(made, TensorType) or not isinstance(chosen, TensorType):
        return
    rows, size = kind.shape[:-1], kind.shape[-1]
    if len(indices) != len(kind.shape) or not rows or not isinstance(size, int) or chosen != TensorType(torch.int64, rows):
        return
    if made.shape != rows or not all(_counts(draft, index, rows, dim) for dim, index in enumerate(indices[:-1])):
        return
    wide, held = TensorType(torch.int64, (*rows, 1)), TensorType(kind.dtype, (*rows, 1))
    with draft.graph.inserting_before(node):
        below = draft.call(aten.lt.Scalar, last, 0, type=TensorType(torch.bool, rows), like=node)
        more = draft.call(aten.add.Tensor, last, size, type=chosen, like=node)
        place = draft.call(aten.where.self, below, more, last, type=chosen, like=node)
        index = draft.call(aten.unsqueeze.default, place, len(rows), type=wide, like=node)
        found = draft.call(aten.gather.default, source, len(rows), index, type=held, like=node)
        draft.replace(node, draft.call(aten.squeeze.dims, found, [len(rows)], type=made, like=node))


def _counts(draft: Draft, index: object, rows: tuple[Size, ...], dim: int) -> bool:
    """Whether an index is all places of a dimension in order, along that dimension of what is indexed.

    Where their number was written as it was at capture, it is the one that it is broadcast with.
    """
    kind = draft.types[index.name] if isinstance(index, fx.Node) else None
    if not isinstance(kind, TensorType) or len(kind.shape) != len(rows) - dim or any(size != 1 for size in kind.shape[1:]):
        return False
    count, size = kind.shape[0], rows[dim]
    if count != size and (not isinstance(count, int) or isinstance(size, int) or count == 1):
        return False
    while isinstance(index, fx.Node) and op_name(index) in ("aten.unsqueeze.default", "aten.view.default", "aten.reshape.default"):
        index = index.args[0]
    if not isinstance(index, fx.Node) or op_name(index) not in ("aten.arange.default", "aten.arange.start"):
        return False
    return op_name(index) == "aten.arange.default" or argument(index, "start") == 0


def _origin(node: fx.Node) -> fx.Node:
    """The value that a copy or a detached value is of."""
    while node.op == "call_function" and op_name(node) in (
        "aten.lift_fresh_copy.default",
        "aten.detach.default",
        "aten.clone.default",
        "aten.detach_.default",
    ):
        node = node.all_input_nodes[0]
    return node


def join_slices(draft: Draft, node: fx.Node) -> None:
    """Slices of one value that cover a dimension without a gap are one split: at its first slice."""
    if op_name(node) == "aten.slice.Tensor":
        source = node.args[0]
        assert isinstance(source, fx.Node)
        for parts in _tilings(draft, source, [user for user in source.users if op_name(user) == "aten.slice.Tensor"]):
            if node is min(parts, key=list(source.users).index) and len(parts) > 1:
                _split_at(draft, source, parts)
                return


def _tilings(draft: Draft, source: fx.Node, slices: Iterable[fx.Node]) -> Iterable[list[fx.Node]]:
    kind = draft.types[source.name]
    assert isinstance(kind, TensorType)
    by_dim: dict[int, dict[tuple[int, int], fx.Node]] = {}
    for piece in slices:
        dim = argument(piece, "dim") % len(kind.shape)
        start, stop, step = argument(piece, "start") or 0, argument(piece, "end"), argument(piece, "step")
        size = kind.shape[dim]
        stop = size if stop is None or stop == END else stop
        if isinstance(size, int) and isinstance(start, int) and isinstance(stop, int) and step == 1:
            bounds = (start + size if start < 0 else start, min(stop + size if stop < 0 else stop, size))
            by_dim.setdefault(dim, {}).setdefault(bounds, piece)
    for dim, pieces in by_dim.items():
        ordered = sorted(pieces)
        starts, stops = [a for a, _ in ordered], [b for _, b in ordered]
        if starts == [0, *stops[:-1]] and stops[-1] == kind.shape[dim]:
            yield [pieces[bounds] for bounds in ordered]


def _split_at(draft: Draft, source: fx.Node, parts: list[fx.Node]) -> None:
    dim = argument(parts[0], "dim")
    kinds = tuple(draft.types[part.name] for part in parts)
    first = min(parts)  # in the graph's order
    twins = [[user for user in source.users if _same_slice(draft, user, part)] for part in parts]
    with draft.graph.inserting_before(first):
        sizes = [kind.shape[dim] for kind in kinds]  # type: ignore[union-attr]
        split = draft.call(aten.split_with_sizes.default, source, sizes, dim, type=kinds, like=first)  # type: ignore[arg-type]
        items = [draft.call(operator.getitem, split, index, type=kind, like=first) for index, kind in enumerate(kinds)]
    for item, same in zip(items, twins, strict=True):
        for part in same:
            draft.replace(part, item)


def _same_slice(draft: Draft, user: fx.Node, part: fx.Node) -> bool:
    return op_name(user) == op_name(part) and all(argument(user, n) == argument(part, n) for n in ("self", "dim", "start", "end", "step"))


def name_repeats(draft: Draft, node: fx.Node) -> None:
    """A new dimension expanded and merged into the one before it repeats each index: key/value heads shared by query heads."""
    if op_name(node) not in ("aten.reshape.default", "aten.view.default", "aten.flatten.using_ints"):
        return
    expand = node.args[0]
    if not isinstance(expand, fx.Node) or expand.op != "call_function" or op_name(expand) != "aten.expand.default":
        return
    source = expand.args[0]
    assert isinstance(source, fx.Node)
    before, wide, after = (draft.types[n.name] for n in (source, expand, node))
    assert isinstance(before, TensorType) and isinstance(wide, TensorType) and isinstance(after, TensorType)
    grown = (
        [d for d, (a, b) in enumerate(zip(before.shape, wide.shape, strict=True)) if a != b] if len(before.shape) == len(wide.shape) else []
    )
    if len(grown) != 1 or grown[0] == 0 or not isinstance(wide.shape[grown[0]], int):
        return
    dim = grown[0]
    if after.shape != (*wide.shape[: dim - 1], wide.shape[dim - 1] * wide.shape[dim], *wide.shape[dim + 1 :]):
        return
    with draft.graph.inserting_before(node):
        narrow = TensorType(before.dtype, (*before.shape[:dim], *before.shape[dim + 1 :]))
        made_there = op_name(source) == "aten.unsqueeze.default" and argument(source, "dim") % len(before.shape) == dim
        squeezed = source.args[0] if made_there else draft.call(aten.squeeze.dims, source, [dim], type=narrow, like=node)
        times = quotient(after.shape[dim - 1], narrow.shape[dim - 1])
        assert divides(narrow.shape[dim - 1], after.shape[dim - 1])
        draft.replace(node, draft.call(aten.repeat_interleave.self_int, squeezed, times, dim - 1, type=after, like=node))
