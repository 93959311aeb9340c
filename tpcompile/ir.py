"""The values that flow between passes: an fx graph that nobody mutates once built, and frozen tables keyed by node name.

Program   the global graph: what the user's model computes, on one device
Sharded   the same graph, with a layout for every value and for its gradient
Local     the graph of one tensor-parallel rank, with collectives; numbers that differ by rank are `PerRank`
Stage     the part of a Local graph that one pipeline stage runs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import sympy
import torch
from torch import fx

from tpcompile.graphs import copy_graph, drop_dead
from tpcompile.layout import Layout, Size, TensorType, local_size

Type = TensorType | tuple[TensorType, ...] | Size
"""What a node makes: a tensor, several tensors, or a symbolic size."""


@dataclass(frozen=True)
class Source:
    """The user's line that a node came from, and the module it ran in."""

    file: str
    line: int
    code: str
    path: str  # dotted module path in the user's model, "" for its root

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Input:
    """One tensor of the user's batch. `path` is its place in the keyword arguments, as "input_ids" or "past.0.key"."""

    path: str
    batch_dim: int | None  # the dimension that counts the batch's rows; None: the same tensor for all rows


@dataclass(frozen=True)
class Count:
    """A number N of the whole batch that its loss is computed with: a part of the batch takes it as an extra input named `name`.

    `graph` computes a part's share of N from the part alone: its placeholders are a subset of the program's inputs, buffers and
    constants, by the same names. N is the sum over all micro-batches of all replicas, rounded once to the type of the extra input.
    Without a graph N is the number of replicas, over which the engine averages.
    """

    name: str
    graph: fx.Graph | None

    @cached_property
    def module(self) -> fx.GraphModule:
        """What runs the graph: made once, since making one generates code."""
        assert self.graph is not None
        return fx.GraphModule({}, self.graph)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The graph's placeholders."""
        assert self.graph is not None
        return tuple(node.name for node in self.graph.find_nodes(op="placeholder"))


@dataclass(frozen=True)
class Guards:
    """What a capture took for granted: another batch may use it only where all of this holds again."""

    training: frozenset[str]  # the modules in training mode
    trained: frozenset[str]  # the parameters that require a gradient
    leaves: Mapping[str, Any]  # path in the batch → its value, for what is no tensor
    ranges: Mapping[sympy.Symbol, tuple[int, int | None]]  # symbol → least and greatest value
    conditions: tuple[sympy.Basic, ...]  # relations between symbols


@dataclass(frozen=True)
class Program:
    """A captured model: one flat ATen graph whose placeholders are parameters, buffers, constants and the user's inputs.

    The graph's output is the tuple of the user's outputs, the loss among them, and then of the values that the buffers named in
    `updates` have after forward: what the model does to its own state is a result like any other, and nothing is changed in place.
    """

    graph: fx.Graph
    types: Mapping[str, Type]
    sources: Mapping[str, Source]
    parameters: Mapping[str, str]  # placeholder → qualified name of a parameter in the user's model
    buffers: Mapping[str, str]  # placeholder → qualified name of a buffer
    constants: Mapping[str, torch.Tensor]  # placeholder → a tensor that capture found outside the model's state
    inputs: Mapping[str, Input]  # placeholder → the user's tensor
    aliases: Mapping[str, str]  # qualified name of a tied twin → the name under which it stands in `parameters`
    symbols: Mapping[sympy.Symbol, tuple[str, int]]  # symbol → (input placeholder, dimension) that it measures
    layers: tuple[str, ...]  # module paths of the repeated layers, in the order they run
    out_spec: Any  # torch.utils._pytree.TreeSpec of the user's outputs
    loss: str | None  # the node that is the scalar loss
    outputs: tuple[str | None, ...] = ()  # the node of every leaf of out_spec; None for a leaf that is no tensor
    output_constants: Mapping[int, Any] = field(default_factory=dict)  # leaves that are no tensors
    counts: tuple[Count, ...] = ()  # what the loss needs to know of the whole batch, taken as extra inputs
    updates: tuple[str, ...] = ()  # qualified names of the buffers that forward gives a new value, which ends the graph's output
    loss_reason: str = ""  # why the loss of a batch is not the sum of its micro-batches' losses; "" when it is
    update_reason: str = ""  # why a buffer's value after a batch is not the one after any of its micro-batches; "" when it is
    random: bool = False  # takes the extra int64 input `rng_key`: mixed seed and step, which part of the rows it is, of how many
    sites: Mapping[str, int] = field(default_factory=dict)  # random operation → its place in the order in which the model ran them
    guards: Guards | None = None  # None: a program that no capture made
    witness: Program | None = None  # of the same model for more rows, where this one was captured for a single row
    notes: tuple[str, ...] = ()  # what the capture left out, in words
    kept: tuple[Left, ...] = ()  # attentions that stay as the model writes them, and why
    attention: tuple[str, ...] = ()  # which attentions were written in another way, and why others were not, in words
    repeated: tuple[str, ...] = ()  # which layers were captured as copies of which, and why others were not, in words

    def nodes(self) -> Mapping[str, fx.Node]:
        return {node.name: node for node in self.graph.nodes}

    def returned(self) -> tuple[str, ...]:
        """The values that the last stage returns: the outputs, each once, the loss first."""
        names = dict.fromkeys(node.name for node in results(self.graph, self.updates)[0])
        return tuple(names) if self.loss not in names else (self.loss, *(name for name in names if name != self.loss))

    @property
    def undivided(self) -> str:
        """Why a batch may not be divided among replicas or micro-batches; "" when it may."""
        if self.update_reason:
            return self.update_reason
        return f"the loss of a batch is not the sum of its parts' losses: {self.loss_reason}" if self.loss_reason else ""


