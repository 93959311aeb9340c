"""Equal layers as one template, in which only the numbers of names are open.

    %linear_2 = aten.linear(%add_1, %p_h_1_up_weight)      %linear_{2i} = aten.linear(%add_{i}, %p_h_{i}_up_weight), i from 1 to 125
    %linear_4 = aten.linear(%add_2, %p_h_2_up_weight)
    …

Layers are equal if nothing but the numbers in names differs, and the names of what they are given: operations, arguments, types, layouts,
bytes and source lines are the same, and a name stands in the same places. So a page holds one layer of each kind, and can still spell every
name of every layer.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpcompile.inspect.page.lines import Call, Line, Name
from tpcompile.ir import Source

Packed = dict[str, Any]
"""What JSON can hold."""

_NUMBER = re.compile(r"\d+")
_ZERO = re.compile(r"(?<!\d)0\d")  # 01 is not the number 1


@dataclass
class Pool:
    """Templates, each stored once, and the user's lines that they come from."""

    templates: dict[str, int] = field(default_factory=dict)  # the template's text → its number
    packed: list[Packed] = field(default_factory=list)
    sources: dict[tuple[str, int, str], int] = field(default_factory=dict)

    def add(self, parts: Mapping[str, Sequence[Line]], numbers: Mapping[str, int]) -> dict[str, int]:
        """Store the lines of all parts; the template of each. `numbers` says which layer of its stack a part is."""
        alike: dict[Hashable, list[tuple[str, list[str]]]] = {}
        for part, lines in parts.items():
            key, names = _pattern(lines, part)
            alike.setdefault((part.rpartition(".")[0] if part in numbers else (part,), key), []).append((part, names))
        found = {}
        for group in alike.values():
            first = group[0][0]
            places = [numbers.get(part, 0) for part, _ in group]
            columns = zip(*(names for _, names in group), strict=True)
            made = self._template(parts[first], first, group[0][1], [over_layers(column, places) for column in columns])
            found.update(dict.fromkeys((part for part, _ in group), made))
        return found

    def _template(self, lines: Sequence[Line], part: str, names: Sequence[str], spelled: Sequence[Any]) -> int:
        place = {name: index for index, name in enumerate(names)}
        packed = {"names": list(spelled), "lines": [self._line(line, part, place) for line in lines]}
        return self.stored(packed)

    def stored(self, packed: Packed) -> int:
        """The number of a template, new or known."""
        text = repr(packed)
        if text not in self.templates:
            self.templates[text] = len(self.packed)
            self.packed.append(packed)
        return self.templates[text]

    def _line(self, line: Line, part: str, place: Mapping[str, int]) -> Packed:
        made: Packed = {"kind": line.kind}
        made |= {"name": place[line.name]} if line.name else {}
        made |= {"tokens": [place[token.name] if isinstance(token, Name) else token for token in line.tokens]} if line.tokens else {}
        made |= {key: value for key in ("op", "type", "state") if (value := getattr(line, key))}
        made |= {"calls": [vars(call) for call in line.calls]} if line.calls else {}
        if line.source is not None:
            made |= {"source": self.source(line.source), "path": below(line.source.path, part)}
        return made

    def source(self, source: Source) -> int:
        """The number of a line of the user's."""
        return self.sources.setdefault((source.file, source.line, source.code), len(self.sources))


def below(path: str, part: str) -> str:
    """A module path from a part on: "" for the part itself; other paths as they are, after a slash."""
    if path == part:
        return ""
    return path[len(part) + 1 :] if part and path.startswith(f"{part}.") else f"/{path}" if part else path


def _pattern(lines: Sequence[Line], part: str) -> tuple[Hashable, list[str]]:
    """What equal layers have in common; and the names in a layer, in the order of their first use."""
    place: dict[str, int] = {}
    rows: list[Hashable] = []
    for line in lines:
        tokens = tuple(
            place.setdefault(token.name, len(place)) if isinstance(token, Name) else ("text", token)
            for token in (*line.tokens, *([Name(line.name)] if line.name else []))
        )
        source = (line.source.file, line.source.line, line.source.code, below(line.source.path, part)) if line.source else None
        calls: tuple[Call, ...] = line.calls
        rows.append((line.kind, line.op, tokens, line.type, line.state, source, calls))
    made = {line.name for line in lines}
    return (tuple(rows), tuple(re.sub(r"_?\d+", "", name) if name in made else "" for name in place)), list(place)


def over_layers(names: Iterable[str], places: Sequence[int]) -> Any:
    """One name in all layers of a group: itself, if it is always the same; else what stands between its numbers, and these.

    ["p_h_", "_up_weight"], [[0, 1]]            a number a + b·i of layer i as [a, b]; numbers without such a rule by layer, as {i: number}
    ["linear_", ""], [[0, 4]], {0: "linear"}    names that are built otherwise, by layer: the first of its kind has no number
    """
    spelled = dict(zip(places, names, strict=True))
    if len(set(spelled.values())) == 1:
        return next(iter(spelled.values()))
    texts = _NUMBER.split(list(spelled.values())[-1])
    regular = {place: name for place, name in spelled.items() if _NUMBER.split(name) == texts and not _ZERO.search(name)}
    columns = zip(*([int(number) for number in _NUMBER.findall(name)] for name in regular.values()), strict=True)
    made: list[Any] = [texts, [_rule(column, list(regular)) for column in columns]]
    others = {str(place): name for place, name in spelled.items() if place not in regular}
    return [*made, others] if others else made


def _rule(column: Sequence[int], places: Sequence[int]) -> Any:
    step, rest = divmod(column[-1] - column[0], places[-1] - places[0]) if len(places) > 1 else (0, 0)
    start = column[0] - step * places[0]
    if not rest and all(value == start + step * place for value, place in zip(column, places, strict=True)):
        return [start, step]
    return {str(place): value for place, value in zip(places, column, strict=True)}
