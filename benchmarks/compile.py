"""What a compile costs, beside plain torch.export and torch's own pipeline(): seconds and peak memory, every row in a fresh process.

    python benchmarks/compile.py                                              all rows
    python benchmarks/compile.py --models llama-8b,llama-405b --sizes static  some
    python benchmarks/compile.py --depths 32,126 --ways tpcompile             Llama-8B's layers, so many of them
    python benchmarks/compile.py --meshes "tp=8 dp=2048,tp=8"                 rank 0 of 8 and of 16,384
    python benchmarks/compile.py --ranks                                      the last two, in turn, --repeat times; their ratio
    python benchmarks/compile.py --processor                                  processor time, which others on a machine lengthen less
    python benchmarks/compile.py --emit --models llama-405b --meshes pp=2,tp=8    the sources of all ranks to disk, too
    python benchmarks/compile.py --json rows.json

Models are on the meta device. The clock starts when torch, transformers and tpcompile are imported, with all of torch that is imported
on its first use, and the model is made. "compile" is `tpcompile.compile`, from capture to the checked schedule; "rank" is
`compiled.program(0)`, the finished modules of one rank; "verify" is what the checks between passes take of compile. "MB" is the peak of
the process, and "imports" what it was before the clock started. "emit" is `compiled.emit`,
of it "plan.txt" the estimates. Of `--repeat` runs the fastest counts.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LLAMA_70B = LLAMA_8B | {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
LLAMA_405B = LLAMA_70B | {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "llama-8b": ("llama", LLAMA_8B),
    "llama-70b": ("llama", LLAMA_70B),
    "gpt3-175b": ("gpt2", {"n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048}),
    "llama-405b": ("llama", LLAMA_405B),
}
DEPTHS = {"llama": "num_hidden_layers", "gpt2": "n_layer"}
SIZES = ("static", "dynamic")
WAYS = ("tpcompile", "torch.export", "pipeline()")
ROWS, LENGTH = 2, 128
EIGHT, MANY = "tp=8", "dp=2048,tp=8"
LAZY = ("torch.export._trace", "torch._functorch.aot_autograd", "torch.distributed.pipelining", "torch._inductor", "torch._dynamo")


@dataclass(frozen=True)
class Row:
    """One row: what is measured, and what was found."""

    way: str
    model: str
    sizes: str
    mesh: str = ""
    layers: int = 0  # 0: as many as the model has
    processor: bool = False  # seconds of the processor, not of the clock on the wall
    emit: bool = False  # whether the program is written to disk as well
    seconds: dict[str, float] = field(default_factory=dict)
    megabytes: int = 0
    imports: int = 0
    nodes: int = 0
    failed: str = ""

    @property
    def clock(self) -> Callable[[], float]:
        return time.process_time if self.processor else time.perf_counter

    @property
    def total(self) -> float:
        return sum(self.seconds.get(name, math.inf) for name in ("compile", "rank"))


def peak() -> int:
    """The most memory that this process has had, in MB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


# ------------------------------------------------------------------------------------------- in a fresh process


def measure(row: Row) -> Row:
    import importlib

    import torch

    for name in LAZY:
        importlib.import_module(name)
    kind, settings = MODELS[row.model]
    model = made(kind, settings | ({DEPTHS[kind]: row.layers} if row.layers else {}))
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids.clone()}
    run = {"tpcompile": compiled, "torch.export": exported, "pipeline()": pipelined}[row.way]
    import tpcompile  # noqa: F401 (before the clock starts)

    before = peak()
    seconds, nodes = run(model, batch, row)
    layers = row.layers or settings.get(DEPTHS[kind], 12)
    found = {"layers": layers, "seconds": seconds, "megabytes": peak(), "imports": before, "nodes": nodes}
    return Row(**{**asdict(row), **found})


def made(kind: str, settings: dict[str, Any]) -> Any:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings)).train()


