"""Every schedule with every mode of data parallelism on real processes, beside one device: three steps of AdamW with clipping, in float64.

    python benchmarks/grid.py                                   dp=2,pp=2
    python benchmarks/grid.py --meshes "pp=2 dp=2,pp=2,tp=2"    others
    python benchmarks/grid.py --json grid.json --markdown README.md   and write the tables into a file, between its marks

Exit status: 0 if loss, norm, gradients and parameters of every cell are within 1e-9 of one device's, or it is refused; 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import parallel_workers as workers  # noqa: E402 (of the tests beside)
from parallel_workers import Case  # noqa: E402

import tpcompile  # noqa: E402
from tpcompile.errors import TpcompileError  # noqa: E402
from tpcompile.runtime.data_parallel import MODES  # noqa: E402
from tpcompile.schedules import SCHEDULES  # noqa: E402

LIMIT = 1e-9
MARKS = "<!-- what benchmarks/grid.py prints -->", "<!-- end -->"


def cells(cases: tuple[Case, ...]) -> list[float | str]:
    """On one rank: the worst error of every case, or why it is refused."""
    found: list[float | str] = []
    for case in cases:
        try:
            made = workers.train(case, case.compiled(case.made()))
        except TpcompileError as error:
            found.append(error.what)
            continue
        errors = [made.loss_error, made.evaluation_error, made.norm_error, *made.gradients.values(), *made.parameters.values()]
        found.append(max(errors))
    return found


def markdown(tables: Mapping[str, Mapping[str, Mapping[str, float | str]]]) -> str:
    """One table for each mesh; equal reasons of refusals are said once, under it."""
    lines = []
    for title, rows in tables.items():
        reasons = list(dict.fromkeys(error for own in rows.values() for error in own.values() if isinstance(error, str)))
        lines += ["", f"| {title} | {' | '.join(MODES)} |", "|---" * (1 + len(MODES)) + "|"]
        for schedule, own in rows.items():
            cells = (f"refused ({reasons.index(e) + 1})" if isinstance(e, str) else f"{e:.1e}" for e in own.values())
            lines.append(f"| {schedule} | {' | '.join(cells)} |")
        lines += ["", *(f"({number}) {reason}" for number, reason in enumerate(reasons, 1))] if reasons else []
    return "\n".join(lines) + "\n"


def between_marks(text: str, made: str) -> str:
    """The text of a file, with these tables in place of those that it has."""
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{made}\n{MARKS[1]}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--meshes", default="dp=2,pp=2", help="separated by spaces (default: dp=2,pp=2)")
    made.add_argument("--model", default="gpt2 of 4", choices=sorted(workers.MODELS), help="default: gpt2 of 4, tied")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the errors there")
    made.add_argument("--markdown", type=Path, metavar="FILE", help=f"write the tables there, between {' and '.join(MARKS)}")
    args = made.parse_args(argv)
    console, tables = Console(), dict[str, dict[str, dict[str, float | str]]]()
    for mesh in args.meshes.split():
        cases = tuple(Case(args.model, mesh, mode, microbatches=4, schedule=schedule) for schedule in SCHEDULES for mode in MODES)
        ranks = tpcompile.launch(cells, mesh, cases)
        worst = [next((r for r in found if isinstance(r, str)), None) or max(found) for found in zip(*ranks, strict=True)]
        title = f"{args.model}, {mesh}"
        table, tables[title] = Table(title, *MODES), {}
        for schedule in SCHEDULES:
            own = {case.data_parallel: error for case, error in zip(cases, worst, strict=True) if case.schedule == schedule}
            tables[title][schedule] = own
            table.add_row(schedule, *(error if isinstance(error, str) else f"{error:.1e}" for error in own.values()))
        console.print(table)
    if args.json:
        args.json.write_text(json.dumps(tables, indent=1))
    if args.markdown:
        args.markdown.write_text(between_marks(args.markdown.read_text(), markdown(tables)))
    errors = [error for rows in tables.values() for own in rows.values() for error in own.values()]
    return 0 if all(isinstance(error, str) or error <= LIMIT for error in errors) else 1


if __name__ == "__main__":
    sys.exit(main())
