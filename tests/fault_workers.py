"""What the tests of faults run in real processes: a rank that dies, raises or waits, in the middle of its work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import handmade
import torch
import torch.distributed as dist

from tpcompile.runtime.checkpoint import files
from tpcompile.runtime.compiled import Compiled

Fault = Callable[[], Any]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait() -> None:
    time.sleep(60)


def throw() -> None:
    raise ValueError("a bad day")


FAULTS: dict[str, Fault] = {"die": die, "wait": wait, "throw": throw}


def trained(mesh: str, where: str, fault: str, directory: str) -> None:
    """Two steps and a checkpoint; in the third step, or in the second save, the last rank comes to grief."""
    compiled = handmade.compiled(handmade.Tied(), mesh, handmade.batch(), microbatches=2)
    optimizer = compiled.optimizer(torch.optim.AdamW, lr=0.1)
    for step in range(4):
        if step == 2:
            compiled.save(directory, optimizer=optimizer, step=2)
        if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            arrange(compiled, where, FAULTS[fault])
        if step == 3 and where == "save":
            compiled.save(directory, optimizer=optimizer, step=3)
        compiled.train_step(**handmade.batch(seed=step))
        optimizer.step()
        optimizer.zero_grad()


def arrange(compiled: Compiled, where: str, fault: Fault) -> None:
    if where == "forward":
        compiled.module.register_forward_pre_hook(lambda *_: fault())
    elif where == "backward":
        next(iter(compiled.parameters())).register_hook(lambda _: fault())
    else:
        files.save_file = lambda *_: fault()  # type: ignore[assignment]
