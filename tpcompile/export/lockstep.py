"""ONNX files of all tensor ranks, run together in one process by ONNX's reference evaluator, with our own AllReduce and AllGather."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tpcompile.export.onnx import DOMAIN


def run_ranks(files: Sequence[Path], inputs: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """The outputs of every rank's file by name, given every rank's inputs. The ranks wait for each other at collectives."""
    exchange = _Exchange(len(files))
    with ThreadPoolExecutor(len(files)) as pool:
        running = [pool.submit(_run, file, given, exchange, rank) for rank, (file, given) in enumerate(zip(files, inputs, strict=True))]
        return [future.result() for future in running]


class _Exchange:
    """Where the ranks put their tensors, and wait for those of the others."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.given = threading.Barrier(ranks), [np.empty(0)] * ranks

    def all(self, rank: int, value: np.ndarray) -> list[np.ndarray]:
        self.given[rank] = value
        self.barrier.wait()
        taken = list(self.given)
        self.barrier.wait()
        return taken


def _run(file: Path, inputs: Mapping[str, np.ndarray], exchange: _Exchange, rank: int) -> dict[str, np.ndarray]:
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    class AllReduce(OpRun):
        op_domain = DOMAIN

        def _run(self, x: np.ndarray, **_: Any) -> tuple[np.ndarray]:
            return (np.sum(exchange.all(rank, x), axis=0, dtype=x.dtype),)

    class AllGather(OpRun):
        op_domain = DOMAIN

        def _run(self, x: np.ndarray, **_: Any) -> tuple[np.ndarray]:
            return (np.concatenate(exchange.all(rank, x)),)

    try:
        evaluator = ReferenceEvaluator(str(file), new_ops=[AllReduce, AllGather])
        outputs = evaluator.run(None, dict(inputs))
    except BaseException:
        exchange.barrier.abort()
        raise
    return dict(zip(evaluator.output_names, outputs, strict=True))
