"""How long a step of one layer takes with attention in its normal form, and as the model writes it.

python benchmarks/attention.py
python benchmarks/attention.py --lengths 256 1024 --rounds 7 --json attention.json
python benchmarks/attention.py --heads            what repeated key/value heads cost beside shared ones

Forward and backward of the program of one rank on one CPU core; both ways in turn, in one process. Figures are the medians over the
rounds, and the ratio is the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tpcompile.driver import Options, lower
from tpcompile.mesh import Mesh
from tpcompile.models import Sizes, load

GPT2 = "hf:gpt2,n_layer=1,n_embd=512,n_head=8,vocab_size=512"
LLAMA = "hf:llama,num_hidden_layers=1,hidden_size=512,num_attention_heads=8,num_key_value_heads=8,intermediate_size=1376,vocab_size=512"
ROWS = 2

Row = dict[str, Any]
Work = Callable[[], Tensor]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--lengths", type=int, nargs="*", default=[256, 1024])
    made.add_argument("--rounds", type=int, default=7, help="steps of each way, after one that is not counted (default: 7)")
    made.add_argument("--heads", action="store_true", help="time attention alone, of 8 heads with 2 key/value heads")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    torch.set_num_threads(1)
    found = heads if args.heads else layers
    names = ("repeated", "shared") if args.heads else ("written", "normal")
    table = Table("what", "length", *(f"{name}, ms" for name in names), "ratio", box=None, pad_edge=False)
    rows: list[Row] = []
    for what, length, first, second in found(args.lengths):
        row = {"what": what, "length": length, **timed(dict(zip(names, (first, second), strict=True)), args.rounds)}
        rows.append(row)
        table.add_row(what, str(length), *(f"{row[name]:.1f}" for name in names), f"{row['ratio']:.2f}")
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
    Console().print(table)


def timed(ways: dict[str, Work], rounds: int) -> Row:
    """The milliseconds of each way's forward and backward, and the second's share of the first's."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, work in ways.items():
            start = time.perf_counter()
            work().backward()  # type: ignore[no-untyped-call]
            taken[name].append(1000 * (time.perf_counter() - start))
    first, second = (each[1:] for each in taken.values())
    medians = {name: round(statistics.median(each[1:]), 2) for name, each in taken.items()}
    return {**medians, "ratio": round(statistics.median(b / a for a, b in zip(first, second, strict=True)), 3)}


def layers(lengths: Sequence[int]) -> Iterator[tuple[str, int, Work, Work]]:
    """A layer of GPT-2 and of Llama, as they call torch's attention with a mask and as they write it out."""
    for name, model in (("gpt2", GPT2), ("llama", LLAMA)):
        for way in ("sdpa", "eager"):
            for length in lengths:
                yield f"{name}, {way}", length, *(step(model, way, length, kind) for kind in ("written", "normal"))


def step(name: str, way: str, length: int, attention: Any) -> Work:
    """The forward of the one rank's program."""
    model, batch = load(name, Sizes(rows=ROWS, sequence=length))
    model.set_attn_implementation(way)  # type: ignore[operator]
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    program = lower(model, Mesh(), batch, Options(attention=attention, outputs="loss")).rank_program(model, 0)
    counts = {name: torch.tensor(1.0, dtype=torch.float64) for name in program.stages[0].inputs if name not in batch}
    given = {name: (batch | counts)[name] for name in program.stages[0].inputs}
    return lambda: program.module(**given)[0]  # type: ignore[no-any-return]


def heads(lengths: Sequence[int]) -> Iterator[tuple[str, int, Work, Work]]:
    """Causal attention of 8 heads of 64 with 2 key/value heads: repeated for it, or shared inside it."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for length in lengths:
            q, k, v = (torch.randn(ROWS, count, length, 64, dtype=dtype, requires_grad=True) for count in (8, 2, 2))

            def repeated(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                return F.scaled_dot_product_attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), is_causal=True).sum()

            def shared(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).sum()

            yield str(dtype).removeprefix("torch."), length, repeated, shared


if __name__ == "__main__":
    main()
