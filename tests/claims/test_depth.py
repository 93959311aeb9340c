"""Work that grows with a model's depth grows no faster than its depth."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import tpcompile
from tpcompile.demo.model import GPT, Config

OURS = Path(tpcompile.__file__).resolve().parent.parent


class Calls:
    """While inside, counts the calls of Python's functions by the file that they are in."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    def __enter__(self) -> Calls:
        sys.setprofile(self.note)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def note(self, frame: FrameType, event: str, given: Any) -> None:
        if event == "call":
            self.of[frame.f_code.co_filename] += 1


def calls(layers: int) -> Counter[Path]:
    """Those in our own files, from capture to the checked schedule and one rank's program."""
    model = GPT(Config(layers=layers, heads=4, hidden=32, inner=48))
    ids = torch.zeros(2, 6, dtype=torch.long)
    with Calls() as made:
        tpcompile.compile(model, "tp=2", {"input_ids": ids, "labels": ids.clone()}, dynamic=False).program(0)
    files = {Path(name).resolve(): count for name, count in made.of.items()}
    return Counter({file.relative_to(OURS): count for file, count in files.items() if file.is_relative_to(OURS)})


@pytest.mark.slow
def test_a_compile_is_linear_in_depth() -> None:
    """Twice as many layers more are twice as many calls more, in every file: a walk that is quadratic makes four times as many."""
    _, few, more, most = (calls(layers) for layers in (6, 6, 12, 24))  # the first fills what is kept
    first, second = (sum(b.values()) - sum(a.values()) for a, b in ((few, more), (more, most)))
    assert second == pytest.approx(2 * first, rel=0.05)
    for file, count in most.items():
        assert count - more[file] <= 2.3 * (more[file] - few[file]) + 100, (file, few[file], more[file], count)
    assert Path("tpcompile/rules.py") in most and Path("tpcompile/verify.py") in most
