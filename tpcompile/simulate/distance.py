"""How far two tensors are apart."""

from __future__ import annotations

from torch import Tensor


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference between elements; infinite where shapes differ or one is not a number and the other is."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    if not a.is_floating_point() and not a.is_complex():
        return float((a != b).any())
    apart = (a.detach() - b.detach()).abs()
    same = (a == b) | (a.isnan() & b.isnan())
    worst = float(apart.masked_fill(same, 0.0).max())
    return float("inf") if worst != worst else worst
