"""Real processes: what they get, what they return, and how their failures come back."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import runtime_workers as workers

from tpcompile.errors import InputError
from tpcompile.runtime.launch import ProcessError, launch

pytestmark = pytest.mark.processes


def test_every_rank_runs_and_returns() -> None:
    assert launch(workers.place, "dp=2", "word") == [("word", rank, 2, 1, "1") for rank in range(2)]


def test_large_results_come_back() -> None:
    assert [result.sum().item() for result in launch(workers.big, "dp=2", 3_000_000)] == [0.0, 3_000_000.0]


def test_a_failure_comes_with_its_rank_and_trace() -> None:
    with pytest.raises(ProcessError) as error:
        launch(workers.fail, "dp=3", 1)
    assert error.value.rank == 1
    assert str(error.value).startswith("rank 1 failed: ValueError: a bad day\n\nTraceback (most recent call last):\n")
    assert error.value.trace.endswith('    raise ValueError("a bad day")\nValueError: a bad day\n')
    assert "launch.py" not in error.value.trace


def test_a_process_that_is_killed() -> None:
    with pytest.raises(ProcessError) as error:
        launch(workers.vanish, "dp=2", 1)
    assert str(error.value) == "rank 1 failed: Signal 9 (SIGKILL) received by PID " + str(error.value).split()[-1]


def test_a_function_that_no_process_can_import() -> None:
    with pytest.raises(InputError) as error:
        launch(lambda: None, "dp=2")
    assert error.value.what.startswith("the processes cannot be given test_a_function_that_no_process_can_import.<locals>.<lambda>")
    assert error.value.fix == "use a function at the top of a module, and arguments that can be pickled"


def test_a_module_that_no_process_can_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pytest's importlib mode makes of a test file: a module in sys.modules that lies on no path."""
    monkeypatch.setattr(workers.place, "__module__", "nowhere.test_it")
    monkeypatch.setitem(sys.modules, "nowhere", ModuleType("nowhere"))
    monkeypatch.setitem(sys.modules, "nowhere.test_it", workers)
    with pytest.raises(InputError) as error:
        launch(workers.place, "dp=2", "word")
    assert error.value.what == "the processes cannot import nowhere.test_it: nowhere is not on sys.path"


def test_mesh_and_processes_do_not_match() -> None:
    for message in launch(workers.wrong_world, "dp=2", "dp=2,pp=2"):
        lines = message.split("\n")
        assert lines[0] == "mesh dp=2,pp=2,tp=1 needs 4 processes, 2 are running"
        assert lines[1] == "  at   compiled.train_step(input_ids=[8, 5], labels=[8, 5])"
        assert lines[2].startswith("  from runtime_workers.py:")
        assert lines[3:] == ["  fix  start 4 processes (torchrun --nproc-per-node 4), or use a mesh whose sizes multiply to 2"]
