"""`tpcompile run`: what is on disk, at work on every rank."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from tpcompile.errors import InputError
from tpcompile.export.batches import made_batch, nested
from tpcompile.export.load import Loaded, load
from tpcompile.export.read import Saved


def run(directory: Path, steps: int, lr: float, data: str) -> None:
    """Train for some steps of AdamW with this learning rate, or without a loss run forward; in processes of torchrun, or in local ones.

    `data` names a function that gives batches, "package.module:function"; without it a batch is made.
    """
    if "LOCAL_RANK" in os.environ:
        if not dist.is_initialized():
            dist.init_process_group()
        try:
            work(str(directory), steps, lr, data)
        finally:
            dist.destroy_process_group()
        return
    from tpcompile.runtime.launch import launch

    for line in launch(work, Saved.open(directory, "tpcompile run").mesh, str(directory), steps, lr, data)[0]:
        print(line)


def work(directory: str, steps: int, lr: float, data: str) -> list[str]:
    """On one rank; the lines that are printed, which under torchrun the first rank prints."""
    loaded = load(directory)
    saved, lines = loaded._saved, []
    given = _batches(data) if data else (nested(made_batch(saved, seed)) for seed in range(steps))
    for line in _lines(loaded, islice(given, steps), lr, trains=saved.content["program"]["loss"] is not None):
        lines.append(line)
        if "LOCAL_RANK" in os.environ and dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_RUN_ID") != "tpcompile":
            print(line, flush=True)
    return lines


def _lines(loaded: Loaded, batches: Iterable[dict[str, Any]], lr: float, *, trains: bool) -> Iterator[str]:
    optimizer = loaded.optimizer(torch.optim.AdamW, lr=lr) if trains and lr else None
    for number, batch in enumerate(batches):
        if optimizer is None:
            with torch.no_grad():
                made = loaded(**batch)
            values = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
            shown = (f"{list(value.shape)} of {value.dtype}" if value.ndim else f"{value.item():.6f}" for value in values)
            yield f"batch {number}: {', '.join(shown)}"
            continue
        loss = loaded.train_step(**batch)
        optimizer.step()
        optimizer.zero_grad()
        yield f"step {number}: loss {loss.item():.6f}"


def _batches(name: str) -> Iterator[dict[str, Any]]:
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return iter(getattr(importlib.import_module(module), function)())
    except (ImportError, AttributeError, ValueError) as error:
        fix = "give package.module:function, a function that returns batches"
        raise InputError(f"there are no batches in {name!r}: {error}", at="tpcompile run --data", fix=fix) from error
    finally:
        sys.path.remove(os.getcwd())
