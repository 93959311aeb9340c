"""The layers of a stage that can be units: torch's engine shards, gathers and reduces the parameters of each together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from tpcompile.ir import Program, Stage
from tpcompile.passes._parts import Part, layer_of


def units(stage: Stage, program: Program, parts: Sequence[Part]) -> tuple[str, ...]:
    """The layers, in the order in which they run, all uses of whose parameters are in them.

    A layer one of whose parameters has another name outside of it, or is read by another layer or by the root, is none; nor is one that
    does not run as a module of its own.
    """
    readers, twins = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for part in parts:
        for node in part.nodes:
            for source in node.all_input_nodes:
                if source.op == "placeholder" and source.name in stage.parameters:
                    readers[stage.parameters[source.name]].add(part.layer)
    for twin, name in program.aliases.items():
        twins[name].add(twin)
    layers = dict.fromkeys(part.layer for part in parts if part.layer)
    own: dict[str, list[bool]] = {layer: [] for layer in layers}  # of each parameter that it has or reads, whether nothing else does
    for name in stage.parameters.values():
        names = {name, *twins[name]}
        holders = {above for each in names for above in _above(each) if above in layers}
        for layer in holders | (readers[name] & layers.keys()):
            own[layer].append(all(each.startswith(f"{layer}.") for each in names) and readers[name] <= {layer})
    found = {layer for layer, alone in own.items() if alone and all(alone)}
    return tuple(layer for layer in layers if layer in found and layer_of(layer, found) == layer)


def _above(path: str) -> Iterator[str]:
    """The modules that something lies in."""
    words = path.split(".")
    return (".".join(words[:count]) for count in range(1, len(words)))
