"""The command `tpcompile`: demo, plan, inspect, emit, run and check."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tpcompile import colours
from tpcompile.errors import InputError, TpcompileError
from tpcompile.mesh import Mesh
from tpcompile.models import HELP, Sizes, load
from tpcompile.schedules import SCHEDULES


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="tpcompile",
        description="Compile an unmodified PyTorch Transformer for a mesh of data, pipeline and tensor parallel ranks.",
        epilog="Exit status: 0 all is well, 1 numbers differ, 2 the call does not fit the model, the mesh or the machine.",
    )
    commands = root.add_subparsers(dest="command", required=True)
    command = _Commands(commands)
    demo = command.add("demo", _demo, "train a small GPT on local processes and on one, and compare every number")
    demo.add_argument("--model", default="tpcompile.demo.model:gpt", help="what to train (default: the demo's GPT)")
    _sizes(demo, mesh="dp=2,pp=2,tp=2", rows=16, sequence=48)
    demo.add_argument("--steps", type=_count, default=20, help="default: 20")
    demo.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is a GPU for every rank")
    demo.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="default: float64, so that rounding hides nothing")
    plan = command.add("plan", _plan, "print what would be cut, how, and what stays whole and why")
    _model(plan)
    _training(plan)
    plan.add_argument("--full", action="store_true", help="every stage, every tensor rank and every formula, in 160 columns")
    plan.add_argument("--device-memory", type=float, default=80.0, metavar="GIB", help="what a device has (default: 80)")
    inspect = command.add("inspect", _inspect, "print what the passes did, the graph after one of them, or the rules of all operations")
    _model(inspect, needed=False)
    _training(inspect)
    inspect.add_argument("--pass", dest="after", metavar="NAME", help="capture, normalize, …; without it, what every pass did")
    inspect.add_argument("--layer", metavar="NAME", help="of one layer alone: its number, or its module's path")
    inspect.add_argument("--diff", action="store_true", help="what the pass changed")
    inspect.add_argument("--source", action="store_true", help="under the lines of the model")
    inspect.add_argument("--rules", action="store_true", help="print what every operation does to a cut; needs no model")
    inspect.add_argument("--api", action="store_true", help="print the reference of everything public; needs no model")
    inspect.add_argument("--rank", type=int, help="print the numbers and the source of this rank (with --pass emit)")
    inspect.add_argument("--html", metavar="FILE", help="write a page of everything instead: one file, for any browser")
    emit = command.add("emit", _emit, "write the programs of all ranks to a folder")
    _model(emit)
    emit.add_argument("--out", required=True, metavar="DIR", help="a new folder, or one that a program was written to")
    emit.add_argument("--formats", default="", metavar="FORMAT,…", help="onnx, pt2, aoti, beside the sources")
    run = command.add("run", _run, "train, or run forward, what is on disk; under torchrun, or in local processes")
    run.add_argument("directory", metavar="DIR", help="what tpcompile emit wrote")
    run.add_argument("--steps", type=_count, default=3, help="default: 3")
    run.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW; 0 runs forward alone (default: 0.001)")
    run.add_argument("--data", default="", metavar="package.module:function", help="a function that returns batches (default: made ones)")
    check = command.add("check", _check, "run every rank in this process beside the untouched model; or the formats of a program on disk")
    _model(check, mesh_needed=False)
    check.add_argument("--dtype", choices=("float64", "float32"), help="default: the model's own")
    check.add_argument("--json", action="store_true", help="print the report as JSON")
    return root


class _Commands:
    """Subcommands that know what they run."""

    def __init__(self, commands: Any) -> None:
        self._commands = commands

    def add(self, name: str, run: Any, help: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = self._commands.add_parser(
            name, help=help, description=f"{help[0].upper()}{help[1:]}.", epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        made.set_defaults(run=run)
        return made


def _model(command: argparse.ArgumentParser, *, needed: bool = True, mesh_needed: bool = True) -> None:
    text = "package.module:factory, or hf:llama,num_hidden_layers=2,hidden_size=64"
    command.add_argument("model", metavar="MODEL", nargs=None if needed else "?", help=text)
    _sizes(command, mesh=None, rows=8, sequence=16, needed=needed and mesh_needed)
    _add_options(command)


def _sizes(command: argparse.ArgumentParser, *, mesh: str | None, rows: int, sequence: int, needed: bool = True) -> None:
    command.add_argument(
        "--mesh", default=mesh, required=needed and mesh is None, help='such as "dp=2,pp=2,tp=2"' + (" (the default)" if mesh else "")
    )
    command.add_argument("--batch", type=_count, default=rows, help=f"rows of a batch that is made here (default: {rows})")
    command.add_argument("--sequence", type=_count, default=sequence, help=f"words in a row of it (default: {sequence})")
    command.add_argument("--microbatches", type=_count, help="per replica (default: 1 without a pipeline, else as many as stages)")


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b", help="the pipeline's schedule (default: 1f1b)")
    command.add_argument("--stages-per-rank", type=_count, help="stages that a rank holds (default: what the schedule needs)")
    how = "how masks are drawn; check compares dropout if they are exact (default: local)"
    command.add_argument("--dropout", choices=("local", "exact", "fast"), default="local", help=how)
    command.add_argument(
        "--sequence-parallel",
        choices=("on", "off", "regather"),
        default="on",
        help="whether tensor ranks keep their own positions between regions; regather: and gather them again in backward (default: on)",
    )
    command.add_argument(
        "--overlap",
        choices=("on", "off"),
        default="on",
        help="whether tensor ranks communicate while weights' gradients are computed (default: on)",
    )
    command.add_argument(
        "--vocab-parallel",
        choices=("on", "off"),
        default="on",
        help="whether tables of tokens, heads and their losses are cut (default: on)",
    )
    command.add_argument("--outputs", choices=("all", "loss"), default="all", help="what a step returns (default: all)")
    command.add_argument(
        "--attention",
        choices=("normal", "written"),
        default="normal",
        help="attention as one operation, causal masks as its option; or as the model writes it (default: normal)",
    )


def _training(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data-parallel", choices=("ddp", "zero1", "zero2", "zero3"), default="ddp", help="what replicas share out (default: ddp, nothing)"
    )
    command.add_argument("--precision", choices=("bf16", "fp16"), help="the type to compute in (default: the model's own)")
    command.add_argument(
        "--recompute", choices=("none", "full", "selective"), default="none", help="which layers run again in backward (default: none)"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except TpcompileError as error:
        print(f"tpcompile: {error}", file=sys.stderr)
        return 2


def _demo(args: argparse.Namespace) -> int:
    from tpcompile.demo.run import Work, demo

    mesh = Mesh.of(args.mesh)
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() >= mesh.size else "cpu"
    dtype = getattr(torch, args.dtype)
    work = Work(args.model, str(mesh), args.steps, device, dtype, Sizes(args.batch, args.sequence), args.microbatches)
    return 0 if demo(work, Console(soft_wrap=True)) else 1


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `compile` and `check` that the command line gives."""
    sequence_parallel = {"on": True, "off": False}.get(args.sequence_parallel, "regather")
    chosen = {"sequence_parallel": sequence_parallel, "vocab_parallel": args.vocab_parallel == "on", "outputs": args.outputs}
    chosen |= {"attention": args.attention, "overlap": args.overlap == "on"}
    chosen |= {"schedule": args.schedule, "stages_per_rank": args.stages_per_rank}
    training = {name: getattr(args, name) for name in ("data_parallel", "precision", "recompute") if hasattr(args, name)}
    return {"microbatches": args.microbatches, "dropout": args.dropout, **chosen, **training}


