"""Private to split: which stage gives which buffer its new value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from torch import fx

from tpcompile.errors import Refused
from tpcompile.ir import Local, results

Needs = Callable[[int, fx.Node], Set[fx.Node]]


def homes_of_updates(
    local: Local, places: Mapping[fx.Node, int], free: Set[fx.Node], reads: Sequence[Set[fx.Node]], needs: Needs
) -> list[dict[str, fx.Node]]:
    """For every stage the buffers that it updates, and their new values. All stages that read a buffer have to.

    A value that any stage can compute, such as a counter plus one, is computed on each that reads the buffer, or where the module runs
    that has it. Another is known on its own stage alone. `reads` are the nodes that each stage has for what it sends, `needs` those for
    one more value there.
    """
    held = {name: node for node in local.graph.find_nodes(op="placeholder") if (name := local.program.buffers.get(node.name))}
    new = results(local.graph, local.program.updates)[1]
    have = [set(nodes) for nodes in reads]
    homes: dict[str, set[int]] = {}
    for name, value in new.items():
        if value not in free and value.op != "placeholder":
            homes[name] = {places[value]}
            have[places[value]] |= needs(places[value], value)
    changed = True
    while changed:
        changed = False
        for name, value in new.items():
            readers = {index for index, nodes in enumerate(have) if held.get(name) in nodes}
            if name not in homes or (value in free and not readers <= homes[name]):
                homes[name] = homes.get(name, set()) | readers or {_near(local, places, free, name)}
                changed = True
                for index in homes[name]:
                    have[index] |= needs(index, value)
            elif not readers <= homes[name]:
                raise _elsewhere(local, name, value, homes[name], readers)
    return [{name: value for name, value in new.items() if index in homes[name]} for index in range(len(reads))]


def _near(local: Local, places: Mapping[fx.Node, int], free: Set[fx.Node], name: str) -> int:
    """The first stage on which the module runs that has a buffer, or the nearest module around it."""
    owner = name.rpartition(".")[0]
    while owner:
        for node, place in places.items():
            source = local.program.sources.get(local.origins.get(node.name, node.name))
            if node not in free and source is not None and f"{source.path}.".startswith(f"{owner}."):
                return place
        owner = owner.rpartition(".")[0]
    return 0


def _elsewhere(local: Local, name: str, value: fx.Node, homes: Set[int], readers: Set[int]) -> Refused:
    source: object = local.program.sources.get(local.origins.get(value.name, value.name), "")
    return Refused(
        f"the buffer {name} is read on pipeline stage {min(readers - homes)}, and its new value is known on stage {min(homes)}",
        at=f"compile(mesh pp={len({*homes, *readers})})",
        source=str(source),
        fix="use pp=1, or update the buffer in the layer that reads it",
    )
