"""Private to divide_loss: loss functions with a sum or a mean inside, each as the losses that are summed, and their number."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tpcompile.layout import Size, product
from tpcompile.operation import Op
from tpcompile.rule_texts import cross_entropy, elements, letters, reduced
from tpcompile.rules import aten_names, bind_rule

NONE, MEAN, SUM = 0, 1, 2

BY_LABELS = aten_names("cross_entropy_loss.default nll_loss_nd.default")
"""Their mean is over the labels that are not ignored, by class weight."""

LOSSES: Mapping[str, Callable[[Op], str]] = {
    "aten.binary_cross_entropy.default": elements,
    "aten.binary_cross_entropy_with_logits.default": elements,
    "aten.cosine_embedding_loss.default": lambda op: elements(op, "z!", "z!"),
    "aten.cross_entropy_loss.default": cross_entropy,
    "aten.hinge_embedding_loss.default": elements,
    "aten.huber_loss.default": elements,
    "aten.kl_div.default": elements,
    "aten.l1_loss.default": elements,
    "aten.margin_ranking_loss.default": elements,
    "aten.mse_loss.default": elements,
    "aten.nll_loss_nd.default": cross_entropy,
    "aten.poisson_nll_loss.default": elements,
    "aten.smooth_l1_loss.default": elements,
    "aten.soft_margin_loss.default": elements,
    "aten.triplet_margin_loss.default": lambda op: elements(op, "z!", "z!", "z!"),
}
"""The rule of each without its reduction."""

MEANS: Mapping[str, Callable[[Op], str]] = {
    "aten.mean.default": lambda op: f"{letters(op, 0)} ->",
    "aten.mean.dim": reduced,
}
"""The rule of the sum that each is, but for its divisor."""


def sum_text(op: Op) -> str | None:
    """The rule of the sum that a mean divides, or that a loss function makes; None for any other operation."""
    if op.name in MEANS:
        return MEANS[op.name](op)
    if op.name not in LOSSES or op.argument("reduction", MEAN) == NONE:
        return None
    return f"{LOSSES[op.name](op).split('->')[0]}->"


def loss_shape(op: Op) -> tuple[Size, ...]:
    """The shape of a loss function's value without its reduction."""
    text = LOSSES[op.name](op)
    sizes = bind_rule(op, text=f"{text.split('->')[0]}->").sizes
    return tuple(sizes[letter] for letter in text.split("->")[1].split())


def mean_size(op: Op) -> Size:
    """How many elements each mean is over."""
    if op.name in LOSSES:
        return product(loss_shape(op))
    dims = op.dims("dim") if op.name == "aten.mean.dim" and op.argument("dim") else range(op.rank(0))
    return product(op.ins[0].shape[dim] for dim in dims)


def labelled(op: Op) -> bool:
    """Whether a mean is over labels: class numbers, not probabilities."""
    return op.name in BY_LABELS and not op.ins[1].dtype.is_floating_point
