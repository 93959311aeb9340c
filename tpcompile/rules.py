"""What every operation does to factors: one table, and the engine that reads it in both directions.

A rule names each dimension of each tensor operand by a letter, as in `"... k, n k, n -> ... n"` for a linear layer:

    ...   any leading dimensions, aligned from the right as in broadcasting
    k!    a factor that this operation needs whole (a softmax's, a norm's)
    h~    a factor that may be shorter in an operand, each index standing for several of the output's (key/value heads)
    1     a dimension of size one
    *     an operand that is needed whole;  _  one of which only type and size are read
    z     a letter that no output has is contracted: cut, it leaves a partial sum

An operand's dimension of size one where the letter is longer is broadcast, hence whole. A row whose value is a function computes its text
from the operation's arguments. In `ENDS` stand operations that a cut can end in though they are no sums of what the pieces give, in
`ALONG` those that a cut can go through along the dimension that they work on: rewrite writes them out. Views are no products of letters:
`RESHAPES` go through `factors.reshape`; `SPLITS` and `JOINS` (concatenations) through `rule_parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from tpcompile.factors import LayoutError, divides, in_steps, join, quotient, reshape
from tpcompile.functions import kept
from tpcompile.layout import (
    Cut,
    Dim,
    Even,
    Factor,
    Layout,
    Open,
    Size,
    TensorType,
    canonical,
    cut_factors,
    is_cut,
    same,
    size_of,
    whole,
    whole_dim,
)
from tpcompile.linear import is_linear
from tpcompile.operation import Op as Op
from tpcompile.operation import argument as argument
from tpcompile.operation import aten_names as aten_names
from tpcompile.operation import op_name as op_name
from tpcompile.operation import view_op as view_op
from tpcompile.rule_parts import joined, split, unjoined, unsplit
from tpcompile.rule_parts import opened as opened
from tpcompile.rule_texts import (
    added_up,
    along,
    attention,
    batch_normed,
    convolution,
    created,
    cross_entropy,
    difference,
    einsum,
    elements,
    exchanged,
    gathered,
    highest,
    index_selected,
    indexed,
    last,
    letters,
    looked_up,
    loss,
    moved,
    normalized,
    normed,
    padded,
    parted,
    patched,
    permuted,
    product_of_matrices,
    put,
    reduced,
    refolded,
    repeated,
    resized,
    scalar,
    scattered,
    stacked,
    tiled,
    transformed,
    unbound,
    windowed,
)

Rule = str | Callable[[Op], str]


# --- the table -------------------------------------------------------------------------------------------------------

RULES: Mapping[str, Rule] = {
    "aten._grouped_mm.default": "t! k, e! k n, e! -> t! n",
    "aten._log_softmax.default": lambda op: along(op),
    "aten._safe_softmax.default": lambda op: along(op),
    "aten._softmax.default": lambda op: along(op),
    "aten.adaptive_avg_pool1d.default": lambda op: resized(op, 1),
    "aten.adaptive_avg_pool2d.default": lambda op: resized(op, 2),
    "aten.adaptive_avg_pool3d.default": lambda op: resized(op, 3),
    "aten.adaptive_max_pool1d.default": lambda op: resized(op, 1),
    "aten.adaptive_max_pool2d.default": lambda op: resized(op, 2),
    "aten.adaptive_max_pool3d.default": lambda op: resized(op, 3),
    "aten.addmm.default": lambda op: f"{last('m n', op.rank(0))}, m k, k n -> m n",
    "aten.all.default": lambda op: scalar(op),
    "aten.amax.default": lambda op: reduced(op, never=True),
    "aten.amin.default": lambda op: reduced(op, never=True),
    "aten.any.default": lambda op: scalar(op),
    "aten.argmax.default": lambda op: reduced(op, never=True),
    "aten.argsort.default": lambda op: along(op),
    "aten.avg_pool1d.default": lambda op: resized(op, 1),
    "aten.avg_pool2d.default": lambda op: resized(op, 2),
    "aten.avg_pool3d.default": lambda op: resized(op, 3),
    "aten.baddbmm.default": lambda op: f"{last('b m n', op.rank(0))}, b m k, b k n -> b m n",
    "aten.batch_norm.default": lambda op: batch_normed(op),
    "aten.binary_cross_entropy.default": lambda op: loss(op, elements(op)),
    "aten.binary_cross_entropy_with_logits.default": lambda op: loss(op, elements(op)),
    "aten.bincount.default": "a! -> z!",
    "aten.bmm.default": "b m k, b k n -> b m n",
    "aten.chunk.default": lambda op: parted(op),
    "aten.col2im.default": lambda op: refolded(op),
    "aten.conv1d.default": lambda op: convolution(op, 1),
    "aten.conv1d.padding": lambda op: convolution(op, 1),
    "aten.conv2d.default": lambda op: convolution(op, 2),
    "aten.conv2d.padding": lambda op: convolution(op, 2),
    "aten.cosine_embedding_loss.default": lambda op: loss(op, elements(op, "z!", "z!")),
    "aten.cross_entropy_loss.default": lambda op: loss(op, cross_entropy(op)),
    "aten.cummax.default": lambda op: along(op, outputs=2),
    "aten.cumprod.default": lambda op: along(op),
    "aten.cumsum.default": lambda op: along(op),
    "aten.diff.default": lambda op: difference(op),
    "aten.einsum.default": lambda op: einsum(op),
    "aten.dot.default": "k, k ->",
    "aten.embedding.default": "v! h, ... -> ... h",
    "aten.expand.default": "... -> ...",
    "aten.expand_as.default": "..., ... -> ...",
    "aten.fft_fft.default": lambda op: transformed(op),
    "aten.fft_fftn.default": lambda op: transformed(op),
    "aten.fft_ifft.default": lambda op: transformed(op),
    "aten.fft_ifftn.default": lambda op: transformed(op),
    "aten.fft_irfft.default": lambda op: transformed(op),
    "aten.fft_rfft.default": lambda op: transformed(op),
    "aten.flip.default": lambda op: along(op, "dims"),
    "aten.gather.default": lambda op: gathered(op),
    "aten.group_norm.default": lambda op: f"{letters(op, 0, never=range(1, op.rank(0)))}, *, * -> {letters(op, 0)}",
    "aten.hinge_embedding_loss.default": lambda op: loss(op, elements(op)),
    "aten.histc.default": lambda op: f"{letters(op, 0, never=range(op.rank(0)))} -> z!",
    "aten.huber_loss.default": lambda op: loss(op, elements(op)),
    "aten.im2col.default": lambda op: refolded(op),
    "aten.index.Tensor": lambda op: indexed(op),
    "aten.index_put.default": lambda op: put(op),
    "aten.index_select.default": lambda op: index_selected(op),
    "aten.kl_div.default": lambda op: loss(op, elements(op)),
    "aten.l1_loss.default": lambda op: loss(op, elements(op)),
    "aten.layer_norm.default": lambda op: normed(op),
    "aten.linalg_vector_norm.default": lambda op: reduced(op, never=True),
    "aten.linear.default": "... k, n k, n -> ... n",
    "aten.log_softmax.int": lambda op: along(op),
    "aten.logsumexp.default": lambda op: reduced(op, never=True),
    "aten.margin_ranking_loss.default": lambda op: loss(op, elements(op)),
    "aten.masked_fill.Tensor": "..., ..., ... -> ...",
    "aten.matmul.default": lambda op: product_of_matrices(op),
    "aten.max.default": lambda op: scalar(op),
    "aten.max.dim": lambda op: reduced(op, never=True, outputs=2),
    "aten.max_pool1d.default": lambda op: resized(op, 1),
    "aten.max_pool2d.default": lambda op: resized(op, 2),
    "aten.max_pool2d_with_indices.default": lambda op: resized(op, 2),
    "aten.max_pool3d.default": lambda op: resized(op, 3),
    "aten.mean.default": lambda op: scalar(op),
    "aten.mean.dim": lambda op: reduced(op, never=True),
    "aten.min.default": lambda op: scalar(op),
    "aten.min.dim": lambda op: reduced(op, never=True, outputs=2),
    "aten.mm.default": "m k, k n -> m n",
    "aten.movedim.int": lambda op: moved(op),
    "aten.mT.default": lambda op: permuted(op, [*range(op.rank(0) - 2), op.rank(0) - 1, op.rank(0) - 2]),
    "aten.mse_loss.default": lambda op: loss(op, elements(op)),
    "aten.mv.default": "m k, k -> m",
    "aten.new_empty.default": lambda op: created(op),
    "aten.new_full.default": lambda op: created(op),
    "aten.new_ones.default": lambda op: created(op),
    "aten.new_zeros.default": lambda op: created(op),
    "aten.nll_loss_nd.default": lambda op: loss(op, cross_entropy(op)),
    "aten.numpy_T.default": lambda op: permuted(op, list(reversed(range(op.rank(0))))),
    "aten.one_hot.default": lambda op: f"{letters(op, 0)} -> {letters(op, 0)} Z",
    "aten.outer.default": "m, n -> m n",
    "aten.pad.default": lambda op: padded(op),
    "aten.permute.default": lambda op: permuted(op, op.dims("dims")),
    "aten.pixel_shuffle.default": lambda op: resized(op, 3),
    "aten.pixel_unshuffle.default": lambda op: resized(op, 3),
    "aten.poisson_nll_loss.default": lambda op: loss(op, elements(op)),
    "aten.prelu.default": lambda op: f"{letters(op, 0)}, {'b' if op.ins[1].shape != (1,) else '1'} -> {letters(op, 0)}",
    "aten.prod.dim_int": lambda op: reduced(op, never=True),
    "aten.repeat.default": lambda op: tiled(op),
    "aten.repeat_interleave.self_int": lambda op: repeated(op),
    "aten.rms_norm.default": lambda op: normed(op),
    "aten.roll.default": lambda op: along(op, "dims"),
    "aten.scaled_dot_product_attention.default": lambda op: attention(op),
    "aten.scatter.src": lambda op: scattered(op),
    "aten.scatter.value": lambda op: scattered(op),
    "aten.scatter_add.default": lambda op: scattered(op),
    "aten.scatter_reduce.two": lambda op: scattered(op),
    "aten.select.int": lambda op: reduced(op, never=True),
    "aten.select_scatter.default": lambda op: patched(op),
    "aten.slice.Tensor": lambda op: along(op) if op.ins[0].shape != op.outs[0].shape else "... -> ...",
    "aten.slice_scatter.default": lambda op: patched(op),
    "aten.smooth_l1_loss.default": lambda op: loss(op, elements(op)),
    "aten.soft_margin_loss.default": lambda op: loss(op, elements(op)),
    "aten.softmax.int": lambda op: along(op),
    "aten.sort.default": lambda op: along(op, outputs=2),
    "aten.split.Tensor": lambda op: parted(op),
    "aten.stack.default": lambda op: stacked(op),
    "aten.sum.default": lambda op: f"{letters(op, 0)} ->",
    "aten.sum.dim_IntList": lambda op: reduced(op),
    "aten.swapaxes.default": lambda op: permuted(op, exchanged(op, "axis0", "axis1")),
    "aten.t.default": lambda op: permuted(op, list(reversed(range(op.rank(0))))),
    "aten.tensor_split.sections": lambda op: parted(op),
    "aten.topk.default": lambda op: along(op, outputs=2),
    "aten.transpose.int": lambda op: permuted(op, exchanged(op)),
    "aten.tril.default": lambda op: f"{letters(op, 0, never=(-1, -2))} -> {letters(op, 0)}",
    "aten.triplet_margin_loss.default": lambda op: loss(op, elements(op, "z!", "z!", "z!")),
    "aten.triu.default": lambda op: f"{letters(op, 0, never=(-1, -2))} -> {letters(op, 0)}",
    "aten.unbind.int": lambda op: unbound(op),
    "aten.unfold.default": lambda op: windowed(op),
    "aten.upsample_bicubic2d.vec": lambda op: resized(op, 2),
    "aten.upsample_bilinear2d.vec": lambda op: resized(op, 2),
    "aten.upsample_linear1d.vec": lambda op: resized(op, 1),
    "aten.upsample_nearest1d.vec": lambda op: resized(op, 1),
    "aten.upsample_nearest2d.vec": lambda op: resized(op, 2),
    "aten.upsample_nearest3d.vec": lambda op: resized(op, 3),
    "aten.upsample_trilinear3d.vec": lambda op: resized(op, 3),
    "aten.var.dim": lambda op: reduced(op, never=True),
    "aten.view_as_complex.default": lambda op: f"{letters(op, 0, never=(-1,))} -> {letters(op, 0, drop=(-1,))}",
    "aten.view_as_real.default": lambda op: f"{letters(op, 0)} -> {letters(op, 0)} z!",
    "tpcompile.dropout.default": lambda op: "..., * -> ...",
    "tpcompile.dropout_at.default": lambda op: "..., * -> ...",
    "tpcompile.uniform.default": lambda op: f"* -> {' '.join(f'Y{n}!' for n in range(len(op.outs[0].shape)))}",
    "transformers.grouped_mm_fallback.default": "t! k, e! k n, e! -> t! n",
}


ENDS: Mapping[str, Rule] = {
    "aten.amax.default": lambda op: reduced(op),
    "aten.argmax.default": lambda op: highest(op),
    "aten.cross_entropy_loss.default": lambda op: loss(op, cross_entropy(op, cut=True)),
    "aten.embedding.default": lambda op: looked_up(op),
    "aten.gather.default": lambda op: gathered(op, cut=True),
    "aten.kl_div.default": lambda op: added_up(op),
    "aten.logsumexp.default": lambda op: reduced(op),
    "aten.max.dim": lambda op: reduced(op, outputs=2),
    "aten.mean.default": lambda op: f"{letters(op, 0)} ->",
    "aten.mean.dim": lambda op: reduced(op),
    "aten.mse_loss.default": lambda op: added_up(op),
    "aten.nll_loss_nd.default": lambda op: loss(op, cross_entropy(op, cut=True)),
}
"""Operations that a cut can end in, though on pieces they are other operations: a look-up in a table whose rows are cut, a loss of cut
scores, the largest of them. Here a `!` is missing: that letter is contracted, and small reductions make the value whole."""

SUMMED = aten_names("embedding.default gather.default kl_div.default mean.default mean.dim mse_loss.default nll_loss_nd.default")
"""Those in `ENDS` that are a sum of what each rank makes of its piece; it may wait for its reduction as any partial sum."""

ALONG: Mapping[str, Rule] = {
    "aten._log_softmax.default": lambda op: normalized(op),
    "aten._softmax.default": lambda op: normalized(op),
    "aten.log_softmax.int": lambda op: normalized(op),
    "aten.scatter.value": lambda op: scattered(op, cut=True),
    "aten.softmax.int": lambda op: normalized(op),
}
"""Operations that work along a cut dimension with small reductions of their own, and leave it cut. Only scores are cut so: attention's
and all others' softmax stays within a rank."""


