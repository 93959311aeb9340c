"""A rank that fails ends all of them soon, with an error that says which it was and how far it had come; and nothing good is lost."""

from __future__ import annotations

import time
from pathlib import Path

import fault_workers as workers
import handmade
import pytest
import torch

from tpcompile.runtime import compiled as compiled_module
from tpcompile.runtime.launch import ProcessError, launch

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def failed(tmp_path: Path, where: str, fault: str, mesh: str = "pp=2", timeout: float = 1800.0) -> ProcessError:
    start = time.monotonic()
    with pytest.raises(ProcessError) as error:
        launch(workers.trained, mesh, mesh, where, fault, str(tmp_path), timeout=timeout)
    assert time.monotonic() - start < 60
    return error.value


@pytest.mark.parametrize("where", ["forward", "backward", "save"])
def test_a_rank_that_is_killed(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, doing = failed(tmp_path, where, "die"), "saving" if where == "save" else "training"
    assert str(error).startswith(f"rank 1 failed (stage 1, {doing}, step 3): Signal 9 (SIGKILL) received by PID ")
    monkeypatch.setattr(compiled_module, "lower", handmade.lower)
    monkeypatch.setattr(compiled_module, "matches", handmade.matches)
    alone = handmade.compiled(handmade.Tied(), "tp=1", handmade.batch())
    assert alone.load(tmp_path, optimizer=alone.optimizer(torch.optim.AdamW)) == 2


def test_a_rank_that_raises(tmp_path: Path) -> None:
    error = failed(tmp_path, "backward", "throw")
    assert str(error).startswith("rank 1 failed (stage 1, training, step 3): ") and "\nValueError: a bad day\n" in error.trace
    assert error.trace.endswith("\nrank 1 (dp 0, stage 1, tp 0), training, step 3\n")


def test_a_rank_that_raises_in_a_save(tmp_path: Path) -> None:
    """It is told to all of them."""
    error = failed(tmp_path, "save", "throw", mesh="dp=2")
    assert "on rank 1: ValueError: a bad day" in str(error) and "saving, step 3" in error.place


def test_a_rank_that_does_not_answer(tmp_path: Path) -> None:
    error = failed(tmp_path, "forward", "wait", mesh="dp=2", timeout=5.0)
    assert str(error).startswith("rank 0 failed (training, step 3): ") and "imed out" in str(error)
    assert "\n  rank 1 was at: training, step 3" in str(error)
