"""One stage as a schedule runs it: torch's PipelineStage, whose backward can be kept whole, and whose work can be timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage


class Timer:
    """How long a rank's stages work, and how long its steps take, while `on`: in seconds, by the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._works: list[tuple[Any, Any]] = []
        self._steps: list[tuple[Any, Any]] = []
        self.on = False

    def start(self) -> None:
        """Begin anew."""
        self._works, self._steps, self.on = [], [], True

    def stop(self) -> tuple[float, float]:
        """The seconds of work and of all steps since the start."""
        self.on = False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            between = [sum(begin.elapsed_time(end) / 1e3 for begin, end in marks) for marks in (self._works, self._steps)]
        else:
            between = [sum(end - begin for begin, end in marks) for marks in (self._works, self._steps)]
        return between[0], between[1]

    def work(self) -> Any:
        """Around one run of a stage."""
        return self._timed(self._works)

    def step(self) -> Any:
        """Around a step's whole schedule."""
        return self._timed(self._steps)

    @contextmanager
    def _timed(self, marks: list[tuple[Any, Any]]) -> Iterator[None]:
        if not self.on:
            yield
            return
        begin = self._now()
        yield
        marks.append((begin, self._now()))

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class Piece(PipelineStage):
    """A stage. With `whole`, where a schedule asks for backward in halves, the first is all of it and the second nothing."""

    def __init__(self, *args: Any, timer: Timer, whole: bool = False, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._timer, self._whole = timer, whole

    def forward_one_chunk(self, *args: Any, **settings: Any) -> Any:
        with self._timer.work():
            return super().forward_one_chunk(*args, **settings)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        with self._timer.work():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward or self._whole, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self._whole:
            with self._timer.work():
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