POINTWISE = aten_names(
    """
    __and__.Scalar __and__.Tensor __or__.Tensor _to_copy.default absolute.default alias.default arccos.default celu.default clone.default
    contiguous.default copy.default detach.default divide.Tensor dropout.default empty_like.default fill.Tensor floor_divide.Scalar
    floor_divide.default full_like.default hardsigmoid.default hardswish.default hardtanh.default imag.default isfinite.default
    lift_fresh_copy.default log_sigmoid.default masked_fill.Scalar mish.default multiply.Tensor negative.default
    ones_like.default polar.default real.default reciprocal.default relu6.default rsub.Scalar rsub.Tensor selu.default silu.default
    softplus.default square.default subtract.Tensor to.device to.dtype to.dtype_layout true_divide.Tensor where.Scalar where.ScalarOther
    where.ScalarSelf zeros_like.default
    """
)
"""Element-wise operations that torch does not tag so; the tagged ones need no row."""

RESHAPES = aten_names(
    """
    _unsafe_view.default flatten.using_ints reshape.default squeeze.dims unflatten.int unsqueeze.default view.default
    """
)

SPLITS = aten_names("split_with_sizes.default")

JOINS = aten_names("cat.default concat.default concatenate.default")

PARTED = RESHAPES | SPLITS | JOINS
"""Operations on the parts of dimensions, which letters cannot tell."""