def compiled(model: Any, batch: dict[str, Any], row: Row) -> tuple[dict[str, float], int]:
    import tpcompile
    from tpcompile import driver

    verify, checking = driver.verify, 0.0

    def timed(value: Any, known: Any = None) -> Any:
        nonlocal checking
        start = row.clock()
        try:
            return verify(value, known)
        finally:
            checking += row.clock() - start

    driver.verify, driver.time = timed, SimpleNamespace(perf_counter=row.clock)
    start = row.clock()
    made = tpcompile.compile(model, row.mesh, batch, dynamic=row.sizes == "dynamic")
    middle = row.clock()
    program = made.program(0)
    end = row.clock()
    passes = {name: step.seconds for name, step in made.history.items()}
    times = {"compile": middle - start, "rank": end - middle, **passes, "verify": checking, **(emitted(made, row) if row.emit else {})}
    return times, sum(len(graph.nodes) for graph in program.graphs)


def emitted(made: Any, row: Row) -> dict[str, float]:
    """The sources, the manifest and the plan of all ranks; of a model on the meta device, no weights."""
    from tpcompile.export import write

    plan, planning = write.write_plan, 0.0

    def timed(*args: Any) -> None:
        nonlocal planning
        start = row.clock()
        plan(*args)
        planning += row.clock() - start

    write.write_plan = timed
    with tempfile.TemporaryDirectory() as directory:
        start = row.clock()
        made.emit(directory)
        return {"emit": row.clock() - start, "plan.txt": planning}


def exported(model: Any, batch: dict[str, Any], row: Row) -> tuple[dict[str, float], int]:
    import torch
    from torch.export import Dim

    shapes = {name: {0: Dim.AUTO, 1: Dim.AUTO} for name in batch} | {"use_cache": None} if row.sizes == "dynamic" else None
    start = row.clock()
    program = torch.export.export(model, (), {**batch, "use_cache": False}, dynamic_shapes=shapes, strict=False)
    return {"compile": row.clock() - start, "rank": 0.0}, len(program.graph.nodes)


def pipelined(model: Any, batch: dict[str, Any], row: Row) -> tuple[dict[str, float], int]:
    """Two stages, cut before the layer in the middle."""
    import torch
    from torch.distributed.pipelining import SplitPoint, pipeline

    name, layers = next((name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList))
    points = {f"{name}.{len(layers) // 2}": SplitPoint.BEGINNING}
    start = row.clock()
    pipe = pipeline(model, (), {**batch, "use_cache": False}, split_spec=points)
    middle = row.clock()
    stage = pipe.get_stage_module(0)
    return {"compile": middle - start, "rank": row.clock() - middle}, len(stage.graph.nodes)


# ----------------------------------------------------------------------------------------------- one after the other


