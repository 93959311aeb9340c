"""Every type of the zoo on small meshes, beside the untouched model: a table of what is equal, what is cut and what stays whole.

    python benchmarks/zoo.py                                  all types
    python benchmarks/zoo.py --types causal/llama,s2s/t5      some
    python benchmarks/zoo.py --shard 0/2 --json a.json        every second type, rows kept in a file
    python benchmarks/zoo.py --meshes "tp=2 tp=4" --options sequence_parallel=False,vocab_parallel=False
    python benchmarks/zoo.py --rows a.json,b.json --markdown docs/zoo.md

Exit status: 0 if every row is equal, or refused for what the list notes about it; 1 if not.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from zoo.measure import MESHES, NOTED, Row, measure, notes, options_of  # noqa: E402 (of the tests beside)
from zoo.tiny import types  # noqa: E402

VERDICTS = ("equal", *(verdict for _, verdict in NOTED.values()), "refused", "different", "error")
"""In the order in which the head of the table counts them."""

NOTED_IN_WORDS = """At pp=2 the batch is two micro-batches. A type that learns the statistics of its batch is refused there, as it must
be, and compared in one micro-batch. One that draws random numbers beside dropout is compared with dropout="exact"."""

ENOUGH = 0.98
"""The share of block weights that is to be cut where blocks are attention and MLP."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--types", help="task/type,…; default: all of tests/zoo/types.tsv")
    made.add_argument("--meshes", default=" ".join(MESHES), help=f'separated by spaces (default: "{" ".join(MESHES)}")')
    made.add_argument("--options", default="", metavar="NAME=VALUE,…", help="of tpcompile.compile, for all meshes")
    made.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th type, from the I-th")
    made.add_argument("--limit", type=int, default=120, metavar="SECONDS", help="for one type (default: 120)")
    made.add_argument("--rows", metavar="FILE,…", help="show rows that --json wrote, and run nothing")
    made.add_argument("--json", type=Path, metavar="FILE", help="write rows there, after every type")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    torch.set_num_threads(1)
    console = Console()
    rows: list[Row] = []
    options = options_of(args.options.split(",") if args.options else ())
    fresh = () if args.rows else run(chosen(args.types, args.shard), args.meshes.split(), args.limit, options)
    for row in kept(args.rows.split(",")) if args.rows else fresh:
        rows.append(row)
        if args.json:
            args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        if not args.rows:
            line = f"{len(rows):>3}  {row.type:<32}{row.seconds:>6.1f} s  {'ok' if row.ok else row.failures[0]}"
            console.print(line, highlight=False, markup=False)
    console.print(table(rows))
    console.print("\n".join(summary(rows)), highlight=False)
    if args.markdown:
        args.markdown.parent.mkdir(exist_ok=True)
        args.markdown.write_text(markdown(rows))
    return 0 if all(row.ok for row in rows) else 1


def chosen(names: str | None, shard: str) -> list[str]:
    listed = names.split(",") if names else [f"{row['task']}/{row['model_type']}" for row in types()]
    first, step = map(int, shard.split("/"))
    return listed[first::step]


class Late(BaseException):
    """A type takes too long; no `except Exception` on the way is to stop it."""


def run(names: Iterable[str], meshes: Sequence[str], limit: int, options: Mapping[str, Any]) -> Iterator[Row]:
    """Measure one type after the other, each for so many seconds at most."""

    def late(*_: object) -> None:
        raise Late(f"took more than {limit} seconds")

    signal.signal(signal.SIGALRM, late)
    for name in names:
        signal.alarm(limit)
        try:
            yield measure(name, meshes, **options)
        except Late as error:
            yield Row(name, notes().get(name, ""), meshes=dict.fromkeys(meshes, f"error: {error}"), seconds=limit)
        finally:
            signal.alarm(0)


def kept(files: Iterable[str]) -> Iterator[Row]:
    """The rows of several runs in the order of the list; a type that was run again counts as it came out last."""
    found = {row["type"]: Row(**row) for file in files for row in json.loads(Path(file).read_text())}
    order = {name: place for place, name in enumerate(chosen(None, "0/1"))}
    yield from sorted(found.values(), key=lambda row: order.get(row.type, len(order)))


# ----------------------------------------------------------------------------------------------------------- what is shown


def table(rows: Sequence[Row]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for heading in headings(rows):
        shown.add_column(heading, overflow="fold", no_wrap=heading == "type")
    for row in rows:
        shown.add_row(*cells(row, rows), style="" if row.ok else "bold red")
    return shown


def headings(rows: Sequence[Row]) -> list[str]:
    return ["type", *(rows[0].meshes if rows else ()), "layers", "cut at tp=2", "left whole", "seconds"]


def cells(row: Row, rows: Sequence[Row]) -> list[str]:
    results = [row.verdict(mesh) for mesh in rows[0].meshes]
    share = "" if row.share is None else f"{row.share:.1%}"
    return [row.type, *results, row.layers or "not captured", share, str(len(row.whole)) if row.captured else "", f"{row.seconds:.1f}"]


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """What the table comes to, then every failure and every refusal."""
    members = [row for row in rows if row.attention_and_mlp]
    enough = [row for row in members if (row.share or 0) >= ENOUGH]
    yield f"{sum(row.captured for row in rows)} of {len(rows)} types captured"
    for mesh in rows[0].meshes if rows else ():
        counts = Counter(row.verdict(mesh) for row in rows)
        yield f"{mesh}: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict] or verdict == "equal")
    yield f"blocks of attention and MLP: {len(members)} types, {len(enough)} of them with {ENOUGH:.0%} of block weights cut at tp=2"


def markdown(rows: Sequence[Row]) -> str:
    """The table, then for each type what stays whole and why."""
    head = headings(rows)
    lines = ["# The zoo", "", "Written by `benchmarks/zoo.py`. Training mode; loss, all gradients and buffers beside the untouched model."]
    lines += [NOTED_IN_WORDS, ""]
    lines += [f"- {line}" for line in summary(rows)]
    lines += ["", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    lines += [f"| {' | '.join(cells(row, rows))} |" for row in rows]
    lines += section("Not equal", ((row, [f"{m}: {r}" for m, r in row.meshes.items() if r != "equal"]) for row in rows))
    short_of = [row for row in rows if row.attention_and_mlp and (row.share or 0) < ENOUGH]
    lines += section(f"Blocks of attention and MLP with less than {ENOUGH:.0%} cut", ((row, row.whole) for row in short_of))
    lines += section("Whole by law", ((row, row.by_law) for row in rows))
    lines += section("Left whole", ((row, row.whole) for row in rows))
    return "\n".join(lines) + "\n"


def section(title: str, items: Iterable[tuple[Row, Iterable[str]]]) -> list[str]:
    """One line a reason, with the places that share it; numbers of layers and values folded to `*`."""
    lines = []
    for row, found in items:
        if reasons := list(dict.fromkeys(folded(text) for text in found)):
            lines += [f"- {row.type}", *(f"  - {reason}" for reason in reasons)]
    return ["", f"## {title}", "", *lines] if lines else []


def folded(text: str) -> str:
    """model.layers.0.mlp → model.layers.*.mlp; mul_7 → mul."""
    return re.sub(r"_\d+\b", "", re.sub(r"\.\d+(?=\.|:| |$)", ".*", text)).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