SUMS = aten_names("add.Tensor sub.Tensor")
"""A sum of two partial sums is one, also where they are cut."""


# --- the engine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Token:
    letter: str
    never: bool = False
    shared: bool = False


@lru_cache(maxsize=4096)
def parse_rule(text: str) -> tuple[tuple[tuple[Token, ...], ...], tuple[tuple[Token, ...], ...]]:
    """The tokens of every operand and of every output."""
    left, right = (side.strip() for side in text.split("->"))
    return tuple(_tokens(part) for part in left.split(",")), tuple(_tokens(part) for part in right.split(","))


def _tokens(text: str) -> tuple[Token, ...]:
    return tuple(Token(word.rstrip("!~"), "!" in word, "~" in word) for word in text.split())


def rule_text(op: Op, end: bool = False) -> str:
    """The rule of an operation as text, or as a cut ends there. Raises LayoutError with the reason when there is none."""
    rule = (ENDS.get(op.name) or ALONG.get(op.name) if end else None) or RULES.get(op.name)
    if rule is None and is_pointwise(op):
        return ", ".join(["..."] * len(op.ins)) + " -> " + ", ".join(["..."] * len(op.outs))
    if rule is None and (way := kept(op.node.target)) is not None:
        rule = way.rule
    if not rule:
        raise LayoutError(no_rule(op))
    return rule if isinstance(rule, str) else rule(op)