def _plan(args: argparse.Namespace) -> int:
    import tpcompile
    from tpcompile.inspect.explain import explain, show

    model, batch = load(args.model, Sizes(args.batch, args.sequence))
    compilation = tpcompile.compile(model, args.mesh, batch, **_options(args)).compilation
    how: dict[str, Any] = {"full": args.full, "device_memory": args.device_memory}
    if (console := _console()).is_terminal:
        show(compilation, console, **how)
    else:
        print(explain(compilation, **how))
    return 0


def _console() -> Console:
    return Console(highlight=False)


def _inspect(args: argparse.Namespace) -> int:
    import tpcompile
    from tpcompile.inspect.operations import operations

    if args.html is not None:
        return _page(args)
    if args.rules:
        print(operations(), end="")
        return 0
    if args.api:
        from tpcompile.api import api

        print(api(), end="")
        return 0
    if missing := [name for name, given in (("MODEL", args.model), ("--mesh", args.mesh)) if given is None]:
        raise InputError(f"{', '.join(missing)} not given", at="tpcompile inspect", fix="give both MODEL and --mesh, or --rules alone")
    model, batch = load(args.model, Sizes(args.batch, args.sequence))
    compiled = tpcompile.compile(model, args.mesh, batch, **_options(args))
    if args.after == "emit":
        print(compiled.program(args.rank or 0).source)
        return 0
    history = compiled.history
    if args.after is None:
        _say(history, str(history))
        return 0
    if args.after not in history:
        raise InputError(
            f"no pass is named {args.after!r}", at=f"--pass {args.after}", fix=f"the passes are {', '.join([*history, 'emit'])}"
        )
    step = history[args.after] if args.layer is None else history[args.after].layer(args.layer)
    shown = step.diff(sources=args.source) if args.diff else step.text_of(step.made, sources=args.source)
    _say((colours.diff if args.diff else colours.graph)(shown), shown)
    return 0


