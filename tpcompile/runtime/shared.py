"""Weights that several pipeline stages use, such as a tied embedding and head: one weight, held by several ranks, or twice by one.

Every holder has the gradient of its own uses; their sum is the weight's gradient, and all holders get it, so that equal optimizers
keep the copies equal. The sum comes after the data-parallel reduction, and over this step's gradients alone (`gradients_aside`):
what an earlier step has summed must not be summed again. Stages of one rank hold the same tensor, unless a data-parallel engine makes
its own of each: then the first one counts, and the others follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from tpcompile.runtime.data_parallel import local
from tpcompile.runtime.groups import Groups
from tpcompile.runtime.stage import RankRoot, Root


class SharedWeights:
    """The weights of this rank that other stages hold too, by the stages that hold them. Making one is collective; so are its calls."""

    def __init__(self, shared: Mapping[str, tuple[int, ...]], groups: Groups, place_of: Callable[[int], int]) -> None:
        places = {name: tuple(sorted({place_of(stage) for stage in held})) for name, held in shared.items()}
        by_holders = {held: groups.holders(held) for held in sorted(set(places.values())) if len(held) > 1}
        here = groups.coordinates["pp"]
        self._groups = [(name, group) for name, held in places.items() if here in held and (group := by_holders.get(held)) is not None]

    @torch.no_grad()
    def sum_gradients(self, root: Root) -> None:
        """After a step whose gradients are joined on this rank: sum over the holders."""
        parameters = dict(root.named_own_parameters())
        for name, group in self._groups:
            if parameters[name].requires_grad:
                dist.all_reduce(local(_gradient(parameters[name])), group=group)


@torch.no_grad()
def join(root: Root) -> None:
    """After a step: sum over the stages of this rank."""
    if isinstance(root, RankRoot):
        for first, other in root.twins():
            if other.grad is not None:
                local(_gradient(first)).add_(local(other.grad))
                other.grad = None


@torch.no_grad()
def follow(root: Root) -> None:
    """Before a call: what later stages hold of an earlier one's weights is as the optimizer has left that."""
    if isinstance(root, RankRoot):
        for first, other in root.twins():
            local(other).copy_(local(first))


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