ADDENDS: Mapping[str, str] = {
    "aten.addmm.default": "self",
    "aten.baddbmm.default": "self",
    "aten.conv1d.default": "bias",
    "aten.conv1d.padding": "bias",
    "aten.conv2d.default": "bias",
    "aten.conv2d.padding": "bias",
    "aten.linear.default": "bias",
}
"""The argument that a contraction adds to its product."""


def addend(node: fx.Node) -> fx.Node | None:
    """What a contraction adds to its product, if anything."""
    value = argument(node, ADDENDS[op_name(node)]) if op_name(node) in ADDENDS else None
    return value if isinstance(value, fx.Node) else None


def is_pointwise(op: Op) -> bool:
    target = op.node.target
    tagged = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return op.name in POINTWISE or tagged


def has_rule(op: Op) -> bool:
    way = kept(op.node.target)
    return op.name in RULES or op.name in PARTED or is_pointwise(op) or bool(way and way.rule)


def no_rule(op: Op) -> str:
    """Why an operation has no rule."""
    way = kept(op.node.target)
    return way.reason if way and way.reason else f"no rule for {op.name}"


@dataclass(frozen=True)
class Bound:
    """A rule with `...` spelled out for the ranks of one operation, and the size of every letter."""

    ins: tuple[tuple[Token, ...], ...]
    outs: tuple[tuple[Token, ...], ...]
    sizes: Mapping[str, Size]

    @cached_property
    def never(self) -> frozenset[str]:
        return frozenset(token.letter for tokens in self.ins + self.outs for token in tokens if token.never)


