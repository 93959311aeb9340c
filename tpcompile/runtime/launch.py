"""Local processes, one per rank of a mesh, through torchrun's own launcher."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tpcompile.errors import InputError, TpcompileError, caller
from tpcompile.mesh import Mesh
from tpcompile.runtime import recorded


class ProcessError(TpcompileError):
    """A process that `launch` started has failed. `rank` is the first one that did, `trace` its own traceback."""

    def __init__(self, rank: int, reason: str, trace: str) -> None:
        self.rank, self.trace = rank, trace
        super().__init__(f"rank {rank} failed: {reason}\n\n{trace}".rstrip())


def launch(fn: Callable[..., Any], mesh: Mesh | DeviceMesh | str, *args: Any, device: str = "cpu", backend: str = "") -> list[Any]:
    """Run `fn(*args)` in one local process per rank of the mesh, and return what each rank returned.

    `fn` is a function at the top of a module that the processes can import; its results must be picklable. The default process group
    is there when it runs: gloo on "cpu", NCCL on "cuda" with one GPU per process; with `backend="recorded"`, on "cpu", one that notes
    every call (`tpcompile.runtime.recorded`). Raises ProcessError when a process fails.
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
    with tempfile.TemporaryDirectory() as logs:
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
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            shutdown_timeout=5,
        )
        try:
            with _quiet(logging.getLogger("torch.distributed.elastic.multiprocessing.api")):
                results = elastic_launch(config, _worker)(call, device, backend, logs)
        except ChildFailedError as error:
            raise _cause(error, Path(logs)) from None
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
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"the processes cannot be given {fn.__qualname__} and its arguments: {error}",
            at=f"launch({fn.__name__}, ...)",
            source=caller(),
            fix="use a function at the top of a module, and arguments that can be pickled",
        ) from None


def _preload(fn: Callable[..., Any]) -> None:
    """Have the server that the processes are forked from import what all of them need, once."""
    modules = ["torch", "torch.distributed.pipelining", "tpcompile", __name__, "tpcompile.runtime.compiled"]
    if fn.__module__ != "__main__":
        modules.append(fn.__module__)
    multiprocessing.set_forkserver_preload(modules)


def _worker(call: bytes, device: str, backend: str, logs: str) -> bytes:
    """What every process runs: a process group around the user's function."""
    local = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local)
        dist.init_process_group(backend or "cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local))
    else:
        os.environ["OMP_NUM_THREADS"] = "1"  # torch is loaded already; other libraries may not be
        torch.set_num_threads(1)
        if backend == recorded.BACKEND:
            recorded.register()
        dist.init_process_group(backend or "gloo")
    try:
        fn, args = pickle.loads(call)
        result = pickle.dumps(fn(*args))
    except Exception as error:
        _report(error, Path(logs))
        raise SystemExit(1) from None
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return result


def _report(error: Exception, logs: Path) -> None:
    """Leave word of a failure, with its time: others fail because of the first."""
    trace = traceback.format_exception(type(error), error, error.__traceback__.tb_next if error.__traceback__ else None)
    reason = "".join(traceback.format_exception_only(error)).strip()
    found = {"time": time.monotonic_ns(), "reason": reason, "trace": "".join(trace)}
    (logs / f"failure_{os.environ['RANK']}.json").write_text(json.dumps(found))


def _cause(error: ChildFailedError, logs: Path) -> ProcessError:
    """The first failure that a process left word of; else what torch's launcher saw, such as a signal."""
    failures = [(json.loads(path.read_text()), int(path.stem.split("_")[1])) for path in logs.glob("failure_*.json")]
    if failures:
        first, rank = min(failures, key=lambda failure: failure[0]["time"])
        return ProcessError(rank, first["reason"], first["trace"])
    rank, seen = error.get_first_failure()
    return ProcessError(rank, str(seen.message), "")
