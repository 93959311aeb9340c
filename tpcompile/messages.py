"""What a stage's operators hand to the process group in one micro-batch, forward and backward, in order: by its graph alone.

One list serves all ranks of the stage. Sizes are expressions in the sizes of a micro-batch (b, s, …) and in the number of tensor
ranks (tp). Backward runs in the reverse order of forward: autograd always takes the youngest operation whose gradient is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tpcompile.collectives import COLLECTIVES, Collective, summed_in
from tpcompile.collectives.table import Given, Message
from tpcompile.element_types import dtypes
from tpcompile.gradients import asked_for, trained, with_gradient
from tpcompile.halves import first_half, second_half, why_whole
from tpcompile.ir import Local, Stage
from tpcompile.layout import Layout, Size, size_of
from tpcompile.operation import argument, op_name


@dataclass(frozen=True)
class Sent:
    """One call of a process group. Every rank of the group gives a tensor of this type and number of elements to it."""

    axis: str  # "tp", "dp", "pp"; "all" for all processes
    direction: str  # "forward" or "backward"; "step": once for all micro-batches; "clipping", "update": after it
    call: str  # as in collectives.RING, or "recv"
    value: str  # the value that is sent, or what the call is for
    dtype: torch.dtype
    elements: Size
    places: tuple[int, ...] = ()  # over pp: the place of the rank on the other end, or those of all that take part
    microbatch: int | None = None
    stage: int | None = None  # None: for all stages of the rank

    @property
    def bytes(self) -> Size:
        return self.dtype.itemsize * self.elements


@dataclass(frozen=True)
class StageMessages:
    """The calls of one micro-batch on a stage; those of backward also by halves: all of a backward that stays whole are in the first."""

    forward: tuple[Sent, ...]
    backward: tuple[Sent, ...]
    input: tuple[Sent, ...] = ()
    weight: tuple[Sent, ...] = ()


def collective_of(node: fx.Node) -> Collective | None:
    """What a node hands to the process group; None for what is no operator of ours."""
    name = op_name(node)
    return COLLECTIVES.get(name.split(".")[1]) if name.startswith("tpcompile.") else None


def stage_messages(local: Local, stage: Stage, order: Iterable[str]) -> StageMessages:
    """The calls of a stage whose nodes run in this order. The last stage's backward begins at the loss, others' at what they send."""
    nodes = {node.name: node for node in stage.graph.nodes}
    running = [node for name in order if (node := nodes[name]).op == "call_function"]
    having, types = has_gradient(local, stage), dtypes(local, stage.graph)
    asked = asked_for(stage.graph, roots(local, stage), having)
    forward, backward = list[Sent](), dict[str, tuple[Sent, ...]]()
    for node in running:
        if (own := collective_of(node)) is not None:
            forward += _sent(local, node, types, "forward", own.forward)
    for node in reversed(running):
        if (own := collective_of(node)) is not None and node.name in asked:
            backward[node.name] = tuple(_sent(local, node, types, "backward", _serving(node, own.backward, having)))

    def of(names: Iterable[str]) -> tuple[Sent, ...]:
        return tuple(sent for name in names for sent in backward[name])

    if stage.unhalved or not stage.index:
        return StageMessages(tuple(forward), of(backward), *((of(backward), ()) if stage.unhalved else ((), of(backward))))
    first = first_half(stage.graph, _received(stage), asked)
    later = [name for group in second_half(stage.graph, stage.parameters, first, asked) for name in backward if name in group]
    return StageMessages(tuple(forward), of(backward), of(name for name in backward if name in first), of(later))


def why_unhalved(local: Local, stage: Stage) -> str:
    """Why a stage's backward is never run in halves; "" where it can be. That of the first stage is all for its weights."""
    if not stage.index:
        return ""
    asked = asked_of(local, stage)
    first = first_half(stage.graph, _received(stage), asked)
    return why_whole(stage.graph, stage.parameters, first, roots(local, stage), asked)


def asked_of(local: Local, stage: Stage) -> frozenset[str]:
    """The values of a stage that its backward reaches."""
    return asked_for(stage.graph, roots(local, stage), has_gradient(local, stage))


def _received(stage: Stage) -> list[str]:
    return [boundary.name for boundary in stage.receives if boundary.requires_grad]


def run_again(local: Local, stage: Stage, messages: StageMessages, layers: Sequence[set[str]]) -> StageMessages:
    """The calls of a stage whose layers, each given by its nodes, run forward again in backward, where anything in them has a gradient.

    When in its layer's backward that is depends on what autograd keeps; here it is before all calls of it.
    """
    having, backward = has_gradient(local, stage), list(messages.backward)
    for nodes in reversed(layers):
        again = [replace(sent, direction="backward") for sent in messages.forward if sent.value in nodes]
        place = next((place for place, sent in enumerate(backward) if sent.value in nodes), len(backward))
        backward[place:place] = again if nodes & having else []
    return replace(messages, backward=tuple(backward))


def has_gradient(local: Local, stage: Stage) -> frozenset[str]:
    """The stage's values that depend on what is trained, here or on the stages before."""
    leaves = {*trained(local.program), *(boundary.name for boundary in stage.receives if boundary.requires_grad)}
    types = {node.name: kind for node in stage.graph.nodes if (kind := local.program.types.get(local.origins.get(node.name, node.name)))}
    return with_gradient(stage.graph, leaves & {node.name for node in stage.graph.find_nodes(op="placeholder")}, types)


def roots(local: Local, stage: Stage) -> list[str]:
    """Where the stage's backward begins: at the gradients of what it sends; at the loss; without a loss, at all outputs."""
    returned = [node.name for node in stage.graph.output_node().all_input_nodes]
    if stage.sends:
        return [boundary.name for boundary in stage.sends if boundary.requires_grad]
    return [name for name in returned if local.program.loss in (None, local.origins.get(name, name))]


def _serving(node: fx.Node, messages: Sequence[Message], having: Collection[str]) -> list[Message]:
    """Those of a node's calls in backward for which something that it reads has a gradient."""
    value, *_, weights, _ = node.args if any(sent.gradient for sent in messages) else (None, (), None)
    served: Mapping[str, Any] = {"value": [value], "weights": weights}
    return [sent for sent in messages if not sent.gradient or any(one.name in having for one in served[sent.gradient])]


def _sent(local: Local, node: fx.Node, types: Mapping[str, torch.dtype], direction: str, messages: Sequence[Message]) -> Iterable[Sent]:
    """A node's calls; those that would send nothing are not made."""
    if not messages:
        return
    operand = node.all_input_nodes[0]
    layout = local.layouts[operand.name]
    assert isinstance(layout, Layout)
    dim, bounds = argument(node, "dim", 0), tuple(argument(node, "bounds", ()))
    given = Given(tuple(size_of(places) for places in layout.dims), dim % max(len(layout.dims), 1), bounds, local.parts)
    for message in messages:
        if (elements := message.elements(given)) != 0:
            dtype = types[operand.name]
            if message.call != "all_gather" and op_name(node) != "tpcompile.reduce_max.default":
                dtype = summed_in(dtype)
            yield Sent(argument(node, "axis"), direction, message.call, node.name, dtype, elements)