def results(graph: fx.Graph, updates: Sequence[str]) -> tuple[list[fx.Node], dict[str, fx.Node]]:
    """What a graph returns, as far as it has nodes, and the new values of the buffers named in `updates`: the last of its output."""
    values = graph.output_node().args[0]
    if not updates:
        return graph.output_node().all_input_nodes, {}
    assert isinstance(values, (tuple, list))
    returned, renewed = values[: -len(updates)], values[-len(updates) :]
    return [node for node in returned if isinstance(node, fx.Node)], dict(zip(updates, renewed, strict=True))


Kind = Literal["attention", "mlp", "vocabulary", "linear", "sum", "column", "row"]


@dataclass(frozen=True)
class Cone:
    """What the backward walk from a contraction with a weight found: how its region would be cut, or why it cannot be.

    Layouts hold open cuts: the ranges are chosen by plan, once for all values of a region. A node with several outputs has a tuple.
    """

    seed: str  # the row-cut linear, a sum over values, or the look-up or loss that a cut of the vocabulary ends in
    kind: Kind
    wants: tuple[Layout, ...]  # what the seed needs of its operands
    layouts: Mapping[str, Layout | tuple[Layout, ...]]  # every value of the region that is cut, weights included
    columns: tuple[str, ...]  # the column-cut linears; without one there is no region
    stop: str = ""  # the first operation that cannot work on pieces, where the walk stopped
    reason: str = ""  # why it cannot
    limits: tuple[tuple[str, str], ...] = ()  # operations that stay whole for the pieces that this region has, and why


@dataclass(frozen=True)
class Region:
    """A part of the model that is cut over an axis: column-cut linears, what follows them, row-cut linears or what else a cut ends in."""

    name: str
    kind: Kind
    axis: str
    rows: Mapping[str, tuple[Layout, ...]]  # row-cut linear → the layouts that it needs of its operands
    columns: tuple[str, ...]
    layouts: Mapping[str, Layout | tuple[Layout, ...]]
    weights: Mapping[str, str]  # qualified parameter name → its layout's text


@dataclass(frozen=True)
class Left:
    """What stays as it is, and why: a linear, for one, that stays whole."""

    name: str
    node: str
    reason: str
    source: Source | None


@dataclass(frozen=True)
class Plan:
    """Which regions are cut, and what is left whole."""

    regions: tuple[Region, ...]
    whole: tuple[Left, ...]


