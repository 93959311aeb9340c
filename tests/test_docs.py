"""Pages of docs/ quote what commands print: every quoted line is there, in its order."""

from __future__ import annotations

import linecache
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pytest import CaptureFixture

from tpcompile.cli import main
from tpcompile.errors import Refused

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


FILES = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
RAISED = re.compile(r"<!-- raised by: (.*?) -->\n```\n(.*?)```", re.DOTALL)
CI = (DOCS / "ci.md").read_text()


def test_files_of_the_example_are_shown_as_they_are() -> None:
    shown = {name: text for name, text in FILES.findall(CI) if "/" in name}
    assert len(shown) == 2
    for name, text in shown.items():
        assert text in (DOCS.parent / name).read_text(), f"ci.md shows another {name}"


def test_the_test_that_fails_says_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = [text for name, text in FILES.findall(CI) if name == "test_rooted.py"]
    file = tmp_path / "test_rooted.py"
    monkeypatch.syspath_prepend(DOCS.parent / "examples" / "ci_parity")
    blocks = dict(RAISED.findall(CI))
    for how, code in (("test_rooted", source), ("test_rooted, without overrides", source.replace(", overrides=accepted", ""))):
        file.write_text(code)
        linecache.checkcache(str(file))
        found: dict[str, Any] = {}
        exec(compile(code, str(file), "exec"), found)
        with pytest.raises((AssertionError, Refused)) as raised:
            found["test_rooted"]()
        rest = iter(line.strip() for line in str(raised.value).splitlines())
        for line in lines_of(blocks.pop(how)):
            assert any(printed.startswith(line) for printed in rest), f"ci.md quotes a line that is not printed: {line}\n{raised.value}"
    assert not blocks
