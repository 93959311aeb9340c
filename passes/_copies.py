"""Private to capture: the operations of a layer, put in the place of each operation that stands for a layer like it.

begin(0, [%x, %w0])                   %a = linear(%x, %w0), %y = gelu(%a)
%a = linear(%x, %w0), …               %b = linear(%y, %w1), %z = gelu(%b)
end(0, [%y])                  →       …
%z = again(1, [%y, %w1], [%y])
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from tpcompile.graphs import copy_node
from tpcompile.passes._layers import Call, Different
from tpcompile.passes._likeness import kind_of
from tpcompile.passes._origin import source_of

SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Span:
    """The operations of one call, and what they are given and return."""

    stack: Mapping[str, Any]  # the modules around it, and itself
    trace: Any  # the line of its call
    operands: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


class Copies:
    """What has been seen of the calls of layers while a graph is flattened."""

    def __init__(self, graph: fx.Graph, calls: Sequence[Call]) -> None:
        self._graph, self._calls = graph, calls
        self._open: tuple[fx.Node, fx.Node, tuple[fx.Node, ...]] | None = None  # its node, the last one before it, its operands
        self._spans: dict[int, Span] = {}
        self._memory = itertools.count(-2, -1)  # no storage has such a number

    def begin(self, node: fx.Node, operands: tuple[fx.Node, ...]) -> None:
        self._open = node, self._graph._root.prev, operands

    def end(self, node: fx.Node, results: tuple[fx.Node, ...]) -> None:
        if self._open is None:
            raise Different("a layer ends that has not begun")
        begin, before, operands = self._open
        nodes, each = [], before.next
        while each.op != "root":
            nodes.append(each)
            each = each.next
        number: Any = node.args[0]
        span = Span(begin.meta.get("nn_module_stack") or {}, begin.meta.get("stack_trace"), operands, tuple(nodes), results)
        self._spans[number], self._open = span, None
        call = self._calls[number]
        if call.role == "last":
            if call.first < 0 or call.first not in self._spans:
                raise Different(f"{call.path} returns something else than {self._calls[0].path}")
            _compare(self._spans[call.first], span, call.path)

    def again(self, node: fx.Node, operands: tuple[fx.Node, ...]) -> list[fx.Node]:
        """Copy the operations of the layer that this one is like. Returns what it returns."""
        number: Any = node.args[0]
        span = self._spans.get(self._calls[number].first)
        if span is None:
            raise Different(f"the operations of {self._calls[self._calls[number].first].path} are not found")
        new = _operands(span, operands, self._calls[number].path)
        memory = _memories(span, operands, self._calls[number].path)
        moved = _Moved(span, node)
        for each in span.nodes:
            if isinstance(each.meta.get("val"), SIZES):
                new[each] = each  # a size is the same number everywhere
                continue
            made = copy_node(self._graph, each, lambda operand: _now(new, operand))
            own = each.meta["storage"]
            if own is not None:
                made.meta["storage"] = memory[own] if own in memory else memory.setdefault(own, next(self._memory))
            moved.place(made, each)
            new[each] = made
        return [new[result] for result in span.results]


def _now(new: Mapping[fx.Node, fx.Node], operand: fx.Node) -> fx.Node:
    if operand in new:
        return new[operand]
    if isinstance(operand.meta.get("val"), SIZES):
        return operand
    raise Different(f"%{operand.name} is read in a layer that is not given it")


def _operands(span: Span, operands: Sequence[fx.Node], path: str) -> dict[fx.Node, fx.Node]:
    """The operands of the first layer by those of another; the same ones are the same in both."""
    new: dict[fx.Node, fx.Node] = {}
    for first, other in zip(span.operands, operands, strict=True):
        if new.setdefault(first, other) is not other:
            raise Different(f"{path} is given two values where the first layer is given one")
    if len(set(new.values())) != len(new):
        raise Different(f"{path} is given one value where the first layer is given two")
    return new


def _memories(span: Span, operands: Sequence[fx.Node], path: str) -> dict[int, int]:
    """The memory of the first layer's operands by that of another's."""
    found: dict[int, int] = {}
    for first, other in zip(span.operands, operands, strict=True):
        own, its = first.meta["storage"], other.meta["storage"]
        if (own is None) != (its is None) or (own is not None and found.setdefault(own, its) != its):
            raise Different(f"{path} is given values that share memory otherwise")
    if len(set(found.values())) != len(found):
        raise Different(f"{path} is given values that share memory")
    return found


class _Moved:
    """Where the copied operations come from: the same lines, in the modules of the layer that they are copied for."""

    def __init__(self, span: Span, node: fx.Node) -> None:
        self.stack, self.trace = node.meta.get("nn_module_stack") or {}, node.meta.get("stack_trace")
        self.depth = len(span.stack)
        self.before, self.after = _path(span.stack), _path(self.stack)
        self.line = _line(span.trace)
        self.stacks: dict[tuple[str, ...], dict[str, Any]] = {}

    def place(self, made: fx.Node, first: fx.Node) -> None:
        stack = first.meta.get("nn_module_stack") or {}
        key = tuple(stack)
        if key not in self.stacks:
            inside = list(stack.items())[self.depth :]
            names = [(self.name(name), (self.name(path), kind)) for name, (path, kind) in inside]
            self.stacks[key] = {**self.stack, **dict(names)}
        made.meta["nn_module_stack"] = self.stacks[key]
        if _line(first.meta.get("stack_trace")) == self.line:
            made.meta["stack_trace"] = self.trace

    def name(self, path: str) -> str:
        return self.after + path[len(self.before) :] if path.startswith(self.before) else path


def _path(stack: Mapping[str, Any]) -> str:
    return str(list(stack.values())[-1][0]) if stack else ""


def _line(trace: str | None) -> Any:
    """The innermost line of a trace."""
    return None if trace is None else trace.rstrip().rpartition('File "')[2]


# ---------------------------------------------------------------------------------------------- two that were traced


def _compare(first: Span, last: Span, path: str) -> None:
    """Raises Different at the first operation that two layers do not share."""
    pairs = _operands(first, last.operands, path)
    _memories(first, last.operands, path)
    ours, theirs = [_made(span) for span in (first, last)]
    if len(ours) != len(theirs):
        raise Different(f"{path} has {len(theirs)} operations, and the first layer {len(ours)}")
    for a, b in zip(ours, theirs, strict=True):
        if a.target != b.target or _spelled(a, pairs) != _spelled(b, None) or _kinds(a) != _kinds(b) or _where(first, a) != _where(last, b):
            raise Different(f"{path} computes %{b.name} otherwise than the first layer %{a.name}")
        pairs[a] = b
    if [pairs.get(a) for a in first.results] != list(last.results):
        raise Different(f"{path} returns other values than the first layer")


def _made(span: Span) -> list[fx.Node]:
    return [node for node in span.nodes if not isinstance(node.meta.get("val"), SIZES)]


def _spelled(node: fx.Node, pairs: Mapping[fx.Node, fx.Node] | None) -> Any:
    """A call's arguments, with those of the other layer in place of `pairs`; sizes by their expressions."""

    def spell(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            value = leaf.meta.get("val")
            if isinstance(value, SIZES):
                return str(value.node.expr)
            return leaf.name if pairs is None else pairs[leaf].name if leaf in pairs else None
        return str(leaf) if isinstance(leaf, SIZES) else (type(leaf), repr(leaf))

    leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    return [spell(leaf) for leaf in leaves], spec


def _kinds(node: fx.Node) -> Any:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return node.meta.get("no_grad"), [kind_of(leaf) if isinstance(leaf, Tensor) else str(leaf) for leaf in leaves]


def _where(span: Span, node: fx.Node) -> Any:
    """The line of an operation, and its module's place in the layer."""
    source, before = source_of(node), re.sub(r"@\d+", "", _path(span.stack))
    stack = node.meta.get("nn_module_stack") or {}
    inside = [re.sub(r"@\d+", "", path).removeprefix(before) for path, _ in list(stack.values())[len(span.stack) :]]
    return inside, source and (source.file, source.line if _line(node.meta.get("stack_trace")) != _line(span.trace) else 0)


def tensors(values: Iterator[Any]) -> tuple[fx.Node, ...]:
    """The nodes of the tensors that a call is given. Raises Different for what is none."""
    found = tuple(values)
    if not all(isinstance(value, fx.Node) for value in found):
        raise Different("a layer is given what is no value of the graph")
    return found
