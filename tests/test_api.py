"""The public API is short, and its options have names."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import tpcompile


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


def test_every_public_name_is_documented() -> None:
    assert all(inspect.getdoc(getattr(tpcompile, name)) for name in tpcompile.__all__)


def test_transformers_is_not_imported() -> None:
    code = "import sys, tpcompile, tpcompile.cli, tpcompile.demo.run; print([m for m in ('transformers', 'onnx') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
