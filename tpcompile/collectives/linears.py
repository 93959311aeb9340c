"""Linear layers joined with the collective of the value that they alone read: in backward that is under way while products are computed.

    of the value     Σ grad · weight  ──start──┐
                                               │ on its way
    of the weights   gradᵀ · value             │
                                      ──wait───┘

Apart, autograd starts the collective when the gradients of all weights are there, and computes nothing until it is done. The sum over
the layers is made in one tensor of its own, which is then added up over the ranks in its place.

An operator is a kernel of autograd's, as the identities are: eagerly that costs a tenth of what `custom_op` with lists of tensors does, and
what traces sees linear layers and, in backward, functional collectives. Export sees one operator.
Source of the order: V. Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpcompile.collectives.groups import check_bound, place
from tpcompile.collectives.positions import all_gather_positions, start_gather, start_scatter
from tpcompile.collectives.sums import plain, start_sum

Where = tuple[Any, ...]
"""The axis; of a value that is cut along its positions also the dimension, and the whole length."""


@dataclass(frozen=True)
class _Way:
    """How the layers come by their value, and how its gradient goes back."""

    gathers: bool = False  # the positions of all ranks
    again: bool = False  # in backward too, instead of keeping them

    def whole(self, x: Tensor, where: Where) -> Tensor:
        if not self.gathers:
            return x
        made: Tensor = (all_gather_positions if _running(x) else torch.ops.tpcompile.seq_gather.default)(x, *where)
        return made

    def start(self, grad: Tensor, where: Where) -> Callable[[], Tensor]:
        """The sum of a gradient over the ranks, or this rank's positions of it, under way."""
        return start_scatter(grad, *where) if self.gathers else start_sum(grad, *where)


class _Linears(torch.autograd.Function):
    """All layers of a value, as one function: `given` are their weights, and then their biases if they have any."""

    @staticmethod
    def forward(ctx: Any, backward: Any, way: _Way, where: Where, count: int, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        whole = way.whole(x, where)
        ctx.to_inputs, ctx.way, ctx.where, ctx.count, ctx.shape = backward, way, where, count, whole.shape
        asked = ctx.needs_input_grad[4:]
        kept = [x if way.again else whole] if any(asked[1 : 1 + count]) else []
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept, *(given[:count] if asked[0] else ()))
        return tuple(_linears(whole, given[:count], given[count:]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return ctx.to_inputs(ctx, *grads)  # type: ignore[no-any-return]


def _linears(whole: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    if not biases:
        return [F.linear(whole, weight) for weight in weights]
    return [F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """The gradients that are asked for: of x, of every weight and of every bias.

    Where x is gathered again, that is under way while the sum of gradients is computed, and the collective of that while those of weights.
    """
    (of_x, *asked), saved = ctx.needs_input_grad[4:], list(ctx.saved_tensors)
    asked_weights, asked_biases = asked[: ctx.count], asked[ctx.count :]
    value = saved.pop(0) if any(asked_weights) else None
    gathering = start_gather(value, *ctx.where) if ctx.way.again and value is not None else None
    rows = [None if grad is None else _flat(grad) for grad in grads]
    summing = ctx.way.start(_of_value(rows, saved, ctx.shape), ctx.where) if of_x else None
    read = None if value is None else _flat(value if gathering is None else gathering())
    of_weights = [None if row is None or read is None or not own else row.t() @ read for row, own in zip(rows, asked_weights, strict=True)]
    of_biases = [None if row is None or not own else row.sum(0) for row, own in zip(rows, asked_biases, strict=bool(asked_biases))]
    return None, None, None, None, None if summing is None else summing(), *of_weights, *of_biases


def _of_value(rows: Sequence[Tensor | None], weights: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The gradient of the value, summed over the layers whose results have one."""
    total: Tensor | None = None
    for row, weight in zip(rows, weights, strict=True):
        if row is not None:
            total = row @ weight if total is None else total.addmm_(row, weight)
    return weights[0].new_zeros(shape) if total is None else total.view(shape)


def _flat(value: Tensor) -> Tensor:
    """All rows one under another, also where they are empty."""
    return value.flatten(0, -2) if value.dim() > 1 else value[None]


def _running(x: Tensor) -> bool:
    return plain(x) and not x.is_meta


def _fake(x: Tensor, axis: str, *rest: Any) -> list[Tensor]:
    *where, weights, _ = rest
    shape = list(x.shape[:-1])
    if where and place(axis)[1] > 1:
        shape[where[0]] = where[1]
    return [x.new_empty([*shape, weight.shape[0]]) for weight in weights]


def _define(library: Any, first_order: Callable[[Any], Any], name: str, way: _Way) -> None:
    """An operator of this family."""
    backward = first_order(_backward)

    def run(x: Tensor, axis: str, *rest: Any) -> list[Tensor]:
        *positions, weights, biases = rest
        where = (axis, *positions)
        if _running(x):
            check_bound(axis)
        if torch.is_grad_enabled() and any(each.requires_grad for each in (x, *weights, *biases)):
            return list(_Linears.apply(backward, way, where, len(weights), x, *weights, *biases))  # type: ignore[no-untyped-call]
        return below(x, axis, *rest)

    def below(x: Tensor, axis: str, *rest: Any) -> list[Tensor]:
        *positions, weights, biases = rest
        return _linears(way.whole(x, (axis, *positions)), weights, biases)

    positions = ", int dim, SymInt length" if way.gathers else ""
    library.define(f"{name}(Tensor x, str axis{positions}, Tensor[] weights, Tensor[] biases) -> Tensor[]")
    library.impl(name, run, "Autograd")
    library.impl(name, below, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tpcompile::{name}", _fake, lib=library)


def define(library: Any, first_order: Callable[[Any], Any]) -> None:
    """Register the operators. `first_order` guards a backward against being recorded itself."""
    _define(library, first_order, "enter_linear", _Way())
    _define(library, first_order, "kept_linear", _Way(gathers=True))
    _define(library, first_order, "seq_linear", _Way(gathers=True, again=True))
