"""Real processes for tests: every worker runs as one rank of a gloo group. Workers live in modules that a new process can import."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore


def run(worker: Callable[[int, int, str], None], size: int) -> None:
    """Call `worker(rank, size, group name)` on every rank; a failure of any of them is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_start, (worker, size, str(Path(folder) / "store")), nprocs=size, start_method="spawn")


def _start(rank: int, worker: Callable[[int, int, str], None], size: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        worker(rank, size, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        dist.barrier()
    finally:
        dist.destroy_process_group()


@contextmanager
def one_of(size: int) -> Iterator[str]:
    """The name of a process group of so many ranks, of which this process is the first and which moves nothing."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield dist.distributed_c10d._get_default_group().group_name
    finally:
        dist.destroy_process_group()
