"""Linear layers over gathered positions that keep their own positions only, and gather again in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpcompile.collectives.groups import check_bound, place
from tpcompile.collectives.positions import all_gather_positions, reduce_scatter_positions


def _forward(x: Tensor, axis: str, dim: int, length: int, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    check_bound(axis)
    whole = all_gather_positions(x, axis, dim, length)
    if not biases:
        return [F.linear(whole, weight) for weight in weights]
    return [F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _fake(x: Tensor, axis: str, dim: int, length: int, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    shape = list(x.shape[:-1])
    shape[dim] = length if place(axis)[1] > 1 else shape[dim]
    return [x.new_empty([*shape, weight.shape[0]]) for weight in weights]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ctx.axis, ctx.dim, ctx.length, weights, biases = inputs
    ctx.biases = [bias.requires_grad for bias in biases]
    ctx.save_for_backward(x, *weights)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The gradients of x, of every weight and of every bias; x once more from all ranks, its gradient as the sum over them."""
    x, *weights = ctx.saved_tensors
    whole = all_gather_positions(x, ctx.axis, ctx.dim, ctx.length)
    total = torch.zeros_like(whole)
    of_weights, of_biases = [], []
    for grad, weight in zip(grads, weights, strict=True):
        made = whole.new_zeros([*whole.shape[:-1], weight.shape[0]]) if grad is None else grad
        total = total + made @ weight
        rows = made.reshape(-1, made.shape[-1])
        of_weights.append(rows.t() @ whole.reshape(-1, whole.shape[-1]))
        of_biases.append(rows.sum(0))
    own = reduce_scatter_positions(total, ctx.axis, ctx.dim, ctx.length)
    return own, None, None, None, of_weights, of_biases if ctx.biases else []


def define(first_order: Callable[[Any], Any]) -> None:
    """Register the operator. `first_order` guards a backward against being recorded itself."""
    schema = "(Tensor x, str axis, int dim, SymInt length, Tensor[] weights, Tensor[] biases) -> Tensor[]"
    made = torch.library.custom_op("tpcompile::seq_linear", _forward, mutates_args=(), schema=schema)
    made.register_fake(_fake)
    made.register_autograd(first_order(_backward), setup_context=_setup)
