"""Local processes, one per rank of a mesh, through torchrun's own launcher."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tpcompile.errors import InputError, TpcompileError, caller
from tpcompile.mesh import Mesh
from tpcompile.runtime import mark, recorded

_PATIENCE = 3.0
"""Seconds for which a process whose peers do not answer leaves the first word to them."""


class ProcessError(TpcompileError):
    """A process that `launch` started has failed. `rank` is the first one that did, `trace` its own traceback.

    `place` says where it was: its pipeline stage and its step, as far as it had come.
    """

    def __init__(self, rank: int, reason: str, trace: str, place: str = "", others: str = "") -> None:
        self.rank, self.trace, self.place = rank, trace, place
        text = f"rank {rank} failed{f' ({place})' if place else ''}: {reason}" + (f"\n{others}" if others else "")
        super().__init__(f"{text}\n\n{trace}".rstrip())


def launch(
    fn: Callable[..., Any],
    mesh: Mesh | DeviceMesh | str,
    *args: Any,
    device: str = "cpu",
    backend: str = "",
    timeout: float = 1800.0,
    logs: Literal["first", "all"] = "first",
) -> list[Any]:
    """Run `fn(*args)` in one local process per rank of the mesh, and return what each rank returned.

    The default process group is there when it runs. Raises InputError, before any process starts, when they cannot be given `fn`, or
    where there are fewer GPUs than ranks, and ProcessError when one fails; all are ended then.

    - `fn`: a function at the top of a module that the processes can import; its results must be picklable.
    - `mesh`: as for `tpcompile.compile`; `args`: what `fn` is given, picklable too.
    - `device`: "cpu", or "cuda" with one GPU per process.
    - `backend`: of the process group; gloo on "cpu" and NCCL on "cuda" by default. "recorded" notes every call
      (`tpcompile.runtime.recorded`).
    - `timeout`: for how many seconds a process waits for another.
    - `logs`: "first": what rank 0 prints is seen; "all": what all print.
    """
    ranks = Mesh.of(mesh).size
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise InputError(
            f"a mesh of {ranks} ranks on {torch.cuda.device_count()} GPUs",
            at=f'launch({fn.__name__}, "{Mesh.of(mesh)}", device="cuda")',
            source=caller(),
            fix='use a smaller mesh, or device="cpu"',
        )
    call = _pickled(fn, args)
    _preload(fn)
    with tempfile.TemporaryDirectory() as directory:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="tpcompile",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=directory, redirects={rank: Std.ALL for rank in range(1, ranks) if logs == "first"}),
            shutdown_timeout=5,
        )
        try:
            with _quiet(logging.getLogger("torch.distributed.elastic.multiprocessing.api")):
                results = elastic_launch(config, _worker)(call, device, backend, directory, timeout)
        except ChildFailedError as error:
            raise _cause(error, Path(directory), Mesh.of(mesh)) from None
    return [pickle.loads(results[rank]) for rank in range(ranks)]


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Leave out the launcher's account of a failure: ProcessError tells it better."""
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        call = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"the processes cannot be given {fn.__qualname__} and its arguments: {error}",
            at=f"launch({fn.__name__}, ...)",
            source=caller(),
            fix="use a function at the top of a module, and arguments that can be pickled",
        ) from None
    package = fn.__module__.partition(".")[0]
    if package != "__main__" and not any(finder.find_spec(package, None) for finder in sys.meta_path):
        raise InputError(
            f"the processes cannot import {fn.__module__}: {package} is not on sys.path",
            at=f"launch({fn.__name__}, ...)",
            source=caller(),
            fix="move the function to a module that can be imported by its name (pytest's importlib mode gives test files none)",
        )
    return call


def _preload(fn: Callable[..., Any]) -> None:
    """Have the server that the processes are forked from import what all of them need, once."""
    modules = ["torch", "torch.distributed.pipelining", "tpcompile", __name__, "tpcompile.runtime.compiled"]
    if fn.__module__ != "__main__":
        modules.append(fn.__module__)
    multiprocessing.set_forkserver_preload(modules)


def _worker(call: bytes, device: str, backend: str, logs: str, seconds: float) -> bytes:
    """What every process runs: a process group around the user's function."""
    local, timeout = int(os.environ["LOCAL_RANK"]), timedelta(seconds=seconds)
    if device == "cuda":
        torch.cuda.set_device(local)
        if backend == recorded.BACKEND:
            recorded.register(device)
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend or "cpu:gloo,cuda:nccl", timeout=timeout, device_id=torch.device("cuda", local))
    else:
        os.environ["OMP_NUM_THREADS"] = "1"  # torch is loaded already; other libraries may not be
        torch.set_num_threads(1)
        if backend == recorded.BACKEND:
            recorded.register()
        dist.init_process_group(backend or "gloo", timeout=timeout)
    try:
        fn, args = pickle.loads(call)
        result = pickle.dumps(fn(*args))
    except Exception as error:
        _report(error, Path(logs))
        if _is_of_the_group(error):
            time.sleep(_PATIENCE)  # the process that this one lost is found first, and this one is ended
        raise SystemExit(1) from None
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return result


def _report(error: Exception, logs: Path) -> None:
    """Leave word of a failure, with its time: others fail because of the first."""
    trace = traceback.format_exception(type(error), error, error.__traceback__.tb_next if error.__traceback__ else None)
    told = traceback.TracebackException.from_exception(error)
    told.__notes__ = []  # they say where it was, and so does the mark
    reason = "".join(told.format_exception_only()).strip()
    found = {"time": time.monotonic_ns(), "reason": reason, "trace": "".join(trace), "own": not _is_of_the_group(error)}
    (logs / f"failure_{os.environ['RANK']}.json").write_text(json.dumps(found))


def _is_of_the_group(error: Exception) -> bool:
    """Whether an error says that another process does not answer."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(
        word in text for word in ("connection closed", "connection reset", "broken pipe", "gloo")
    )


def _cause(error: ChildFailedError, logs: Path, mesh: Mesh) -> ProcessError:
    """The first process that told of an error of its own; else the one that died, if it did without a word; else the first that told.

    A process may be ended by a signal because another has gone: an abort in its barrier comes before the launcher's first look.
    """
    rank, seen = error.get_first_failure()
    reason, trace, others = str(seen.message), "", ""
    places = mark.read(logs)
    failures = [(json.loads(path.read_text()), int(path.stem.split("_")[1])) for path in logs.glob("failure_*.json")]
    own = [failure for failure in failures if failure[0]["own"]]
    if own or (failures and (seen.exitcode >= 0 or any(rank == peer for _, peer in failures))):
        first, rank = min(own or failures, key=lambda failure: failure[0]["time"])
        reason, trace = first["reason"], first["trace"]
    if "timed out" in reason.lower():
        others = "\n".join(f"  rank {peer} was at: {place}" for peer, place in sorted(places.items()) if peer != rank)
    stage = f"stage {mesh.coordinates(rank)['pp']}, " if mesh.pp > 1 else ""
    return ProcessError(rank, reason, trace, f"{stage}{places[rank]}" if rank in places else "", others)
