"""What every pass made of every part of a model, as templates."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tpcompile.driver import Compilation
from tpcompile.inspect.page.lines import Line, Name, Token, local_lines, program_lines, sharded_lines, stage_lines
from tpcompile.inspect.page.places import Places
from tpcompile.inspect.page.templates import Packed, Pool
from tpcompile.ir import Cone, Left, Local, Plan, Program, Region, Sharded, Stage
from tpcompile.text import text

_SHOWN = 12
"""As many names of a list are printed."""


@dataclass(frozen=True)
class Written:
    """The lines of a pass by part, and whether they are a graph."""

    parts: Mapping[str, Sequence[Line]]
    graph: bool = True


def passes(compilation: Compilation, places: Places, pool: Pool, numbers: Mapping[str, int], order: Mapping[str, int]) -> list[Packed]:
    """Every pass: its name, its time in seconds, the number of its operations, whose result it was given, and its parts' templates."""
    steps = list(compilation.history.values())
    packed = []
    for place, step in enumerate(steps):
        written = _written(step.made, compilation, places, order)
        own = pool.add(written.parts, numbers)
        before = next((index for index in reversed(range(place)) if steps[index].made is step.given), None)
        count = sum(line.kind in ("operation", "collective") for lines in written.parts.values() for line in lines)
        parts = [[order[part], template] for part, template in own.items()]
        packed.append(
            {"name": step.name, "seconds": step.seconds, "count": count, "graph": written.graph, "before": before, "parts": parts}
        )
    return packed


def _written(made: object, compilation: Compilation, places: Places, order: Mapping[str, int]) -> Written:
    match made:
        case Program():
            return Written(_by_part(program_lines(made), places))
        case Sharded():
            return Written(_by_part(sharded_lines(made), places))
        case Local():
            return Written(_by_part(local_lines(made, compilation), places))
        case Plan():
            return _plan(made, compilation, places, order)
        case tuple() | list() if all(isinstance(item, Stage) for item in made):
            return Written(_stages(made, compilation, places))
        case tuple() | list() if all(isinstance(item, Cone) for item in made):
            return _cones(made, compilation, places)
    return Written({"": [Line("text", tokens=(line,)) for line in text(made).splitlines()]}, graph=False)


def _by_part(lines: Sequence[Line], places: Places) -> dict[str, list[Line]]:
    found = defaultdict[str, list[Line]](list)
    for line, part in zip(lines, places.of_lines(lines), strict=True):
        found[part].append(line)
    return dict(found)


def _stages(stages: Iterable[Stage], compilation: Compilation, places: Places) -> dict[str, list[Line]]:
    """The parts of all stages; those that run on several have a heading for each."""
    found = defaultdict[str, list[tuple[int, list[Line]]]](list)
    for stage in stages:
        received = {boundary.name for boundary in stage.receives}
        lines = [replace(line, kind="received") if line.name in received else line for line in stage_lines(stage, compilation)]
        for part, own in _by_part(lines, places).items():
            found[part].append((stage.index, own))
    made = {}
    for part, several in found.items():
        heads = ([Line("heading", tokens=(f"stage {index}",))] if len(several) > 1 else [] for index, _ in several)
        made[part] = [line for head, (_, own) in zip(heads, several, strict=True) for line in (*head, *own)]
    return made


def _cones(cones: Iterable[Cone], compilation: Compilation, places: Places) -> Written:
    """One line for what was found behind each linear."""
    lines = program_lines(compilation.program)
    home = dict(zip((line.name for line in lines), places.of_lines(lines), strict=True))
    found = defaultdict[str, list[Line]](list)
    for cone in cones:
        part, source = home.get(cone.seed, ""), compilation.program.sources.get(cone.seed)
        found[part].append(Line("text", tokens=_tokens(text(cone), part, home), source=source))
    return Written(dict(found), graph=False)


def _plan(plan: Plan, compilation: Compilation, places: Places, order: Mapping[str, int]) -> Written:
    """A region and its weights, or what stays whole and why; what is no module's stands with the model itself."""
    names, found = compilation.program.types, defaultdict[str, list[Line]](list)
    items: tuple[Region | Left, ...] = (*plan.regions, *plan.whole)
    weights = compilation.program.parameters.values()
    for item in items:
        part = found_in if (found_in := places.of_path(item.name)) in order else ""
        source = item.source if isinstance(item, Left) else None
        found[part] += [Line("text", tokens=_tokens(line, part, names), source=source) for line in _spelled(item, weights)]
    return Written(dict(found), graph=False)


def _spelled(item: Region | Left, order: Iterable[str]) -> Iterator[str]:
    if isinstance(item, Left):
        yield f"{item.name} stays whole: {item.reason}"
        return
    yield f"{item.name} is cut over {item.axis}: {item.kind}"
    for name in (name for name in order if name in item.weights):
        yield f"    {name} {item.weights[name]}"


def _tokens(line: str, part: str, names: Iterable[str]) -> tuple[Token, ...]:
    """A text with the names of values apart, and without the name of the part that it is about."""
    known = names if isinstance(names, Mapping) else set(names)
    if part:
        itself = rf"(?<![\w.]){re.escape(part)}(?:\.(?=\w)|(?![\w.]))"
        line = re.sub(itself, lambda found: "" if found[0].endswith(".") else "this part", line)
    tokens, end, shown = list[Token](), 0, 0
    for match in re.finditer(r"(?<![\w.])%?([A-Za-z_]\w*)(?!\.\w)", line):
        if match[1] in known:
            shown += 1
            if shown > _SHOWN:
                return (*tokens, line[end : match.start()], "…")
            tokens += [line[end : match.start()], Name(match[1])] if match.start() > end else [Name(match[1])]
            end = match.end()
    return (*tokens, line[end:]) if end < len(line) else tuple(tokens)
