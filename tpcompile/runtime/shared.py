"""Weights that several pipeline stages use, such as a tied embedding and head: one weight, held by several ranks.

Every holder has the gradient of its own uses; their sum is the weight's gradient, and all holders get it, so that equal optimizers
keep the copies equal. The sum comes after the data-parallel reduction, and over this step's gradients alone (`gradients_aside`):
what an earlier step has summed must not be summed again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from tpcompile.runtime.data_parallel import local
from tpcompile.runtime.groups import Groups
from tpcompile.runtime.stage import StageRoot


class SharedWeights:
    """The weights of this rank that other stages hold too. Making one is collective; so are its calls."""

    def __init__(self, shared: Mapping[str, tuple[int, ...]], groups: Groups) -> None:
        by_holders = {held: groups.holders(held) for held in sorted(set(shared.values()))}
        here = groups.coordinates["pp"]
        self._groups = [(name, group) for name, held in shared.items() if here in held and (group := by_holders[held]) is not None]

    @torch.no_grad()
    def sum_gradients(self, root: StageRoot) -> None:
        """After a step: sum over the holders."""
        parameters = dict(root.named_own_parameters())
        for name, group in self._groups:
            parameter = parameters[name]
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local(parameter.grad), group=group)
