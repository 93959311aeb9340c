"""The benchmarks of bytes and of memory: they agree with the formulas on one mode, and say so where a formula is wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import benchmark_workers as workers
import pytest

import tpcompile

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
MESH = "dp=2"
BYTES = ["--meshes", MESH, "--models", "gpt2", "--modes", "zero1"]
MEMORY = ["--meshes", MESH, "--models", "gpt2", "--modes", "zero3", "--recompute", "none"]


@cache
def benchmark(name: str) -> ModuleType:
    """A benchmark as a module, under a name that no other module has."""
    spec = importlib.util.spec_from_file_location(f"benchmark_of_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


@cache
def ranks() -> list[dict[str, workers.Measured]]:
    """What every rank measures for both, in the same processes."""
    of_bytes = tuple(benchmark("bytes").cases(("gpt2",), MESH, ("zero1",), ("1f1b",)))
    of_memory = tuple(benchmark("memory").cases("gpt2", MESH, ("zero3",), ("none",)))
    return tpcompile.launch(workers.measured, MESH, of_bytes, of_memory, backend="recorded")


def status(name: str, wrong: bool, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of a benchmark whose processes have measured that."""
    found = [rank[name][wrong] for rank in ranks()]

    def launch(function: Any, mesh: str, cases: tuple[Any, ...], **settings: Any) -> list[Any]:
        assert mesh == MESH and len(cases) >= len(found[0])
        return [[one[place % len(one)] for place in range(len(cases))] for one in found]

    module = benchmark(name)
    monkeypatch.setattr(module.tpcompile, "launch", launch)
    return int(module.main(arguments))


def test_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks()
    assert status("bytes", False, [*BYTES, "--json", str(tmp_path / "bytes.json")], monkeypatch) == 0
    rows = {row["call"]: row for row in json.loads((tmp_path / "bytes.json").read_text())}
    assert set(rows) == {"all_gather", "all_gather of update", "all_reduce", "all_reduce of clipping"}
    assert all(row["equal"] for row in rows.values())
    assert rows["all_gather"]["recorded"]["bytes"] == 24 and rows["all_reduce of clipping"]["recorded"]["bytes"] == 8
    parameters, gradients = (rows[call]["recorded"]["bytes"] for call in ("all_gather of update", "all_reduce"))
    assert gradients - 16 == 2 * parameters > 10**5, "the loss and one count besides; all rows divide by two"


def test_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks()
    assert status("memory", False, [*MEMORY, "--json", str(tmp_path / "memory.json")], monkeypatch) == 0
    rows = [row for row in json.loads((tmp_path / "memory.json").read_text()) if row["case"]["microbatches"] is None]
    sizes = {row["what"]: row["measured"] for row in rows}
    assert sizes["optimizer"] == pytest.approx(2 * sizes["parameters"]) and sizes["activations"] > sizes["gathered"] > 10**7


@pytest.mark.parametrize(("name", "arguments"), [("bytes", BYTES), ("memory", MEMORY)])
def test_a_wrong_formula(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ranks()
    assert status(name, True, arguments, monkeypatch) == 1
    printed = capsys.readouterr().out
    assert "NO" in printed and ("32" in printed if name == "bytes" else "1.500" not in printed and "0.667" in printed)