def bind_rule(op: Op, end: bool = False, text: str | None = None) -> Bound:
    """The rule of an operation, or the one that `text` is, dimension by dimension; of one whose dimensions are products, as `opened`."""
    if text is None and opened(op) is not op:
        raise LayoutError(f"{op.name} has dimensions that are products")
    return _bind(op.name, rule_text(op, end) if text is None else text, op.ins, op.outs)


@lru_cache(maxsize=4096)
def _bind(name: str, text: str, kinds: tuple[TensorType, ...], made: tuple[TensorType, ...]) -> Bound:
    ins, outs = parse_rule(text)
    ins = ins[: len(kinds)]
    if len(ins) != len(kinds):
        raise LayoutError(f"the rule of {name} has {len(ins)} operands, the call {len(kinds)}")
    spelled_ins = tuple(_spell(tokens, kind) for tokens, kind in zip(ins, kinds, strict=True))
    spelled_outs = tuple(_spell(tokens, kind) for tokens, kind in zip(outs, made, strict=True))
    sizes: dict[str, Size] = {}
    for tokens, kind in zip(spelled_outs + spelled_ins, made + kinds, strict=True):
        for token, size in zip(tokens, kind.shape, strict=True):
            if sizes.get(token.letter, 1) == 1:
                sizes[token.letter] = size
    return Bound(spelled_ins, spelled_outs, MappingProxyType(sizes))


