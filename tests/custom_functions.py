"""Custom autograd.Functions. Their backward is not the derivative of their forward, so that a lost backward shows in the numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Wave(Function):
    """Element-wise, with a number that is no tensor, kept on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, mode: str | None = None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return torch.tanh(x) * x if mode is None else torch.sin(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * (torch.cos(x) + 3) * ctx.scale, None, None


class Bend(Function):
    """With setup_context, a default argument, a keyword, and a result of its own kept for backward."""

    @staticmethod
    def forward(x: Tensor, settings: Any, power: int = 2) -> Tensor:
        return torch.sigmoid(x) ** power * settings["scale"]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grad.mul(2).mul_(y), None, None


class Gate(Function):
    """Two operands, one of them a vector for all rows; gradients only where they are needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.where(x > 0, x, x * weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        to_x = grad * torch.where(x > 0, 1.5, weight) if ctx.needs_input_grad[0] else None
        to_weight = (grad * x.clamp(max=0)).sum(dim=tuple(range(x.ndim - 1))) if ctx.needs_input_grad[1] else None
        return to_x, to_weight


class Halves(Function):
    """Several outputs: one without a gradient, one that is no tensor, and one whose gradient may be None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        sign = torch.sign(x)
        ctx.mark_non_differentiable(sign)
        return torch.exp(-x * x), "halves", sign, x * 0.5

    @staticmethod
    def backward(ctx: Any, to_bump: Tensor | None, _: Any, to_sign: Any, to_half: Tensor | None) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        total = torch.zeros_like(x)
        if to_bump is not None:
            total = total + to_bump * x
        if to_half is not None:
            total = total + to_half * 3
        return total


class Attend(Function):
    """Two products of matrices, as attention has them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.sigmoid(query @ key.mT)
        ctx.save_for_backward(query, key, value, weights)
        return weights @ value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        query, key, value, weights = ctx.saved_tensors
        inner = (grad @ value.mT) * weights
        return inner @ key, inner.mT @ query, weights.mT @ grad


class Reverse(Function):
    """Returns its operand, and turns the gradient round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -2 * grad


class Softened(Function):
    """A softmax: its dimension is whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return 2 * y * (grad - (grad * y).sum(-1, keepdim=True))


class Averaged(Function):
    """Divides by a size: a piece would divide by its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / x.shape[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class AveragedGradient(Function):
    """Does so in backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad / grad.shape[-1]


class Asks(Function):
    """Does something else where a dimension is long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2 if x.shape[-1] > 7 else x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Single(Function):
    """Does something else where a dimension has one element: a trace does not see the branch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 1 if x.shape[-1] == 1 else x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class MeanToWeight(Function):
    """The gradient of the whole operand is no sum over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).mean(dim=0)


class Ignores(Function):
    """The gradient of an operand does not depend on that of the output: in two parts it would be counted twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return grad, weight


class Clips(Function):
    """Clips the gradient: of a gradient in parts, or scaled, it would clip something else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.clamp(-1e-3, 1e-3)


class Drops(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) > 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        return grad * mask


class Counts(Function):
    """Numbers the elements: a piece would start again at zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[-1], dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad
