"""The tables of `explain()` that fit on a screen: equal ranks share a line, and a call has one line for all stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tpcompile.driver import Compilation
from tpcompile.inspect.calls import AXES, DIRECTIONS, MICROBATCHES, Calls, formula
from tpcompile.inspect.cuts import COLLECTIVE
from tpcompile.inspect.fold import spell
from tpcompile.inspect.load import Load, Place
from tpcompile.inspect.long import ran
from tpcompile.inspect.memory import spelled
from tpcompile.inspect.questions import flop
from tpcompile.inspect.tables import table
from tpcompile.layout import Size

PLACES = 6
"""Lines of the table of what ranks hold, at most."""


# ------------------------------------------------------------------------------------------------- what a rank holds


def held(compilation: Compilation, load: Load, most: int | None = PLACES) -> RenderableType:
    """Layers, compute and memory of the ranks at every place along the pipeline, and how even they are."""
    mesh, mode, step = compilation.mesh, compilation.options.data_parallel, compilation.step
    over = f" under {mode} over {mesh.dp} replicas" if mesh.dp > 1 else ""
    sizes = ", ".join(f"{symbol}={size}" for symbol, size in (*compilation.sizes.items(), (MICROBATCHES, step.microbatches)))
    title = Text.assemble((f"held by a rank{over}", "bold"), f", at {sizes}{_balance(load)}")
    first = "stages" if step.per_rank > 1 else "stage"
    names = ("layers", "compute", "forward", "parameters", "gradients", "moments", "in a step", "activations", "in all")
    made = table(first, *names, right=range(2, 10))
    rows = _alike(compilation, load)
    shown = rows if most is None or len(rows) <= most else [*rows[: most // 2], None, *rows[len(rows) - (most - 1) // 2 :]]
    for row in shown:
        made.add_row(*(row if row is not None else [f"… {len(rows) - most + 1} more" if most else "", *[""] * len(names)]))
    why = [Text(f"activations are not counted: {load.unknown}", "yellow")] if load.unknown else []
    return Group(title, made, *why)


def _alike(compilation: Compilation, load: Load) -> list[list[str]]:
    """One row for each place; places next to each other that differ in their layers alone share one."""
    groups: list[tuple[list[str], list[Place]]] = []
    for place in load.places:
        numbers = _numbers(load, place)
        if groups and groups[-1][0] == numbers and len(place.stages) == 1:
            groups[-1][1].append(place)
        else:
            groups.append((numbers, [place]))
    rows = []
    for numbers, places in groups:
        stages = [index for place in places for index in place.stages]
        name = "all" if compilation.mesh.pp == 1 else spell(map(str, stages)) if len(places) > 1 else ", ".join(map(str, stages))
        layers = [layer for index in stages for layer in ran(compilation.stages[index], compilation.program)]
        rows.append([name, spell(dict.fromkeys(layers)) or "–", *numbers])
    return rows


def _numbers(load: Load, place: Place) -> list[str]:
    total, held = sum(one.flops for one in load.places), place.state
    known = [f"{place.flops / max(total, 1):.1%}", flop(place.flops)] if not load.unknown else ["?", "?"]
    sizes = [held.parameters, held.gradients, held.optimizer, held.gathered + held.unreduced]
    return [*known, *map(spelled, sizes), "?" if load.unknown else spelled(place.activations), spelled(place.most)]


def _balance(load: Load) -> str:
    """How much more than the mean the place with most to do has, and the one that holds most."""
    count = len(load.places)
    if count == 1 or load.unknown:
        return ""
    busy, held = ([getattr(one, name) for one in load.places] for name in ("flops", "most"))
    over = [f"{max(one) * count / max(sum(one), 1) - 1:.1%}" for one in (busy, held)]
    return f" (at most {over[0]} of compute, {over[1]} of memory over the mean)"


# ------------------------------------------------------------------------------------------------- what it sends


@dataclass(frozen=True)
class _Row:
    """The calls of one kind of the stage that gives most bytes to them."""

    stages: tuple[int, ...]  # all that make such calls
    made: Calls
    count: int
    bytes: int
    sent: int


def traffic(load: Load, small: int) -> Iterator[RenderableType]:
    """What a rank hands to the process groups in a step; of what is a `small`th of its axis's bytes, the bytes alone."""
    rows = _rows(load)
    if not rows:
        return
    totals = {axis: sum(row.bytes for row in rows if row.made.axis == axis) for axis in AXES}
    large = [row for row in rows if row.bytes * small > totals[row.made.axis] and row.made.axis != "all"]
    headings = ("handed over by a rank in a step", "stage", "calls", "bytes that it gives", "", "sent in a ring")
    made: Table = table(*headings, right=(2, 4, 5))
    made.columns[0].no_wrap = True
    for row in large:
        one = row.made
        name = Text.assemble(f"{one.axis}  {one.direction:8}  ", (one.call.replace("_", "-"), COLLECTIVE))
        stages = spell(map(str, row.stages))
        made.add_row(name, stages, f"{row.count:,}", _formula(one.bytes), spelled(row.bytes), spelled(row.sent))
    yield made
    rest = [row for row in rows if row not in large]
    if rest:
        kinds = ", ".join(f"{row.made.axis} {row.made.direction} {row.made.call.replace('_', '-')} {spelled(row.bytes)}" for row in rest)
        yield Text(f"besides, small: {kinds}")


def _rows(load: Load) -> list[_Row]:
    found: dict[tuple[str, str, str], list[tuple[int, _Row]]] = {}
    for stage, made in load.calls.items():
        for one, *numbers in made:
            found.setdefault((one.axis, one.direction, one.call), []).append((stage, _Row((), one, *numbers)))
    rows = []
    for group in found.values():
        _, most = max(group, key=lambda item: item[1].bytes)
        rows.append(_Row(tuple(index for index, _ in group), most.made, most.count, most.bytes, most.sent))
    return sorted(rows, key=lambda row: (AXES.index(row.made.axis), DIRECTIONS.index(row.made.direction), row.made.call))


def _formula(size: Size) -> str:
    """131072·L·b·m·⌈s/tp⌉"""
    if isinstance(size, int):
        return str(size)
    tidy = sympy.factor_terms(sympy.expand(size.replace(sympy.floor, _ceiling)))
    return formula(tidy)


def _ceiling(inside: sympy.Expr) -> sympy.Expr:
    """floor(s/8 + 7/8), which is that of whole numbers, as ceiling(s/8)."""
    rest = inside.as_coeff_Add()[0]
    up = isinstance(rest, sympy.Rational) and 0 < rest < 1 and rest.p == rest.q - 1
    made: sympy.Expr = sympy.ceiling(inside - rest) if up else sympy.floor(inside)
    return made
