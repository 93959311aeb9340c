"""What is cut over the tensor axis, what each cut sends, what stays whole and why, and which attention stays as it is, as tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from tpcompile.driver import Compilation
from tpcompile.inspect.fold import fold, split_layer
from tpcompile.inspect.options import options
from tpcompile.inspect.tables import table
from tpcompile.inspect.traffic import traffic
from tpcompile.ir import Left, Program, Region, Source


@dataclass(frozen=True)
class Limits:
    """How much of each table is shown, at most. `small`: what is a so-manieth of what its axis sends has no line of its own."""

    regions: int
    options: int
    left: int
    small: int


LIMITS = (Limits(6, 3, 4, 1000), Limits(6, 1, 2, 100), Limits(5, 0, 1, 20), Limits(5, 0, 1, 10))
"""From the first to the last until everything fits a screen."""
COLLECTIVE = "magenta"
MANY_RANGES = re.compile(r"\{(\d+:\d+, \d+:\d+), [^}]*\}")
"""Of more than two ranks."""


def cuts(compilation: Compilation, limits: Limits | None = None) -> Iterator[RenderableType]:
    """Regions, the ways to cut them, what is whole, and what needs all positions; with limits, in short forms."""
    plan = compilation.plan
    if compilation.mesh.tp == 1:
        yield Text("one tensor rank: every weight is whole")
        return
    yield _regions(compilation, limits) if plan.regions else Text("nothing is cut")
    if (limits is None or limits.options) and any(options(compilation, region) for region in plan.regions):
        yield _options(compilation, limits)
    if plan.whole or limits is None:
        yield _left(compilation, "left whole", plan.whole, limits) if plan.whole else Text("no weight is left whole")
    if compilation.sharded.stretches:
        yield _left(compilation, "needs all positions", compilation.sharded.stretches, limits)


def _regions(compilation: Compilation, limits: Limits | None) -> RenderableType:
    full = limits is None
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
    for name, first in rows[: limits.regions] if limits else rows:
        group = [first] if full else [region for region in plan.regions if own(region) == own(first) and like(region) == like(first)]
        usual = [Counter(counts(region, way) for region in group).most_common(1)[0][0] for way in (0, 1)]
        joint = ", " if full else "\n"
        calls = [Text(joint.join(found) or "–", COLLECTIVE if found else "") for found in usual]
        weights = "\n".join(_weights(first, program))
        made.add_row(name, first.kind, weights if full else MANY_RANGES.sub(r"{\1, …}", weights), *calls)
    if limits and len(rows) > limits.regions:
        made.add_row(f"… {len(rows) - limits.regions} more: explain(full=True)", "", "", "", "")
    return made


def _options(compilation: Compilation, limits: Limits | None) -> RenderableType:
    """What the chosen cut of consecutive linears sends, and what the other would."""
    regions, layers = [(region, options(compilation, region)) for region in compilation.plan.regions], compilation.program.layers
    made = table("ways to cut", "linears", "forward", "bytes that a rank sends", "", right=(3,))
    rows = fold([item for item in regions if item[1]], lambda item: item[0].name, lambda item: item[1], layers)
    for name, (_, found) in rows[: limits.options] if limits else rows:
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


def _left(compilation: Compilation, title: str, items: Sequence[Left], limits: Limits | None) -> RenderableType:
    program = compilation.program

    def like(left: Left) -> tuple[object, ...]:
        return re.sub(r"_\d+", "", left.reason), str(left.source)

    made = table(title, "because", "at")
    rows = fold(items, lambda item: item.name, like, program.layers)
    for name, left in rows[: limits.left] if limits else rows:
        made.add_row(name, left.reason, Text(_code(left.source) if left.source else "", no_wrap=True, overflow="ellipsis"))
    if limits and len(rows) > limits.left:
        made.add_row(f"… {len(rows) - limits.left} more: explain(full=True)", "", "")
    return made


def attention(compilation: Compilation, limits: Limits | None = None) -> Iterator[RenderableType]:
    """Attention that stays as the model writes it, or keeps its mask or its repeated heads: each reason once, with its first line."""
    program, reasons = compilation.program, dict[str, list[Left]]()
    for left in program.kept:
        reasons.setdefault(re.sub(r"_\d+", "", left.reason), []).append(left)
    if not reasons:
        return
    made, lines = table("attention", "because", "at"), list[str]()
    for reason, items in reasons.items():
        names = ", ".join(name for name, _ in fold(items, lambda item: item.name, lambda item: "", program.layers))
        first = items[0].source
        made.add_row(names, f"{len(items)} {reason}", Text(_code(first) if first else "", no_wrap=True, overflow="ellipsis"))
        lines.append(f"attention: {len(items)} {reason}" + (f", at {first.file.rpartition('/')[2]}:{first.line}" if first else ""))
    if limits and len(lines) > limits.left:
        lines[limits.left :] = [f"attention: {len(lines) - limits.left} more: explain(full=True)"]
    yield Text("\n".join(lines)) if limits else made


def _code(source: Source) -> str:
    """model.py:87  logits = self.head(self.norm(x))"""
    line = f"{source.file.rpartition('/')[2]}:{source.line}  {source.code}"
    return line if len(line) <= 72 else line[:71] + "…"
