"""The Python source of one stage: a class for each kind of layer, and one for the stage."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from tpcompile.errors import TpcompileError
from tpcompile.ir import Program, Stage, TensorType
from tpcompile.passes._parts import Part
from tpcompile.passes._source import RESERVED, Scope, expression, has_device, origin, site_of, statement, stem, type_text
from tpcompile.passes._tree import Tree, attribute, constructor, numbered

_HEAD = '''"""Stage {index} of {count}, made by tpcompile. It needs torch and tpcompile's collectives.

Shapes in comments are those of the whole values, over all tensor-parallel ranks.
"""

import math
import operator

import torch
from torch import nn

from tpcompile import collectives

aten = torch.ops.aten
'''


def write(
    stage: Stage, parts: Sequence[Part], program: Program, model: nn.Module, tree: Tree, twins: Mapping[str, str], axis: str, count: int
) -> str:
    """The source of a stage's module, class `Stage`; it makes `tree`'s layers to be calls of their classes."""
    writer = _Writer(stage, tuple(parts), program, tree, axis)
    calls = {part: writer.layer(part, type(model.get_submodule(part.layer)).__name__) for part in parts if part.layer}
    body = writer.root(calls, twins)
    classes = []
    for text, paths in writer.classes.items():
        classes.append(text.replace(_PATHS, numbered(paths)))
    return "\n\n".join([_HEAD.format(index=stage.index, count=count), *classes, body])


_PATHS = "{{paths}}"


@dataclass(frozen=True)
class _Call:
    """How the root calls a layer."""

    arguments: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


@dataclass
class _Writer:
    stage: Stage
    parts: tuple[Part, ...]
    program: Program
    tree: Tree
    axis: str
    classes: dict[str, list[str]] = field(default_factory=dict)  # text → the layers that it stands for
    names: dict[str, str] = field(default_factory=dict)  # text → class

    # -------------------------------------------------------------------------------------------- layers

    def layer(self, part: Part, kind: str) -> _Call:
        """Write a layer's class, unless an equal one stands already, and make the tree call it."""
        inside = set(part.nodes)
        scope = Scope()
        arguments = []
        for source in dict.fromkeys(source for node in part.nodes for source in node.all_input_nodes):
            own = self._own(source, part.layer)
            if own:
                scope.names[source] = attribute(self.tree.at(part.layer), own)
            elif source not in inside:
                scope.name(source, self._argument(source))
                arguments.append(source)
        results = tuple(node for node in part.nodes if any(user not in inside for user in node.users))
        sites = tuple(site for node in part.nodes if (site := site_of(node)) is not None)
        returned = ", ".join(scope.names.get(node) or scope.name(node, stem(node)) for node in results)
        lines = self._statements([part], scope, set(results), sites, self._device(self.tree.at(part.layer), arguments, scope))
        signature = ", ".join(["self", *(scope.names[node] for node in arguments)])
        text = self._class(self.tree.at(part.layer), signature, [*lines, f"return {returned}"], bool(sites))
        name = self._register(text, kind, part.layer)
        self.tree.at(part.layer).made = f"{name}(device, sites={sites})" if sites else f"{name}(device)"
        return _Call(tuple(arguments), results)

    def _own(self, node: fx.Node, layer: str) -> str:
        """A parameter's or buffer's path under a layer, or ""."""
        path = self._path(node)
        return path[len(layer) + 1 :] if path.startswith(f"{layer}.") else ""

    def _path(self, node: fx.Node) -> str:
        """The path in the module of a placeholder that is a parameter, buffer or constant."""
        if node.op != "placeholder":
            return ""
        name = self.stage.parameters.get(node.name) or self.stage.buffers.get(node.name) or ""
        return node.name if node.name in self.stage.constants else name

    def _argument(self, node: fx.Node) -> str:
        """A layer's name for what comes from outside: its own name if several layers take it, so that equal layers look equal."""
        layers = {part.layer for part in self.parts if part.layer for inner in part.nodes if node in inner.all_input_nodes}
        shared = len(layers) > 1 or node.name in self.stage.inputs
        return node.name if shared else "x" if self._is_tensor(node) else stem(node)

    def _is_tensor(self, node: fx.Node) -> bool:
        return isinstance(self.program.types.get(node.name, TensorType), TensorType | type) and not stem(node).startswith("sym_")

    def _register(self, text: str, kind: str, layer: str) -> str:
        if text not in self.names:
            taken = {*RESERVED, "Stage", *self.names.values()}
            name = next(n for n in (kind, *(f"{kind}_{i}" for i in range(1, len(taken) + 2))) if n not in taken)
            self.names[text] = name
        full = text.replace("class _Layer(", f"class {self.names[text]}(")
        self.classes.setdefault(full, []).append(layer)
        return self.names[text]

    # -------------------------------------------------------------------------------------------- the root

    def root(self, calls: Mapping[Part, _Call], twins: Mapping[str, str]) -> str:
        """The class of the stage itself."""
        scope, signature, arguments = Scope(), ["self"], []
        taken = {*(boundary.name for boundary in self.stage.receives), *self.stage.inputs}
        for node in self.stage.graph.find_nodes(op="placeholder"):
            if path := self._path(node):
                scope.names[node] = attribute(self.tree, path)
            elif node.users or node.name in taken:
                if node.name not in taken:
                    raise TpcompileError(f"placeholder {node.name} of stage {self.stage.index} is no parameter, buffer, constant or input")
                signature.append(scope.name(node, node.name, keep=True))
                arguments.append(node)
        output = self.stage.graph.output_node()
        kept = set(output.all_input_nodes)
        lines = self._statements(self.parts, scope, kept, (), self._device(self.tree, arguments, scope), calls)
        values = [scope.names[value] if isinstance(value, fx.Node) else repr(value) for value in output.args[0]]  # type: ignore[union-attr]
        lines.append(f"return ({', '.join(values)}{',' if len(values) == 1 else ''})")
        extra = [f"{attribute(self.tree, twin)} = {attribute(self.tree, first)}" for twin, first in twins.items()]
        return (
            self._class(self.tree, ", ".join(signature), lines, False, extra)
            .replace("class _Layer(", "class Stage(")
            .replace(f'    """{_PATHS}"""\n\n', "")
        )

    # -------------------------------------------------------------------------------------------- bodies

    def _statements(
        self,
        parts: Sequence[Part],
        scope: Scope,
        kept: set[fx.Node],
        sites: Sequence[int],
        device: str,
        calls: Mapping[Part, _Call] | None = None,
    ) -> list[str]:
        """The lines that compute `parts`: one statement for a node, or for a layer that is called."""
        steps: list[tuple[Part, fx.Node | None]] = []
        for part in parts:
            steps += [(part, None)] if calls and part.layer else [(part, node) for node in part.nodes]
        reads = [list(node.all_input_nodes if node else calls[part].arguments) for part, node in steps]  # type: ignore[index]
        last = {source: index for index, sources in enumerate(reads) for source in sources}
        lines, seen, site = [], "", 0
        if any(has_device(node) for _, node in steps if node):
            lines.append(f"device = {device}")
        for index, (part, node) in enumerate(steps):
            dead = [scope.names[s] for s in dict.fromkeys(reads[index]) if last[s] == index and s not in kept and s in scope.names]
            dead = [name for name in dead if name.isidentifier()]
            if node is None:
                call = calls[part]  # type: ignore[index]
                target = ", ".join(scope.name(result, result.name) for result in call.results)
                arguments = ", ".join(scope.names[source] for source in call.arguments)
                lines.append(statement(target, f"{attribute(self.tree, part.layer)}({arguments})", dead, ""))
                continue
            where = origin(self.program.sources.get(node.name))
            if where and where != seen:
                lines.append(where)
                seen = where
            chosen = f"self.sites[{site}]" if sites and site_of(node) is not None else ""
            site += bool(chosen)
            value = expression(node, scope.names, chosen)
            name = scope.names.get(node) or scope.name(node, node.name if calls is not None else stem(node))
            lines.append(statement(name, value, dead, type_text(self.program.types.get(node.name))))
        return lines

    def _device(self, tree: Tree, arguments: Sequence[fx.Node], scope: Scope) -> str:
        """An expression for the module's device."""
        first = next((attribute(tree, path) for path, _ in tree.tensors()), "")
        tensors = [node for node in arguments if self._is_tensor(node) and node.name != "rng_key"]
        return f"{first or scope.names[tensors[0]]}.device" if first or tensors else "None"

    def _class(self, tree: Tree, signature: str, body: Sequence[str], sites: bool, extra: Sequence[str] = ()) -> str:
        uses_axis = any("self.tp" in line for line in body)
        made = ["super().__init__()"]
        made += [f'self.tp = "{self.axis}"'] if uses_axis else []
        made += ["self.sites = sites"] if sites else []
        made += [*constructor(tree), *extra]
        return "\n".join(
            [
                "class _Layer(nn.Module):",
                f'    """{_PATHS}"""\n',
                f"    def __init__(self, device=None{', sites=()' if sites else ''}):",
                textwrap.indent("\n".join(made), " " * 8),
                "",
                f"    def forward({signature}):",
                textwrap.indent("\n".join(body), " " * 8),
                "",
            ]
        )
