"""From the exported graph to one flat working graph: regions of no_grad and autocast are inlined, torch's own checks are left out."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import predispatch

from tpcompile.graphs import copy_node
from tpcompile.ir import Source
from tpcompile.passes._copies import Copies, tensors
from tpcompile.passes._layers import Call
from tpcompile.passes._marks import AGAIN, BEGIN, END
from tpcompile.passes._origin import source_of
from tpcompile.passes._reasons import refuse
from tpcompile.passes._unbatched import FIX, is_functorch, regions, traced

GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
LOAD = predispatch.lazy_load_decompositions
AUTOCAST = torch.ops.higher_order.wrap_with_autocast

CHECKS = frozenset(
    {
        "aten::_assert_async",
        "aten::_assert_scalar",
        "aten::_assert_tensor_metadata",
        "aten::sym_constrain_range",
        "aten::sym_constrain_range_for_size",
    }
)
"""Operations that compute nothing."""


class Flattener:
    """Builds the flat copy. In the new nodes' `meta`, "storage" names the memory that a tensor lives in, "no_grad" is where it was made."""

    def __init__(self, calls: Sequence[Call] = ()) -> None:
        self.graph = fx.Graph()
        self._copies = Copies(self.graph, calls)
        self._storages: dict[int, int] = {}  # what a region calls a storage → what is outside

    def flatten(self, module: fx.GraphModule) -> fx.Graph:
        self.graph.output(self._copy(module, {}, grad=True))
        return self.graph

    def _copy(self, module: fx.GraphModule, new: dict[fx.Node, Any], *, grad: bool) -> Any:
        """Copy a graph's nodes but for those that `new` has already: its arguments. Returns what its output holds."""
        batched = regions(module.graph)
        for node in module.graph.nodes:
            if node in new:
                continue
            if node in batched:
                self._unbatch(batched[node], new, grad=grad)
                continue
            if node.op == "output":
                return fx.node.map_arg(node.args[0], new.__getitem__)
            if node.op == "get_attr":
                new[node] = getattr(module, str(node.target))
            elif isinstance(node.target, torch._ops.HigherOrderOperator):
                new[node] = self._inline(node, new, grad=grad)
            elif node.target is operator.getitem and isinstance(new[node.args[0]], tuple | list):
                new[node] = new[node.args[0]][node.args[1]]
                self._same_storage(node, new[node])
            elif node.target in (BEGIN, END, AGAIN):
                operands: Any = node.args[1]
                given = tensors(new[operand] for operand in operands)
                mark = {BEGIN: self._copies.begin, END: self._copies.end, AGAIN: self._copies.again}[node.target]
                new[node] = mark(node, given)
            elif (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in CHECKS) or node.target is LOAD:
                new[node] = None
            elif is_functorch(node):
                refuse(f"forward uses torch.func: {node.target.__name__} cannot be captured", source_of(node), FIX)
            else:
                new[node] = self._node(node, new, grad=grad)
        raise AssertionError("a graph without an output")

    def _node(self, node: fx.Node, new: dict[fx.Node, Any], *, grad: bool) -> fx.Node:
        copy = copy_node(self.graph, node, new.__getitem__)
        copy.meta["no_grad"] = not grad
        copy.meta["storage"] = self._storage(node)
        return copy

    def _unbatch(self, region: list[fx.Node], new: dict[fx.Node, Any], *, grad: bool) -> None:
        """Copy what a vmap does to whole tensors, with the line of its call."""
        graph, operands, results = traced(region)
        inner = dict(zip(graph.find_nodes(op="placeholder"), (new[operand] for operand in operands), strict=True))
        origin = {key: region[0].meta[key] for key in ("stack_trace", "nn_module_stack") if key in region[0].meta}
        new.update(dict.fromkeys(region))
        for node in graph.nodes:
            if node.op == "output":
                for result, value in zip(results, node.args[0], strict=True):
                    new[result] = inner[value]
            elif node not in inner:
                inner[node] = self._node(node, inner, grad=grad)
                inner[node].meta |= origin

    def _inline(self, node: fx.Node, new: dict[fx.Node, Any], *, grad: bool) -> Any:
        operands: tuple[Any, ...] = node.args
        if node.target is GRAD:
            grad, body, *args = operands
        elif node.target is AUTOCAST:
            device, dtype, enabled, _, body, *args = operands
            if enabled:
                refuse(
                    f"autocast to {str(dtype).removeprefix('torch.')} is turned on for {device} in forward: its casts cannot be captured",
                    _first_source(new[body]),
                    "cast with .to(dtype) where it is needed, and leave autocast out",
                )
        else:
            refuse(f"forward uses {node.target}, which holds a graph of its own", source_of(node), "write this part with plain operations")
        module = new[body]
        inner = dict(zip(module.graph.find_nodes(op="placeholder"), fx.node.map_arg(args, new.__getitem__), strict=True))
        for placeholder, outer in inner.items():
            self._same_storage(placeholder, outer)
        return self._copy(module, inner, grad=grad)

    def _storage(self, node: fx.Node) -> int | None:
        value = node.meta.get("val")
        if isinstance(value, tuple | list) and value:
            value = value[0]  # the pieces of a split
        if not isinstance(value, Tensor):
            return None
        own: int = value.untyped_storage()._cdata
        return self._storages.get(own, own)

    def _same_storage(self, node: fx.Node, new: Any) -> None:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and isinstance(new, fx.Node) and new.meta["storage"] is not None:
            self._storages[value.untyped_storage()._cdata] = new.meta["storage"]


def _first_source(module: fx.GraphModule) -> Source | None:
    """The line of a region's first operation: the region itself has none."""
    return next((source for node in module.graph.nodes if (source := source_of(node))), None)
