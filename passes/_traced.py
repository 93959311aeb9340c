"""The forward and the backward of an autograd.Function as one graph, in which every dimension has a symbol of its own for its size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from tpcompile.functions import Kept
from tpcompile.layout import Size
from tpcompile.passes._reasons import reason_of


class Untraceable(Exception):
    """The reason why the code of a Function makes no graph."""


@dataclass(frozen=True)
class Example:
    """An operand: a tensor's sizes, its dimensions by falling stride, and its type; or a size alone.

    Dimensions whose sizes are the same expression of the batch's have one symbol: the code may ask for an order between them.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]  # the expressions; "" for a whole number
    order: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    flows: bool = False  # whether it needs a gradient

    @classmethod
    def of(cls, value: Any, flows: bool) -> Example:
        if not isinstance(value, Tensor):
            return cls((_hint(value),), (_name(value),))
        strides = [_hint(stride) for stride in value.stride()]
        order = tuple(sorted(range(value.ndim), key=lambda dim: (-strides[dim], dim)))
        return cls(tuple(map(_hint, value.shape)), tuple(map(_name, value.shape)), order, value.dtype, value.device, flows)


def _name(size: Any) -> str:
    return str(size) if isinstance(size, torch.SymInt) else ""


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


@dataclass(frozen=True)
class Trace:
    """Forward and backward, where some of the outputs have a gradient.

    The graph takes the operands, then these gradients; it makes the outputs, then the gradients of those operands that need one. Nothing
    in it is changed in place.
    """

    graph: fx.Graph
    env: ShapeEnv
    operands: tuple[tuple[Size, ...], ...]  # the sizes of those that are tensors
    numbers: tuple[Size, ...]  # those that are sizes
    outputs: tuple[tuple[Size, ...], ...]
    wanted: tuple[int, ...]  # the operands that get a gradient, among those that are tensors
    given: int  # the number of gradients that it takes

    @property
    def calls(self) -> Iterator[fx.Node]:
        return (node for node in self.graph.nodes if isinstance(node.target, torch._ops.OpOverload))

    @property
    def is_random(self) -> bool:
        return any(torch.Tag.nondeterministic_seeded in node.target.tags for node in self.calls)  # type: ignore[union-attr]

    def size(self, value: Any) -> Size:
        return size_in(self.env, value)


def size_in(env: ShapeEnv, value: Any) -> Size:
    """A size, with one symbol for sizes that must be equal."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    found = env.replace(value.node.expr)
    return int(found) if found.is_Integer else found


def traces(way: Kept, examples: Sequence[Example], single: frozenset[tuple[int, int]] = frozenset()) -> list[Trace]:
    """One trace for every set of outputs that may have a gradient, first that of all. `single` are dimensions, by operand, of size one."""
    try:
        count = len(_Tracer(way, examples, single).flowing)
        sets = [chosen for size in range(count, 0, -1) for chosen in itertools.combinations(range(count), size)]
        return [_Tracer(way, examples, single).trace(chosen) for chosen in sets or [()]]
    except Exception as error:  # the user's code, under a trace: whatever it raises is the reason
        if "convert all Tensors to FakeTensors first" in str(error):
            raise Untraceable("it reads a tensor that it is not given") from error
        raise Untraceable(reason_of(error)) from error


class _Tracer:
    def __init__(self, way: Kept, examples: Sequence[Example], single: frozenset[tuple[int, int]]) -> None:
        self.way, self.examples, self.single = way, examples, single
        self.env = ShapeEnv(duck_shape=False)
        self.named: dict[str, Any] = {}
        self.mode = FakeTensorMode(shape_env=self.env)
        with self.mode, torch.inference_mode(False), torch.enable_grad():
            self.operands = [self._operand(place, example) for place, example in enumerate(examples)]
            self.outputs = self._outputs(self.operands)
        self.tensors = [operand for operand in self.operands if isinstance(operand, Tensor)]
        self.flowing = [place for place, value in enumerate(self.outputs) if value.requires_grad]
        self.wanted = [place for place, tensor in enumerate(self.tensors) if tensor.requires_grad]

    def _operand(self, place: int, example: Example) -> Any:
        sizes = [self._size(example, place, dim) for dim in range(len(example.sizes))]
        if example.dtype is None:
            return sizes[0]
        strides: list[Any] = [1] * len(sizes)
        for outer, inner in reversed(list(itertools.pairwise(example.order))):
            strides[outer] = strides[inner] * sizes[inner]
        made = torch.empty_strided(sizes, strides, dtype=example.dtype, device=example.device)
        return made.requires_grad_(example.flows)

    def _size(self, example: Example, place: int, dim: int) -> Any:
        size = example.sizes[dim]
        if (place, dim) in self.single or size in (0, 1):
            return min(size, 1)
        name = example.names[dim] or f"operand_{place}_{dim}"
        if name not in self.named:
            source = ConstantSource(name)
            symbol = self.env.create_symbol(size, source, DimDynamic.DYNAMIC, constraint_dim=None)
            self.named[name] = self.env.create_symintnode(symbol, hint=size, source=source)
        return self.named[name]

    def _outputs(self, operands: Sequence[Any]) -> list[Tensor]:
        made = self.way.call(operands)
        return [made] if isinstance(made, Tensor) else made

    def trace(self, chosen: Sequence[int]) -> Trace:
        given = [self.flowing[index] for index in chosen]
        with self.mode:
            gradients = [torch.empty_like(self.outputs[place]) for place in given]

        def joint(operands: list[Any], gradients: list[Tensor]) -> tuple[Tensor | None, ...]:
            outputs = self._outputs(operands)
            wanted = [tensor for tensor in operands if isinstance(tensor, Tensor) and tensor.requires_grad]
            made = torch.autograd.grad([outputs[place] for place in given], wanted, gradients, allow_unused=True) if given else ()
            return (*outputs, *made)

        versions = [tensor._version for tensor in self.tensors]
        with self.mode, torch.inference_mode(False), torch.enable_grad():
            plain = make_fx(joint)(self.operands, gradients)
        if versions != [tensor._version for tensor in self.tensors]:
            raise RuntimeError("its backward writes to a tensor that forward was given")
        with self.mode, torch.no_grad():
            graph = make_fx(torch.func.functionalize(plain))(self.operands, gradients).graph
        shapes = [tuple(size_in(self.env, size) for size in tensor.shape) for tensor in (*self.tensors, *self.outputs)]
        numbers = tuple(size_in(self.env, operand) for operand in self.operands if not isinstance(operand, Tensor))
        wanted = tuple(self.wanted) if given else ()
        return Trace(graph, self.env, tuple(shapes[: len(self.tensors)]), numbers, tuple(shapes[len(self.tensors) :]), wanted, len(given))
