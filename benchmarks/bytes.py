"""What processes hand over in a step of training, in clipping and in the optimizer's step, by axis and call, beside what `explain()` says.

    python benchmarks/bytes.py                                     two processes at most, then four
    python benchmarks/bytes.py --meshes "tp=2 dp=2" --models gpt2  some
    python benchmarks/bytes.py --meshes dp=2,pp=2,tp=2             eight processes
    python benchmarks/bytes.py --device cuda                       over NCCL, a GPU for every rank
    python benchmarks/bytes.py --wire                              and what gloo's connections send, by the kernel's count
    python benchmarks/bytes.py --all                               every row, also those that are equal
    python benchmarks/bytes.py --json bytes.json

The process group itself keeps the record (`tpcompile.runtime.recorded`), so that calls of torch's engines, of autograd and of schedules are
in it like our own. It is of the third step, when the engines are set up. Bytes are those of the tensors that a rank gives to its calls;
"in a ring" is what it then sends where groups run rings. A row has the rank that gives most; it is equal where every rank's own calls are
those of its timeline, and their sums those that `explain()` prints for its place. What a rank receives is compared too, and has no row of
its own. Every model, mesh and mode of data parallelism runs with a stream and a vocabulary that tensor ranks cut and ones that they do not,
and under a pipeline in two schedules.

`--wire` sets the sum of all "in a ring" beside the bytes that the first rank's TCP connections have sent in that step (Linux). gloo's own
algorithms are not all rings, and every message of it has a header, so that no verdict is given.

Exit status: 0 if every row is equal, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import traffic_workers as workers  # noqa: E402 (of the tests beside)
from traffic_workers import Case, Total, Traffic, axis_of, totals  # noqa: E402

import tpcompile  # noqa: E402
from tpcompile.mesh import Mesh  # noqa: E402
from tpcompile.runtime.data_parallel import MODES  # noqa: E402
from tpcompile.runtime.recorded import BACKEND, Call  # noqa: E402

MODELS = ("gpt2", "llama")
MESHES = ("tp=2", "pp=2", "dp=2", "dp=2,tp=2", "pp=2,tp=2")
SCHEDULES = ("1f1b", "interleaved_1f1b")


@dataclass(frozen=True)
class Row:
    """One kind of call over one axis, of the rank that gives most bytes to it."""

    case: Case
    axis: str
    call: str
    stated: Total
    recorded: Total
    equal: bool


def cases(models: Sequence[str], mesh: str, modes: Sequence[str], schedules: Sequence[str]) -> Iterator[Case]:
    """What is measured on a mesh: options that change nothing there are left out."""
    sizes = Mesh.of(mesh)
    for model in models:
        for mode in modes if sizes.dp > 1 else modes[:1]:
            for schedule in schedules if sizes.pp > 1 else schedules[:1]:
                made = Case(model, mesh, schedule, 2 * sizes.pp if sizes.pp > 1 else None, mode)
                yield made
                if sizes.tp > 1:
                    yield replace(made, sequence_parallel=False)
                    yield replace(made, vocab_parallel=False)


def rows(case: Case, ranks: Sequence[Traffic]) -> Iterator[Row]:
    """What all ranks of a case have said, by axis and call."""
    mesh = Mesh.of(case.mesh)
    found = [(one, totals(one)) for one in ranks]
    first = [(one, ran) for one, ran in found if mesh.coordinates(one.rank)["tp"] == 0]
    for key in sorted({key for one, ran in found for key in (*one.stated, *ran)}):
        axis, call, part = key
        equal = all(_close(one.stated.get(key, Total()), ran.get(key, Total())) for one, ran in first)
        equal &= bool(part) or all(_calls(one, one.ran, key) == _calls(one, one.expected, key) for one in ranks)
        traffic, ran = max(first, key=lambda pair: pair[1].get(key, Total()).bytes)
        yield Row(case, axis, f"{call} of {part}" if part else call, traffic.stated.get(key, Total()), ran.get(key, Total()), equal)


def _calls(one: Traffic, calls: Sequence[Call], key: tuple[str, str, str]) -> Counter[Call]:
    """The calls of one kind over one axis; what is received counts with what is sent."""
    axis, call, _ = key
    same = ("send", "recv") if call == "send" else (call,)
    return Counter(made for made in calls if made.call in same and axis_of(one.mesh, one.rank, made.ranks) == axis)


def _close(stated: Total, recorded: Total) -> bool:
    """Equal, but for what rounding leaves of a ring's share."""
    return (stated.count, stated.bytes) == (recorded.count, recorded.bytes) and abs(stated.ring - recorded.ring) <= recorded.count


