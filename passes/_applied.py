"""Calls of the user's autograd.Functions in emitted source: by their own name, imported from where they are defined."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tpcompile.functions import PLAIN, Kept, Operand, importable, kept


def imported(graph: fx.Graph, taken: Collection[str]) -> dict[Any, str]:
    """The names of the Functions that a graph calls, by their operators. Those that no source can name are left to their operators."""
    names: dict[type, str] = {}
    found: dict[Any, str] = {}
    for node in graph.nodes:
        way = kept(node.target)
        if way is None or not importable(way.function) or not _is_literal((way.args, way.kwargs)):
            continue
        if way.function not in names:
            first, held = way.function.__qualname__.split(".")[0], {*taken, *names.values()}
            names[way.function] = next(name for name in (first, *(f"{first}_{i}" for i in range(1, len(held) + 2))) if name not in held)
        found[node.target] = names[way.function]
    return found


def import_lines(functions: Mapping[Any, str]) -> list[str]:
    """from package.module import Function as name"""
    lines = []
    for target, name in functions.items():
        function = way_of(target).function
        first = function.__qualname__.split(".")[0]
        lines.append(f"from {function.__module__} import {first}{f' as {name}' if name != first else ''}")
    return sorted(set(lines))


def apply_text(node: fx.Node, name: str, written: Callable[[Any], str]) -> str:
    """Function.apply(x, 2), with the arguments where the user's call has them. `written` spells an argument."""
    way = way_of(node.target)

    def given(leaf: Any) -> Any:
        return node.args[leaf.index] if isinstance(leaf, Operand) else leaf

    args, kwargs = pytree.tree_map(given, (way.args, way.kwargs))
    inner = way.function.__qualname__.split(".")[1:]
    arguments = ", ".join([*map(written, args), *(f"{key}={written(value)}" for key, value in kwargs.items())])
    call = f"{'.'.join([name, *inner])}.apply({arguments})"
    places = way.outputs
    if places is None or places == tuple(range(len(places))):
        return call
    return f"{call}[{places[0]}:{places[0] + 1}]" if len(places) == 1 else f"operator.itemgetter{places}({call})"


def way_of(target: Any) -> Kept:
    found = kept(target)
    assert found is not None
    return found


def _is_literal(value: Any) -> bool:
    """Whether Python source can write an argument as it is."""
    parts: Iterable[Any]
    match value:
        case dict() if type(value) is dict:
            parts = [*value.keys(), *value.values()]
        case tuple() | list() if type(value) in (tuple, list):
            parts = value
        case _:
            return type(value) is Operand or (type(value) in PLAIN and not isinstance(value, bytes)) or isinstance(value, torch.device)
    return all(map(_is_literal, parts))
