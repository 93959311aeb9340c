"""The submodules whose parameters torch's engine shards, gathers and reduces together: the layers of a stage; its root takes the rest."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from tpcompile.ir import Program, Stage
from tpcompile.passes._parts import arrange, layer_of


def units(module: nn.Module, stage: Stage, program: Program) -> tuple[nn.Module, ...]:
    """The layers of an emitted stage that can be units, in the model's order.

    A parameter has to be in a unit that contains all its uses: a layer one of whose parameters has another name outside of it, or is read
    by another layer or by the root, is none; nor is one that does not run as a module of its own.
    """
    found = []
    readers, names = _readers(stage, program), _names(module)
    for layer in program.layers:
        if layer_of(layer, program.layers) != layer or not any(name.startswith(f"{layer}.") for name, _ in module.named_parameters()):
            continue
        inside = [twins for twins in names if any(name.startswith(f"{layer}.") for name in twins)]
        alone = all(name.startswith(f"{layer}.") for twins in inside for name in twins)
        if alone and all(readers.get(name, {layer}) == {layer} for twins in inside for name in twins):
            found.append(module.get_submodule(layer))
    return tuple(found)


def _readers(stage: Stage, program: Program) -> dict[str, set[str]]:
    """For every parameter of a stage, by qualified name, the layers that read it; "" is the root."""
    paths = {name: source.path for name, source in program.sources.items()}
    found = defaultdict[str, set[str]](set)
    for part in arrange(stage, paths, program.layers):
        for node in part.nodes:
            for source in node.all_input_nodes:
                if source.op == "placeholder" and source.name in stage.parameters:
                    found[stage.parameters[source.name]].add(part.layer)
    return found


def _names(module: nn.Module) -> list[set[str]]:
    """All names of every parameter of a module."""
    found = defaultdict[int, set[str]](set)
    for name, p in module.named_parameters(remove_duplicate=False):
        found[id(p)].add(name)
    return list(found.values())
