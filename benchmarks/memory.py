"""What a rank holds of parameters, gradients, optimizer's state and activations, beside what `explain()` says.

    python benchmarks/memory.py                                          two processes, then four
    python benchmarks/memory.py --meshes "tp=2 pp=2" --models llama      some
    python benchmarks/memory.py --device cuda                            over NCCL, a GPU for every rank
    python benchmarks/memory.py --all                                    every row, also those that are equal
    python benchmarks/memory.py --json memory.json

Models are of four layers of 256, in float32, with a batch of 8 × 64 tokens; with AdamW, in the third step. Parameters, gradients and the
optimizer's state are the storages that they lie in, each once. "activations" are what autograd keeps: every storage, from when it is first
saved until nothing that is saved lies in it, and the most of these at any time of the step, over all micro-batches in flight. "gathered"
is what torch's engine has gathered of parameters at once, looked at whenever autograd saves or reads something, and "whole gradients" those
that wait to be reduced; reductions have buffers that are not seen, so there what is stated need only be enough. A row has the place along
the pipeline where most is stated, and its rank that has most.

On GPUs "allocated" is the most that torch has allocated, beside the sum of all that is stated for a step. It has what kernels need while
they run, so that no verdict is given.

Exit status: 0 if what is measured is within 2 % of what is stated at all places, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import memory_workers as workers  # noqa: E402 (of the tests beside)
from memory_workers import Case, Found  # noqa: E402

import tpcompile  # noqa: E402
from tpcompile.mesh import Mesh  # noqa: E402
from tpcompile.runtime.data_parallel import MODES  # noqa: E402
from tpcompile.runtime.recompute import KINDS  # noqa: E402
from tpcompile.schedules import SCHEDULES  # noqa: E402

LIMIT = 0.02
MESHES = ("tp=2", "pp=2", "dp=2", "dp=2,tp=2", "dp=2,pp=2")
WORDS = "vocab_size=4099"
MODELS = {
    "gpt2": f"hf:gpt2,n_layer=4,n_embd=256,n_head=8,n_positions=64,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0,{WORDS}",
    "llama": f"hf:llama,num_hidden_layers=4,hidden_size=256,intermediate_size=688,num_attention_heads=8,num_key_value_heads=4,{WORDS}",
}
NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer's state",
    "activations": "activations",
    "gathered": "gathered in a step",
    "unreduced": "whole gradients in it",
    "allocated": "allocated",
}
AT_MOST = ("unreduced",)


@dataclass(frozen=True)
class Row:
    """One kind of memory, of the place along the pipeline where most of it is stated."""

    model: str
    case: Case
    what: str
    stated: int
    measured: int
    good: bool | None

    @property
    def ratio(self) -> float | None:
        return self.measured / self.stated if self.stated else None


def cases(model: str, mesh: str, modes: Sequence[str] = MODES, again: Sequence[str] = KINDS) -> Iterator[Case]:
    """What is measured on a mesh: modes, schedules and what runs again in backward, each with the first of the others, or the last."""
    sizes = Mesh.of(mesh)
    made = Case(MODELS[model], mesh, modes[0], again[0], microbatches=4 if sizes.pp > 1 else None)
    for mode in modes if sizes.dp > 1 else modes[:1]:
        yield replace(made, data_parallel=mode)
    for how in again[1:]:
        yield replace(made, data_parallel=modes[-1] if sizes.dp > 1 else modes[0], recompute=how)
    if sizes.pp == 1 and sizes.dp > 1:
        yield replace(made, data_parallel=modes[-1], microbatches=2)
    if sizes.pp > 1 and sizes.dp > 1:
        yield from (replace(made, data_parallel=mode, schedule="zbv") for mode in dict.fromkeys((modes[0], modes[-1])))
    if sizes.pp > 1 and sizes.dp == 1:
        yield from (replace(made, schedule=schedule) for schedule in SCHEDULES if schedule != made.schedule)
        yield from (replace(made, schedule="interleaved_1f1b", recompute=how) for how in again[1:])


def rows(model: str, case: Case, ranks: Sequence[Found]) -> Iterator[Row]:
    """The kinds of memory of a case."""
    for what in NAMES:
        places = {}
        for one in ranks:
            stated, measured = getattr(one.stated, what), getattr(one.measured, what)
            places[one.place] = stated, max(measured, places.get(one.place, (0, 0))[1])
        stated, measured = max(places.values())
        if not any(found for _, found in places.values()) and (not stated or what == "allocated"):
            continue
        good = None if what == "allocated" else all(_agree(what, *pair) for pair in places.values())
        yield Row(model, case, what, stated, measured, good)


def _agree(what: str, stated: int, measured: int) -> bool:
    over, under = measured <= stated * (1 + LIMIT), measured >= stated * (1 - LIMIT)
    return over and (under or what in AT_MOST)


def shown(found: Sequence[Row], everything: bool) -> Table:
    """Rows; those of one mesh and kind that agree are folded into one unless `everything` is wanted."""
    table = Table("model", "mesh", "", "what", "stated, MB", "measured, MB", "ratio", "within 2 %", box=None)
    for column in table.columns[4:]:
        column.justify = "right"
    for row in found:
        if everything or row.good is False:
            _add(table, [row], row.model, str(row.case))
    if not everything:
        for mesh, what in dict.fromkeys((row.case.mesh, row.what) for row in found):
            equal = [row for row in found if (row.case.mesh, row.what) == (mesh, what) and row.good is not False]
            if equal:
                _add(table, equal, ", ".join(dict.fromkeys(row.model for row in equal)), f"{len(equal)} ways")
    return table


def _add(table: Table, some: Sequence[Row], models: str, ways: str) -> None:
    """One line for these, from the least to the most."""
    first = some[0]
    verdict = "" if first.good is None else "yes" if first.good else "[red]NO[/]"
    verdict = "enough" if first.good and first.what in AT_MOST else verdict
    sizes = ([row.stated / 1e6 for row in some], [row.measured / 1e6 for row in some], [row.ratio for row in some if row.ratio is not None])
    spans = (_span(one, digits) for one, digits in zip(sizes, (1, 1, 3), strict=True))
    table.add_row(models, first.case.mesh, ways, NAMES[first.what], *spans, verdict)


def _span(numbers: Sequence[float], digits: int) -> str:
    ends = [f"{number:.{digits}f}" for number in (min(numbers, default=0), max(numbers, default=0))]
    return ends[0] if ends[0] == ends[1] else " – ".join(ends)


def main(argv: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", default=",".join(MODELS), help=f"default: {','.join(MODELS)}")
    made.add_argument("--meshes", default=" ".join(MESHES), help=f"separated by spaces (default: {' '.join(MESHES)})")
    made.add_argument("--modes", default=",".join(MODES), help=f"of data parallelism (default: {','.join(MODES)})")
    made.add_argument("--recompute", default=",".join(KINDS), help=f"default: {','.join(KINDS)}")
    made.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    made.add_argument("--all", action="store_true", help="show every row, also those that agree")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all rows there")
    args = made.parse_args(argv)
    found: list[Row] = []
    for mesh in args.meshes.split():
        ways = args.modes.split(","), args.recompute.split(",")
        wanted = [(model, case) for model in args.models.split(",") for case in cases(model, mesh, *ways)]
        ranks = tpcompile.launch(workers.jobs, mesh, tuple(case for _, case in wanted), device=args.device)
        for place, (model, case) in enumerate(wanted):
            found += rows(model, case, [rank[place] for rank in ranks])
        if args.json:
            args.json.write_text(json.dumps([asdict(row) | {"ratio": row.ratio} for row in found], indent=1))
    Console(width=200).print(shown(found, args.all))
    wrong = sum(row.good is False for row in found)
    print(f"{len(found)} rows, {wrong} of them off by more than {LIMIT:.0%}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
