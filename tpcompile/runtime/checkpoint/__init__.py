"""Checkpoints that any mesh can load, through torch.distributed.checkpoint: every tensor in boxes of the whole one, by its global name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from tpcompile.errors import InputError, TpcompileError
from tpcompile.runtime.checkpoint import directory as directories
from tpcompile.runtime.checkpoint.files import Reader, Writer, describe
from tpcompile.runtime.checkpoint.loading import Loaded, Stateful
from tpcompile.runtime.checkpoint.plain import encode
from tpcompile.runtime.checkpoint.plans import Loading, Saving
from tpcompile.runtime.checkpoint.shares import (
    Running,
    Share,
    of_buffers,
    of_generators,
    of_optimizer,
    of_parameters,
    together_in_groups,
)
from tpcompile.runtime.checkpoint.together import Group, alone, on_first, together

__all__ = ["SCALE", "Checkpoints", "Running", "Stateful"]

SCALE = "loss scale"
"""The engine's own object: a checkpoint of a run that scaled no loss serves one that does."""


class Checkpoints:
    """Saves and loads for one compiled model; a save that goes on in the background is waited for by the next call."""

    def __init__(self) -> None:
        self._writer: ThreadPoolExecutor | None = None
        self._group: Group = None
        self._going: Future[Path] | None = None

    def save(
        self,
        running: Running,
        path: Path,
        optimizer: torch.optim.Optimizer | None,
        objects: Mapping[str, Stateful],
        step: int | None,
        keep: int | None,
        wait: bool,
    ) -> Path | Future[Path]:
        if keep is not None and keep < 1:
            raise InputError(f"keep={keep}", at="compiled.save", fix="keep at least 1 checkpoint, or None to keep all")
        self._settle()
        seed, steps = running.engine.clock
        running.engine.mark.at(f"saving, step {steps}")
        number = steps if step is None else step
        shares, facts = together(lambda: _gathered(running, optimizer, objects))
        description = {
            "step": number,
            "mesh": str(running.engine.groups.mesh),
            "torch": torch.__version__,
            "clock": {"seed": seed, "steps": steps},
            "has_optimizer": optimizer is not None,
        }
        if wait:
            return _write(path, number, keep, shares, facts, description, None)
        shares = [share.like(share.tensor.detach().to("cpu", copy=True)) for share in shares]
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "tpcompile-save")
            self._group = None if alone() else dist.new_group(backend="gloo")  # its own: the training's may be in use
        self._going = self._writer.submit(_write, path, number, keep, shares, facts, description, self._group)
        return self._going

    def _settle(self) -> None:
        """Wait for the save before; its error belongs to whoever holds its future."""
        if self._going is not None:
            self._going.exception()
            self._going = None

    def load(
        self, running: Running, path: Path, optimizer: torch.optim.Optimizer | None, objects: Mapping[str, Stateful], missing_ok: bool
    ) -> int:
        self._settle()
        running.engine.mark.at("loading")
        found = on_first(lambda: directories.find(path))
        if found is None:
            if missing_ok:
                return 0
            raise directories.missing(path)
        description = together(lambda: describe(found))
        wanted = {name: thing for name, thing in objects.items() if name != SCALE or name in description["objects"]}
        loaded = together(lambda: Loaded(running, found, description, optimizer, wanted))
        with _dcp():
            state_dict_loader.load({}, storage_reader=Reader(found, description), planner=Loading(loaded.shares))
        try:
            together(loaded.restore_objects)
        except TpcompileError:
            loaded.undo()
            raise
        loaded.commit()
        return int(description["step"])


def _gathered(
    running: Running, optimizer: torch.optim.Optimizer | None, objects: Mapping[str, Stateful]
) -> tuple[list[Share], dict[str, Any]]:
    """This rank's tensors, and what it has to say beside them."""
    kept = of_optimizer(running, optimizer) if optimizer is not None else None
    groups = running.engine.groups
    shares = [*of_parameters(running), *of_buffers(running), *(kept.shares if kept else ()), *of_generators(groups.device, groups.rank)]
    facts = {
        "groups": kept.groups if kept else (),
        "values": kept.values if kept else {},
        "objects": {name: encode(thing.state_dict(), name) for name, thing in objects.items()},
    }
    return [share for share in shares if 0 not in share.shape], facts


def _merged(description: Mapping[str, Any], everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The notes of all ranks: objects are rank 0's."""
    values: dict[str, Any] = {}
    for facts in everyone:
        for name, own in facts["values"].items():
            values.setdefault(name, {}).update(own)
    groups = together_in_groups(facts["groups"] for facts in everyone)
    return {**description, "groups": groups, "values": values, "objects": everyone[0]["objects"]}


def _write(path: Path, step: int, keep: int | None, shares: list[Share], facts: Any, description: Mapping[str, Any], group: Group) -> Path:
    written, final = on_first(lambda: directories.begin(path, step), group)

    def merge(everyone: Sequence[Any]) -> Mapping[str, Any]:
        return _merged(description, everyone)

    with _dcp():
        state_dict_saver.save({}, storage_writer=Writer(written), planner=Saving(shares, facts, merge), process_group=group)
    on_first(lambda: directories.publish(written, final, keep), group)
    return final


@contextmanager
def _dcp() -> Any:
    """Calls of torch.distributed.checkpoint: an error of any rank is raised on all, with the rank that had it."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        peer, (cause, _) = min(error.failures.items())
        where = "" if alone() else f"on rank {peer}: "
        if isinstance(cause, TpcompileError):
            raise (InputError if isinstance(cause, InputError) else TpcompileError)(f"{where}{cause}") from None
        raise TpcompileError(f"{where}{type(cause).__name__}: {cause}") from cause
