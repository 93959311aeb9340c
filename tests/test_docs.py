"""Pages of docs/ quote what commands print: every quoted line is there, in its order."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from pytest import CaptureFixture

from tpcompile.cli import main

DOCS = Path(__file__).resolve().parent.parent / "docs"
QUOTED = re.compile(r"<!-- printed by: tpcompile (.*?) -->\n```\n(.*?)```", re.DOTALL)
BLOCKS = [(page.name, command, text) for page in sorted(DOCS.glob("*.md")) for command, text in QUOTED.findall(page.read_text())]
PRINTED: dict[str, list[str]] = {}


@cache
def lines_of(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())


@pytest.mark.parametrize(("page", "command", "text"), BLOCKS, ids=[f"{page} {n}" for n, (page, _, _) in enumerate(BLOCKS)])
def test_what_is_quoted_is_printed(page: str, command: str, text: str, capsys: CaptureFixture[str]) -> None:
    """A quoted line may end before the printed one does."""
    if command not in PRINTED:
        assert main(shlex.split(command)) == 0
        PRINTED[command] = [line.strip() for line in capsys.readouterr().out.splitlines()]
    rest = iter(PRINTED[command])
    for line in lines_of(text):
        assert any(printed.startswith(line) for printed in rest), f"{page} quotes a line that is not printed: {line}"


def test_pages_quote_something() -> None:
    assert len(BLOCKS) >= 4