def _spell(tokens: tuple[Token, ...], kind: TensorType) -> tuple[Token, ...]:
    rank = len(kind.shape)
    if tokens == (Token("*"),) or tokens == (Token("_"),):
        return tuple(Token(tokens[0].letter, never=tokens[0].letter == "*") for _ in range(rank))
    if Token("...") not in tokens:
        if len(tokens) != rank:
            raise LayoutError(f"a tensor of rank {rank} where the rule has {len(tokens)}")
        return tokens
    at = tokens.index(Token("..."))
    leading = rank - (len(tokens) - 1)
    return tokens[:at] + tuple(Token(f".{leading - d}") for d in range(leading)) + tokens[at + 1 :]


def backward(op: Op, outs: Sequence[Layout | None], *, end: bool = False) -> list[Layout]:
    """What layouts the operands must have for the outputs to have these; None for an output that nobody needs cut.

    With `end`, operations in `ALONG` may be cut along their dimension.
    Raises LayoutError when the operation cannot work on pieces like that, or would need one value in two layouts.
    """
    if op.name in SPLITS:  # asks which parts are used
        return _in_one_way(op, _needed(op, outs, end))
    return _once(("backward", op.name, op.form, op.ins, op.outs, tuple(outs), end), lambda: _in_one_way(op, _needed(op, outs, end)))


def _once(key: tuple[object, ...], work: Callable[[], list[Layout]]) -> list[Layout]:
    """What `work` makes, or that it cannot: the same for all operations of one key, those of layers that are alike among them."""
    try:
        found = _known.get(key)
    except TypeError:  # an argument without a hash
        return work()
    if found is None:
        if len(_known) >= MOST:
            _known.clear()
        try:
            found = tuple(work())
        except LayoutError as error:
            found = str(error)
        _known[key] = found
    if isinstance(found, str):
        raise LayoutError(found)
    return list(found)


_known: dict[tuple[object, ...], tuple[Layout, ...] | str] = {}
MOST = 1 << 16


def _in_one_way(op: Op, ins: Sequence[Layout]) -> list[Layout]:
    """The layouts of the operands: of one that stands in several places, the same in all."""
    read: dict[fx.Node, Layout] = {}
    for operand, want in zip(op.operands, ins, strict=True):
        if not same(read.setdefault(operand, want), want):
            raise LayoutError(f"{op.name} reads one value in two ways")
    return list(ins)


def _needed(op: Op, outs: Sequence[Layout | None], end: bool) -> list[Layout]:
    if op.name in RESHAPES:
        return [reshape(_only(outs), op.ins[0].shape)] + [whole(*kind.shape) for kind in op.ins[1:]]
    if op.name in SPLITS:
        return [unsplit(op, outs)]
    if op.name in JOINS:
        return unjoined(op, _only(outs))
    if op.name in LIMITS:
        LIMITS[op.name](_only(outs))
    if (apart := opened(op)) is not op:
        ins = backward(apart, [layout and reshape(layout, kind.shape) for layout, kind in zip(outs, apart.outs, strict=True)])
        return [reshape(layout, kind.shape) for layout, kind in zip(ins, op.ins, strict=True)]
    bound = bind_rule(op, end and op.name in ALONG)
    dims: dict[str, Dim] = {}
    for tokens, layout in zip(bound.outs, outs, strict=True):
        for token, dim in zip(tokens, layout.dims, strict=True) if layout else ():
            if is_cut(dim):
                _allow(op, bound, token.letter)
                if end and op.name in ALONG:
                    _apart(dim)
            dims[token.letter] = join(dims[token.letter], dim) if token.letter in dims else dim
    return [
        Layout(tuple(_operand_dim(token, size, dims, bound) for token, size in zip(tokens, kind.shape, strict=True)))
        for tokens, kind in zip(bound.ins, op.ins, strict=True)
    ]


def _only(outs: Sequence[Layout | None]) -> Layout:
    (layout,) = outs
    assert layout is not None
    return layout


def _own_pieces(layout: Layout) -> None:
    """Each rank draws for its own piece: of a piece that several hold, each would drop something else."""
    for cut in (factor.cut for dim in layout.dims for factor in cut_factors(dim)):
        if (isinstance(cut, Cut) and cut.overlaps) or (isinstance(cut, Open) and cut.shared):
            raise LayoutError("dropout of heads that several ranks may hold, each of which would draw for itself")


