"""Programs of one operation, cut on two ranks and run beside the whole: what the rules' proofs are made of."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cuts import cut, put_together
from torch import Tensor, fx

from tpcompile.ir import Input, Plan, Program, Sharded, Type
from tpcompile.layout import Cut, Dim, Factor, Layout, TensorType, whole
from tpcompile.passes._entering import differentiable, entering
from tpcompile.passes.rewrite import rewrite
from tpcompile.rules import Op, view_op
from tpcompile.simulate.lockstep import run
from tpcompile.verify import verify

RANKS = 2


@dataclass(frozen=True)
class Operand:
    """A tensor in an example's arguments: random numbers of a kind, the same every time."""

    shape: tuple[int, ...]
    kind: str = "float"  # "single", "positive", "unit", "signs", "equal", "fixed", "complex", "bool", "every", "int", or "given"
    high: int = 2  # for whole numbers
    low: int = 0
    given: tuple[int, ...] = ()

    def make(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        match self.kind:
            case "int":
                return torch.randint(self.low, self.high, self.shape, generator=generator)
            case "given":
                return torch.tensor(self.given, dtype=torch.int32)
            case "equal":
                return torch.randint(0, 2, self.shape, generator=generator).double()
            case "single":
                return torch.randn(self.shape, generator=generator)
            case "bool":
                return torch.rand(self.shape, generator=generator) > 0.4
            case "every":
                return torch.ones(self.shape, dtype=torch.bool)
            case "signs":
                return torch.where(torch.rand(self.shape, generator=generator) > 0.5, 1.0, -1.0).double()
            case "unit":
                return torch.rand(self.shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1
            case "complex":
                return torch.view_as_complex(torch.randn((*self.shape, 2), generator=generator, dtype=torch.float64))
        value = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        return value.abs() + 0.5 if self.kind in ("positive", "fixed") else value


@dataclass(frozen=True)
class Example:
    """Arguments of a call; its operands are among them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def f(*shape: int) -> Operand:
    return Operand(shape)


def pos(*shape: int) -> Operand:
    return Operand(shape, "positive")


def unit(*shape: int) -> Operand:
    """Between 0.1 and 0.9: probabilities."""
    return Operand(shape, "unit")


def signs(*shape: int) -> Operand:
    """1 and -1, as numbers that no gradient reaches."""
    return Operand(shape, "signs")


def fixed(*shape: int) -> Operand:
    """Positive numbers that no gradient reaches: a buffer's."""
    return Operand(shape, "fixed")


def i(*shape: int, high: int = 2, low: int = 0) -> Operand:
    return Operand(shape, "int", high, low)


def ends(*values: int) -> Operand:
    """Where each group of rows ends."""
    return Operand((len(values),), "given", given=values)


def equal(*shape: int) -> Operand:
    """Numbers of which several are the largest."""
    return Operand(shape, "equal")


def single(*shape: int) -> Operand:
    """For operations that know no float64."""
    return Operand(shape, "single")


def m(*shape: int) -> Operand:
    return Operand(shape, "bool")


def every(*shape: int) -> Operand:
    """A mask that leaves nothing out."""
    return Operand(shape, "every")


def z(*shape: int) -> Operand:
    return Operand(shape, "complex")


def e(*args: Any, **kwargs: Any) -> Example:
    return Example(args, kwargs)


def overload(name: str) -> Any:
    """`aten.linear.default` as an operator."""
    space, packet, variant = name.split(".")
    if space == "transformers":
        importlib.import_module("transformers.integrations.moe")
    return getattr(getattr(getattr(torch.ops, space), packet), variant)


@dataclass(frozen=True)
class Call:
    """A program that makes one call and returns all that it makes."""

    program: Program
    node: fx.Node
    values: Mapping[str, Tensor]

    @property
    def op(self) -> Op:
        return view_op(self.node, self.program.types)

    @classmethod
    def of(cls, name: str, example: Example) -> Call:
        graph, values, types, fixed = fx.Graph(), dict[str, Tensor](), dict[str, Type](), set[str]()

        def placed(argument: Any) -> Any:
            if isinstance(argument, Operand):
                node = graph.placeholder(f"x{len(values)}")
                values[node.name] = argument.make(len(values))
                types[node.name] = type_of(values[node.name])
                fixed.update([node.name] if argument.kind in ("fixed", "signs") else [])
                return node
            if isinstance(argument, (tuple, list)):
                return type(argument)(placed(item) for item in argument)
            return argument

        args, kwargs = placed(example.args), {key: placed(value) for key, value in example.kwargs.items()}
        node = graph.call_function(overload(name), args, kwargs)
        made = node.target(*fx.map_arg(args, lambda n: values[n.name]), **fx.map_arg(kwargs, lambda n: values[n.name]))  # type: ignore[operator]
        if isinstance(made, Tensor):
            types[node.name], returned = type_of(made), [node]
        else:
            types[node.name] = tuple(type_of(part) for part in made)
            returned = [graph.call_function(operator.getitem, (node, index)) for index in range(len(made))]
            types |= {item.name: type_of(part) for item, part in zip(returned, made, strict=True)}
        graph.output(tuple(returned))
        trained = {key: key for key, value in values.items() if _is_real(value) and key not in fixed}
        inputs = {key: Input(key, None) for key in values if key not in trained}
        return cls(Program(graph, types, {}, trained, {}, {}, inputs, {}, {}, (), None, None), node, values)

    def sharded(self, outs: Sequence[Layout], wants: Sequence[Layout], *, given: bool, row: bool = False) -> Sharded:
        """The call with these layouts of outputs; its operands `given` as they are needed, or whole."""
        layouts: dict[str, Layout | tuple[Layout, ...]] = {}
        for name, kind in self.program.types.items():
            layouts[name] = whole(*kind.shape) if isinstance(kind, TensorType) else tuple(whole(*part.shape) for part in kind)  # type: ignore[union-attr]
        if given:
            layouts |= {operand.name: want for operand, want in zip(self.op.operands, wants, strict=True)}
        items = [user for user in self.node.users if user.op == "call_function"]
        layouts[self.node.name] = tuple(outs) if items else outs[0]
        layouts |= {item.name: outs[item.args[1]] for item in items}
        rows = {self.node.name: tuple(wants)} if row else {}
        entered = entering(self.program, layouts, rows, differentiable(self.program))
        return Sharded(self.program, Plan((), ()), "tp", RANKS, layouts, rows, entered)

    def agrees(self, sharded: Sharded) -> None:
        """Run all ranks in lockstep: every output, every piece of an output, and every gradient is the whole call's, or a piece of it."""
        local = verify(rewrite(verify(sharded)))
        held = {name: layout_of(sharded, name) for name in self.values}
        pieces = {name: [self.leaf(name, cut(value, held[name], c)) for c in range(RANKS)] for name, value in self.values.items()}
        values = run(local.graph, pieces, RANKS)
        wholes = {name: self.leaf(name, value) for name, value in self.values.items()}
        expected = run(self.program.graph, {name: [value] for name, value in wholes.items()}, 1)["output"][0]
        for index, made in enumerate(zip(*values["output"], strict=True)):
            assert all(_close(one, expected[index]) for one in made), f"output {index}"
        for node in self.program.graph.output_node().all_input_nodes:
            layout = layout_of(sharded, node.name)
            index = self.program.graph.output_node().args[0].index(node)  # type: ignore[union-attr]
            together = put_together([_plain(value) for value in values[node.name]], layout, expected[index].shape)
            assert _close(together, _plain(expected[index])), node.name
        if not any(value.requires_grad for value in expected):
            return
        for outputs in [*values["output"], expected]:
            _loss(outputs).backward(retain_graph=True)
        for name, value in wholes.items():
            for coordinate, piece in enumerate(pieces[name] if value.requires_grad else ()):
                want = torch.zeros_like(value) if value.grad is None else value.grad
                grad = torch.zeros_like(piece) if piece.grad is None else piece.grad
                assert _close(grad, cut(want, held[name], coordinate)), f"gradient of {name} on {coordinate}"

    def leaf(self, name: str, value: Tensor) -> Tensor:
        return value.detach().clone().requires_grad_(name in self.program.parameters)


def layout_of(sharded: Sharded, name: str) -> Layout:
    layout = sharded.layouts[name]
    assert isinstance(layout, Layout)
    return layout


def type_of(value: Tensor) -> TensorType:
    return TensorType(value.dtype, tuple(value.shape))


def uneven(size: int) -> tuple[tuple[int, int], ...]:
    """Two parts of unequal size, neither empty; of a dozen, in fours, which some kernels need."""
    at = size * 2 // 3 if size % 12 == 0 else size // 2 + 1 if size > 2 else 1
    return ((0, at), (at, size))


def cut_dim(size: int, at: int | None = None) -> Dim:
    """A dimension cut in two, at an index."""
    return ((Factor(size, Cut("tp", uneven(size) if at is None else ((0, at), (at, size)))),),)


def _is_real(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _plain(value: Tensor) -> Tensor:
    """Numbers that add up: whole numbers and truths as floating point, complex ones as pairs on a last dimension of their own."""
    return value.detach() if _is_real(value) else value.double()


def _close(a: Tensor, b: Tensor) -> bool:
    allowed = 1e-5 if a.dtype == torch.float32 else 1e-12
    return a.shape == b.shape and torch.allclose(a, b, rtol=allowed, atol=allowed, equal_nan=True)


def _loss(outputs: Sequence[Tensor]) -> Tensor:
    """Every output times fixed irregular weights."""
    total = torch.zeros((), dtype=torch.float64)
    for number, value in enumerate(outputs):
        if value.requires_grad:
            plain = torch.view_as_real(value) if value.is_complex() else value
            weights = torch.cos(torch.arange(plain.numel(), dtype=torch.float64) + number).reshape(plain.shape)
            total = total + (plain.nan_to_num(0.0, 0.0, 0.0) * weights).sum()
    return total
