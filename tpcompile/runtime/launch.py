"""Local processes, one per rank of a mesh, through torchrun's own launcher."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tpcompile.errors import InputError, TpcompileError, caller
from tpcompile.mesh import Mesh


class ProcessError(TpcompileError):
    """A process that `launch` started has failed. `rank` is the first one that did, `trace` its own traceback."""

    def __init__(self, rank: int, reason: str, trace: str) -> None:
        self.rank, self.trace = rank, trace
        super().__init__(f"rank {rank} failed: {reason}\n\n{trace}".rstrip())


def launch(fn: Callable[..., Any], mesh: Mesh | DeviceMesh | str, *args: Any, device: str = "cpu") -> list[Any]:
    """Run `fn(*args)` in one local process per rank of the mesh, and return what each rank returned.

    `fn` is a function at the top of a module that the processes can import; its results must be picklable. The default process group
    is there when it runs: gloo on "cpu", NCCL on "cuda" with one GPU per process. Raises ProcessError when a process fails.
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
            results = elastic_launch(config, _worker)(call, device)
        except ChildFailedError as error:
            raise _process_error(error) from None
    return [pickle.loads(results[rank]) for rank in range(ranks)]


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


def _worker(call: bytes, device: str) -> bytes:
    """What every process runs: a process group around the user's function."""
    fn, args = pickle.loads(call)
    local = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local))
    else:
        os.environ["OMP_NUM_THREADS"] = "1"  # torch is loaded already; other libraries may not be
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    result = pickle.dumps(fn(*args))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return result


def _process_error(error: ChildFailedError) -> ProcessError:
    """The first failure; the processes that were stopped because of it are not causes."""
    rank, failure = error.get_first_failure()
    data = failure.error_file_data.get("message", "")
    if isinstance(data, dict):
        trace = str(data.get("extraInfo", {}).get("py_callstack", ""))
        return ProcessError(rank, str(data.get("message", "")).strip(), trace)
    return ProcessError(rank, failure.message or f"exit code {failure.exitcode}", "")
