"""What each process does in tests/distributed/test_summed.py: steps whose gradients add up, and the calls they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from training_workers import batch, plain

import tpcompile
from tpcompile.runtime import recorded
from tpcompile.timeline import summed_later


def accumulated(make: Callable[[], nn.Module], mesh: str, microbatches: int) -> tuple[float, int, list[int]]:
    """Several steps, and without a pipeline backwards of the user's own between them, all adding up: the worst error of any gradient, how
    many parameters are summed later, and the calls over the tensor axis that do not grow with the batch, in each of the three.
    """
    model, rows = make(), batch()
    compiled = tpcompile.compile(model, mesh, rows, microbatches=microbatches)
    whole, pieces = dict(model.named_parameters()), compiled.program().parameters
    stage = compiled.program().stages[0]
    later, tensor_ranks = set(summed_later(stage)), compiled.mesh.group("tp", compiled.program().coordinates)
    small, worst = [], 0.0
    for step in range(3):
        recorded.calls().clear()
        if compiled.mesh.pp == 1 and step == 1:
            compiled(**rows).loss.backward()
        else:
            compiled.train_step(**rows)
        small.append(sum(c.call == "all_reduce" and c.ranks == tensor_ranks and c.dtype == torch.float64 for c in recorded.calls()))
        model(**rows).loss.backward()
        largest = max(p.grad.abs().max().item() for p in whole.values() if p.grad is not None)
        for own, p in compiled.named_parameters():
            apart = plain(p.grad) - pieces[own].of(whole[own].grad)
            worst = max(worst, apart.abs().max().item() / largest)
    return worst, len(later), small


def jobs(cases: tuple[tuple[Callable[[], nn.Module], str, int], ...]) -> list[Any]:
    return [accumulated(*case) for case in cases]
