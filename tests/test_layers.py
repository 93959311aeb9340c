"""Imports point one way, and passes do not know each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = (
    ("errors",),
    ("mesh", "memory", "precision"),
    ("layout", "graphs"),
    ("functions",),
    ("factors",),
    ("operation",),
    ("linear",),
    ("rule_texts", "rule_parts"),
    ("rules",),
    ("collectives",),
    ("ir",),
    ("text", "colours", "element_types", "gradients", "halves", "schedules"),
    ("parse", "history"),
    ("messages",),
    ("sharing",),
    ("backend",),
    ("timeline",),
    ("laws",),
    ("verify", "cost"),
    ("passes",),
    ("driver",),
    ("simulate", "runtime", "export", "inspect"),
    ("__init__", "api", "cli", "demo", "models", "testing", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FILES = sorted([*(ROOT / "passes").rglob("*.py"), *(path for path in (ROOT / "tpcompile").rglob("*.py") if "passes" not in path.parts)])
OPTIONAL = {"transformers", "onnx", "onnxscript", "onnxruntime"}


def module_of(path: Path) -> str:
    """tpcompile/runtime/launch.py → "runtime.launch"; passes/emit.py → "passes.emit"."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "tpcompile" else parts)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, and whether it does so as soon as it is loaded."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    own = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        at_once = id(node) not in own
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, at_once) for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from ((f"{module}.{alias.name}" if is_module(f"{module}.{alias.name}") else module, at_once) for alias in names)
            case ast.ImportFrom(level=level) if level:
                yield "." * level, at_once


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_one_way(path: Path) -> None:
    here = module_of(path)
    layer = here.split(".")[0]
    assert layer in RANK, f"{here} has no place among the layers"
    for name, at_once in imports(ast.parse(path.read_text())):
        assert not name.startswith("."), f"{here}: write imports in full"
        assert name.split(".")[0] != "passes", f"{here}: the passes are tpcompile.passes"
        assert not (at_once and name.split(".")[0] in OPTIONAL), f"{here}: {name} is optional, import it where it is used"
        if name.split(".")[0] != "tpcompile":
            continue
        target = name.removeprefix("tpcompile").lstrip(".") or "__init__"
        there = target.split(".")[0]
        assert there in RANK, f"{here} imports {name}, which has no place among the layers"
        if there == "passes" == layer:
            private = target.split(".")[-1].startswith("_")
            assert private, f"{here} imports {name}: a pass does not know another pass"
        elif there == layer:
            continue
        else:
            assert RANK[there] <= RANK[layer], f"{here} imports {name}, which is above it"


def test_every_pass_is_documented() -> None:
    for path in (ROOT / "passes").glob("[!_]*.py"):
        tree = ast.parse(path.read_text())
        public = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == path.stem]
        assert public, f"{path.name} has no function {path.stem}"
        assert ast.get_docstring(public[0]), f"{path.stem} has no docstring"


def test_passes_is_a_link() -> None:
    link = ROOT / "tpcompile" / "passes"
    assert link.is_symlink() and link.resolve() == ROOT / "passes"
