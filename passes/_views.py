"""Views of memory in a working graph: new calls with metadata, and the write of a view's new value into what it is a view of."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

RESHAPES = {"_unsafe_view", "flatten", "reshape", "reshape_as", "squeeze", "squeeze_", "unflatten", "unsqueeze", "unsqueeze_", "view"}
"""Views with the same elements in the same order."""

SAME = {"_to_copy", "alias", "contiguous", "detach", "detach_", "dropout", "expand", "feature_dropout", "to", "type_as"}
"""Views of the whole, where they are views at all."""


def schema_name(node: fx.Node) -> str:
    """ "aten::add" of any overload; "" for what is no operator."""
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def argument(node: fx.Node, name: str) -> Any:
    """An operand by its name in the schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for place, spec in enumerate(node.target._schema.arguments):
        if spec.name == name:
            return node.args[place] if place < len(node.args) else node.kwargs.get(name, spec.default_value)
    raise KeyError(name)


def like(graph: fx.Graph, node: fx.Node, target: Any, args: Any, kwargs: Any, value: Any = None) -> fx.Node:
    """A new call with the metadata of a node, and `value` as its example."""
    new = graph.call_function(target, tuple(args), dict(kwargs))
    new.meta = dict(node.meta)
    if value is not None:
        new.meta |= {"val": value, "storage": None}
    return new


def sizes(graph: fx.Graph, node: fx.Node) -> list[Any]:
    """A tensor's sizes as operands: whole numbers, and nodes for symbolic ones."""
    found = []
    for dim, size in enumerate(node.meta["val"].shape):
        found.append(size if isinstance(size, int) else like(graph, node, aten.sym_size.int, (node, dim), {}, size))
    return found


def undo(graph: fx.Graph, view: fx.Node, whole: fx.Node, new: fx.Node) -> fx.Node | None:
    """`whole` with the part that `view` shows replaced by `new`; None where this is not known. `view` has its own operands still."""
    name, value = schema_name(view).removeprefix("aten::"), whole.meta["val"]
    if view.target is operator.getitem:
        return _undo_piece(graph, view, whole, new)
    if name in SAME and [str(n) for n in view.meta["val"].shape] == [str(n) for n in value.shape] and view.meta["val"].dtype == value.dtype:
        return new
    if name in RESHAPES:
        return like(graph, new, aten.reshape.default, (new, sizes(graph, whole)), {}, value)
    match name:
        case "slice":
            where = [argument(view, key) for key in ("dim", "start", "end", "step")]
            return like(graph, new, aten.slice_scatter.default, (whole, new, *where), {}, value)
        case "select":
            return like(graph, new, aten.select_scatter.default, (whole, new, argument(view, "dim"), argument(view, "index")), {}, value)
        case "narrow":
            start, length = argument(view, "start"), argument(view, "length")
            if isinstance(start, int) and isinstance(length, int) and start >= 0:
                return like(graph, new, aten.slice_scatter.default, (whole, new, argument(view, "dim"), start, start + length), {}, value)
        case "diagonal":
            where = [argument(view, key) for key in ("offset", "dim1", "dim2")]
            return like(graph, new, aten.diagonal_scatter.default, (whole, new, *where), {}, value)
        case "transpose":
            return like(graph, new, aten.transpose.int, (new, argument(view, "dim0"), argument(view, "dim1")), {}, value)
        case "t":
            return like(graph, new, aten.t.default, (new,), {}, value)
        case "permute":
            dims = [dim % value.ndim for dim in argument(view, "dims")]
            return like(graph, new, aten.permute.default, (new, [dims.index(dim) for dim in range(value.ndim)]), {}, value)
    return None


def _undo_piece(graph: fx.Graph, item: fx.Node, whole: fx.Node, new: fx.Node) -> fx.Node | None:
    """One of the pieces that chunk, split or unbind made."""
    split, index = item.args
    assert isinstance(split, fx.Node) and isinstance(index, int)
    pieces, value = split.meta["val"], whole.meta["val"]
    dim = argument(split, "dim") % value.ndim
    if schema_name(split) == "aten::unbind":
        return like(graph, new, aten.select_scatter.default, (whole, new, dim, index), {}, value)
    lengths = [piece.shape[dim] for piece in pieces]
    if not all(isinstance(length, int) for length in lengths):
        return None
    start = sum(lengths[:index])
    return like(graph, new, aten.slice_scatter.default, (whole, new, dim, start, start + lengths[index]), {}, value)


def copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """What copy_ leaves in its target: the source, in the target's shape and type."""
    target, source = node.args[:2]
    assert isinstance(target, fx.Node)
    wanted = target.meta["val"]
    assert isinstance(source, fx.Node)
    value = source.meta["val"]
    if value.dtype != wanted.dtype:
        source = like(graph, node, aten.to.dtype, (source, wanted.dtype), {}, value.to(wanted.dtype))
    if [str(n) for n in value.shape] != [str(n) for n in wanted.shape]:
        source = like(graph, node, aten.expand.default, (source, sizes(graph, target)), {}, wanted)
    return source


def typed(graph: fx.Graph, node: fx.Node, new: fx.Node) -> fx.Node:
    """The value of a functional form in the type of the in-place operation's target, which promotes nothing."""
    wanted = node.meta["val"]
    try:
        args, kwargs = fx.node.map_arg((new.args, new.kwargs), lambda operand: operand.meta["val"])
        made = new.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return new
    if not isinstance(made, Tensor) or made.dtype == wanted.dtype:
        return new
    new.meta["val"] = made
    return like(graph, node, aten.to.dtype, (new, wanted.dtype), {}, wanted)
