"""What the README says, run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tpcompile.driver import lower

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def torchrun(script: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.processes
@pytest.mark.slow
def test_the_training_script_trains(tmp_path: Path) -> None:
    script = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "train_step" in block)
    smaller = {'"dp=2,pp=2,tp=2"': '"tp=2"', "(100, 8, 128)": "(2, 4, 16)"}
    for old, new in smaller.items():
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "train.py").write_text(script + 'print(f"loss {loss:.1f}")\ntorch.distributed.destroy_process_group()\n')
    assert torchrun(tmp_path / "train.py").splitlines() == ["loss 10.8"] * 2


@pytest.mark.processes
@pytest.mark.slow
def test_the_example_trains() -> None:
    lines = torchrun(ROOT / "examples" / "train.py", "pp=2").splitlines()
    first, last = (float(line.split()[-1]) for line in (lines[0], lines[-1]))
    assert len(lines) == 20 and last < first - 0.5


def test_the_passes_are_listed_in_order() -> None:
    table = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    source = Path(lower.__code__.co_filename).read_text()
    body = source[source.index("def lower(") :]
    ran = list(dict.fromkeys(re.findall(r'log\.run\("(\w+)"', body)))
    assert table == [*ran, "emit"]
