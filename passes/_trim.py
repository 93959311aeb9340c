"""Private to plan: a region without the values that something outside it needs whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import fx

from tpcompile.layout import Layout
from tpcompile.rules import op_name

Layouts = Mapping[str, Layout | tuple[Layout, ...]]


def trimmed(
    layouts: Layouts, rows: Collection[str], columns: Iterable[str], nodes: Mapping[str, fx.Node], gone: Collection[str]
) -> Layouts:
    """The cut values that are left when those in `gone` stay whole, and what only they lead to: each row takes a piece of them.

    What is left leads from columns to rows by itself. Empty if some row is led to by no column any more.

    before  %g = gelu(linear(%x, gate)), %n = norm(%e), %y = mul(%g, %n), %z = linear(%y, down)    all cut but for the norm, where %e stops
    after   %y, %g and gate are cut, %e and %n are whole: `mul` takes a piece of %n
    """
    kept = _leading(layouts, rows, nodes, gone)
    while lost := {name for name in kept if _is_lost(nodes[name], kept, rows)}:
        gone = {*gone, *lost}
        kept = _leading(layouts, rows, nodes, gone)
    if not all(_leading(kept, [row], nodes, ()).keys() & set(columns) for row in rows):
        return {}
    return kept


def _leading(layouts: Layouts, rows: Iterable[str], nodes: Mapping[str, fx.Node], gone: Collection[str]) -> Layouts:
    """The cut values that lead to rows, past those that are gone."""
    found: dict[str, Layout | tuple[Layout, ...]] = {}
    stack = list(rows)
    while stack:
        for operand in nodes[stack.pop()].all_input_nodes:
            name = operand.name
            if name in layouts and name not in gone and name not in found:
                found[name] = layouts[name]
                stack.append(name)
    return found


def _is_lost(node: fx.Node, kept: Layouts, rows: Collection[str]) -> bool:
    """Whether a value, no parameter, has become whole: something else reads it, or what it is a part of is whole, or a part of it."""
    if node.op == "placeholder":
        return False
    if op_name(node) == "getitem" and node.all_input_nodes[0].name not in kept:
        return True
    return any(user.name not in kept and user.name not in rows and (op_name(user) == "getitem" or reads(user)) for user in node.users)


def reads(user: fx.Node) -> bool:
    """Whether an operation looks at the numbers of its operand, and not at the shape alone. What is returned is put together at the end."""
    return user.op == "call_function" and op_name(user) not in ("aten.sym_size.int", "aten._assert_tensor_metadata.default")