def _ranges(layout: Layout) -> None:
    """Masks by the index of an element are of ranges, in equal steps along one dimension at most."""
    found = [in_steps(dim) for dim in layout.dims if cut_factors(dim)]
    if sum(steps != 1 for steps, _ in found) > 1 or not all(
        isinstance(factor.size, int) or isinstance(factor.cut, Even) for _, factor in found
    ):
        raise LayoutError("dropout of pieces that are no ranges of a known size")


LIMITS: Mapping[str, Callable[[Layout], None]] = {"tpcompile.dropout.default": _own_pieces, "tpcompile.dropout_at.default": _ranges}
"""Operations that cannot work on every piece that their rule allows: what raises LayoutError for an output's layout."""


def _allow(op: Op, bound: Bound, letter: str) -> None:
    if letter in bound.never:
        raise LayoutError(f"{op.name} needs this dimension whole")


def _apart(dim: Dim) -> None:
    for cut in (factor.cut for factor in cut_factors(dim)):
        if (isinstance(cut, Cut) and cut.overlaps) or (isinstance(cut, Open) and cut.shared):
            raise LayoutError("a sum over pieces that overlap")


def _operand_dim(token: Token, size: Size, dims: Mapping[str, Dim], bound: Bound) -> Dim:
    dim = dims.get(token.letter)
    if dim is None or not is_cut(dim):
        return whole_dim(size)
    if size == bound.sizes[token.letter]:
        return dim
    if token.shared and divides(size, bound.sizes[token.letter]):
        return shared_dim(dim, size)
    if size == 1:
        return whole_dim(1)
    raise LayoutError("operands of unlike sizes")