@dataclass(frozen=True)
class Sharded:
    """A program with a layout for every value. `rows` make partial sums; their operands' layouts are given with them.

    `entering` are the whole values whose gradient is a partial sum where a region uses them. Of the values that are cut along their
    positions, `gathering` are those that some operation outside of regions needs whole; `stretches` says which do, and why.
    """

    program: Program
    plan: Plan
    axis: str
    parts: int  # coordinates along the axis
    layouts: Mapping[str, Layout | tuple[Layout, ...]]
    rows: Mapping[str, tuple[Layout, ...]]
    entering: frozenset[str]
    gathering: frozenset[str] = frozenset()
    stretches: tuple[Left, ...] = ()


@dataclass(frozen=True)
class Local:
    """What one tensor-parallel rank computes: every operation on its own pieces, with collectives between.

    One graph serves all coordinates: arguments that differ by rank are `PerRank`. `layouts` says, for every node, which piece of which
    global value it is (`origins`), so that pieces can be put together again and compared.
    """

    program: Program
    plan: Plan
    axis: str
    parts: int
    graph: fx.Graph
    layouts: Mapping[str, Layout | tuple[Layout, ...]]
    origins: Mapping[str, str]


@dataclass(frozen=True)
class PerRank:
    """A whole number, or a list of them, that differs by coordinate along the tensor axis."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return "|".join(str(value) for value in self.values)

    __repr__ = __str__


@dataclass(frozen=True)
class Boundary:
    """A tensor that crosses from one stage to the next: each tensor rank sends what it holds to its like."""

    name: str
    type: TensorType
    requires_grad: bool
    layout: Layout

    def shape(self, coordinate: int) -> tuple[Size, ...]:
        """Its local shape on a coordinate of the tensor axis."""
        return tuple(local_size(dim, coordinate) for dim in self.layout.dims)


@dataclass(frozen=True)
class Stage:
    """One pipeline stage of a Local graph.

    The graph's placeholders are, in order: what it receives, its parameters, buffers, constants, the user's inputs, counts and
    `rng_key` that it uses. Its output is the tuple of what it sends, of the last stage the program's outputs, the loss first; and then
    of the new values of the buffers named in `updates`. Every stage that reads such a buffer has its new value.
    """

    index: int
    graph: fx.Graph
    receives: tuple[Boundary, ...]
    sends: tuple[Boundary, ...]
    inputs: tuple[str, ...]  # the user's inputs, counts and rng_key that it takes, by placeholder name
    parameters: Mapping[str, str]  # placeholder → qualified name, of those that it uses
    buffers: Mapping[str, str]
    constants: tuple[str, ...]
    updates: tuple[str, ...] = ()
    unhalved: str = ""  # why its backward is never run in halves; "" where it can be
    layers: tuple[str, ...] = ()  # the layers that run as modules of their own, in order
    units: tuple[str, ...] = ()  # those of them all uses of whose parameters are in them


class Draft:
    """A working copy of a program's graph and tables, for a pass to build its result in; the program itself stays as it is."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph, self.nodes = copy_graph(program.graph)
        self.types, self.sources = dict(program.types), dict(program.sources)
        self.erased: set[fx.Node] = set()
        self.renamed: dict[str, str] = {}

    def call(self, target: Any, *args: Any, type: Type, like: fx.Node, **kwargs: Any) -> fx.Node:
        """A new call at the graph's insertion point, with the source line of `like`."""
        node = self.graph.call_function(target, args, kwargs)
        self.types[node.name] = type
        if like.name in self.sources:
            self.sources[node.name] = self.sources[like.name]
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Give all uses of a node to another and drop it."""
        old.replace_all_uses_with(new)
        self.renamed[old.name] = new.name
        self.erase(old)

    def erase(self, node: fx.Node) -> None:
        self.graph.erase_node(node)
        self.erased.add(node)
        self.types.pop(node.name, None)
        self.sources.pop(node.name, None)

    def freeze(self, **changes: Any) -> Program:
        """The finished program; dead pure nodes go."""
        drop_dead(self.graph)
        alive = {node.name for node in self.graph.nodes}
        changes.setdefault("loss", self._now(self.program.loss))
        changes.setdefault("outputs", tuple(map(self._now, self.program.outputs)))
        return replace(
            self.program,
            graph=self.graph,
            types={name: kind for name, kind in self.types.items() if name in alive},
            sources={name: source for name, source in self.sources.items() if name in alive},
            **changes,
        )

    def _now(self, name: str | None) -> str | None:
        while name in self.renamed:
            name = self.renamed[name]
        return name
