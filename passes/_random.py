"""Private to capture and normalize: random operations of a model, beside dropout, written with numbers between 0 and 1 of our own.

    %y = rand([b, 1, 1])              %y = uniform([b, 1, 1], %rng_key, site)
    %y = bernoulli(%x, 0.9)           %u = uniform(…), %k = lt(%u, 0.9), %y = to(%k, f32)
    %y = feature_dropout(%x, 0.1)     %u = uniform([b, c, 1]), %k = ge(%u, 0.1), %n = to(%k, f32), %s = mul(%n, 1 / 0.9), %y = mul(%x, %s)

They are made whole on every rank; what a region needs cut of them is sliced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from tpcompile import collectives
from tpcompile.collectives import ops
from tpcompile.factors import LayoutError
from tpcompile.ir import Draft
from tpcompile.layout import Size, TensorType
from tpcompile.passes._lengths import size_node
from tpcompile.rules import argument, op_name

aten = torch.ops.aten
ALPHA = 1.7580993408473766
"""The negative of what SELU tends to on the left: Klambauer et al., Self-Normalizing Neural Networks (2017), section 2."""


@dataclass(frozen=True)
class Spelling:
    """One call of a random operation, and what its numbers are drawn with."""

    draft: Draft
    node: fx.Node
    key: fx.Node
    site: int
    rows: int

    @property
    def kind(self) -> TensorType:
        kind = self.draft.types[self.node.name]
        assert isinstance(kind, TensorType)
        return kind

    @property
    def source(self) -> fx.Node:
        return self.node.all_input_nodes[0]

    def call(self, target: Callable[..., object], *args: object, dtype: torch.dtype | None = None) -> fx.Node:
        """A call whose value is as large as that of its first operand."""
        (first, *_) = [argument for argument in args if isinstance(argument, fx.Node)]
        before = self.draft.types[first.name]
        assert isinstance(before, TensorType)
        return self.draft.call(target, *args, type=TensorType(dtype or before.dtype, before.shape), like=self.node)

    def uniform(self, shape: tuple[Size, ...], sizes: list[object]) -> fx.Node:
        args = (sizes, self.key, self.site, *((self.rows,) if self.rows != -1 else ()))
        dtype = self.kind.dtype
        return self.draft.call(ops.uniform.default, *args, type=TensorType(dtype, shape), like=self.node, dtype=dtype)

    def alike(self, dims: int | None = None) -> fx.Node:
        """Numbers in the shape of the operand, or in its first dimensions alone."""
        kept = len(self.kind.shape) if dims is None else dims
        shape = tuple(size if dim < kept else 1 for dim, size in enumerate(self.kind.shape))
        return self.uniform(shape, [self.size(dim, size) for dim, size in enumerate(shape)])

    def size(self, dim: int, size: Size) -> object:
        try:
            return size_node(self.draft, size)
        except LayoutError:
            return self.draft.call(aten.sym_size.int, self.source, dim, type=size, like=self.node)

    def cast(self, truth: fx.Node) -> fx.Node:
        return self.call(aten.to.dtype, truth, self.kind.dtype, dtype=self.kind.dtype)


def _rand(s: Spelling) -> fx.Node:
    return s.uniform(s.kind.shape, list(argument(s.node, "size")))


def _bernoulli(s: Spelling) -> fx.Node:
    return s.cast(s.call(aten.lt.Scalar, s.alike(), argument(s.node, "p"), dtype=torch.bool))


def _bernoulli_of(s: Spelling) -> fx.Node:
    return s.cast(s.call(aten.lt.Tensor, s.alike(), s.source, dtype=torch.bool))


def _between(s: Spelling) -> fx.Node:
    low, high = argument(s.node, "from"), argument(s.node, "to")
    return s.call(aten.add.Tensor, s.call(aten.mul.Tensor, s.alike(), high - low), low)


def _exponential(s: Spelling) -> fx.Node:
    """The inverse of its distribution function, and never zero: its logarithm is Gumbel's noise."""
    drawn = s.call(aten.neg.default, s.call(aten.log1p.default, s.call(aten.neg.default, s.alike())))
    return s.call(aten.div.Tensor, s.call(aten.clamp_min.default, drawn, torch.finfo(s.kind.dtype).eps / 2), argument(s.node, "lambd"))


def _normal(s: Spelling, uniform: fx.Node) -> fx.Node:
    """The inverse of the normal distribution's function, of the middles of the steps between numbers: √2 erfinv(2 u - 1)."""
    middle = 2.0 ** -collectives.DIGITS[s.kind.dtype] - 1
    centred = s.call(aten.add.Tensor, s.call(aten.mul.Tensor, uniform, 2.0), middle)
    return s.call(aten.mul.Tensor, s.call(aten.erfinv.default, centred), 2**0.5)


def _normal_of(s: Spelling) -> fx.Node:
    return s.call(aten.add.Tensor, s.call(aten.mul.Tensor, _normal(s, s.alike()), argument(s.node, "std")), argument(s.node, "mean"))


def _features(s: Spelling) -> fx.Node:
    p = argument(s.node, "p")
    kept = s.cast(s.call(aten.ge.Scalar, s.alike(2), p, dtype=torch.bool))
    return s.call(aten.mul.Tensor, s.source, s.call(aten.mul.Tensor, kept, 0.0 if p >= 1 else 1 / (1 - p)))


def _alpha(s: Spelling) -> fx.Node:
    """Dropped elements are -ALPHA, and an affine map keeps mean and variance: the same paper, appendix L."""
    p = argument(s.node, "p")
    if p >= 1:
        return s.call(aten.mul.Tensor, s.source, 0.0)
    scale = 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
    kept = s.cast(s.call(aten.ge.Scalar, s.alike(), p, dtype=torch.bool))
    dropped = s.call(aten.mul.Tensor, s.call(aten.sub.Tensor, kept, 1 - p), ALPHA * scale)
    return s.call(aten.add.Tensor, s.call(aten.mul.Tensor, s.source, s.call(aten.mul.Tensor, kept, scale)), dropped)


SPELLINGS: Mapping[str, Callable[[Spelling], fx.Node]] = {
    "aten.alpha_dropout.default": _alpha,
    "aten.bernoulli.default": _bernoulli_of,
    "aten.bernoulli.p": _bernoulli,
    "aten.exponential.default": _exponential,
    "aten.feature_dropout.default": _features,
    "aten.normal_functional.default": _normal_of,
    "aten.rand.default": _rand,
    "aten.rand_like.default": lambda s: s.alike(),
    "aten.randn.default": lambda s: _normal(s, _rand(s)),
    "aten.randn_like.default": lambda s: _normal(s, s.alike()),
    "aten.uniform.default": _between,
}


def is_random(node: fx.Node) -> bool:
    """Whether a call is one of these and draws something, from torch's own generator."""
    if node.op != "call_function" or op_name(node) not in SPELLINGS or argument(node, "generator") is not None:
        return False
    return "dropout" not in op_name(node) or bool(argument(node, "p") > 0 and argument(node, "train"))
