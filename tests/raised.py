"""Which errors a function raises, read from its source and from those of the functions of this project that it calls."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from tpcompile.errors import TpcompileError


def raised(function: Callable[..., Any], owner: type | None = None, depth: int = 2) -> set[type[TpcompileError]]:
    """Our errors that are raised in it, or in what it calls, so many calls deep."""
    function = inspect.unwrap(function)
    if function.__code__.co_filename.startswith("<"):
        return set()  # a dataclass's own
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = {**function.__globals__, **_imported(tree)}
    found: set[type[TpcompileError]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            kind = names.get(node.exc.func.id)
            if isinstance(kind, type) and issubclass(kind, TpcompileError):
                found.add(kind)
        if isinstance(node, ast.Call) and depth:
            called, holder = _called(node.func, names, owner)
            if inspect.isfunction(called) and called.__module__.startswith("tpcompile"):
                found |= raised(called, holder, depth - 1)
    return found


def _imported(tree: ast.AST) -> dict[str, Any]:
    """What a function imports in its body."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tpcompile")]
    return {
        alias.asname or alias.name: getattr(importlib.import_module(str(s.module)), alias.name) for s in statements for alias in s.names
    }


def _called(expression: ast.expr, names: dict[str, Any], owner: type | None) -> tuple[Any, type | None]:
    """The function that is called, and the class that it is a method of."""
    match expression:
        case ast.Name(id=name):
            thing, holder = names.get(name), None
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            thing, holder = inspect.getattr_static(owner, name, None), owner
        case ast.Attribute(value=ast.Name(id=of), attr=name) if inspect.ismodule(names.get(of)) or isinstance(names.get(of), type):
            holder = names[of] if isinstance(names[of], type) else None
            thing = inspect.getattr_static(names[of], name, None)
        case _:
            return None, None
    if isinstance(thing, type):
        thing, holder = inspect.getattr_static(thing, "__init__"), thing
    thing = getattr(thing, "__func__", thing)
    return (inspect.unwrap(thing) if callable(thing) else thing), holder


def unnamed(errors: set[type[TpcompileError]], docstring: str) -> list[str]:
    """Those of which a docstring names neither the class nor one that it is of."""
    return sorted(
        kind.__name__ for kind in errors if not any(base.__name__ in docstring for base in kind.__mro__ if issubclass(base, TpcompileError))
    )
