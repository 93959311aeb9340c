"""Where gradients flow in a working graph, and where the user has stopped them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from tpcompile.passes._views import like, schema_name
from tpcompile.rules import argument

aten = torch.ops.aten


def connected(graph: fx.Graph, seeds: Iterable[fx.Node]) -> set[fx.Node]:
    """The values that depend on one of the seeds so that a gradient could reach it."""
    found = set(seeds)
    for node in graph.nodes:
        stops = node.op != "call_function" or schema_name(node) in ("aten::detach", "aten::detach_") or not _is_float(node.meta.get("val"))
        if not stops and any(operand in found for operand in node.all_input_nodes):
            found.add(node)
    return found


def _is_float(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()) for leaf in pytree.tree_leaves(value))


def stop_gradients(graph: fx.Graph, seeds: Iterable[fx.Node]) -> None:
    """A detach between what was made under no_grad and its readers outside, where a gradient would else pass.

    before  %c = cos(%x)    made under no_grad        after  %c = cos(%x), %d = detach(%c)
            %y = mul(%z, %c)                                 %y = mul(%z, %d)

    An operation that has nothing to do returns its very operand, as a cast to the same type: gradients pass there even under no_grad,
    and a trace cannot tell later uses of the operand from uses of the result.
    """
    found = set(seeds)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.meta.get("no_grad") and _returns_operand(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        if schema_name(node) == "aten::detach":
            if node.args[0] not in found:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            continue
        if not _is_float(node.meta.get("val")) or not any(operand in found for operand in node.all_input_nodes):
            continue
        found.add(node)
        readers = [user for user in node.users if not user.meta.get("no_grad")]
        if node.meta.get("no_grad") and readers and isinstance(node.meta["val"], Tensor):
            with graph.inserting_after(node):
                detached = like(graph, node, aten.detach.default, (node,), {})
            for user in readers:
                user.replace_input_with(node, detached)


def _returns_operand(node: fx.Node) -> bool:
    operand = node.args[0] if node.args else None
    if not isinstance(operand, fx.Node) or schema_name(node) not in ("aten::to", "aten::contiguous", "aten::type_as"):
        return False
    before, after = operand.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or argument(node, "copy", False):
        return False
    return before.dtype == after.dtype and before.device == after.device and before.stride() == after.stride()


def drop_copies(graph: fx.Graph) -> None:
    """Constants are read as they are: nothing writes to them any more. Empty pieces of a cat go, as those of a cache that starts empty."""
    for node in list(graph.nodes):
        if schema_name(node) == "aten::lift_fresh_copy":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif schema_name(node) == "aten::cat":
            pieces = list(node.args[0])
            kept = [piece for piece in pieces if tuple(piece.meta["val"].shape) != (0,)]
            if len(kept) == 1 and len(pieces) > 1 and kept[0].meta["val"].dtype == node.meta["val"].dtype:
                node.replace_all_uses_with(kept[0])
                graph.erase_node(node)
