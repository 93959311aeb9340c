"""Every schedule with every mode of data parallelism on real processes, beside one device: three steps of AdamW with clipping, in float64.

    python benchmarks/grid.py                                   dp=2,pp=2
    python benchmarks/grid.py --meshes "pp=2 dp=2,pp=2,tp=2"    others
    python benchmarks/grid.py --json grid.json

Exit status: 0 if loss, norm, gradients and parameters of every cell are within 1e-9 of one device's, or it is refused; 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
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


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--meshes", default="dp=2,pp=2", help="separated by spaces (default: dp=2,pp=2)")
    made.add_argument("--model", default="gpt2 of 4", choices=sorted(workers.MODELS), help="default: gpt2 of 4, tied")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the errors there")
    args = made.parse_args(argv)
    console, rows = Console(), dict[str, dict[str, float | str]]()
    for mesh in args.meshes.split():
        cases = tuple(Case(args.model, mesh, mode, microbatches=4, schedule=schedule) for schedule in SCHEDULES for mode in MODES)
        ranks = tpcompile.launch(cells, mesh, cases)
        worst = [next((r for r in found if isinstance(r, str)), None) or max(found) for found in zip(*ranks, strict=True)]
        table = Table(f"{args.model}, {mesh}", *MODES)
        for schedule in SCHEDULES:
            own = {case.data_parallel: error for case, error in zip(cases, worst, strict=True) if case.schedule == schedule}
            rows[f"{mesh} {schedule}"] = own
            table.add_row(schedule, *(error if isinstance(error, str) else f"{error:.1e}" for error in own.values()))
        console.print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(isinstance(e, str) or e <= LIMIT for own in rows.values() for e in own.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
