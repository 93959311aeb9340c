"""Private to normalize: a linear layer that merges rows and positions into one dimension, and takes them apart after, does neither."""

from __future__ import annotations

import torch
from torch import fx

from tpcompile.ir import Draft
from tpcompile.layout import TensorType
from tpcompile.rules import argument, op_name

aten = torch.ops.aten
VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")


def keep_dims(draft: Draft, node: fx.Node) -> None:
    """addmm(b, view(x, [-1, k]), w) and its view as [..., n]: linear(x, t(w), b)."""
    parts = _parts(node)
    if parts is None:
        return
    merged, weight, bias = parts
    added = draft.types[bias.name] if bias is not None else None
    if isinstance(added, TensorType) and len(added.shape) != 1:
        return
    source = merged.args[0] if op_name(merged) in VIEWS else None
    if not isinstance(source, fx.Node):
        return
    before, flat, out = (draft.types[n.name] for n in (source, merged, node))
    if not isinstance(before, TensorType) or not isinstance(flat, TensorType) or not isinstance(out, TensorType):
        return
    apart = TensorType(out.dtype, (*before.shape[:-1], out.shape[-1]))
    back = [user for user in node.users if op_name(user) in VIEWS and draft.types[user.name] == apart]
    if before.shape[-1] != flat.shape[-1] or len(flat.shape) != 2 or not back or len(back) < len(node.users):
        return
    with draft.graph.inserting_before(node):
        made = draft.call(aten.linear.default, source, _transposed(draft, weight, node), bias, type=apart, like=node)
    for user in back:
        draft.replace(user, made)
    draft.erase(node)


def _parts(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """The merged rows, the weight, as in a matrix product, and the bias."""
    match op_name(node):
        case "aten.addmm.default" if argument(node, "beta") == argument(node, "alpha") == 1:
            bias, merged, weight = (argument(node, name) for name in ("self", "mat1", "mat2"))
        case "aten.mm.default":
            bias, merged, weight = None, *node.args[:2]
        case _:
            return None
    return (merged, weight, bias) if isinstance(merged, fx.Node) and isinstance(weight, fx.Node) else None


def _transposed(draft: Draft, weight: fx.Node, like: fx.Node) -> fx.Node:
    if op_name(weight) == "aten.t.default":
        source = weight.args[0]
        assert isinstance(source, fx.Node)
        return source
    kind = draft.types[weight.name]
    assert isinstance(kind, TensorType)
    return draft.call(aten.t.default, weight, type=TensorType(kind.dtype, kind.shape[::-1]), like=like)
