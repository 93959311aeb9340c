"""Private to rewrite: one operation being written as it is on pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from tpcompile.collectives import ops
from tpcompile.ir import Sharded
from tpcompile.layout import Dim, Layout, TensorType, cut_factors, pieces, size_of, whole, whole_dim

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


class Writer(Protocol):
    """The local graph as it grows."""

    sharded: Sharded

    def add(
        self, op: str, target: Any, args: Any, kwargs: Any, name: str, layout: Layout | tuple[Layout, ...] | None, origin: str = ""
    ) -> fx.Node: ...

    def number(self, of: Callable[[int], Any]) -> Any: ...

    def reduced(self, partial: fx.Node, layout: Layout, name: str, origin: str) -> fx.Node: ...

    def has_gradient(self, node: fx.Node) -> bool: ...


@dataclass(frozen=True)
class Written(ABC):
    """An operation on pieces: its operands by name, and where its cut dimension is. Calls are named after it."""

    writer: Writer
    node: fx.Node
    operands: Mapping[str, Any]
    given: Layout  # of the operand that is cut
    made: Layout | tuple[Layout, ...]

    @property
    def axis(self) -> str:
        return self.writer.sharded.axis

    @property
    def dim(self) -> int:
        """The dimension that is cut."""
        return next(dim for dim, places in enumerate(self.given.dims) if cut_factors(places))

    @property
    def flows(self) -> bool:
        """Whether a gradient comes back."""
        return self.writer.has_gradient(self.node)

    @abstractmethod
    def write(self) -> fx.Node | dict[fx.Node, fx.Node]:
        """The calls; what stands for the operation's value, or for each item of several."""

    def start(self, dim: Dim) -> Any:
        """The first index that a rank holds."""
        return self.writer.number(lambda coordinate: pieces(dim, coordinate)[0][0])

    def type_of(self, node: fx.Node) -> TensorType:
        kind = self.writer.sharded.program.types[node.name]
        assert isinstance(kind, TensorType)
        return kind

    def call(self, target: Any, *args: Any, name: str, layout: Layout, origin: str = "", **kwargs: Any) -> fx.Node:
        return self.writer.add("call_function", target, args, kwargs, f"{self.node.name}{name}", layout, origin)

    def last(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """The call that makes the operation's own value."""
        assert isinstance(self.made, Layout)
        return self.call(target, *args, name="", layout=self.made, origin=self.node.name, **kwargs)

    def reduced(self, partial: fx.Node, name: str, layout: Layout, origin: str = "", how: Any = ops.reduce.default) -> fx.Node:
        return self.call(how, partial, self.axis, name=name, layout=layout, origin=origin)

    def ended(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call that makes a partial sum of the operation's value: as it is where it may wait, else reduced."""
        assert isinstance(self.made, Layout)
        if self.made.partial:
            return self.last(target, *args, **kwargs)
        waiting = Layout(whole(*(size_of(dim) for dim in self.made.dims)).dims, (self.axis,))
        partial = self.call(target, *args, name="_partial", layout=waiting, origin=self.node.name, **kwargs)
        return self.writer.reduced(partial, self.made, self.node.name, self.node.name)

    def single(self, dims: Sequence[int]) -> Layout:
        """The layout with some dimensions, the cut one among them, reduced to one."""
        return Layout(tuple(whole_dim(1) if dim in dims else places for dim, places in enumerate(self.given.dims)))

    def part(self, layout: Layout) -> Layout:
        return Layout(layout.dims, (self.axis,))

    def fixed(self, scores: fx.Node) -> fx.Node:
        """The cut operand as a constant."""
        return self.call(aten.detach.default, scores, name="_scores", layout=self.given)

    def largest(self, fixed: fx.Node, dims: Sequence[int]) -> fx.Node:
        """The largest element over some dimensions, which stay, of size one; no gradient goes through it."""
        each = self.single(dims)
        held = self.call(aten.amax.default, fixed, list(dims), True, name="_max_partial", layout=Layout(each.dims, (), (self.axis,)))
        return self.reduced(held, "_max", each, how=ops.reduce_max.default)

    def entered(self, value: fx.Node, name: str, layout: Layout) -> fx.Node:
        """A whole value where pieces are computed with it: its gradient there is a partial sum."""
        return self.reduced(value, name, layout, how=ops.enter.default) if self.flows else value

    def normalizer(self, scores: fx.Node, dims: Sequence[int]) -> tuple[fx.Node, fx.Node, fx.Node]:
        """x - max and its exponential on pieces, and the whole sum of these."""
        each = self.single(dims)
        shifted = self.call(aten.sub.Tensor, scores, self.largest(self.fixed(scores), dims), name="_shifted", layout=self.given)
        powers = self.call(aten.exp.default, shifted, name="_powers", layout=self.given)
        total = self.call(aten.sum.dim_IntList, powers, list(dims), True, name="_total_partial", layout=self.part(each))
        return shifted, powers, self.reduced(total, "_total", each)

    def shifted(self, scores: fx.Node, dims: Sequence[int]) -> tuple[fx.Node, fx.Node]:
        """x - max on pieces, and the whole log Σ exp(x - max), whose difference is log softmax."""
        shifted, _, total = self.normalizer(scores, dims)
        return shifted, self.call(aten.log.default, total, name="_log", layout=self.single(dims))

    def logs(self, shifted: fx.Node, log: fx.Node, each: Layout) -> fx.Node:
        return self.call(aten.sub.Tensor, shifted, self.entered(log, "_log_enter", each), name="_logs", layout=self.given)

    def exact(self, value: fx.Node, name: str, dtype: torch.dtype | None = None) -> fx.Node:
        """A value in a type that is summed in: the one that is asked for, of 32 bits at least."""
        have = self.type_of(self.node.all_input_nodes[0]).dtype
        wanted = torch.float32 if (dtype or have) in HALF else dtype or have
        return value if wanted == have else self.call(aten.to.dtype, value, wanted, name=name, layout=self.given)
