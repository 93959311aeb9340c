"""Private to plan: lone products with a weight, which no region wants, cut by themselves.

    column   every rank makes some of the output's channels, and they are gathered:   y[n] = gather(W[n@tp, k] x[k])
    row      every rank takes some of the input's, and the partial sums are reduced:   y[n] = reduce(W[n, k@tp] x[k@tp])

For every token the gradient of x is reduced either way, which is 2k numbers sent where an all-reduce sends each twice; a column gathers
n in forward and nothing in backward, a row reduces 2n. So it is a column, unless what a row makes is added to another row's partial sum:
that is reduced anyhow.

Lone is what stands in a repeated layer and holds a considerable part of its weights. Three kinds of products stay whole as they do
elsewhere: those that choose (routers); those whose value alone is normed, or is all that other products read (down-projections of
low rank); and those around a product of values that is whole (attention with too few heads, a state space): it stays whole entirely.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.ir import Program
from tpcompile.layout import Cut, Factor, Layout, Range, TensorType, product
from tpcompile.operation import attends
from tpcompile.passes._trim import reads
from tpcompile.passes._weights import contracts, seeds, weight_values
from tpcompile.rules import Bound, Op, Token, backward, bind_rule, forward, has_rule, op_name, opened, view_op

CONSIDERABLE = 64
"""A lone product is cut if it has one in so many of its layer's weights: one of h·h has, beside attention and an MLP of 12·h·h in all; one
that makes a number for each head has not."""

CHOICES = frozenset(["argmax", "argsort", "sort", "topk"])
NORMS = frozenset(["group_norm", "layer_norm", "linalg_vector_norm", "rms_norm", "var"])

Way = Literal["column", "row"]
Layouts = dict[str, Layout | tuple[Layout, ...]]
Rows = dict[str, tuple[Layout, ...]]


@dataclass(frozen=True)
class Lone:
    """The lone products of a program, beside regions: the values that these cut, and their rows."""

    program: Program
    cut: Collection[str]
    rows: Collection[str]

    def products(self) -> Iterator[fx.Node]:
        """Those that are worth cutting, in the graph's order."""
        for node in self.program.graph.nodes:
            if node in self.weighted and not self.is_taken(node) and self.is_considerable(node) and not self.stays_whole(node):
                yield node

    def is_taken(self, node: fx.Node) -> bool:
        return node.name in self.cut or node.name in self.rows

    def ways(self, node: fx.Node) -> tuple[Way, Way]:
        """How to cut a product, the cheaper way first."""
        (user, *others) = node.users
        joins = not others and op_name(user) == "aten.add.Tensor" and any(operand.name in self.rows for operand in user.all_input_nodes)
        return ("row", "column") if joins else ("column", "row")

    @cached_property
    def weights(self) -> frozenset[fx.Node]:
        return weight_values(self.program)

    @cached_property
    def weighted(self) -> frozenset[fx.Node]:
        return frozenset(node for node in self.program.graph.nodes if any(seeds(self.program, node, self.weights)))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Elements of the parameters of every repeated layer."""
        found = dict.fromkeys(self.program.layers, 0)
        for placeholder, name in self.program.parameters.items():
            if layer := self.layer(name):
                found[layer] += self.size(placeholder)
        return found

    def size(self, placeholder: str) -> int:
        kind = self.program.types[placeholder]
        assert isinstance(kind, TensorType)
        return int(product(kind.shape))

    def layer(self, path: str) -> str:
        return max((layer for layer in self.program.layers if path.startswith(f"{layer}.")), key=len, default="")

    def is_considerable(self, node: fx.Node) -> bool:
        source = self.program.sources.get(node.name)
        layer = self.layer(f"{source.path}.") if source else ""
        own = sum(self.size(value.name) for value in self.weights_of(node) if value.name in self.program.parameters)
        return bool(layer) and bool(node.users) and own * CONSIDERABLE >= self.sizes[layer]

    def weights_of(self, node: fx.Node) -> set[fx.Node]:
        """The weights of a product, and what they are computed from."""
        todo, seen = [operand for operand in node.all_input_nodes if operand in self.weights], set[fx.Node]()
        while todo:
            if (value := todo.pop()) not in seen:
                seen.add(value)
                todo += value.all_input_nodes
        return seen

    def stays_whole(self, node: fx.Node) -> bool:
        weights = self.weights_of(node)
        is_shared = any(value.name in self.cut or sum(map(reads, value.users)) > 1 for value in weights)
        inside = any(operand.name in self.cut for operand in node.all_input_nodes)
        return is_shared or inside or self.feeds_products(node) or self.comes_of(node) or self.meets(node)

    def feeds_products(self, node: fx.Node) -> bool:
        """Whether a product makes fewer channels than it takes, for other products alone: the first of a low-rank pair."""
        narrow = self.program.types[node.name], self.program.types[node.all_input_nodes[0].name]
        sizes = [kind.shape[-1] for kind in narrow if isinstance(kind, TensorType) and kind.shape]
        shrinks = len(sizes) == 2 and all(isinstance(size, int) for size in sizes) and sizes[0] < sizes[1]
        return shrinks and all(user in self.weighted for user in node.users)

    def mixes_whole(self, node: fx.Node) -> bool:
        """Whether an operation is a softmax or a product of values, and no region's."""
        if node.op != "call_function" or self.is_taken(node) or node in self.weights or node in self.weighted:
            return False
        if attends(op_name(node)):
            return True
        kind = self.program.types.get(node.name)
        return isinstance(kind, TensorType) and has_rule(op := view_op(node, self.program.types)) and contracts(op)

    def comes_of(self, node: fx.Node) -> bool:
        """Whether what a product takes comes of a mixture that is whole, with no other product with a weight between."""
        todo, seen = list(node.all_input_nodes), set[fx.Node]()
        while todo:
            value = todo.pop()
            if value in seen or value in self.weights or value in self.weighted:
                continue
            if self.mixes_whole(value) and "softmax" not in op_name(value):
                return True
            seen.add(value)
            todo += value.all_input_nodes
        return False

    def meets(self, node: fx.Node) -> bool:
        """Whether, before another product with a weight, a choice or a mixture reads a product's value, or a norm that value alone."""
        todo, seen = [(node, True, False)], {node}
        while todo:
            value, alone, squared = todo.pop()
            for user in value.users:
                word = word_of(user)
                if user in self.weighted or word == "detach" or not isinstance(self.program.types.get(user.name), (TensorType, tuple)):
                    continue
                operands = [operand for operand in user.all_input_nodes if self.is_floating(operand)]
                square = squared or word in ("pow", "square") or (word == "mul" and operands == [value])
                lonely = alone and all(operand in seen or operand in self.weights for operand in operands)
                if self.mixes_whole(user) or chooses(user) or (lonely and (word in NORMS or (word == "mean" and square))):
                    return True
                if user not in seen:
                    seen.add(user)
                    todo.append((user, lonely, square))
        return False

    def is_floating(self, node: fx.Node) -> bool:
        kind = self.program.types.get(node.name)
        first = kind[0] if isinstance(kind, tuple) and kind else kind
        return isinstance(first, TensorType) and first.dtype.is_floating_point


