"""Colours for the text of graphs, and of what changed in them: collectives stand out, cuts and partial sums too."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

_STYLES = (
    (re.compile(r"^. %\w+ = tpcompile\.\w+"), "bold magenta"),
    (re.compile(r"@\w+(?:\{[^}]*\})?"), "cyan"),
    (re.compile(r" [+^](?=\w)\w+(?= |$)"), "bold yellow"),
    (re.compile(r"grad \+\w+"), "yellow"),
    (re.compile(r"^\s*#.*"), "dim"),
)
_CHANGED = {"+": "green", "-": "red", "@": "cyan", "b": "dim", "a": "dim"}


def graph(text: str) -> Text:
    """The text of a graph."""
    return _joined(_line(line) for line in text.splitlines())


def diff(text: str) -> Text:
    """What a pass changed: what is new in green, with its collectives, and what is gone in red."""
    lines = []
    for line in text.splitlines():
        style = "dim" if line.startswith(("---", "+++")) else _CHANGED.get(line[:1], "")
        made = Text(line, style)
        if style == "green" and (match := re.match(r"\+! %\w+ = tpcompile\.\w+", line)):
            made.stylize("bold magenta", 1, match.end())
        lines.append(made)
    return _joined(lines)


def terminal(text: Text) -> str:
    """A text with the codes that colour it on a terminal."""
    made = io.StringIO()
    Console(file=made, force_terminal=True, color_system="standard", soft_wrap=True).print(text)
    return made.getvalue().rstrip("\n")


def _line(line: str) -> Text:
    made = Text(line)
    for pattern, style in _STYLES:
        for match in pattern.finditer(line):
            made.stylize(style, *match.span())
    return made


def _joined(lines: Iterable[Text]) -> Text:
    return Text("\n").join(lines)
