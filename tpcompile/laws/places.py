"""Where a fault is: the value, the call, and the user's line that it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from tpcompile.errors import VerifyError
from tpcompile.ir import Local, Source
from tpcompile.operation import op_name


def broken(local: Local, node: fx.Node, law: str) -> VerifyError:
    """`node = op: law`, with the call and the line of the user's code."""
    call = f"{node.name} = {op_name(node)}: {law}" if node.op == "call_function" else f"{node.name}: {law}"
    return VerifyError(call, at=node.format_node() or "", source=line_of(local, node))


def line_of(local: Local, node: fx.Node) -> str:
    """The user's line: of what a pass added, that of the nearest value around it, users first."""
    return str(_nearest(local, node, lambda n: n.users) or _nearest(local, node, lambda n: n.all_input_nodes) or "")


def _nearest(local: Local, start: fx.Node, around: Callable[[fx.Node], Iterable[fx.Node]]) -> Source | None:
    edge, seen = [start], {start}
    while edge:
        for node in edge:
            if (source := local.program.sources.get(local.origins.get(node.name, node.name))) is not None:
                return source
        edge = [one for node in edge for one in around(node) if one not in seen]
        seen.update(edge)
    return None
