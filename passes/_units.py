"""The layers of a stage that can be units: torch's engine shards, gathers and reduces the parameters of each together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

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
    found = []
    for layer in dict.fromkeys(part.layer for part in parts if part.layer):
        own = [name for name in stage.parameters.values() if _inside(layer, {name, *twins[name]}) or layer in readers[name]]
        if own and all(_all_inside(layer, {name, *twins[name]}) and readers[name] <= {layer} for name in own):
            found.append(layer)
    return tuple(layer for layer in found if layer_of(layer, found) == layer)


def _inside(layer: str, names: set[str]) -> bool:
    return any(name.startswith(f"{layer}.") for name in names)


def _all_inside(layer: str, names: set[str]) -> bool:
    return all(name.startswith(f"{layer}.") for name in names)
