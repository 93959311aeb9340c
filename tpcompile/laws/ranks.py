"""A rank's graph is its stage's, and its parameters are the pieces of the layouts.

Every rank holds its own program against the stage that all ranks have agreed on; so all ranks run the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from tpcompile.ir import Local, PerRank, Stage
from tpcompile.laws.places import broken
from tpcompile.layout import Layout, local_size
from tpcompile.messages import collective_of


def check_rank(local: Local, stage: Stage, graph: fx.Graph, coordinate: int, parameters: Mapping[str, Tensor]) -> None:
    """Raise VerifyError where a rank's graph is not its stage's with the numbers of its coordinate, or a parameter not its piece.

    `parameters` are the rank's, by the names of the user's model.
    """

    def own(leaf: Any) -> Any:
        return leaf.values[coordinate] if isinstance(leaf, PerRank) else leaf

    nodes = {node.name: node for node in stage.graph.nodes}
    for mine, common in zip(_collectives(graph), _collectives(stage.graph), strict=False):
        if mine.name != common.name:
            raise broken(local, mine, f"rank {coordinate} runs it where the other ranks of stage {stage.index} run {common.name}")
    for mine, common in zip(graph.nodes, stage.graph.nodes, strict=False):
        if mine.name != common.name:
            what = f"it stands where the other ranks of stage {stage.index} have {common.name}"
            raise broken(local, nodes.get(mine.name, common), what)
        expected = fx.node.map_aggregate((common.args, common.kwargs), own)
        if mine.target is not common.target or _spelled((mine.args, mine.kwargs)) != _spelled(expected):
            raise broken(local, mine, f"on rank {coordinate} it is another call than in stage {stage.index}: {common.format_node()}")
    if len(graph.nodes) != len(stage.graph.nodes):
        raise broken(local, stage.graph.output_node(), f"rank {coordinate} runs {len(graph.nodes)} nodes of {len(stage.graph.nodes)}")
    for place, name in stage.parameters.items():
        layout = local.layouts.get(place)
        shape = [local_size(dim, coordinate) for dim in layout.dims] if isinstance(layout, Layout) else None
        if name not in parameters or (shape is not None and list(parameters[name].shape) != shape):
            held = list(parameters[name].shape) if name in parameters else "nothing"
            raise broken(local, nodes[place], f"rank {coordinate} holds {held} of {name}, and its layout {layout} says {shape}")


def _collectives(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and collective_of(node) is not None]


def _spelled(value: Any) -> str:
    return str(fx.map_arg(value, lambda operand: f"%{operand.name}"))
