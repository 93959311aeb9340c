"""The examples run, and one that is interrupted goes on."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

import tpcompile

ROOT = Path(__file__).resolve().parent.parent
SIZES = ["num_hidden_layers=2", "hidden_size=16", "num_attention_heads=2", "intermediate_size=24"]
SMALL = ["--rows", "4", "--length", "16", "--steps", "6", "--save-every", "2", "--dtype", "float64", "--size", *SIZES]


def torchrun(*script: str, restarts: int = 0) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-ranks-filter", "0", *script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a shared store still has the addresses of those that died
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)/6  loss ([\d.]+)", printed)}


@pytest.mark.processes
@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """A rank dies in the fifth step; torchrun starts all again, and they begin with the fifth."""
    example = str(ROOT / "examples" / "train_hf.py")
    unbroken = losses(torchrun(example, "--mesh", "tp=2", *SMALL, "--export", str(tmp_path / "export")))
    assert list(unbroken) == [1, 2, 3, 4, 5, 6]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert model.config.num_hidden_layers == 2 and model.dtype == torch.float64
    dying = [str(ROOT / "tests" / "dying_example.py"), "4", example, "--mesh", "pp=2", "--checkpoints", str(tmp_path / "ckpt"), *SMALL]
    printed = torchrun(*dying, restarts=3)
    assert re.findall(r"step (\d)/6", printed) == ["1", "2", "3", "4", "5", "6"]
    assert losses(printed) == pytest.approx(unbroken, abs=1e-4)
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["latest", "step_00000004", "step_00000006"]


@pytest.mark.processes
@pytest.mark.slow
def test_every_option_by_its_flag() -> None:
    """What is set away from its default still learns the text: the loss of 256 even bytes is 5.55."""
    flags = ["--mesh", "dp=2", "--data-parallel", "zero3", "--microbatches", "2", "--precision", "bf16", "--recompute", "selective"]
    example = str(ROOT / "examples" / "train_hf.py")
    found = losses(
        torchrun(example, *SMALL, *flags, "--dtype", "float32", "--model", "gpt2", "--lr", "0.01", "--size", "n_embd=16", "n_layer=2")
    )
    assert list(found) == [1, 2, 3, 4, 5, 6] and found[6] < found[1] - 0.1 and abs(found[1] - 5.55) < 0.2, found


def ran(*command: str, directory: Path = ROOT) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=directory, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.processes
def test_lines_written_by_hand() -> None:
    found = re.findall(r"step +(\d+)  loss ([\d.]+)  one device ([\d.]+)", ran("examples/gpt.py", "pp=2", "--steps", "3"))
    assert [step for step, _, _ in found] == ["1", "2", "3"] and len({loss for _, loss, _ in found}) == 3
    assert all(abs(float(ours) - float(theirs)) < 1e-10 for _, ours, theirs in found)


def test_a_look_at_a_llama(tmp_path: Path) -> None:
    printed = ran("examples/inspect_llama.py", "--mesh", "pp=2,tp=2", "--layers", "2", "--html", str(tmp_path / "page.html"))
    assert all(part in printed for part in ("does it fit one device?", "tpcompile.seq_scatter", "class LlamaDecoderLayer(nn.Module):"))
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_parity_in_a_repository_of_its_own(tmp_path: Path) -> None:
    """The folder alone, as a user would copy it; and what its workflow runs is there."""
    there = shutil.copytree(ROOT / "examples" / "ci_parity", tmp_path / "theirs")
    assert "4 passed" in ran("-m", "pytest", "-q", "-p", "no:cacheprovider", directory=there)
    steps = re.findall(r"- run: (.*)", (there / ".github" / "workflows" / "parity.yml").read_text())
    assert steps == ["pip install pytest -r requirements.txt", "pytest test_parity.py"] and (there / "requirements.txt").is_file()


def test_progress_without_a_terminal() -> None:
    written = io.StringIO()
    with tpcompile.progress(40, start=30, console=Console(file=written)) as report:
        for step in range(30, 40):
            report.step(torch.tensor(step / 10), tokens=100)
    lines = written.getvalue().splitlines()
    assert [line.split("  ")[:2] for line in lines] == [[f"step {n}/40", f"loss {(n - 1) / 10:.4f}"] for n in (32, 34, 36, 38, 40)]
    assert all(re.fullmatch(r"step \d+/40  loss [\d.]+  [\d,]+ tokens/s  [\d.]+ GiB", line) for line in lines)


def test_progress_on_a_terminal() -> None:
    written = io.StringIO()
    with tpcompile.progress(2, console=Console(file=written, force_terminal=True, width=100)) as report:
        report.step(1.5, tokens=10)
        report.step(0.5, tokens=10)
    assert "loss 0.5000" in written.getvalue() and "2/2" in written.getvalue() and "step 2/2" not in written.getvalue()
