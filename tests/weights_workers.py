"""What the tests of weights run in real processes: models without values of their own, and what their ranks read and hold."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tpcompile
from tpcompile.demo.model import GPT, Config
from tpcompile.runtime import weights

SIZES = Config(vocab_size=4096, layers=2, heads=8, hidden=1024, inner=4096)


def large() -> GPT:
    return GPT(SIZES)


@dataclass
class Loaded:
    own: int  # bytes of the rank's parameters
    read: int  # bytes that it took from files
    peak: int  # bytes that it had more than before, at most
    right: bool


class Watch(threading.Thread):
    """The largest amount of memory of its own that this process has, in bytes: files that are mapped do not count."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.going = 0, True

    def run(self) -> None:
        while self.going:
            self.most = max(self.most, held())
            time.sleep(0.002)


def held() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


class Counting:
    """A slice that notes what is taken of it."""

    read = 0

    def __init__(self, given: Any) -> None:
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def __getitem__(self, index: Any) -> Tensor:
        value: Tensor = self._given[index]
        Counting.read += value.nbytes
        return value


def own_slices(directory: str, mesh: str) -> Loaded:
    """A model on the meta device that takes its weights from files."""
    with torch.device("meta"):
        model: nn.Module = large()
    ids = torch.randint(0, SIZES.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    compiled = tpcompile.compile(model, mesh, {"input_ids": ids, "labels": ids}, weights=directory)
    compiled.program()
    slices = weights.Weights.slices
    weights.Weights.slices = lambda self, name: Counting(slices(self, name))  # type: ignore[method-assign]
    gc.collect()
    before, watch = held(), Watch()
    watch.start()
    own = sum(p.nbytes for p in compiled.parameters())
    watch.going = False
    watch.join()
    source = weights.Weights(directory)
    whole = {name: source._file(source.where(name)).get_tensor(name) for name in source.names}
    pieces = compiled.program().parameters
    right = all(torch.equal(p, pieces[name].of(whole[name])) for name, p in compiled.named_parameters())
    return Loaded(own, Counting.read, watch.most - before, right)


def initialised(mesh: str, seed: int) -> dict[str, Tensor] | None:
    """All values that a model without any starts with, on the first rank, after a forward."""
    with torch.device("meta"):
        model: nn.Module = GPT(Config(vocab_size=91, layers=2, heads=3, hidden=24, inner=40))
    ids = torch.randint(0, 91, (4, 8), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(seed + 1)  # it has no part in it
    compiled = tpcompile.compile(model, mesh, {"input_ids": ids, "labels": ids}, weights=tpcompile.Initial(seed))
    compiled.eval_step(input_ids=ids, labels=ids)
    return compiled.full_state_dict()
