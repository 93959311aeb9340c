"""Private to emit: a source does not grow with the number of layers. Calls of equal layers, each of what the last one gave, are a loop."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, count

LEAST = 4
"""Fewer calls than this stay as they are."""

_CALL = re.compile(r'(\w+) = (self(?:\.\w+|\["\w+"\])*)\[("?)(\d+)"?\]\((\w+)(, [\w, ]+)?\); del (\w+)')


def folded(lines: Sequence[str]) -> list[str]:
    """The lines of a method, with a loop in the place of calls that follow each other.

    before  add_1 = self.layers[0](add, mask); del add
            …
            add_9 = self.layers[8](add_8, mask); del add_8
    after   add_9 = add; del add
            for i in range(9):
                add_9 = self.layers[i](add_9, mask)
    """
    words = {word for line in lines for word in re.findall(r"\w+", line)}
    name = next(name for name in chain(["i"], (f"i_{number}" for number in count(1))) if name not in words)
    made, place = list[str](), 0
    while place < len(lines):
        run = _run(lines[place:])
        made += _loop(run, name) if len(run) >= LEAST else [lines[place]]
        place += len(run) if len(run) >= LEAST else 1
    return made


def _run(lines: Sequence[str]) -> list[re.Match[str]]:
    """The calls at the beginning of some lines that follow each other: next layer, value of the one before, other arguments alike."""
    run = list[re.Match[str]]()
    for line in lines:
        call = _CALL.fullmatch(line)
        if call is None or call[7] != call[5]:
            break
        if run:
            before = run[-1]
            alike = call.group(2, 3, 6) == before.group(2, 3, 6)
            if not alike or call[5] != before[1] or int(call[4]) != int(before[4]) + 1 or call[1] in (call[6] or "").split(", "):
                break
        run.append(call)
    return run


def _loop(run: Sequence[re.Match[str]], name: str) -> list[str]:
    first, last = run[0], run[-1]
    value, key = last[1], f"str({name})" if first[3] else name
    return [
        f"{value} = {first[5]}; del {first[5]}",
        f"for {name} in {spelled(range(int(first[4]), int(last[4]) + 1))}:",
        f"    {value} = {first[2]}[{key}]({value}{first[6] or ''})",
    ]


def spelled(numbers: range) -> str:
    """range(3) or range(3, 7), as a linter wants it."""
    return f"range({numbers.start}, {numbers.stop})" if numbers.start else f"range({numbers.stop})"
