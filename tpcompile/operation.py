"""A call in a graph, as rules see it: its name, its arguments by name, its tensor operands and their types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from tpcompile.layout import TensorType


@dataclass(frozen=True)
class Op:
    """A call in the graph with the types of its tensor operands, in the order of its arguments, and of its outputs."""

    name: str
    node: fx.Node
    operands: tuple[fx.Node, ...]
    ins: tuple[TensorType, ...]
    outs: tuple[TensorType, ...]

    def rank(self, operand: int) -> int:
        return len(self.ins[operand].shape)

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its schema's name, positional or not."""
        return argument(self.node, name, default)

    def dims(self, name: str) -> list[int]:
        """An argument that lists dimensions of the first operand, counted from the front."""
        value = self.argument(name)
        listed = [value] if isinstance(value, int) else list(value if value is not None else range(self.rank(0)))
        return [dim % max(self.rank(0), 1) for dim in listed]


def op_name(node: fx.Node) -> str:
    """`aten.linear.default` for a call of an operator, the function's name for others."""
    return _target_name(node.target)


@lru_cache(maxsize=4096)
def _target_name(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def attends(name: str) -> bool:
    """Whether an operation of this name is a softmax or a fused attention."""
    return "softmax" in name or "attention" in name


def aten_names(words: str) -> frozenset[str]:
    """Names of aten operations, written without their namespace."""
    return frozenset(f"aten.{word}" for word in words.split())


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """The value of the schema's argument `name` in a call, or its default."""
    assert isinstance(node.target, torch._ops.OpOverload), node
    position, usual = _declared(node.target).get(name, (None, None))
    if position is None:
        return default
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default if usual is NONE else usual)


NONE = object()
"""Stands for the default of an argument that has none."""


@lru_cache(maxsize=4096)
def _declared(target: Any) -> Mapping[str, tuple[int, Any]]:
    """Position and default of an operator's arguments, by name: asking the schema makes new objects each time."""
    arguments = enumerate(target._schema.arguments)
    return {one.name: (place, one.default_value if one.has_default_value() else NONE) for place, one in arguments}


def view_op(node: fx.Node, types: Mapping[str, Any]) -> Op:
    """The operation of a call node."""
    operands = tuple([operand for operand in _leaves(node) if _is_tensor(types.get(operand.name))])
    out = types[node.name]
    return Op(op_name(node), node, operands, tuple(types[o.name] for o in operands), (out,) if isinstance(out, TensorType) else tuple(out))


def _leaves(node: fx.Node) -> list[fx.Node]:
    """The nodes that a call reads, in the order of its arguments, each as often as it stands there."""
    found: list[fx.Node] = []
    _add(node.args, found)
    if node.kwargs:
        _add(node.kwargs.values(), found)
    return found


def _add(values: Iterable[Any], found: list[fx.Node]) -> None:
    for value in values:
        if type(value) is fx.Node:
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _add(value, found)
        elif isinstance(value, dict):
            _add(value.values(), found)


def _is_tensor(kind: object) -> bool:
    return isinstance(kind, TensorType) or (isinstance(kind, tuple) and bool(kind) and all(isinstance(part, TensorType) for part in kind))
