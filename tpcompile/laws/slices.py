"""Collectives run over the program's axis, and cut or join what the layouts say, on all ranks alike."""

from __future__ import annotations

import torch
from torch import fx

from tpcompile.ir import Local, PerRank
from tpcompile.laws.places import broken
from tpcompile.layout import Cut, Dim, Layout, bounds, cut_factors
from tpcompile.messages import collective_of
from tpcompile.operation import argument, op_name

ALIKE = ("axis", "dim", "bounds")
"""Arguments that decide which ranks meet, and over what."""

CUTS = {"local_slice": True, "gather": False, "shared": False}
"""Operators whose `bounds` are those of a layout: of the value that they make (True), or of the one that they take."""


def check_slices(local: Local) -> None:
    """Raise VerifyError for a collective that ranks would not run alike, or that takes other pieces than its layouts say."""
    for node in local.graph.nodes:
        if node.op == "call_function" and collective_of(node) is not None:
            _check_alike(local, node)
            _check_bounds(local, node)
            _check_shared(local, node)
            _check_later(local, node)
    seen: set[tuple[object, object]] = set()
    for node in local.graph.nodes:
        layout = local.layouts.get(node.name)
        for part in layout if isinstance(layout, tuple) else (layout,):
            for dim in part.dims if part is not None else ():
                _check_cover(local, node, dim, seen)


def _check_alike(local: Local, node: fx.Node) -> None:
    assert isinstance(node.target, torch._ops.OpOverload)
    for declared in node.target._schema.arguments:
        value = argument(node, declared.name)
        listed = value if isinstance(value, (list, tuple)) else (value,)
        if declared.name in ALIKE and any(isinstance(item, PerRank) for item in listed):
            raise broken(local, node, f"its {declared.name} differs by rank: {value}, so the ranks would not meet")
        if declared.name == "axis" and value != local.axis:
            raise broken(local, node, f"goes over the axis {value}, and the program is cut over {local.axis}")


def _check_bounds(local: Local, node: fx.Node) -> None:
    name = op_name(node).split(".")[1]
    if name not in CUTS:
        return
    layout = local.layouts.get(node.name if CUTS[name] else node.all_input_nodes[0].name)
    dim = argument(node, "dim")
    if not isinstance(layout, Layout) or not cut_factors(layout.dims[dim]):
        raise broken(local, node, f"dimension {dim} of its pieces is not cut: {layout}")
    if list(argument(node, "bounds")) != (expected := bounds(layout.dims[dim], local.parts)):
        raise broken(local, node, f"takes the pieces {list(argument(node, 'bounds'))}, and its layout {layout} says {expected}")


def _check_shared(local: Local, node: fx.Node) -> None:
    """A parameter's gradient is summed over the ranks that share it once for each use."""
    operand = node.all_input_nodes[0]
    if op_name(node) == "tpcompile.shared.default" and operand.name not in local.program.parameters:
        raise broken(local, node, f"{operand.name} is no parameter, and its gradient is not shared")


def _check_later(local: Local, node: fx.Node) -> None:
    """The gradient that is summed after the step is a parameter's, and a part of the sum by every way that it comes."""
    if op_name(node) != "tpcompile.enter_later.default":
        return
    operand = node.all_input_nodes[0]
    if operand.name not in local.program.parameters:
        raise broken(local, node, f"{operand.name} is no parameter, and its gradient is not summed after the step")
    for user in operand.users:
        if user.target is not node.target:
            raise broken(local, user, f"reads the parameter {operand.name}, whose gradient is summed once more after the step")


def _check_cover(local: Local, node: fx.Node, dim: Dim, seen: set[tuple[object, object]]) -> None:
    """Together the ranks hold every index of a factor."""
    for factor in cut_factors(dim):
        if not isinstance(factor.cut, Cut) or not isinstance(factor.size, int) or (factor.size, factor.cut) in seen:
            continue
        seen.add((factor.size, factor.cut))
        reached = 0
        for start, stop in sorted(held for held in factor.cut.ranges if held[0] < held[1]):
            if start > reached:
                break
            reached = max(reached, stop)
        if reached != factor.size:
            raise broken(local, node, f"no rank holds index {reached} of {factor.size}: {factor}")
        if len(factor.cut.ranges) != local.parts:
            raise broken(local, node, f"is cut for {len(factor.cut.ranges)} ranks, and {local.parts} run: {factor}")
