"""Scaled losses for gradients of 16 bits: torch.amp.GradScaler's rule, with one decision for all ranks.

train_step         backward of loss · scale; gradients, which are held in 32 bits, are divided by the scale at once
a rank overflows   all ranks know: the next `step` of an optimizer is left out on all, and the scale is halved
2,000 good steps   the scale is doubled
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from tpcompile.runtime.data_parallel import local
from tpcompile.runtime.groups import Groups
from tpcompile.runtime.optimizer import inner

START, GROWTH, BACKOFF, INTERVAL = 65536.0, 2.0, 0.5, 2000
"""The defaults of torch.amp.GradScaler."""


class Scaler:
    """The scale, equal on all ranks, and whether any gradient since the last step of an optimizer was not finite."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.scale = torch.full((), START, device=groups.device)
        self._good = torch.zeros((), dtype=torch.int32, device=groups.device)
        self._found = torch.zeros((), device=groups.device)
        self._decided, self._skips = False, False

    def state_dict(self) -> dict[str, Any]:
        """The scale, and for how many steps it has been good."""
        return {"scale": self.scale.item(), "good": self._good.item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.fill_(state["scale"])
        self._good.fill_(state["good"])
        self._found.zero_()
        self._decided, self._skips = False, False

    @torch.no_grad()
    def unscale(self, parameters: list[nn.Parameter]) -> None:
        """After a step of training, whose gradients alone are there. Collective over all processes."""
        if self._decided:
            self._found.zero_()
            self._decided = False
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for p in parameters:
            if p.grad is not None and p.grad.numel():
                by_type.setdefault(p.grad.dtype, []).append(local(p.grad))
        for grads in by_type.values():
            torch._amp_foreach_non_finite_check_and_unscale_(grads, self._found, self.scale.double().reciprocal().float())
        if self._groups.devices is not None:
            dist.all_reduce(self._found, dist.ReduceOp.MAX)

    def skips(self) -> bool:
        """Whether optimizers leave out their step. The first to ask after a step of training moves the scale."""
        if not self._decided:
            self._skips, self._decided = bool(self._found.item()), True
            torch._amp_update_scale_(self.scale, self._good, self._found, GROWTH, BACKOFF, INTERVAL)
        return self._skips


class _Skipping:
    """What a class of optimizers does differently. It stands before that class."""

    _scaler: Scaler

    def step(self, closure: Any = None) -> Any:
        return None if self._scaler.skips() else inner(super().step, self, closure)  # type: ignore[misc]


def skipping(kind: type[Optimizer], scaler: Scaler) -> type[Optimizer]:
    """The same class of optimizers, which leaves out the steps that overflowed."""
    return type(kind.__name__, (_Skipping, kind), {"__doc__": kind.__doc__, "__module__": kind.__module__, "_scaler": scaler})
