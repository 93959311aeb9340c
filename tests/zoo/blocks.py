"""Which models' blocks are attention and MLP, read off the captured graph before anything is cut.

    attention   a softmax between two products of values, or fused attention
    MLP         a product with a weight whose input comes, through an activation, from products with weights alone

A model is counted where every layer has one of these. Of its block weights (parameters of two or more dimensions under the layers' paths)
two kinds are whole by law: routers, whose product ends in a choice; and down-projections, whose product meets a norm over the dimension
that it makes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from tpcompile.ir import Program
from tpcompile.layout import TensorType, product
from tpcompile.rules import op_name
from zoo.laws import NORMED, law


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUSED = "scaled_dot_product_attention"
PRODUCTS = words("_grouped_mm addmm baddbmm bmm conv1d conv2d einsum grouped_mm_fallback linear matmul mm") | {FUSED}
SOFTMAX = words("_safe_softmax log_softmax softmax")
NORMS = words("layer_norm rms_norm")
MIXERS = NORMS | words("cumprod cumsum embedding flip logcumsumexp mean roll rsqrt sum var")
"""What mixes positions or channels: a value that comes through one of these is no MLP's."""
ACTIVATIONS = words("celu elu erf gelu hardswish leaky_relu mish pow relu relu6 selu sigmoid silu softplus square tanh")


def word(node: fx.Node) -> str:
    """`max` for `aten.max.dim`."""
    if node.op != "call_function":
        return node.op
    parts = op_name(node).split(".")
    return parts[1] if len(parts) > 2 else parts[0]


@dataclass(frozen=True)
class Layer:
    path: str
    attention: bool
    mlp: bool

    def __str__(self) -> str:
        return " + ".join(name for name, found in (("attention", self.attention), ("MLP", self.mlp)) if found) or "other"


