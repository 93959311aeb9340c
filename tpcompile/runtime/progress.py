"""How a training run gets on: loss, tokens per second and memory, drawn by one rank."""

from __future__ import annotations

import resource
import sys
import time
from types import TracebackType

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

_KEPT = 20  # steps over which the speed is taken
_LINES = 20  # where there is no terminal


def progress(steps: int, *, start: int = 0, console: Console | None = None) -> Report:
    """A progress bar for the steps `start` to `steps`: on a terminal a bar, else some lines; on rank 0 alone.

    `console` is where it is drawn, standard output by default.

        with tpcompile.progress(1000, start=step) as report:
            for batch in batches:
                report.step(loss, tokens=batch["input_ids"].numel())
    """
    return Report(steps, start, console or Console())


class Report:
    """What `progress` returns."""

    def __init__(self, steps: int, start: int, console: Console) -> None:
        self._steps, self._done, self._console = steps, start, console
        self._first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not (self._first and console.is_terminal))
        self._task = self._bar.add_task("training", total=steps, completed=start)
        self._spent: list[tuple[float, int]] = [(time.perf_counter(), 0)]

    def __enter__(self) -> Report:
        self._bar.start()
        self._spent = [(time.perf_counter(), 0)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def step(self, loss: Tensor | float, *, tokens: int = 0) -> None:
        """A step is done; `loss` is its loss, a number or a scalar, and `tokens` are those of the whole batch."""
        self._done += 1
        if not self._first:
            return
        value = loss.item() if isinstance(loss, Tensor) else loss  # waits for the step: the clock is read after it
        self._spent = [*self._spent[-_KEPT:], (time.perf_counter(), tokens)]
        text = f"loss {value:.4f}  {self.speed:,.0f} tokens/s  {memory() / 2**30:.2f} GiB"
        self._bar.update(self._task, completed=self._done, description=text)
        if not self._console.is_terminal and (self._done % max(1, self._steps // _LINES) == 0 or self._done == self._steps):
            self._console.print(f"step {self._done}/{self._steps}  {text}", highlight=False, soft_wrap=True)

    @property
    def speed(self) -> float:
        """Tokens per second over the last steps."""
        seconds = self._spent[-1][0] - self._spent[0][0]
        return sum(tokens for _, tokens in self._spent[1:]) / seconds if seconds > 0 else 0.0


def memory() -> int:
    """The most that this process has held, in bytes: on its GPU, if it uses one, else in all."""
    if torch.cuda.is_available() and torch.cuda.memory_allocated():
        return torch.cuda.max_memory_allocated()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
