"""Gradients of whole parameters that tensor ranks have parts of (a norm's weight between regions, where each rank has its positions).

They are summed once a step, as one tensor of each type, after the last micro-batch and after the replicas' mean; a user's own backward
sums each where it is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.collectives import postponed
from tpcompile.runtime.data_parallel import local
from tpcompile.runtime.groups import Groups
from tpcompile.runtime.stage import Root


@contextmanager
def summed_once(root: Root, names: Sequence[str], groups: Groups) -> Iterator[None]:
    """Within, micro-batches run forward and backward through the rank's stages; at the end, this step's gradients of the
    parameters with these names are summed over tp. Collective over tp.

    What earlier steps left in `.grad` is summed already: it is set aside, and added back after.
    """
    group = groups.group("tp")
    if group is None or not names:
        yield
        return
    before = {name: grad.clone() for name, grad in _gradients(root, names).items()}  # torch may reuse the memory for the next ones
    for name, parameter in root.named_own_parameters():
        if name in before:
            parameter.grad = None
    try:
        with ExitStack() as running:
            for stage in root.stages:
                running.enter_context(postponed(stage.running, "tp"))
            yield
        _sum([local(grad) for grad in _gradients(root, names).values()], group)
    finally:
        with torch.no_grad():
            for name, parameter in root.named_own_parameters():
                if name in before:
                    parameter.grad = before[name] if parameter.grad is None else before[name] + parameter.grad


def _gradients(root: Root, names: Sequence[str]) -> dict[str, Tensor]:
    """The gradients of some parameters, in the order of their names."""
    held = dict(root.named_own_parameters())
    return {name: grad for name in names if (grad := held[name].grad) is not None}


@torch.no_grad()
def _sum(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    """In place, one call for each type."""
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        alike = [grad for grad in grads if grad.dtype == dtype]
        together = torch.cat([grad.flatten() for grad in alike])
        dist.all_reduce(together, group=group)
        for grad, total in zip(alike, torch.split(together, [grad.numel() for grad in alike]), strict=True):
            grad.copy_(total.view_as(grad))
