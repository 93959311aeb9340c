"""Where a node comes from: the user's line, the module, and the repeated layers of the model."""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path

from torch import fx, nn

from tpcompile.ir import Source
from tpcompile.passes._reasons import OWN, is_user_file

FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+), in .*\n\s*(?P<code>.*)')
ROOT = "model"  # what the wrapper that is exported calls the user's model


def source_of(node: fx.Node, loss: Source | None = None) -> Source | None:
    """The innermost line outside torch that made a node; inside torch where all of it is. None for what no line made.

    Torch notes the lines of modules alone: for what ran outside of any it is where the `loss` stands.
    """
    frame, is_users, is_ours = _frame(node.meta.get("stack_trace") or "")
    if frame is None:
        return None
    if not is_users and is_ours and not _in_model(node):
        return loss
    return Source(*frame, path_of(node))


@lru_cache(4096)
def _frame(trace: str) -> tuple[tuple[str, int, str] | None, bool, bool]:
    """File, line and code of a trace's innermost frame outside torch, else of the innermost; if it is outside; if any frame is ours."""
    frames = list(FRAME.finditer(trace))
    own = [frame for frame in frames if is_user_file(frame["file"])]
    if not frames:
        return None, False, False
    frame = (own or frames)[-1]
    ours = any(OWN in Path(each["file"]).parents for each in frames)
    return (Path(frame["file"]).name, int(frame["line"]), frame["code"].strip()), bool(own), ours


def _in_model(node: fx.Node) -> bool:
    return any(re.fullmatch(rf"{ROOT}(@\d+)?(\..*)?", entry[0]) for entry in (node.meta.get("nn_module_stack") or {}).values())


def line_of(function: object) -> Source | None:
    """Where a function is defined, if it is written in Python."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    return Source(Path(code.co_filename).name, code.co_firstlineno, linecache.getline(code.co_filename, code.co_firstlineno).strip(), "")


def path_of(node: fx.Node) -> str:
    """The dotted path of the innermost module that a node ran in."""
    stack = node.meta.get("nn_module_stack") or {}
    return _own_path(next(reversed(stack.values()))[0]) if stack else ""


@cache
def _own_path(path: str) -> str:
    """Without the wrapper, and without the mark of a second call: "model.h.0@1.fc" is h.0.fc."""
    return re.sub(r"@\d+", "", path).removeprefix(ROOT).removeprefix(".")


# ------------------------------------------------------------------------------------------------ layers


def layers_of(model: nn.Module, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """The paths of the repeated layers, in the order they run: children of the outermost containers of like modules."""
    runs = _runs(model, nodes)
    picked: dict[str, list[str]] = {}
    for container in sorted(runs, key=lambda path: path.count(".")):
        inside = any(f"{container}.".startswith(f"{child}.") for children in picked.values() for child in children)
        layers = _like(model, container, runs[container])
        if layers and not inside:
            picked[container] = layers
    composite = {name: kept for name, layers in picked.items() if (kept := [layer for layer in layers if _is_composite(model, layer)])}
    chosen = [layer for layers in (composite or picked).values() for layer in layers]
    first = {path: index for index, path in enumerate(_paths(nodes))}
    return tuple(sorted(chosen, key=first.__getitem__))


def _paths(nodes: Iterable[fx.Node]) -> list[str]:
    """All module paths that nodes ran in, by their first node."""
    return list(dict.fromkeys(path for node in nodes for path in _above(node)))


def _around(node: fx.Node) -> list[str]:
    """The modules that a node ran in, outermost first."""
    return [_own_path(entry[0]) for entry in (node.meta.get("nn_module_stack") or {}).values()]


def _above(node: fx.Node) -> list[str]:
    """The modules that hold those that a node ran in: with those whose `forward` was called past the module itself."""
    return [above for path in _around(node) for above in _prefixes(path)]


@cache
def _prefixes(path: str) -> tuple[str, ...]:
    words = path.split(".")
    return tuple(".".join(words[:depth]) for depth in range(1, len(words) + 1))


def _runs(model: nn.Module, nodes: Iterable[fx.Node]) -> dict[str, list[str]]:
    """For every container, its children in the order they run. Containers whose children run again later are left out."""
    found = {**_children(model, map(_above, nodes)), **_children(model, map(_around, nodes))}
    return {parent: run for parent, run in found.items() if len(set(run)) == len(run)}


def _children(model: nn.Module, ways: Iterable[Iterable[str]]) -> dict[str, list[str]]:
    runs: dict[str, list[str]] = {}
    holds: dict[str, bool] = {}
    for path in (path for way in ways for path in way):
        parent = path.rpartition(".")[0]
        if parent not in holds:
            holds[parent] = isinstance(model.get_submodule(parent), nn.ModuleList | nn.Sequential | nn.ModuleDict)
        if path and holds[parent]:
            run = runs.setdefault(parent, [])
            if not run or run[-1] != path:
                run.append(path)
    return runs


def _like(model: nn.Module, container: str, children: Sequence[str]) -> list[str]:
    """The children that are layers: of a list all that have parameters, of a sequence those of a class that comes twice or more."""
    holders = [child for child in children if any(True for _ in model.get_submodule(child).parameters())]
    kinds = Counter(type(model.get_submodule(child)) for child in holders)
    if not isinstance(model.get_submodule(container), nn.ModuleList):
        holders = [child for child in holders if kinds[type(model.get_submodule(child))] >= 2]
    return holders if len(holders) >= 2 else []


def _is_composite(model: nn.Module, path: str) -> bool:
    return any(True for _ in model.get_submodule(path).children())
