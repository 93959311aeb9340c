"""The parts of a model that a page shows one at a time: its layers, and the modules beside them. "" is what the model's own forward runs.

model.embed_tokens, model.layers.0, model.layers.1, …, model.norm, lm_head
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from tpcompile.inspect.page.lines import Line, Name
from tpcompile.ir import Program
from tpcompile.passes._parts import layer_of


class Places:
    """Where the values of a model's graphs belong."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._layers = {layer: layer_of(layer, program.layers) for layer in program.layers}
        stacks = {layer.rpartition(".")[0] for layer in program.layers}
        self._outer = {"", *(stack[:end] for stack in stacks for end in (i for i, c in enumerate(stack) if c == "."))}
        self._outer |= {stack.rpartition(".")[0] for stack in stacks}
        self._known: dict[str, str] = {}

    def of_path(self, path: str) -> str:
        """The part that a module, or a tensor in it, belongs to."""
        if path not in self._known:
            self._known[path] = layer_of(path, self.program.layers) or self._beside(path)
        return self._known[path]

    def _beside(self, path: str) -> str:
        """Outside of layers: the child of the innermost module that has layers below it."""
        if path in self._outer:
            return path
        above = max((name for name in self._outer if not name or path.startswith(f"{name}.")), key=len)
        rest = path[len(above) :].lstrip(".")
        return f"{above}.{rest.partition('.')[0]}".lstrip(".")

    def of_lines(self, lines: Iterable[Line]) -> list[str]:
        """The part of every line: what has no source goes to those who use it, or else to where it was made."""
        own = list(lines)
        using: dict[str, set[str]] = {}
        found: dict[str, str] = {}
        for line in reversed(own):
            users = using.get(line.name, set())
            if (part := self._said(line)) is None and len(users) == 1:
                part = next(iter(users))
            if part is not None:
                found[line.name] = part
                for token in line.tokens:
                    if isinstance(token, Name):
                        using.setdefault(token.name, set()).add(part)
        placed = []
        for line in own:
            if line.name not in found or not line.name:
                made = [found[token.name] for token in line.tokens if isinstance(token, Name) and token.name in found]
                found[line.name] = made[-1] if made and line.name else ""
            placed.append(found[line.name])
        return placed

    def _said(self, line: Line) -> str | None:
        """The part that a line's own words name."""
        if line.kind == "received":
            return ""
        if line.source is not None:
            return self.of_path(line.source.path)
        held: Mapping[str, str] = {"parameter": self.program.parameters, "buffer": self.program.buffers}.get(line.kind, {})
        if line.name in held:
            return self.of_path(held[line.name].rpartition(".")[0])
        return "" if line.kind in ("input", "return") else None


def ordered(places: Places, graph: fx.Graph) -> list[str]:
    """All parts, in the order in which they first compute something; those that only hold tensors come last."""
    program: Any = places.program
    paths = [program.sources[node.name].path for node in graph.nodes if node.op == "call_function" and node.name in program.sources]
    first = dict.fromkeys(places.of_path(path) for path in paths)
    owners = (name.rpartition(".")[0] for name in (*program.parameters.values(), *program.buffers.values()))
    return list(dict.fromkeys(["", *first, *(places.of_path(owner) for owner in owners)]))
