"""Private to capture: operations that put their result into a tensor which they are given.

before  %y = mv.out(%w, %v, out=%u)           after   %new = mv(%w, %v), %y = copy_(%u, %new)
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import fx

from tpcompile.passes._origin import source_of
from tpcompile.passes._reasons import refuse
from tpcompile.passes._views import like, schema_name

aten = torch.ops.aten


def spell_copies(graph: fx.Graph) -> None:
    """Make what is given as `out` the target of a copy. Raises CaptureError where the result has another size, or no form of its own."""
    for node in list(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and isinstance(node.kwargs.get("out"), fx.Node):
            _spell(graph, node)


def _spell(graph: fx.Graph, node: fx.Node) -> None:
    kwargs: dict[str, Any] = {name: value for name, value in node.kwargs.items() if name != "out"}
    given: Any = node.kwargs["out"]
    target = _without_out(node.target)
    if target is None:
        _refuse(node, "writes to its operands and has no functional form")
    args, named = fx.node.map_arg((node.args, kwargs), lambda operand: operand.meta["val"])
    value, wanted = target(*args, **named), given.meta["val"]
    if [str(size) for size in value.shape] != [str(size) for size in wanted.shape]:
        _refuse(node, "changes the size of a tensor that it is given")
    with graph.inserting_before(node):
        made = like(graph, node, target, node.args, kwargs, value)
        copy = like(graph, node, aten.copy_.default, (given, made), {})
    node.replace_all_uses_with(copy)
    graph.erase_node(node)


def _without_out(target: Any) -> torch._ops.OpOverload | None:
    """The form of an operation that takes the same operands, and returns its result."""
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments if a.name != "out"]
    for overload in target.overloadpacket.overloads():
        found: torch._ops.OpOverload = getattr(target.overloadpacket, overload)
        if [(a.name, str(a.type)) for a in found._schema.arguments] == wanted:
            return found
    return None


def _refuse(node: fx.Node, why: str) -> NoReturn:
    refuse(f"{schema_name(node).removeprefix('aten::')} {why}", source_of(node), "write it without out=")