def shared_dim(dim: Dim, size: Size) -> Dim:
    """The layout of key/value heads, each of which stands for several of `dim`'s query heads."""
    segments = canonical(dim)
    if len(segments) != 1 or len(segments[0]) != 1:
        raise LayoutError("heads that are cut in parts share key/value heads")
    factor = segments[0][0]
    step = quotient(factor.size, size)
    match factor.cut:
        case Open(key):
            return ((Factor(size, Open(key, shared=True)),),)
        case Cut(axis, ranges) if isinstance(step, int):
            held = tuple((start // step, -(-stop // step) if stop > start else start // step) for start, stop in ranges)
            return ((Factor(size, Cut(axis, held)),),)
    raise LayoutError("a number of heads that is not known")


def forward(op: Op, ins: Sequence[Layout], declared: Sequence[Layout] = (), *, end: bool = False, text: str | None = None) -> list[Layout]:
    """The outputs' layouts, given the operands'. The other direction of `backward`, and the law that `verify` holds programs to.

    `text` stands in for the operation's own rule where a pass is about to write it as another one.

    Where no operand has a dimension at its full length, the `declared` outputs say how it is cut: what is expanded is the same
    everywhere along it; and of repeated key/value heads any cut will do that needs just the heads which the operand has. A cut may `end`
    in the operation.
    Raises LayoutError when the operands do not fit each other or when a partial sum meets an operation that is not linear in it.
    """
    if any(layout.partial for layout in ins) and not any(layout.is_cut for layout in ins):
        return _waiting(op, ins)  # asks what operands are made of
    key = ("forward", op.name, op.form, op.ins, op.outs, tuple(ins), tuple(declared), end, text)
    return _once(key, lambda: _made(op, ins, declared, end, text))


def _made(op: Op, ins: Sequence[Layout], declared: Sequence[Layout], end: bool, text: str | None) -> list[Layout]:
    if op.name in RESHAPES:
        return [reshape(ins[0], op.outs[0].shape)]
    if op.name in SPLITS:
        return split(op, ins[0])
    if op.name in JOINS:
        return [joined(op, ins)]
    if (apart := opened(op)) is not op:
        sides = ((ins, apart.ins), (declared, apart.outs))
        ins, declared = ([reshape(layout, kind.shape) for layout, kind in zip(*side, strict=False)] for side in sides)
        made = forward(apart, ins, declared, end=end, text=text)
        return [reshape(layout, kind.shape) for layout, kind in zip(made, op.outs, strict=True)]
    bound = bind_rule(op, end, text)
    dims: dict[str, Dim] = {}
    unlike: list[tuple[str, Dim]] = []  # sizes that are equal only when it runs, if at all
    for tokens, layout, kind in zip(bound.ins, ins, op.ins, strict=True):
        for token, dim, size in zip(tokens, layout.dims, kind.shape, strict=True):
            if token.letter == "_":
                continue
            if is_cut(dim):
                _allow(op, bound, token.letter)
            if size == bound.sizes[token.letter]:
                dims[token.letter] = join(dims[token.letter], dim) if token.letter in dims else dim
            elif size != 1 and not token.shared:
                unlike.append((token.letter, dim))
    if any(is_cut(dim) or is_cut(dims.get(letter, ())) for letter, dim in unlike):
        raise LayoutError("operands of unlike sizes")
    for tokens, layout in zip(bound.outs, declared, strict=False):
        for token, dim in zip(tokens, layout.dims, strict=True):
            if token.letter not in bound.never:
                dims.setdefault(token.letter, dim)
    _check_shared(bound, op, ins, dims)
    partial = _partial(op, bound, ins, dims)
    return [
        Layout(tuple(_out_dim(dims.get(token.letter), size) for token, size in zip(tokens, kind.shape, strict=True)), partial)
        for tokens, kind in zip(bound.outs, op.outs, strict=True)
    ]


def _waiting(op: Op, ins: Sequence[Layout]) -> list[Layout]:
    """The outputs of an operation on partial sums and whole values: partial sums, where it is linear in them."""
    axes = {layout.partial for layout in ins if layout.partial}
    if len(axes) > 1 or not is_linear(op, [position for position, layout in enumerate(ins) if layout.partial]):
        raise LayoutError("a partial sum is used before it is reduced")
    return [Layout(whole(*kind.shape).dims, axes.copy().pop()) for kind in op.outs]


def _out_dim(dim: Dim | None, size: Size) -> Dim:
    """An output's dimension: its letter's, unless the operation changes the length of what it needs whole."""
    return dim if dim is not None and size_of(dim) == size else whole_dim(size)


def _check_shared(bound: Bound, op: Op, ins: Sequence[Layout], dims: Mapping[str, Dim]) -> None:
    for tokens, layout, kind in zip(bound.ins, ins, op.ins, strict=True):
        for token, dim, size in zip(tokens, layout.dims, kind.shape, strict=True):
            if token.shared and size != bound.sizes[token.letter] and token.letter in dims and is_cut(dims[token.letter]):
                join(shared_dim(dims[token.letter], size), dim)


def _partial(op: Op, bound: Bound, ins: Sequence[Layout], dims: Mapping[str, Dim]) -> tuple[str, ...]:
    kept = {token.letter for tokens in bound.outs for token in tokens}
    axes: list[str] = []
    for letter, dim in dims.items():
        for factor in cut_factors(dim) if letter not in kept else []:
            if isinstance(factor.cut, Cut) and factor.cut.overlaps:
                raise LayoutError("a sum over pieces that overlap")
            axes.append(factor.cut.axis if isinstance(factor.cut, (Cut, Even)) else "?")
    waiting = [layout.partial for layout in ins]
    if any(waiting):
        if op.name not in SUMS or len(waiting) != 2 or waiting[0] != waiting[1]:
            raise LayoutError("a partial sum is used before it is reduced")
        axes += waiting[0]
    return tuple(dict.fromkeys(axes))


def wants_of(
    node: fx.Node,
    types: Mapping[str, Any],
    layouts: Mapping[str, Layout | tuple[Layout, ...]],
    rows: Mapping[str, tuple[Layout, ...]],
) -> list[tuple[fx.Node, Layout]]:
    """The layouts that a call which works on pieces needs of its tensor operands, in order; empty for one that works on whole values.

    What a row-cut linear adds to its product (a bias) is not among them: it is added once, after the reduction, hence whole.
    """
    if node.op != "call_function" or node.name not in layouts or op_name(node) == "getitem":
        return []
    out = layouts[node.name]
    outs = out if isinstance(out, tuple) else (out,)
    if node.name in rows:
        op = view_op(node, types)
        return [(n, want) for n, want in zip(op.operands, _in_one_way(op, rows[node.name]), strict=True) if n is not addend(node)]
    if not any(layout.is_cut for layout in outs):
        return []
    op = view_op(node, types)
    return list(zip(op.operands, backward(op, outs, end=True), strict=True))
