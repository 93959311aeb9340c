"""The layers of an emitted stage: what torch's engines shard, gather, reduce and run again together; a stage's root takes the rest."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from tpcompile.ir import Stage


def units(module: nn.Module, stage: Stage) -> tuple[nn.Module, ...]:
    """The layers of an emitted stage that can be units, in the order in which they run. What is unused counts too: it has no graph."""
    names = defaultdict[int, set[str]](set)
    for name, p in module.named_parameters(remove_duplicate=False):
        names[id(p)].add(name)

    def alone(layer: str) -> bool:
        within = [{name.startswith(f"{layer}.") for name in twins} for twins in names.values()]
        return all(len(inside) == 1 for inside in within)

    return tuple(module.get_submodule(layer) for layer in stage.units if alone(layer))
