"""Which dimensions of an autograd.Function's operands may be cut: proved on a trace of its forward and its backward.

Sizes that the code needs equal have one symbol in the trace, which is a letter of the rule:

    y = matmul(w, v), grad_w = matmul(g, v.mT), grad_v = matmul(w.mT, g)            "b m n!, b n! d -> b m d"

The backward must be linear in the gradients. A letter may then be cut if nothing depends on the size itself (no branch, no number), and
if the rules carry its cut through the graph: a piece of the operands gives that piece of the outputs, and with a piece of the outputs'
gradients that piece of the operands'. An operand that does not have the letter is whole; its gradient must be a sum over the pieces. Since
a trace takes no size for one, the letter is then set to one, and the same operations must be found.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from tpcompile.factors import LayoutError
from tpcompile.functions import Kept
from tpcompile.layout import Factor, Layout, Open, Size, TensorType, cut_factors, whole
from tpcompile.passes._linear import check_linear
from tpcompile.passes._traced import Example, Trace, Untraceable, traces
from tpcompile.rules import RESHAPES, Op, aten_names, forward, has_rule, op_name, view_op

MOST_OUTPUTS = 3
"""Of a Function with more outputs that may have a gradient no letter is cut: every set of them is traced."""

FILLED = aten_names("empty.memory_format full.default ones.default scalar_tensor.default zeros.default")
GROWN = aten_names("expand.default new_empty.default new_full.default new_ones.default new_zeros.default")
"""Operations that make a dimension of a given size, the same all along it: alone, or from an operand."""

COPIES = aten_names("alias.default clone.default contiguous.default detach.default")

SIZED = FILLED | GROWN | RESHAPES
"""Operations that may be given the size of what is cut: it is known what becomes of them."""

SHAPES = SIZED | COPIES | aten_names("squeeze.dim squeeze.dims")
"""Operations that may differ where a size is one, without a difference in what is computed."""


def proved(way: Kept, examples: Sequence[Example]) -> Kept:
    """The same call with its rule, or with the reason why it has none. Raises Untraceable."""
    found = traces(way, examples)
    if any(trace.is_random for trace in found):
        return replace(way, random=True, reason=f"{way.name} draws random numbers")
    if len(found) >= 2**MOST_OUTPUTS:
        return replace(way, reason=f"{way.name} has more than {MOST_OUTPUTS} outputs")
    try:
        for trace in found:
            check_linear(trace.graph, len(trace.outputs), trace.given)
    except LayoutError as error:
        return replace(way, reason=f"{way.name}: {error}")
    reasons: dict[Size, str] = {}
    letters = dict.fromkeys(size for shape in found[0].operands for size in shape if not isinstance(size, int))
    for letter in letters:
        try:
            _prove(way, examples, found, letter)
        except LayoutError as error:
            reasons[letter] = f"{way.name}: {error}"
    if letters.keys() == reasons.keys():
        return replace(way, reason=next(iter(reasons.values()), f"{way.name} has no dimension to cut"))
    return replace(way, rule=_text(found[0], reasons.keys()))


def _text(trace: Trace, never: Collection[Size]) -> str:
    names: dict[Size, str] = {}

    def token(size: Size) -> str:
        name = names.setdefault(size, f"z{len(names)}") if size != 1 else "1"
        return f"{name}!" if size != 1 and (isinstance(size, int) or size in never) else name

    left, right = (", ".join(" ".join(map(token, shape)) for shape in shapes) for shapes in (trace.operands, trace.outputs))
    return f"{left} -> {right}"


def _prove(way: Kept, examples: Sequence[Example], found: Sequence[Trace], letter: Size) -> None:
    """Raises LayoutError with the reason if a letter may not be cut."""
    for trace in found:
        if trace.operands != found[0].operands:
            raise LayoutError("its sizes depend on which outputs have a gradient")
        _check(trace, letter)
    tensors = [place for place, example in enumerate(examples) if example.dtype is not None]
    places = {(tensors[i], dim) for i, shape in enumerate(found[0].operands) for dim, size in enumerate(shape) if size == letter}
    try:
        single = traces(way, examples, frozenset(places))
    except Untraceable as error:
        raise LayoutError(f"with a size of one it cannot be traced: {error}") from error
    if [_steps(trace) for trace in found] != [_steps(trace) for trace in single]:
        raise LayoutError("it does something else where a size is one")


def _steps(trace: Trace) -> list[tuple[Any, ...]]:
    """What is computed, in order, with all that is no tensor and no size."""
    nodes = [node for node in trace.calls if op_name(node) not in SHAPES and _tensors(node.meta["val"]) and not _takes_all(trace, node)]
    return [(op_name(node), *(leaf for leaf in _leaves(node) if not isinstance(leaf, fx.Node))) for node in nodes]


def _takes_all(trace: Trace, node: fx.Node) -> bool:
    """x[:], which is left out where a size is one."""
    if op_name(node) != "aten.slice.Tensor":
        return False
    before, after = ([trace.size(size) for size in value.meta["val"].shape] for value in (node.all_input_nodes[0], node))
    return before == after


def _check(trace: Trace, letter: Size) -> None:
    """Cut a letter in all operands, and in the gradients of the outputs, and see what becomes of the results."""
    if not isinstance(letter, sympy.Symbol):
        raise LayoutError(f"it needs a size that is {letter}")
    for guard in trace.env.guards:
        rest = guard.expr.xreplace(trace.env.replacements)
        if letter in rest.free_symbols:
            raise LayoutError(f"it asks whether {rest}")
    if any(_has(size, letter) for size in trace.numbers) or any(
        _has(size, letter) and size != letter for s in trace.operands for size in s
    ):
        raise LayoutError("a size is computed from this one")
    results = _Carrier(trace, letter).run()
    outputs, gradients = results[: len(trace.outputs)], results[len(trace.outputs) :]
    for shape, layout in zip(trace.outputs, outputs, strict=True):
        if letter not in shape or layout != _cut(shape, letter):
            raise LayoutError("an output is not cut as its operands are")
    for place, gradient in zip(trace.wanted, gradients, strict=True):
        shape = trace.operands[place]
        if gradient is not None and gradient != _cut(shape, letter):
            raise LayoutError("a gradient is not cut as its operand is" if letter in shape else "a gradient is no sum over the pieces")


def _has(size: Size, letter: sympy.Basic) -> bool:
    return letter in sympy.sympify(size).free_symbols


def _cut(shape: Sequence[Size], letter: Size) -> Layout:
    """A value where it has the letter; the sum over the pieces where it has not."""
    return Layout(tuple(((Factor(size, Open(0) if size == letter else None),),) for size in shape), () if letter in shape else ("?",))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _leaves(node: fx.Node) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate((node.args, node.kwargs), found.append)
    return found


class _Carrier:
    """Carries the cut of one letter through a trace, by the rules. Raises LayoutError where they do not let it pass."""

    def __init__(self, trace: Trace, letter: sympy.Symbol) -> None:
        self.trace, self.letter = trace, letter
        self.types: dict[str, Any] = {}
        self.layouts: dict[fx.Node, tuple[Layout, ...]] = {}

    def run(self) -> list[Layout | None]:
        """The layouts of the trace's results, in order; None for one that is no tensor."""
        for node in self.trace.graph.nodes:
            if _tensors(node.meta.get("val")):
                self.visit(node)
        results: Any = self.trace.graph.output_node().args[0]
        return [self.layouts[value][0] if isinstance(value, fx.Node) else None for value in results]

    def visit(self, node: fx.Node) -> None:
        value = node.meta["val"]
        kinds = tuple(TensorType(v.dtype, tuple(map(self.trace.size, v.shape))) for v in _tensors(value))
        self.types[node.name] = kinds[0] if isinstance(value, Tensor) else kinds
        layouts: tuple[Layout, ...]
        if node.op == "placeholder":
            layouts = (_cut(kinds[0].shape, self.letter) if self.letter in kinds[0].shape else whole(*kinds[0].shape),)
        elif node.op == "call_function" and op_name(node) == "getitem":
            layouts = (self.layouts[node.args[0]][node.args[1]],)  # type: ignore[index]
        elif node.op == "call_function":
            layouts = self.call(view_op(node, self.types))
        else:
            layouts = tuple(whole(*kind.shape) for kind in kinds)
        for layout, kind in zip(layouts, kinds, strict=True):
            if any(_has(size, self.letter) and not cut_factors(dim) for dim, size in zip(layout.dims, kind.shape, strict=True)):
                raise LayoutError(f"{op_name(node)} makes a dimension of this size")
            if sum(bool(cut_factors(dim)) for dim in layout.dims) > 1:
                raise LayoutError(f"{op_name(node)} needs this dimension twice")
        self.layouts[node] = layouts

    def call(self, op: Op) -> tuple[Layout, ...]:
        values = [leaf.meta["val"] for leaf in _leaves(op.node) if isinstance(leaf, fx.Node)]
        sizes = [value.node.expr for value in values if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)]
        if op.name not in SIZED and any(_has(self.trace.env.replace(size), self.letter) for size in sizes):
            raise LayoutError(f"{op.name} computes with this size")
        ins = [self.layouts[operand][0] for operand in op.operands]
        if op.name in FILLED or (op.name in GROWN and not any(layout.partial for layout in ins)):
            return tuple(self.grown(layout) for layout in self.forward(op, ins))
        return self.forward(op, ins)

    def forward(self, op: Op, ins: Sequence[Layout]) -> tuple[Layout, ...]:
        if all(layout.is_whole for layout in ins):
            return tuple(whole(*kind.shape) for kind in op.outs)
        if not has_rule(op):
            raise LayoutError(f"no rule for {op.name}")
        if any(layout.partial for layout in ins) and op.name in COPIES:
            return (ins[0],)
        return tuple(forward(op, ins))

    def grown(self, layout: Layout) -> Layout:
        return Layout(
            tuple(((Factor(self.letter, Open(0)),),) if dim == ((Factor(self.letter),),) else dim for dim in layout.dims), layout.partial
        )
