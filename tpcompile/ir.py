"""The values that flow between passes: an fx graph that nobody mutates once built, and frozen tables keyed by node name.

    Program   the global graph: what the user's model computes, on one device
    Sharded   the same graph, with a layout for every value and for its gradient
    Local     the graph of one tensor-parallel rank, with collectives; numbers that differ by rank are `PerRank`
    Stage     the part of a Local graph that one pipeline stage runs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

Size = int | sympy.Expr
"""A tensor's size along a dimension: a whole number, or an expression in symbols such as b and s."""


@dataclass(frozen=True)
class TensorType:
    """Element type and global shape of a value."""

    dtype: torch.dtype
    shape: tuple[Size, ...]


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
    """A weight sum N that a mean loss divides by: the graph takes it as an extra scalar input named `name`.

    `graph` computes N from the batch alone: its placeholders are a subset of the program's inputs and buffers, by the same names.
    The sum of its values over equal micro-batches and replicas is N of the whole batch.
    """

    name: str
    graph: fx.Graph


@dataclass(frozen=True)
class Program:
    """A captured model: one flat ATen graph whose placeholders are parameters, buffers, constants and the user's inputs."""

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
    counts: tuple[Count, ...] = ()  # divisors of mean losses, taken as extra inputs
    loss_reason: str = ""  # why the loss of a batch is not the sum of its micro-batches' losses; "" when it is
    random: bool = False  # takes the extra int64 input `rng_key` of three numbers: seed, step, micro-batch

    def nodes(self) -> Mapping[str, fx.Node]:
        return {node.name: node for node in self.graph.nodes}


@dataclass(frozen=True)
class PerRank:
    """A whole number, or a list of them, that differs by coordinate along the tensor axis."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return "|".join(str(value) for value in self.values)

    __repr__ = __str__


@dataclass(frozen=True)
class Boundary:
    """A tensor that crosses from one stage to the next, whole on every tensor rank."""

    name: str
    type: TensorType
    requires_grad: bool


@dataclass(frozen=True)
class Stage:
    """One pipeline stage of a Local graph.

    The graph's placeholders are, in order: what it receives, its parameters, buffers, constants, the user's inputs, counts and
    `rng_key` that it uses. Its output is the tuple of what it sends; the last stage's is the tuple of the program's outputs, the loss first.
    """

    index: int
    graph: fx.Graph
    receives: tuple[Boundary, ...]
    sends: tuple[Boundary, ...]
    inputs: tuple[str, ...]  # the user's inputs, counts and rng_key that it takes, by placeholder name
    parameters: Mapping[str, str]  # placeholder → qualified name, of those that it uses
    buffers: Mapping[str, str]
    constants: tuple[str, ...]
