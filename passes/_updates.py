"""Private to capture: the new values of buffers, as results of the working graph.

before  %_ = add_(%b_counter, 1)                  after   %w = add(%b_counter, 1)
        return (%loss,)                                   return (%loss, %w)          updates: counter
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from tpcompile.passes._call import Found
from tpcompile.passes._origin import source_of
from tpcompile.passes._reasons import refuse
from tpcompile.passes._views import like, schema_name

aten = torch.ops.aten


@dataclass
class Updates:
    """The buffers that a forward changes: those that it writes to, and those that it `found` other tensors in place of."""

    model: nn.Module
    graph: fx.Graph
    buffers: Mapping[fx.Node, str]  # placeholder → name in the model, the first of tied ones before the others
    found: Found
    names: tuple[str, ...] = field(default=())

    def refuse_exchanged(self, constants: Mapping[fx.Node, str]) -> None:
        """Refuse to read a plain attribute that forward puts another tensor in place of: the next forward would read that one."""
        for node, name in constants.items():
            if name in self.found.exchanged and node.users:
                what = f"forward reads {name} and puts another tensor in its place, and it is a plain attribute, no buffer"
                refuse(
                    what, source_of(next(iter(node.users))), "register it with register_buffer, so that it is a part of the model's state"
                )

    def collect(self, written: Mapping[fx.Node, fx.Node]) -> tuple[str, ...]:
        """Let the graph return the new values at its end; the names of their buffers, in the model's order."""
        output = self.graph.output_node()
        values: Any = output.args[0]
        count = len(values) - len(self.found.replaced)
        new: dict[str, fx.Node] = {self.buffers[node]: value for node, value in written.items() if node in self.buffers}
        new |= {self._first_name(name): value for name, value in zip(self.found.replaced, values[count:], strict=True)}
        order = [name for name, _ in self.model.named_buffers(remove_duplicate=False) if name in new]
        output.args = ((*values[:count], *(self._own(name, new[name]) for name in order)),)
        self.names = tuple(order)
        return self.names

    def _first_name(self, name: str) -> str:
        """The name under which the graph knows a buffer that may have several."""
        held = self.model.get_buffer(name)
        return next((known for known in self.buffers.values() if self.model.get_buffer(known) is held), name)

    def _own(self, name: str, value: fx.Node) -> fx.Node:
        """A value in memory of its own, with the type of its buffer."""
        buffer, example = self.model.get_buffer(name), value.meta["val"]
        if buffer.requires_grad:
            refuse(
                f"forward changes {name}, a buffer that requires a gradient", source_of(value), "make it a parameter, or stop its gradient"
            )
        if example.dtype != buffer.dtype or [str(size) for size in example.shape] != [str(size) for size in buffer.shape]:
            shown = ", ".join(f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.") for tensor in (buffer, example))
            refuse(f"forward gives {name} another type or size: {shown}", source_of(value), "keep what a buffer holds in one type and size")
        if _is_fresh(value):
            return value
        with self.graph.inserting_before(self.graph.output_node()):
            return like(self.graph, value, aten.clone.default, (value,), {"memory_format": torch.contiguous_format}, example)

    def refuse_gradients(self, connected: Set[fx.Node]) -> None:
        """Refuse a new value with a gradient: the next step's backward would go back through this one's."""
        values: Any = self.graph.output_node().args[0]
        for name, value in zip(self.names, values[len(values) - len(self.names) :], strict=True):
            if value in connected:
                what = f"the new value of {name} carries a gradient from one step to the next"
                refuse(what, source_of(value), "compute it under torch.no_grad(), or from detached values")


def _is_fresh(node: fx.Node) -> bool:
    """Whether an operation makes its value in memory that nothing else lives in."""
    while schema_name(node) == "aten::detach":
        node = node.args[0]  # type: ignore[assignment]
    if not isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem:
        return False
    return isinstance(node.meta["val"], Tensor) and all(made.alias_info is None for made in node.target._schema.returns)
