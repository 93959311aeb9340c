"""Stages are parts of the program, hold all of its parameters, and agree on what passes between them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from tpcompile.ir import Boundary, Local, Stage
from tpcompile.laws.places import broken
from tpcompile.layout import Layout
from tpcompile.text import type_text


def check_stages(local: Local, stages: Sequence[Stage]) -> None:
    """Raise VerifyError for stages that compute something else than the program, or that do not fit each other."""
    whole = {node.name: node for node in local.graph.nodes}
    for stage in stages:
        _check_nodes(local, whole, stage)
        _check_state(local, stage)
    for sender, receiver in zip(stages, stages[1:], strict=False):
        _check_boundary(local, whole, sender, receiver)
    _check_covered(local, stages)
    _check_returned(local, whole, stages[-1])


def _check_nodes(local: Local, whole: dict[str, fx.Node], stage: Stage) -> None:
    """A stage's calls are the program's, with the same operands."""
    received = {boundary.name for boundary in stage.receives}
    for node in stage.graph.nodes:
        if node.op == "output" or node.name in received:
            continue
        own = whole.get(node.name)
        if own is None:
            raise broken(local, node, f"stage {stage.index} computes it, and the program does not")
        if own.target is not node.target or _spelled(own) != _spelled(node):
            raise broken(local, node, f"stage {stage.index} computes it otherwise than the program: {own.format_node()}")


def _spelled(node: fx.Node) -> str:
    return str(fx.map_arg((node.args, node.kwargs), lambda operand: f"%{operand.name}"))


def _check_state(local: Local, stage: Stage) -> None:
    """Every placeholder is received, state or an input, and stands in the table that says what it is; no parameter stands twice."""
    program = local.program
    tables = (stage.parameters, stage.buffers, stage.constants, stage.inputs, [boundary.name for boundary in stage.receives])
    for node in stage.graph.find_nodes(op="placeholder"):
        if sum(node.name in table for table in tables) != 1:
            raise broken(local, node, f"stage {stage.index} does not say what this placeholder is")
        if node.name in stage.parameters and stage.parameters[node.name] != program.parameters.get(node.name):
            raise broken(local, node, f"stage {stage.index} takes it for {stage.parameters[node.name]}")
    names = list(stage.parameters.values())
    for node in stage.graph.find_nodes(op="placeholder"):
        name = stage.parameters.get(node.name)
        if name is not None and names.count(name) > 1:
            raise broken(local, node, f"stage {stage.index} holds {name} twice: its gradient would be in two places")


def _check_covered(local: Local, stages: Sequence[Stage]) -> None:
    """What the program uses of its parameters, some stage holds."""
    held = {name for stage in stages for name in stage.parameters.values()}
    for node in local.graph.find_nodes(op="placeholder"):
        name = local.program.parameters.get(node.name)
        if name is not None and node.users and name not in held:
            raise broken(local, node, f"no stage holds the parameter {name}")


def _check_boundary(local: Local, whole: dict[str, fx.Node], sender: Stage, receiver: Stage) -> None:
    """What one stage sends, the next receives: the same values in the same order, of one type and one layout, which is the program's."""
    between = f"stage {sender.index} sends {_listed(sender.sends)}, and stage {receiver.index} receives {_listed(receiver.receives)}"
    for sent, got in zip(sender.sends, receiver.receives, strict=False):
        if sent != got:
            raise broken(local, whole[sent.name], between)
    if len(sender.sends) != len(receiver.receives):
        longer = max(sender.sends, receiver.receives, key=len)
        raise broken(local, whole[longer[min(len(sender.sends), len(receiver.receives))].name], between)
    returned = [node.name for node in sender.graph.output_node().all_input_nodes]
    placed = [node.name for node in receiver.graph.find_nodes(op="placeholder")][: len(receiver.receives)]
    for boundary, out, place in zip(sender.sends, returned, placed, strict=False):
        if not out == place == boundary.name:
            raise broken(
                local, whole[boundary.name], f"it crosses as {out} from stage {sender.index} and as {place} to stage {receiver.index}"
            )
        if boundary.layout != local.layouts.get(boundary.name):
            raise broken(local, whole[boundary.name], f"it crosses as {boundary.layout}, and is {local.layouts.get(boundary.name)}")


def _listed(boundaries: Sequence[Boundary]) -> str:
    def one(boundary: Boundary) -> str:
        layout = "" if boundary.layout.is_whole else f" as {boundary.layout}"
        return f"{boundary.name} {type_text(boundary.type)}{layout}" + ("" if boundary.requires_grad else " without a gradient")

    return ", ".join(map(one, boundaries)) or "nothing"


def _check_returned(local: Local, whole: dict[str, fx.Node], last: Stage) -> None:
    """What the last stage returns is whole on every rank: the loss is the same, and backward begins with 1, everywhere."""
    for node in last.graph.output_node().all_input_nodes:
        layout = local.layouts.get(node.name)
        if isinstance(layout, Layout) and not layout.is_whole:
            raise broken(local, whole[node.name], f"is returned, and is {layout}")