def _say(coloured: Any, plain: str) -> None:
    """In colours on a terminal."""
    if (console := _console()).is_terminal:
        console.print(coloured, soft_wrap=True)
    else:
        print(plain)


def _emit(args: argparse.Namespace) -> int:
    import tpcompile

    model, batch = load(args.model, Sizes(args.batch, args.sequence))
    formats = [name for name in args.formats.split(",") if name]
    tpcompile.compile(model, args.mesh, batch, **_options(args)).emit(args.out, formats=formats)
    for file in sorted(Path(args.out).iterdir()):
        print(f"{file.stat().st_size:>12,}  {file}")
    return 0


def _page(args: argparse.Namespace) -> int:
    import tpcompile

    file = Path(args.html)
    if missing := [name for name, given in (("MODEL", args.model), ("--mesh", args.mesh)) if given is None]:
        raise InputError(f"{', '.join(missing)} not given", at=f"tpcompile inspect --html {file}", fix="give MODEL and --mesh")
    if not file.absolute().parent.is_dir():
        raise InputError(f"there is no folder {file.parent}", at=f"--html {file}", fix="make the folder, or name another file")
    model, batch = load(args.model, Sizes(args.batch, args.sequence))
    file.write_text(tpcompile.compile(model, args.mesh, batch, **_options(args)).html(), encoding="utf-8")
    print(f"{file.stat().st_size:>12,}  {file}")
    return 0


def _run(args: argparse.Namespace) -> int:
    from tpcompile.export.run import run

    run(Path(args.directory), args.steps, args.lr, args.data)
    return 0


def _check_disk(directory: Path) -> int:
    from tpcompile.export.check import TOLERANCE, check_formats

    found = check_formats(directory)
    for name, worst in found.items():
        print(f"{name}: {'equal' if worst <= TOLERANCE else 'DIFFERENT'}, by {worst:.1e} at most")
    return 0 if all(worst <= TOLERANCE for worst in found.values()) else 1


def _check(args: argparse.Namespace) -> int:
    import tpcompile

    if Path(args.model).is_dir():
        return _check_disk(Path(args.model))
    if args.mesh is None:
        raise InputError("no mesh is given", at="tpcompile check", fix="add --mesh, or give the folder that tpcompile emit wrote")
    model, batch = load(args.model, Sizes(args.batch, args.sequence))
    if args.dtype:
        model.to(getattr(torch, args.dtype))
    report = tpcompile.check(model, args.mesh, batch, **_options(args))
    print(report.to_json() if args.json else report)
    return 0 if report.ok else 1