@dataclass(frozen=True)
class Blocks:
    """The layers of a captured model, and its block weights."""

    program: Program
    rows: set[fx.Node] = field(default_factory=set)  # products that end an attention or an MLP

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Where the layers are. Where none follows another, as one layer that runs again and again: the outermost numbered modules."""
        numbered = re.compile(r"(?:\w+\.)*?\d+(?=\.)")
        names = (numbered.match(name) for name in self.program.parameters.values())
        return self.program.layers or tuple(dict.fromkeys(name[0] for name in names if name)) or ("",)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        found: dict[str, set[str]] = {layer: set() for layer in self.paths}
        for node, kind in self.parts():
            if (layer := self.layer_of(node)) is not None:
                found[layer].add(kind)
        return tuple(Layer(path, "attention" in kinds, "MLP" in kinds) for path, kinds in found.items())

    @property
    def are_attention_and_mlp(self) -> bool:
        kinds = [(layer.attention, layer.mlp) for layer in self.layers]
        return all(any(kind) for kind in kinds) and any(kind[0] for kind in kinds) and any(kind[1] for kind in kinds)

    def summary(self) -> str:
        """2 × attention + MLP, 1 × other"""
        return ", ".join(f"{count} × {kind}" for kind, count in Counter(map(str, self.layers)).items())

    @cached_property
    def weights(self) -> Mapping[str, int]:
        """Elements of every block weight, by placeholder; those that are whole by law are left out."""
        found = {}
        for placeholder, name in self.program.parameters.items():
            kind = self.program.types[placeholder]
            inside = any(name == layer or name.startswith(layer + ".") or not layer for layer in self.paths)
            if inside and isinstance(kind, TensorType) and len(kind.shape) > 1 and placeholder not in self.by_law:
                found[placeholder] = int(product(kind.shape))
        return found

    @cached_property
    def by_law(self) -> Mapping[str, str]:
        """Routers and down-projections, by placeholder."""
        _ = self.layers  # finds the rows
        found: dict[str, str] = {}
        for node in self.program.graph.nodes:
            if not self.weighted(node) or self.layer_of(node) is None:
                continue
            reason = law(self.program, node, self.constant)
            if reason == NORMED and node in self.rows:
                continue
            for weight in self.parameters_of(node) if reason else ():
                found[weight] = reason
        return found

    # ------------------------------------------------------------------------------------------ parts of layers

    def parts(self) -> Iterator[tuple[fx.Node, str]]:
        """The products, softmaxes and fused attentions that make a layer attention or MLP."""
        for node in self.program.graph.nodes:
            if word(node) == FUSED or (word(node) in SOFTMAX and self.between_products(node)):
                self.rows.update(found for found in self.after(node, self.weighted))
                yield node, "attention"
            elif self.weighted(node) and self.ends_mlp(node):
                self.rows.add(node)
                yield node, "MLP"

    def between_products(self, softmax: fx.Node) -> bool:
        scores = list(self.before(softmax, is_product))
        return any(self.of_values(node) for node in scores) and any(map(self.of_values, self.after(softmax, is_product)))

    def ends_mlp(self, row: fx.Node) -> bool:
        """Whether a product's input comes through an activation from products with weights, and from nothing else in its layer."""
        activated, products = False, 0
        stack, seen = self.data_inputs(row), set[fx.Node]()
        while stack:
            node = stack.pop()
            if node in seen or node in self.constant:
                continue
            seen.add(node)
            if is_product(node):
                if not self.weighted(node):
                    return False
                products += self.layer_of(node) == self.layer_of(row)
                continue
            if node.op != "call_function" or word(node) in SOFTMAX | MIXERS:
                return False
            activated |= word(node) in ACTIVATIONS
            stack += self.data_inputs(node)
        return activated and products > 0

    def data_inputs(self, node: fx.Node) -> list[fx.Node]:
        """The operands that hold numbers, not places or masks."""

        def floating(kind: object) -> bool:
            first = kind[0] if isinstance(kind, tuple) and kind else kind
            return isinstance(first, TensorType) and first.dtype.is_floating_point

        return [operand for operand in node.all_input_nodes if floating(self.program.types.get(operand.name))]

    # -------------------------------------------------------------------------------------------------- the graph

    @cached_property
    def constant(self) -> frozenset[fx.Node]:
        """Parameters, buffers, and what is computed from them alone."""
        found: set[fx.Node] = set()
        given = {*self.program.parameters, *self.program.buffers, *self.program.constants}
        for node in self.program.graph.nodes:
            inside = node.op == "call_function" and node.all_input_nodes and found.issuperset(node.all_input_nodes)
            if node.name in given or inside:
                found.add(node)
        return frozenset(found)

    def weighted(self, node: fx.Node) -> bool:
        return is_product(node) and any(self.parameters_below(operand) for operand in node.all_input_nodes if operand in self.constant)

    def of_values(self, node: fx.Node) -> bool:
        return is_product(node) and sum(operand not in self.constant for operand in node.all_input_nodes) > 1

    def parameters_below(self, node: fx.Node) -> set[str]:
        """The parameters that a constant value is computed from."""
        names, stack, seen = set(), [node], set[fx.Node]()
        while stack:
            value = stack.pop()
            if value not in seen:
                seen.add(value)
                names |= {value.name} & self.program.parameters.keys()
                stack += value.all_input_nodes
        return names

    def parameters_of(self, node: fx.Node) -> set[str]:
        return set().union(*(self.parameters_below(operand) for operand in node.all_input_nodes if operand in self.constant))

    def layer_of(self, node: fx.Node) -> str | None:
        source = self.program.sources.get(node.name)
        if self.paths == ("",):
            return ""
        inside = [layer for layer in self.paths if source and (source.path == layer or source.path.startswith(layer + "."))]
        return max(inside, key=len, default=None)

    def before(self, node: fx.Node, wanted: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
        """The nearest wanted nodes that a value comes from, with no product between."""
        return self.nearest(node, wanted, lambda n: [operand for operand in n.all_input_nodes if operand not in self.constant])

    def after(self, node: fx.Node, wanted: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
        """The nearest wanted nodes that a value goes to, with no product between."""
        return self.nearest(node, wanted, lambda n: list(n.users))

    def nearest(self, node: fx.Node, wanted: Callable[[fx.Node], bool], following: Callable[[fx.Node], list[fx.Node]]) -> Iterator[fx.Node]:
        stack, seen = following(node), set[fx.Node]()
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            if wanted(value):
                yield value
            elif not is_product(value) and word(value) not in NORMS | {"rsqrt"}:
                stack += following(value)


def is_product(node: fx.Node) -> bool:
    return word(node) in PRODUCTS
