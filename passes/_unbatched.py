"""torch.vmap in an exported graph, as the plain operations that it stands for.

    %s = sym_size(%x, 0)                              after  %y = unsqueeze(%x, 1)
    _vmap_increment_nesting(%s, "error")                     %z = le(%y, %t)
    %y = _add_batch_dim(%x, 0, 1)
    %z = le(%y, %t)
    %w = _remove_batch_dim(%z, 1, %s, 0)
    _vmap_decrement_nesting()

Export notes where vmap begins and ends, and between the operations as they are written, without the dimension that vmap adds. Run again
under a trace that looks below vmap, they show what is done to whole tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import predispatch
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx

from tpcompile.passes._origin import source_of
from tpcompile.passes._reasons import reason_of, refuse

FIX = "write this part with a batch dimension of its own"


def is_functorch(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", "").startswith("torch._functorch")


def regions(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes of every outermost vmap, by their first."""
    found: dict[fx.Node, list[fx.Node]] = {}
    depth, inside = 0, list[fx.Node]()
    for node in graph.nodes:
        depth += node.target is predispatch._vmap_increment_nesting
        if depth:
            inside.append(node)
        depth -= node.target is predispatch._vmap_decrement_nesting
        if inside and not depth:
            found[inside[0]], inside = inside, []
    return found


def traced(region: Sequence[fx.Node]) -> tuple[fx.Graph, list[fx.Node], list[fx.Node]]:
    """The plain graph of a region, the values outside that are its placeholders, and the region's nodes that are its outputs.

    Raises CaptureError, with the line, for what cannot run below vmap.
    """
    inside = set(region)
    operands = list(dict.fromkeys(operand for node in region for operand in node.all_input_nodes if operand not in inside))
    results = [node for node in region if any(user not in inside for user in node.users)]
    if any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in region):
        refuse("forward uses torch.vmap around a change of grad mode or autocast", source_of(region[0]), FIX)

    def run(*values: Any) -> list[Any]:
        known = dict(zip(operands, values, strict=True))
        for node in region:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return [known[node] for node in results]

    values = [operand.meta["val"] for operand in operands]
    mode = detect_fake_mode(values)
    assert mode is not None
    try:
        with mode, torch.no_grad():
            plain = [value.detach() if isinstance(value, Tensor) else value for value in values]
            graph = make_fx(run)(*plain).graph
    except Exception as error:  # whatever torch makes of it
        refuse(f"forward uses torch.vmap, which torch.export cannot take apart: {reason_of(error)}", source_of(region[0]), FIX)
    return graph, operands, results
