"""The Python source of one stage: a class for each kind of layer, and one for the stage."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import fx, nn

from tpcompile.collectives.table import LINEARS
from tpcompile.errors import TpcompileError
from tpcompile.graphs import copy_graph
from tpcompile.ir import PerRank, Program, Stage
from tpcompile.layout import Layout, TensorType
from tpcompile.passes._applied import import_lines, imported
from tpcompile.passes._chain import folded
from tpcompile.passes._cores import arranged, cores_of
from tpcompile.passes._parts import Part
from tpcompile.passes._source import (
    RESERVED,
    Scope,
    Written,
    argument_comment,
    expression,
    has_device,
    origin,
    site_of,
    statement,
    stem,
    type_text,
)
from tpcompile.passes._tree import Numbers, Tree, assignment, attribute, constructor, numbered, quoted
from tpcompile.rules import op_name

_HEAD = '''"""Stage {index} of {count}, made by tpcompile. Parameters and buffers are empty until their values are loaded, by name.{needs}

{shapes}
"""
'''
_WHOLE = "Shapes in comments are those of the whole values."
_TABLE = "\n# What differs between tensor ranks, by rank."
_CUT = "Shapes in comments are those of the whole values; @tp marks what is cut over the tensor-parallel ranks, +tp a partial sum."

_LATER = "  # gradients of whole parameters are summed over it; within collectives.postponed, by the caller, once a step"


@dataclass(frozen=True)
class About:
    """What the sources of all stages are written from."""

    program: Program
    model: nn.Module
    parts: int  # tensor ranks
    layouts: Mapping[str, Layout | tuple[Layout, ...]]
    origins: Mapping[str, str]  # node that a pass added → the program's node whose value it is a piece of
    stages: int
    cores: bool = False  # whether the cores of attention are methods of their own, `core`, so that they can run again in backward


def write(stage: Stage, parts: Sequence[Part], tree: Tree, twins: Mapping[str, str], about: About) -> str:
    """The source of a stage's module, class `Stage`: one for all tensor ranks, with a table of what differs between them.

    `tree` holds the stage's tensors, and its layers become calls of their classes; `twins` are other names of some tensors.
    """
    taken = {*stage.inputs, *(boundary.name for boundary in stage.receives), *(type(part).__name__ for part in about.model.modules())}
    numbers = Numbers("N" if not any(re.fullmatch(r"N\d+", name) for name in taken) else "N_")
    graph = _numbered(stage.graph, numbers)
    nodes = {node.name: node for node in graph.nodes}
    renewed = tuple(Part(part.layer, tuple(nodes[node.name] for node in part.nodes)) for part in parts)
    writer = _Writer(replace(stage, graph=graph), renewed, tree, about, numbers)
    parts = renewed
    calls = {part: writer.layer(part) for part in parts if part.layer}
    root = writer.root(calls, twins)
    body = "\n\n".join([*(_class(name, numbered(writer.layers[name]), text) for text, name in writer.classes.items()), root])
    code = re.sub(r"#.*", "", body)
    imports = [f"import {name}" for name in ("math", "operator") if f"{name}." in code]
    ours = ["\nfrom tpcompile import collectives"] if "collectives." in body else []
    foreign = sorted(set(re.findall(r"torch\.ops\.(\w+)\.", body)))
    needs = f" Operators of {', '.join(foreign)} have to be registered before." if foreign else ""
    theirs = "".join(f"\n{line}" for line in import_lines(writer.functions))
    head = _HEAD.format(index=stage.index, count=about.stages, needs=needs, shapes=_CUT if about.layouts else _WHOLE)
    lines = [
        head,
        *imports,
        *([""] if imports else []),
        "import torch",
        "from torch import nn",
        *([theirs] if theirs else []),
        *ours,
        "\naten = torch.ops.aten",
        *([_TABLE, *numbers.lines()] if numbers.rows else []),
        "\n",
    ]
    return "\n".join(lines) + "\n" + body


def _numbered(graph: fx.Graph, numbers: Numbers) -> fx.Graph:
    """The graph with a place in the table instead of each number that differs by rank."""

    def written(leaf: object) -> object:
        return Written(f"{numbers.name(leaf)}[self.rank]") if isinstance(leaf, PerRank) else leaf

    return copy_graph(graph, written)[0]


def _class(name: str, doc: str, text: str) -> str:
    doc = doc.replace("\\", r"\\").replace('"', r"\"")  # it has names of the user's modules
    return f'class {name}(nn.Module):\n    """{doc}"""\n\n{textwrap.indent(text, "    ")}\n'


@dataclass(frozen=True)
class _Call:
    """How the root calls a layer, or a layer its core."""

    target: str
    arguments: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


@dataclass
class _Writer:
    stage: Stage
    parts: tuple[Part, ...]
    tree: Tree
    about: About
    numbers: Numbers
    classes: dict[str, str] = field(default_factory=dict)  # text of a layer's methods → the class that has them
    layers: dict[str, list[str]] = field(default_factory=dict)  # class → the layers that it stands for

    def __post_init__(self) -> None:
        given = {*(boundary.name for boundary in self.stage.receives), *self.stage.inputs}
        self.functions = imported(self.stage.graph, {*RESERVED, "Stage", *given})
        read = [{source for node in part.nodes for source in node.all_input_nodes} for part in self.parts if part.layer]
        self.readers = Counter(source for sources in read for source in sources)  # value → how many layers take it
        self.run = {node for part in self.parts for node in part.nodes} | {self.stage.graph.output_node()}

    def layer(self, part: Part) -> _Call:
        """Write a layer's class, unless an equal one stands already, and make the tree call it."""
        inside, scope, tree = set(part.nodes), Scope(self.functions.values()), self.tree.at(part.layer)
        arguments = []
        for source in dict.fromkeys(source for node in part.nodes for source in node.all_input_nodes):
            if own := self._own(source, part.layer):
                scope.names[source] = attribute(tree, own)
            elif source not in inside:
                scope.name(source, self._argument(source))
                arguments.append(source)
        results = self._results(part.nodes)
        sites = tuple(site for node in part.nodes if (site := site_of(node)) is not None)
        drawn = (node for node in part.nodes if site_of(node) is not None)
        spelled = {node: f"self.sites[{number}]" for number, node in enumerate(drawn)}
        parts, cores, methods = [part], dict[Part, _Call](), list[str]()
        if self.about.cores and (found := cores_of(self.stage, part.nodes)):
            parts = [Part("", step) for step in arranged(part.nodes, found)]
            names = itertools.chain(["core"], (f"core_{i}" for i in itertools.count(1)))
            free = (name for name in names if name not in {*tree.children, *tree.held})
            for core, name in zip(found, free, strict=False):
                cores[Part("", core)] = self._core(name, core, part.layer, tree, spelled, methods)
        signature = self._signature("forward", arguments, scope)
        body = self._statements(parts, scope, set(results), spelled, self._device(tree, arguments, scope), cores, short=True)
        body.append(f"return {', '.join(scope.names[node] for node in results)}")
        name = self._named(self._methods(tree, signature, body, sites=bool(sites), methods=methods), part.layer)
        tree.made = f"{name}(tp, device, sites={sites})" if sites else f"{name}(tp, device)"
        return _Call(attribute(self.tree, part.layer), tuple(arguments), results)

    def _core(self, name: str, core: Sequence[fx.Node], layer: str, tree: Tree, sites: Mapping[fx.Node, str], methods: list[str]) -> _Call:
        """Write a method of a layer's class that computes the core of its attention."""
        inside, scope, arguments = set(core), Scope(self.functions.values()), []
        for source in dict.fromkeys(source for node in core for source in node.all_input_nodes):
            if own := self._own(source, layer):
                scope.names[source] = attribute(tree, own)
            elif source not in inside:
                scope.name(source, self._argument(source) if source.op == "placeholder" else stem(source))
                arguments.append(source)
        results = self._results(core)
        signature = self._signature(name, arguments, scope)
        body = self._statements([Part("", tuple(core))], scope, set(results), sites, self._device(tree, arguments, scope), short=True)
        body.append(f"return {', '.join(scope.names[node] for node in results)}")
        methods.append(f"{signature}\n{textwrap.indent(chr(10).join(body), '    ')}")
        return _Call(f"self.{name}", tuple(arguments), results)

    def _results(self, nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """Of these nodes, those that others take."""
        inside = set(nodes)
        return tuple(node for node in nodes if any(user in self.run and user not in inside for user in node.users))

    def root(self, calls: Mapping[Part, _Call], twins: Mapping[str, str]) -> str:
        """The class of the stage itself."""
        scope, arguments = Scope(self.functions.values()), []
        given = {*(boundary.name for boundary in self.stage.receives), *self.stage.inputs}
        for node in self.stage.graph.find_nodes(op="placeholder"):
            if path := self._path(node):
                scope.names[node] = attribute(self.tree, path)
            elif node.name in given:
                scope.name(node, node.name, keep=True)
                arguments.append(node)
            elif node.users:
                raise TpcompileError(f"placeholder {node.name} of stage {self.stage.index} is no parameter, buffer, constant or input")
        signature = self._signature("forward", arguments, scope)
        output = self.stage.graph.output_node()
        body = folded(
            self._statements(self.parts, scope, set(output.all_input_nodes), {}, self._device(self.tree, arguments, scope), calls)
        )
        values = [scope.names[value] if isinstance(value, fx.Node) else repr(value) for value in output.args[0]]  # type: ignore[union-attr]
        count = len(values) - len(self.stage.updates)
        new = dict(zip(self.stage.updates, values[count:], strict=True))
        body += [assignment(self.tree, name, value) for name, value in new.items()]
        body += [assignment(self.tree, twin, attribute(self.tree, first)) for twin, first in twins.items() if first in new]
        body.append(f"return ({', '.join(values[:count])}{',' if count == 1 else ''})")
        again = [self._twin(twin, first) for twin, first in twins.items()]
        doc = f"Stage {self.stage.index} of {self.about.stages}"
        return _class("Stage", doc, self._methods(self.tree, signature, body, again))

    def _twin(self, twin: str, first: str) -> str:
        """The statement of __init__ that makes another name of a parameter or a buffer."""
        owner, _, name = twin.rpartition(".")
        module, value = self.about.model.get_submodule(owner), attribute(self.tree, first)
        if name not in module._buffers:
            return f"{attribute(self.tree, twin)} = {value}"
        saved = ", persistent=False" if name in module._non_persistent_buffers_set else ""
        return f"{attribute(self.tree, owner) if owner else 'self'}.register_buffer({quoted(name)}, {value}{saved})"

    # -------------------------------------------------------------------------------------------- names

    def _path(self, node: fx.Node) -> str:
        """The path in the module of a placeholder that is a parameter, buffer or constant; "" for any other node."""
        if node.op != "placeholder":
            return ""
        name = self.stage.parameters.get(node.name) or self.stage.buffers.get(node.name) or ""
        return node.name if node.name in self.stage.constants else name

    def _own(self, node: fx.Node, layer: str) -> str:
        """A parameter's or buffer's path under a layer, or "". A buffer that forward updates is an argument: a layer that is run again,
        for its gradients, has to see it as it was.
        """
        path = self._path(node)
        return path[len(layer) + 1 :] if path.startswith(f"{layer}.") and path not in self.stage.updates else ""

    def _argument(self, node: fx.Node) -> str:
        """A layer's name for what comes from outside: its own name if several layers take it, so that equal layers look equal."""
        if self.readers[node] > 1 or node.name in self.stage.inputs:
            return node.name
        if (path := self._path(node)) and path in self.stage.updates:
            return re.sub(r"\W", "_", path.rpartition(".")[2])
        return "x" if self._is_tensor(node) else stem(node)

    def _is_tensor(self, node: fx.Node) -> bool:
        kind = self.about.program.types.get(node.name)
        return isinstance(kind, TensorType) or (kind is None and not stem(node).startswith("sym_"))

    def _named(self, text: str, layer: str) -> str:
        """The class that has these methods."""
        if text not in self.classes:
            kind = re.sub(r"^(?=\d)|\W", "_", type(self.about.model.get_submodule(layer)).__name__)
            taken = {*RESERVED, "Stage", *self.functions.values(), *self.classes.values()}
            self.classes[text] = next(n for n in (kind, *(f"{kind}_{i}" for i in range(1, len(taken) + 2))) if n not in taken)
        self.layers.setdefault(self.classes[text], []).append(layer)
        return self.classes[text]

    # -------------------------------------------------------------------------------------------- methods

    def _statements(
        self,
        parts: Sequence[Part],
        scope: Scope,
        kept: set[fx.Node],
        sites: Mapping[fx.Node, str],
        device: str,
        calls: Mapping[Part, _Call] = MappingProxyType({}),
        *,
        short: bool = False,
    ) -> list[str]:
        """The lines that compute `parts`: a statement for every node, or for a part that is called. Values die after their last use.

        With `short`, values have their names without what tells equal layers apart.
        """
        steps = [(part, node) for part in parts for node in ([None] if part in calls else part.nodes)]
        reads = [node.all_input_nodes if node else calls[part].arguments for part, node in steps]
        last = {source: index for index, sources in enumerate(reads) for source in sources}
        lines = [f"device = {device}"] if any(has_device(node) for _, node in steps if node) else []
        said = ""
        for index, (part, node) in enumerate(steps):
            dead = [scope.names[source] for source in dict.fromkeys(reads[index]) if last[source] == index and source not in kept]
            dead = [name for name in dead if name.isidentifier()]  # self.weight stays
            if node is None:
                lines.append(self._call(calls[part], scope, dead, short))
                continue
            where = self._origin(node)
            if where and where != said:
                lines.append(where)
                said = where
            value = expression(node, scope.names, sites.get(node, ""), self.functions)
            name = scope.name(node, stem(node) if short else node.name)
            lines.append(statement(name, value, dead, self._comment(node)))
        return lines

    def _call(self, call: _Call, scope: Scope, dead: Sequence[str], short: bool) -> str:
        arguments = ", ".join(scope.names[source] for source in call.arguments)
        target = ", ".join(scope.name(result, stem(result) if short else result.name) for result in call.results)
        return statement(target, f"{call.target}({arguments})", dead, "")

    def _origin(self, node: fx.Node) -> str:
        """The user's line; for what a pass added, its value's, but for our operators: their value's may be in another layer.

        Of joined linear layers it is the first one's.
        """
        sources = self.about.program.sources
        node = next(iter(node.users)) if op_name(node) in LINEARS else node
        ours = getattr(node.target, "namespace", "") == "tpcompile"
        return origin(sources.get(node.name) or sources.get("" if ours else self.about.origins.get(node.name, "")))

    def _comment(self, node: fx.Node) -> str:
        value = self.about.origins.get(node.name, node.name)
        return type_text(self.about.program.types.get(value), self.about.layouts.get(node.name))

    def _signature(self, method: str, arguments: Sequence[fx.Node], scope: Scope) -> str:
        """The first lines of a method: its arguments, and their types."""
        names = [scope.names[node] for node in arguments]
        comment = argument_comment([(name, self._comment(node)) for name, node in zip(names, arguments, strict=True)])
        return f"def {method}({', '.join(['self', *names])}):" + (f"\n    {comment}" if comment else "")

    def _device(self, tree: Tree, arguments: Sequence[fx.Node], scope: Scope) -> str:
        """An expression for the module's device."""
        first = next((attribute(tree, path) for path, held in tree.tensors() if held.is_parameter), "")
        tensors = [scope.names[node] for node in arguments if self._is_tensor(node) and node.name != "rng_key"]
        return f"{first or tensors[0]}.device" if first or tensors else "None"

    def _methods(
        self,
        tree: Tree,
        signature: str,
        body: Sequence[str],
        extra: Sequence[str] = (),
        *,
        sites: bool = False,
        methods: Sequence[str] = (),
    ) -> str:
        made, lines = ["super().__init__()"], [*body, *methods]
        made += ["self.rank = tp"] if any("self.rank" in line for line in lines) else []
        for name, note in (("tp", ""), ("tp_later", _LATER)):
            spelled = f'self.{name} = f"tp:{{tp}}/{self.about.parts}"{note}'
            made += [spelled] if any(re.search(rf"self\.{name}\b", line) for line in lines) else []
        made += ["self.sites = sites  # of random numbers"] if sites else []
        made += [*constructor(tree, self.numbers), *extra]
        return "\n".join(
            [
                f"def __init__(self, tp=0, device=None{', sites=()' if sites else ''}):",
                textwrap.indent("\n".join(made), "    "),
                "",
                signature,
                textwrap.indent("\n".join(body), "    "),
                *(f"\n{method}" for method in methods),
            ]
        )