def fresh(row: Row, repeat: int = 1) -> Row:
    """The fastest of so many processes that measure nothing else."""
    runs = []
    for _ in range(repeat):
        command = [sys.executable, str(Path(__file__).resolve()), "--row", json.dumps(asdict(row))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return Row(**{**asdict(row), "failed": lines[-1] if lines else f"exit status {done.returncode}"})
        runs.append(Row(**json.loads(done.stdout.splitlines()[-1])))
    return min(runs, key=lambda run: run.total)


def chosen(args: argparse.Namespace) -> Iterator[Row]:
    models = args.models.split(",")
    depths = [int(depth) for depth in args.depths.split(",")] if args.depths else [0]
    for model in [next(name for name in models if name != "gpt2")] if args.depths else models:
        for layers in depths:
            for sizes in args.sizes.split(","):
                for way in args.ways.split(","):
                    if way == "pipeline()" and sizes == "dynamic":
                        continue  # it has no such sizes
                    for mesh in args.meshes.split() if way == "tpcompile" else [""]:
                        yield Row(way, model, sizes, mesh, layers, args.processor, args.emit and way == "tpcompile")


def shown(rows: Sequence[Row]) -> Table:
    table = Table(
        "model",
        "layers",
        "sizes",
        "",
        "compile, s",
        "capture",
        "passes",
        "verify",
        "rank",
        "emit",
        "plan.txt",
        "MB",
        "imports",
        "nodes",
        box=None,
    )
    for column in table.columns[4:]:
        column.justify = "right"
    for row in rows:
        name = f"{row.way} {row.mesh}".strip()
        if row.failed:
            table.add_row(row.model, str(row.layers or ""), row.sizes, name, row.failed)
            continue
        passes = sum(s for n, s in row.seconds.items() if n not in ("compile", "rank", "capture", "verify", "emit", "plan.txt"))
        parts = [row.seconds.get("capture"), passes if "capture" in row.seconds else None, row.seconds.get("verify"), row.seconds["rank"]]
        parts += [row.seconds.get("emit"), row.seconds.get("plan.txt")]
        cells = ["" if part is None else f"{part:.2f}" for part in parts]
        memory = (str(row.megabytes), str(row.imports), str(row.nodes))
        table.add_row(row.model, str(row.layers), row.sizes, name, f"{row.seconds['compile']:.2f}", *cells, *memory)
    return table


def of_passes(rows: Sequence[Row]) -> Table:
    rows = [row for row in rows if "capture" in row.seconds]
    table = Table("seconds", *(f"{row.model} {row.layers}\n{row.sizes}\n{row.mesh}" for row in rows), box=None)
    names = list(dict.fromkeys(name for row in rows for name in row.seconds if name not in ("compile", "rank")))
    for name in [*names, "rank"]:
        table.add_row(name, *(f"{row.seconds[name]:.2f}" if name in row.seconds else "" for row in rows))
    return table


def ratio(args: argparse.Namespace, console: Console) -> list[Row]:
    """Rank 0 of 8 and of 16,384, in turn."""
    best: dict[str, Row] = {}
    for _ in range(args.repeat):
        for mesh in (EIGHT, MANY):
            run = fresh(Row("tpcompile", args.models.split(",")[0], args.sizes.split(",")[-1], mesh, processor=args.processor))
            best[mesh] = min(best.get(mesh, run), run, key=lambda row: row.total)
    console.print(shown(list(best.values())))
    if any(row.failed for row in best.values()):
        return list(best.values())
    console.print(f"rank 0 of 16,384 ({MANY}) takes {best[MANY].total / best[EIGHT].total:.2f} of the time of rank 0 of 8 ({EIGHT})")
    return list(best.values())


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", default=",".join(MODELS), help=f"default: {','.join(MODELS)}")
    made.add_argument("--depths", default="", metavar="N,…", help="so many layers instead of the model's own, of the first model but gpt2")
    made.add_argument("--sizes", default=",".join(SIZES), help="static,dynamic (default: both)")
    made.add_argument("--ways", default=",".join(WAYS), help=f"default: {','.join(WAYS)}")
    made.add_argument("--meshes", default=EIGHT, help=f"separated by spaces (default: {EIGHT})")
    made.add_argument("--ranks", action="store_true", help="rank 0 of 8 and of 16,384, of the first model and the last of sizes")
    made.add_argument("--emit", action="store_true", help="write the sources of all ranks as well")
    made.add_argument("--processor", action="store_true", help="seconds of processor time, not of the clock on the wall")
    made.add_argument("--repeat", type=int, default=1, metavar="N", help="processes for a row, of which the fastest counts")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    made.add_argument("--row", help=argparse.SUPPRESS)
    args = made.parse_args(argv)
    if args.row:
        print(json.dumps(asdict(measure(Row(**json.loads(args.row))))))
        return 0
    console = Console(width=200)
    rows: list[Row] = []
    run: Callable[[Row], Row] = lambda row: fresh(row, args.repeat)  # noqa: E731
    if args.ranks:
        rows = ratio(args, console)
    else:
        for row in chosen(args):
            rows.append(run(row))
            if args.json:
                args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
        console.print(shown(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    console.print(of_passes(rows))
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
