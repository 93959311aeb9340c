"""A training step of what tpcompile emits, beside the same model parallelized by hand, by DTensor, by transformers, and beside one device.

    python benchmarks/step.py                                           tp=2, at hidden sizes 128, 512 and 1024
    python benchmarks/step.py --meshes "tp=1 tp=2 pp=2 dp=2" --hidden 512   other meshes; tp=1 is one device
    python benchmarks/step.py --device cuda --hidden 4096 --layers 8    on GPUs, with NCCL
    python benchmarks/step.py --json step.json

A step is forward and backward of a Llama of `--layers` layers, without an optimizer. All ways run in the same processes, one after the
other in every round, the first another one each time; a ratio is the median over rounds of a way's time beside the first way's in the same
round. "peak" is the most memory that a step has beyond what it starts with. A way that does not run says why.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import tpcompile  # noqa: E402


@dataclass(frozen=True)
class Case:
    """What is measured: sizes of the model and the batch, and how often."""

    mesh: str
    hidden: int
    layers: int
    rows: int
    length: int
    vocabulary: int
    rounds: int
    device: str
    ways: tuple[str, ...] = ()


@dataclass
class Found:
    """What one way took."""

    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    failed: str = ""


def made(case: Case) -> tuple[Any, dict[str, Any]]:
    """The model, and a batch of equal tokens on every rank."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": case.hidden, "intermediate_size": 11 * case.hidden // 4, "num_hidden_layers": case.layers}
    heads = max(4, case.hidden // 64)
    config = AutoConfig.for_model(
        "llama", **sizes, vocab_size=case.vocabulary, num_attention_heads=heads, num_key_value_heads=heads, use_cache=False
    )
    model = AutoModelForCausalLM.from_config(config).to(case.device).train()
    ids = torch.randint(case.vocabulary, (case.rows, case.length), device=case.device)
    return model, {"input_ids": ids, "labels": ids.clone()}


def measured(case: Case) -> dict[str, Found]:
    """On one rank: every way's times, in turn."""
    import step_peers
    import torch
    import torch.distributed as dist

    model, batch = made(case)
    whole = tpcompile.Mesh.of(case.mesh)
    axes = [axis for axis in ("dp", "pp", "tp") if getattr(whole, axis) > 1]
    ways, found, steps = step_peers.WAYS["".join(axes)], dict[str, Found](), dict[str, Any]()
    for name, make in ways.items():
        if case.ways and name not in case.ways:
            continue
        found[name] = Found()
        try:
            steps[name] = make(model, batch, case.mesh)
            steps[name]()
            steps[name]()
        except Exception as error:  # a peer that does not run here is a row of its own
            steps.pop(name, None)
            found[name].failed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    names = list(steps)
    for index in range(case.rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            if case.device == "cuda":
                torch.cuda.synchronize()
            found[name].seconds.append(time.perf_counter() - start)
    for name in names:
        found[name].peak = peak(steps[name], case.device)
    return found


def peak(step: Any, device: str) -> int:
    """The most bytes that a step has at a time beyond those that it starts with."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


def shown(case: Case, found: Mapping[str, Found]) -> Table:
    table = Table(f"{case.mesh}, hidden {case.hidden}", "ms", "ratio", "peak, MB")
    first = next(iter(found.values()))
    for name, own in found.items():
        if own.failed:
            table.add_row(name, "–", "–", own.failed)
        else:
            table.add_row(name, f"{1000 * statistics.median(own.seconds):.1f}", f"{ratio(own, first):.2f}", f"{own.peak / 1e6:.1f}")
    return table


def ratio(own: Found, first: Found) -> float:
    return statistics.median(a / b for a, b in zip(own.seconds, first.seconds, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--meshes", default="tp=2", help="separated by spaces (default: tp=2)")
    made.add_argument("--hidden", default="128,512,1024", help="separated by commas")
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--rows", type=int, default=4)
    made.add_argument("--length", type=int, default=128)
    made.add_argument("--vocabulary", type=int, default=2048)
    made.add_argument("--rounds", type=int, default=20)
    made.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    made.add_argument("--ways", default="", help="names of ways, separated by semicolons (default: all)")
    made.add_argument("--json", type=Path, metavar="FILE")
    args = made.parse_args(argv)
    console, rows = Console(), []
    sizes = {name: getattr(args, name) for name in ("layers", "rows", "length", "vocabulary", "rounds", "device")}
    for mesh in args.meshes.split():
        for hidden in map(int, args.hidden.split(",")):
            case = Case(mesh, hidden, ways=tuple(filter(None, args.ways.split(";"))), **sizes)
            found = tpcompile.launch(measured, mesh, case, device=args.device)[0]
            console.print(shown(case, found))
            rows.append(asdict(case) | {"found": {name: asdict(own) for name, own in found.items()}})
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
