"""Every parameter: where it lies, and which part of it each tensor rank owns, as index ranges that a page draws as strips.

    c_attn.weight [192, 64], q, k and v stacked, on 2 ranks
    rank 0   rows 0:32   64:96    128:160
    rank 1   rows 32:64  96:128   160:192
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from tpcompile.driver import Compilation
from tpcompile.gradients import trained
from tpcompile.inspect.page.places import Places
from tpcompile.inspect.page.templates import Packed, below
from tpcompile.ir import Program, Region
from tpcompile.layout import Dim, Layout, TensorType, cut_factors, local_size, pieces, product
from tpcompile.text import DTYPES

_NEAR = 4
"""As many operations after a weight its parts are looked for."""


def parameters(compilation: Compilation, places: Places, order: Mapping[str, int]) -> list[Packed]:
    """The parameters of all parts. Those that equal layers have alike are one entry, with all of these layers."""
    program, stages = compilation.program, _stages(compilation)
    regions = {name: region for region in compilation.plan.regions for name in region.weights}
    whole = {left.name: left for left in compilation.plan.whole}
    asked, twins = trained(program), dict[str, list[str]]()
    for twin, name in program.aliases.items():
        twins.setdefault(name, []).append(twin)
    groups, nodes = dict[Hashable, Packed](), program.nodes()
    for placeholder, name in program.parameters.items():
        kind, layout = program.types[placeholder], compilation.local.layouts.get(placeholder)
        assert isinstance(kind, TensorType)
        owner = name.rpartition(".")[0]
        part = places.of_path(owner)
        entry: Packed = {
            "name": below(name, part), "type": DTYPES.get(kind.dtype, str(kind.dtype)), "item": kind.dtype.itemsize,
            "shape": [int(size) for size in kind.shape], "trained": placeholder in asked,
        }  # fmt: skip
        if isinstance(layout, Layout):
            entry |= {"layout": str(layout), "cuts": list(_cuts(layout, compilation.mesh.tp, _named(nodes[placeholder], program)))}
        entry |= {"region": _region(regions[name], part)} if name in regions else {}
        entry |= {"why": whole[owner].reason} if owner in whole and name not in regions else {}
        entry |= {"twins": twins[name]} if name in twins else {}
        folded = part.rpartition(".")[0] if part in program.layers else part
        key = (folded, repr({k: v for k, v in entry.items() if k != "why"}))
        held = groups.setdefault(key, {**entry, "parts": [], "placeholders": [], "stages": []})
        held["parts"].append(order[part])
        held["placeholders"].append(placeholder)
        held["stages"].append(stages.get(name, []))
    return list(groups.values())


def _region(region: Region, part: str) -> str:
    name = below(region.name, part)
    return f"{name}: {region.kind}" if name else region.kind


def _stages(compilation: Compilation) -> dict[str, list[int]]:
    """The stages that hold each parameter."""
    found: dict[str, list[int]] = {}
    for stage in compilation.stages:
        for name in stage.parameters.values():
            found.setdefault(name, []).append(stage.index)
    return found


def _cuts(layout: Layout, ranks: int, names: Sequence[str]) -> Iterator[Packed]:
    """Every cut dimension: its segments, as (length, text, name), and what each rank holds of it."""
    for place, dim in enumerate(layout.dims):
        if cut_factors(dim):
            held = [[list(piece) for piece in _joined(pieces(dim, rank))] for rank in range(ranks)]
            yield {"dim": place, "segments": list(_segments(dim, names)), "ranks": held}


def _segments(dim: Dim, names: Sequence[str]) -> Iterator[list[Any]]:
    labels = names if len(names) == len(dim) else [""] * len(dim)
    for segment, label in zip(dim, labels, strict=True):
        yield [int(product(factor.size for factor in segment)), "·".join(map(str, segment)), label]


def _named(node: fx.Node, program: Program) -> list[str]:
    """What the user's line calls the parts that come of a weight: q, k, v = self.qkv(x).split(…) names three."""
    edge, seen = [node], set[fx.Node]()
    for _ in range(_NEAR):
        edge = [user for value in edge for user in value.users if user not in seen]
        seen.update(edge)
        for user in edge:
            if isinstance(program.types.get(user.name), tuple) and user.name in program.sources:
                names = [name.strip() for name in program.sources[user.name].code.partition("=")[0].split(",")]
                if all(name.isidentifier() for name in names):
                    return names
    return []


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that follow each other as one; empty ones left out."""
    made: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if made and made[-1][1] == start:
            made[-1] = (made[-1][0], stop)
        else:
            made.append((start, stop))
    return made


def held_bytes(compilation: Compilation, placeholder: str, rank: int) -> int:
    """The bytes of a parameter that a tensor rank holds."""
    kind, layout = compilation.program.types[placeholder], compilation.local.layouts.get(placeholder)
    assert isinstance(kind, TensorType)
    shape = [local_size(dim, rank) for dim in layout.dims] if isinstance(layout, Layout) else kind.shape
    return int(product(shape)) * kind.dtype.itemsize