def shown(found: Sequence[Row], everything: bool) -> Table:
    """Rows, those of one kind of call that are equal folded into one unless `everything` is wanted."""
    table = Table(
        "model", "mesh", "", "axis", "call", "calls stated", "recorded", "bytes stated", "recorded", "in a ring", "equal", box=None
    )
    for column in (5, 6, 7, 8, 9):
        table.columns[column].justify = "right"
    for row in found:
        case, one, other = row.case, row.stated, row.recorded
        what = str(case).split(" ", 2)[2]
        if everything or not row.equal:
            numbers = (f"{number:,}" for number in (one.count, other.count, one.bytes, other.bytes, one.ring))
            verdict = "yes" if row.equal else "[red]NO[/]"
            table.add_row(case.model, case.mesh, what, row.axis, row.call, *numbers, verdict)
    if not everything:
        for mesh in dict.fromkeys(row.case.mesh for row in found):
            for axis, call in dict.fromkeys((row.axis, row.call) for row in found if row.case.mesh == mesh):
                _fold(table, [row for row in found if (row.case.mesh, row.axis, row.call) == (mesh, axis, call) and row.equal])
    return table


def _fold(table: Table, equal: Sequence[Row]) -> None:
    """One line for rows of one mesh, axis and call, which are all equal: from the least to the most."""
    if equal:
        models = ", ".join(dict.fromkeys(row.case.model for row in equal))
        names = [[getattr(getattr(row, side), name) for row in equal] for name in ("count", "bytes") for side in ("stated", "recorded")]
        names.append([row.stated.ring for row in equal])
        spans = (f"{min(one):,} – {max(one):,}" if min(one) < max(one) else f"{one[0]:,}" for one in names)
        first = equal[0]
        table.add_row(models, first.case.mesh, f"{len(equal)} ways", first.axis, first.call, *spans, "yes")


def wired(found: Mapping[Case, Traffic]) -> Table:
    """What rings would send in a step, beside what the first rank of each case has sent."""
    table = Table("model", "mesh", "", "in rings", "over TCP", "ratio", "of it reduce-scatters", box=None)
    for column in table.columns[3:]:
        column.justify = "right"
    for case, one in found.items():
        ring = sum(total.ring for (_, _, part), total in one.stated.items() if not part)
        scattered = sum(total.ring for (_, call, _), total in one.stated.items() if call == "reduce_scatter")
        numbers = f"{ring:,}", f"{one.wire:,}", f"{one.wire / max(ring, 1):.2f}", f"{scattered / max(ring, 1):.0%}"
        table.add_row(case.model, case.mesh, str(case).split(" ", 2)[2], *numbers)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", default=",".join(MODELS), help=f"of tests/parity_models.py (default: {','.join(MODELS)})")
    made.add_argument("--meshes", default=" ".join(MESHES), help=f"separated by spaces (default: {' '.join(MESHES)})")
    made.add_argument("--modes", default=",".join(MODES), help=f"of data parallelism (default: {','.join(MODES)})")
    made.add_argument("--schedules", default=",".join(SCHEDULES), help=f"default: {','.join(SCHEDULES)}")
    made.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    made.add_argument("--wire", action="store_true", help="show what gloo's connections have sent, too")
    made.add_argument("--all", action="store_true", help="show every row, also those that are equal")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all rows there")
    args = made.parse_args(argv)
    found, first = list[Row](), dict[Case, Traffic]()
    for mesh in args.meshes.split():
        wanted = list(cases(args.models.split(","), mesh, args.modes.split(","), args.schedules.split(",")))
        ranks = tpcompile.launch(workers.steps, mesh, tuple(wanted), device=args.device, backend=BACKEND)
        for place, case in enumerate(wanted):
            found += rows(case, [rank[place] for rank in ranks])
            first[case] = ranks[0][place]
        if args.json:
            args.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    console = Console(width=200)
    console.print(shown(found, args.all))
    if args.wire:
        console.print(wired(first))
    different = sum(not row.equal for row in found)
    print(f"{len(found)} rows, {different} of them different")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
