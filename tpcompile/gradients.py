"""Which values of a graph have a gradient, and which of these are asked for: what autograd finds out when a step runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import fx

from tpcompile.collectives import COLLECTIVES
from tpcompile.ir import Program, Type
from tpcompile.layout import TensorType
from tpcompile.operation import op_name
from tpcompile.rules import aten_names

STOPS = aten_names(
    "detach.default bernoulli.default empty_like.default full_like.default ones_like.default rand_like.default randn_like.default "
    "zeros_like.default new_empty.default new_full.default new_ones.default new_zeros.default"
)
"""Operations whose results are constants, whatever they are made from."""

LIKE = aten_names("expand_as.default reshape_as.default to.other type_as.default view_as.default")
"""Operations that ask their second operand for its shape or its type alone."""


def trained(program: Program) -> frozenset[str]:
    """The placeholders of parameters that are to be trained."""
    asked = program.guards.trained if program.guards is not None else None
    return frozenset(place for place, name in program.parameters.items() if asked is None or name in asked)


def differentiable(node: fx.Node) -> Iterator[fx.Node]:
    """The operands whose gradients a call computes from its own, before their types are looked at."""
    name = op_name(node)
    own = COLLECTIVES.get(name.removeprefix("tpcompile.").removesuffix(".default")) if name.startswith("tpcompile.") else None
    if node.op != "call_function" or name in STOPS or (own is not None and not own.differentiable):
        return
    yield from node.all_input_nodes[:1] if name in LIKE else node.all_input_nodes


def with_gradient(graph: fx.Graph, leaves: Iterable[str], types: Mapping[str, Type]) -> frozenset[str]:
    """The values that depend on one of `leaves` in a way that can be differentiated; `types` says which are floating.

    A value without a type counts as floating.
    """
    found = set(leaves)
    for node in graph.nodes:
        if is_floating(types.get(node.name)) and any(operand.name in found for operand in differentiable(node)):
            found.add(node.name)
    return frozenset(found)


def asked_for(graph: fx.Graph, roots: Iterable[str], having: frozenset[str]) -> frozenset[str]:
    """The values with a gradient that backward from `roots` reaches."""
    found = {name for name in roots if name in having}
    for node in reversed(graph.nodes):
        if node.name in found:
            found |= {operand.name for operand in differentiable(node) if operand.name in having}
    return frozenset(found)


def is_floating(kind: Type | None) -> bool:
    """Whether a value of this type can have a gradient."""
    parts: Iterable[object] = kind if isinstance(kind, tuple) else (kind,)
    return any(part is None or (isinstance(part, TensorType) and (part.dtype.is_floating_point or part.dtype.is_complex)) for part in parts)
