"""What is cut over the tensor axis, what each cut sends, and what stays whole and why, as tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from tpcompile.driver import Compilation
from tpcompile.inspect.fold import fold, split_layer
from tpcompile.inspect.options import options
from tpcompile.inspect.tables import table
from tpcompile.inspect.traffic import traffic
from tpcompile.ir import Left, Program, Region, Source

REGIONS, LEFT = 6, 4
"""Rows of a short table at most."""
COLLECTIVE = "magenta"
MANY_RANGES = re.compile(r"\{(\d+:\d+, \d+:\d+), [^}]*\}")
"""Of more than two ranks."""


def cuts(compilation: Compilation, full: bool) -> Iterator[RenderableType]:
    """Regions, the ways to cut them, what is whole, and what needs all positions; on one screen no more than some rows of each."""
    plan = compilation.plan
    if compilation.mesh.tp == 1:
        yield Text("one tensor rank: every weight is whole")
        return
    yield _regions(compilation, full) if plan.regions else Text("nothing is cut")
    if any(options(compilation, region) for region in plan.regions):
        yield _options(compilation, full)
    if plan.whole or full:
        yield _left(compilation, "left whole", plan.whole, full) if plan.whole else Text("no weight is left whole")
    if compilation.sharded.stretches:
        yield _left(compilation, "needs all positions", compilation.sharded.stretches, full)


def _regions(compilation: Compilation, full: bool) -> RenderableType:
    plan, program = compilation.plan, compilation.program
    sent = traffic(compilation.local)

    def counts(region: Region, way: int) -> tuple[str, ...]:
        return tuple(f"{count} {name}" for name, count in sent[region.name][way].items())

    def like(region: Region) -> tuple[object, ...]:
        alike = region.kind, _weights(region, program)
        return (*alike, counts(region, 0), counts(region, 1)) if full else alike

    def own(region: Region) -> tuple[str, str]:
        layer, rest = split_layer(region.name, program.layers)
        return layer.rpartition(".")[0], rest

    made = table(f"cut over {plan.regions[0].axis}", "found", "weights", "forward", "backward")
    rows = fold(plan.regions, lambda r: r.name, like, program.layers)
    for name, first in rows if full else rows[:REGIONS]:
        group = [first] if full else [region for region in plan.regions if own(region) == own(first) and like(region) == like(first)]
        usual = [Counter(counts(region, way) for region in group).most_common(1)[0][0] for way in (0, 1)]
        joint = ", " if full else "\n"
        calls = [Text(joint.join(found) or "–", COLLECTIVE if found else "") for found in usual]
        weights = "\n".join(_weights(first, program))
        made.add_row(name, first.kind, weights if full else MANY_RANGES.sub(r"{\1, …}", weights), *calls)
    if not full and len(rows) > REGIONS:
        made.add_row(f"… {len(rows) - REGIONS} more: explain(full=True)", "", "", "", "")
    return made


def _options(compilation: Compilation, full: bool) -> RenderableType:
    """What the chosen cut of consecutive linears sends, and what the other would."""
    regions, layers = [(region, options(compilation, region)) for region in compilation.plan.regions], compilation.program.layers
    made = table("ways to cut", "linears", "forward", "bytes that a rank sends", "", right=(3,))
    rows = fold([item for item in regions if item[1]], lambda item: item[0].name, lambda item: item[1], layers)
    for name, (_, found) in rows if full else rows[: REGIONS // 2]:
        for place, option in enumerate(found):
            made.add_row("" if place else name, option.cut, option.collectives, str(option), "" if place else "chosen")
    return made


def _weights(region: Region, program: Program) -> tuple[str, ...]:
    """up.weight [230@tp, 60], for a bias that is cut like it up.{weight, bias}; in the order of the model, below the region's name."""
    lines: dict[str, str] = {}
    for name in sorted(region.weights, key=list(program.parameters.values()).index):
        owner, _, own = name.rpartition(".")
        layout, weight = region.weights[name], f"{owner}.weight"
        if own == "bias" and weight in lines and region.weights[weight].startswith(layout[:-1] + ","):
            lines[weight] = lines[weight].replace(".weight ", ".{weight, bias} ", 1)
            continue
        within = name.removeprefix(f"{region.name}.")
        lines[name] = f"{within if within != name else split_layer(name, program.layers)[1]} {layout}"
    return tuple(lines.values())


def _left(compilation: Compilation, title: str, items: Sequence[Left], full: bool) -> RenderableType:
    program = compilation.program

    def like(left: Left) -> tuple[object, ...]:
        return re.sub(r"_\d+", "", left.reason), str(left.source)

    made = table(title, "because", "at")
    rows = fold(items, lambda item: item.name, like, program.layers)
    for name, left in rows if full else rows[:LEFT]:
        made.add_row(name, left.reason, Text(_code(left.source) if left.source else "", no_wrap=True, overflow="ellipsis"))
    if not full and len(rows) > LEFT:
        made.add_row(f"… {len(rows) - LEFT} more: explain(full=True)", "", "")
    return made


def _code(source: Source) -> str:
    """model.py:87  logits = self.head(self.norm(x))"""
    line = f"{source.file.rpartition('/')[2]}:{source.line}  {source.code}"
    return line if len(line) <= 72 else line[:71] + "…"
