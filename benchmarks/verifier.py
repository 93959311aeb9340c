"""What the verifier takes of the time of a compile.

python benchmarks/verifier.py
python benchmarks/verifier.py --models hf:llama,num_hidden_layers=8,hidden_size=64 --meshes "tp=2 dp=64,pp=2,tp=8"
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tpcompile
from tpcompile import driver
from tpcompile.models import Sizes, load

MODELS = ("hf:llama,num_hidden_layers=4,hidden_size=64,intermediate_size=176", "hf:gpt2,n_layer=4,n_embd=64,n_head=8")
MESHES = ("tp=2", "tp=8", "dp=64,pp=2,tp=4")


@dataclass
class Clock:
    """The seconds that `verify` takes in all of its calls."""

    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.verify = driver.verify

    def __call__(self, value: Any, known: Any = None) -> Any:
        start = time.perf_counter()
        try:
            return self.verify(value, known)
        finally:
            self.seconds += time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="*", default=MODELS)
    made.add_argument("--meshes", default=" ".join(MESHES))
    args = made.parse_args(argv)
    torch.set_num_threads(1)
    table = Table("model", "mesh", "compile, s", "verify, s", "share", box=None, pad_edge=False)
    for name in args.models:
        for mesh in ("tp=1", *args.meshes.split()):  # the first compile of a process loads what all use
            model, batch = load(name, Sizes(rows=128, sequence=32))
            driver.verify = clock = Clock()  # type: ignore[assignment]
            start = time.perf_counter()
            tpcompile.compile(model, mesh, batch)
            seconds = time.perf_counter() - start
            driver.verify = clock.verify
            if mesh != "tp=1":
                table.add_row(name, mesh, f"{seconds:.1f}", f"{clock.seconds:.2f}", f"{clock.seconds / seconds:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
