"""The public API is short, and its options have names."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from raised import raised, unnamed

import tpcompile
from tpcompile.api import SECTIONS, fields_of, function_of, members
from tpcompile.cli import main
from tpcompile.errors import InputError, Refused

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
ENTRIES = [entry for section in SECTIONS for entry in section.entries]
FUNCTIONS = [(entry.name, entry.thing, None) for entry in ENTRIES if not isinstance(entry.thing, type)]
FUNCTIONS += [(f"{entry.name}.{name}", member, entry.thing) for entry in ENTRIES for name, member in members(entry)]


def test_the_public_names() -> None:
    assert sorted(tpcompile.__all__) == ["Initial", "Mesh", "TpcompileError", "check", "compile", "launch", "load", "progress", "testing"]
    assert all(hasattr(tpcompile, name) for name in tpcompile.__all__)


@pytest.mark.parametrize(
    ("function", "positional"),
    [
        (tpcompile.compile, ["model", "mesh", "example_inputs"]),
        (tpcompile.check, ["model", "mesh", "example_inputs"]),
        (tpcompile.launch, ["fn", "mesh"]),
        (tpcompile.progress, ["steps"]),
        (tpcompile.testing.assert_parity, ["model", "mesh", "example_inputs"]),
    ],
)
def test_options_are_keyword_only(function: object, positional: list[str]) -> None:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert all(p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY)


def test_the_page_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--api"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(), "tpcompile inspect --api > docs/api.md"


def test_every_public_name_is_on_the_page() -> None:
    names = {entry.name.removeprefix("tpcompile.").partition(".")[0] for entry in ENTRIES if entry.name.startswith("tpcompile.")}
    assert names == set(tpcompile.__all__)
    assert {f"testing.{name}" for name in tpcompile.testing.__all__} <= {entry.name.removeprefix("tpcompile.") for entry in ENTRIES}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry.name))
def test_every_public_thing_is_documented(entry: Any) -> None:
    assert inspect.getdoc(entry.thing)
    if isinstance(entry.thing, type) and not issubclass(entry.thing, tuple):
        assert all(said for _, _, said in fields_of(entry.thing))


@pytest.mark.parametrize(("name", "member", "owner"), FUNCTIONS, ids=[name for name, _, _ in FUNCTIONS])
def test_docstrings_say_what_arguments_mean_and_what_is_raised(name: str, member: Any, owner: type | None) -> None:
    function = function_of(member)
    said = inspect.getdoc(function) or ""
    assert said, f"{name} has no docstring"
    assert not (missing := unnamed(raised(function, owner), said)), f"{name} raises {', '.join(missing)}, and its docstring does not say so"
    named = [p.name for p in inspect.signature(function).parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unsaid = [word for word in named if word not in ("self", "cls") and f"`{word}`" not in said and f"`{word}=" not in said]
    assert not unsaid, f"{name} takes {', '.join(unsaid)}, and its docstring does not say what for"


def test_errors_are_found_in_what_is_called() -> None:
    assert {InputError, Refused} <= raised(tpcompile.compile)
    assert raised(tpcompile.Mesh.of.__func__, tpcompile.Mesh, depth=0) == {InputError}  # type: ignore[attr-defined]
    assert raised(tpcompile.progress) == set()
    assert unnamed({Refused}, "Raises InputError.") == ["Refused"] and not unnamed({InputError}, "Raises TpcompileError.")


def test_transformers_is_not_imported() -> None:
    code = "import sys, tpcompile, tpcompile.cli, tpcompile.demo.run; print([m for m in ('transformers', 'onnx') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
