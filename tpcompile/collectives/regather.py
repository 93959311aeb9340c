"""Linear layers over gathered positions that keep their own positions only, and gather again in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpcompile.collectives.groups import check_bound, place
from tpcompile.collectives.positions import all_gather_positions, start_gather, start_scatter


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
    """The gradients of x, of every weight and of every bias; x once more from all ranks, its gradient as the sum over them.

    Both are under way while products are computed: x, while its gradient is; the sum of that, while those of the weights are.
    Source of the order: V. Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022), section 4.2.2.
    """
    x, *weights = ctx.saved_tensors
    where = ctx.axis, ctx.dim, ctx.length
    gathering = start_gather(x, *where)
    shape = list(x.shape[:-1])
    shape[ctx.dim] = ctx.length if place(ctx.axis)[1] > 1 else shape[ctx.dim]
    made = [x.new_zeros([*shape, weight.shape[0]]) if g is None else g for g, weight in zip(grads, weights, strict=True)]
    scattering = start_scatter(reduce(torch.add, (g @ weight for g, weight in zip(made, weights, strict=True))), *where)
    whole, rows = gathering(), [g.reshape(-1, g.shape[-1]) for g in made]
    of_weights = [g.t() @ whole.reshape(-1, whole.shape[-1]) for g in rows]
    of_biases = [g.sum(0) for g in rows] if ctx.biases else []
    return scattering(), None, None, None, of_weights, of_biases


def define(first_order: Callable[[Any], Any]) -> None:
    """Register the operator. `first_order` guards a backward against being recorded itself."""
    schema = "(Tensor x, str axis, int dim, SymInt length, Tensor[] weights, Tensor[] biases) -> Tensor[]"
    made = torch.library.custom_op("tpcompile::seq_linear", _forward, mutates_args=(), schema=schema)
    made.register_fake(_fake)
    made.register_autograd(first_order(_backward), setup_context=_setup)