def word_of(node: fx.Node) -> str:
    """`max` for `aten.max.dim`."""
    name, *rest = op_name(node).split(".")
    return rest[0] if rest else name


def chooses(node: fx.Node) -> bool:
    """Whether an operation finds places by the numbers there: `max` does where its indices are used."""
    word = word_of(node)
    return word in CHOICES or (word == "max" and any(op_name(item) == "getitem" and item.args[1] == 1 for item in node.users))


def cut_alone(program: Program, node: fx.Node, way: Way, axis: str, ranges: Callable[[int], tuple[Range, ...]]) -> tuple[Rows, Layouts]:
    """The layouts of a product that is cut by itself: as a row what it takes, as a column what it makes; and those of its weights.

    Raises LayoutError where it cannot be cut so.
    """
    op, weights = view_op(node, program.types), weight_values(program)
    if opened(op) is not op:
        raise LayoutError("its dimensions are products")
    bound = bind_rule(op)
    cut = letter(op, bound, way, weights)
    size = bound.sizes[cut]
    if not isinstance(size, int):
        raise LayoutError("its size is not known before it runs")
    places = Cut(axis, ranges(size))
    ins = tuple(placed(tokens, kind, cut, places) for tokens, kind in zip(bound.ins, op.ins, strict=True))
    (made,) = forward(op, ins)
    if (made.is_cut, made.partial) != ((True, ()) if way == "column" else (False, (axis,))):
        raise LayoutError(f"{op.name} does not make a {way} of it")
    layouts: Layouts = {}
    for operand, layout in zip(op.operands, ins, strict=True):
        if operand in weights and layout.is_cut:
            hold(program, operand, layout, layouts)
    return ({node.name: ins}, layouts) if way == "row" else ({}, {**layouts, node.name: made})


def letter(op: Op, bound: Bound, way: Way, weights: Collection[fx.Node]) -> str:
    """The dimension that a weight brings to the product, or has in common with what the product takes; the longest of several."""
    sides: dict[bool, set[str]] = {True: set(), False: set()}
    for operand, tokens in zip(op.operands, bound.ins, strict=True):
        sides[operand in weights] |= {token.letter for token in tokens}
    kept = {token.letter for token in bound.outs[0]}
    found = (sides[True] & kept) - sides[False] if way == "column" else (sides[True] & sides[False]) - kept
    known = {name: size for name in found - bound.never if isinstance(size := bound.sizes[name], int)}
    if not known:
        raise LayoutError(f"{op.name} has no dimension to cut as a {way}")
    return max(sorted(known), key=known.__getitem__)


def placed(tokens: Iterable[Token], kind: TensorType, cut: str, places: Cut) -> Layout:
    sizes = zip(tokens, kind.shape, strict=True)
    return Layout(tuple(((Factor(size, places if token.letter == cut and size != 1 else None),),) for token, size in sizes))


def hold(program: Program, node: fx.Node, layout: Layout, layouts: Layouts) -> None:
    """Give a weight its layout, and what it is computed from the one that this needs."""
    layouts[node.name] = layout
    if node.name not in program.parameters:
        op = view_op(node, program.types)
        for operand, need in zip(op.operands, backward(op, [layout]), strict=True):
            if need.is_cut:
                hold(program, operand, need, layouts)
