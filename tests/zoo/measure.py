"""One type of the zoo, captured once and compared with the untouched model on several meshes."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.driver import Compilation, Options, lower_captured
from tpcompile.errors import CaptureError, Refused
from tpcompile.ir import Left, Program
from tpcompile.layout import Layout, local_size
from tpcompile.mesh import Mesh
from tpcompile.passes._random import is_random
from tpcompile.passes.capture import capture
from tpcompile.simulate import compare
from tpcompile.simulate.reference import weighted_sum
from tpcompile.verify import verify
from zoo.blocks import Blocks
from zoo.tiny import tiny, types

MESHES = ("tp=2", "tp=3", "pp=2")
ROWS = 2
"""Rows of a micro-batch."""


UNDIVIDED = "; equal undivided"
NOTED: Mapping[str, tuple[str, str]] = {"batch statistics": (f"refused: .*{UNDIVIDED}", "equal in one micro-batch")}
"""By the list's note about a type: the result other than "equal" that it is to have, and what that is called."""


@dataclass
class Row:
    """What was found about one type."""

    type: str
    note: str = ""  # the list's: what this type may be refused for
    captured: bool = False
    meshes: dict[str, str] = field(default_factory=dict)  # mesh → "equal", "refused: …", "different: …" or "error: …"
    attention_and_mlp: bool = False
    layers: str = ""
    share: float | None = None  # of block weight elements, cut at tp=2
    held: float | None = None  # elements of block weights on all ranks, relative to the model's
    by_law: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Equal wherever it was run, or refused as the list notes that it has to be."""
        return bool(self.meshes) and not self.failures

    @property
    def failures(self) -> list[str]:
        allowed = ("equal", *(verdict for _, verdict in NOTED.values()))
        return [f"{mesh} {result}" for mesh, result in self.meshes.items() if self.verdict(mesh) not in allowed]

    def verdict(self, mesh: str) -> str:
        """What a result comes to: "equal", what the note allows, "refused", "different" or "error"."""
        result = self.meshes.get(mesh, "")
        wanted, verdict = NOTED.get(self.note, ("", ""))
        return verdict if wanted and re.fullmatch(wanted, result) else result.partition(":")[0]


def measure(kind: str, meshes: Iterable[str] = MESHES, **options: Any) -> Row:
    """Capture `task/model_type` and compare it on these meshes, with as many micro-batches as stages. Errors become part of the row.

    A mesh may name options of its own: "tp=2 sequence_parallel=False"; `options` are those of all meshes. A model that draws random numbers
    beside dropout is compared with those that one device draws.
    """
    row, start = Row(kind, notes().get(kind, "")), time.perf_counter()
    try:
        model, batch = sample(kind)
        program = verify(capture(model, part(batch, ROWS), loss=weighted_sum))
        row.captured = True
        read_blocks(row, Blocks(program))
    except Exception as error:  # whatever a type does, the others are measured
        row.meshes = dict.fromkeys(meshes, told(error))
    else:
        if any(map(is_random, program.graph.nodes)):
            options = {"dropout": "exact", **options}
        for mesh in meshes:
            axes, *own = mesh.split()
            row.meshes[mesh] = outcome(row, program, model, batch, Mesh.of(axes), **{**options, **options_of(own)})
    row.seconds = round(time.perf_counter() - start, 1)
    return row


def options_of(texts: Iterable[str]) -> dict[str, Any]:
    """Keywords of `compile` as text: ["sequence_parallel=False", "dropout=exact"]."""
    known = {"True": True, "False": False}
    pairs = (text.partition("=") for text in texts)
    return {name: known.get(value, value) for name, _, value in pairs}


def notes() -> dict[str, str]:
    return {f"{row['task']}/{row['model_type']}": row["note"] for row in types()}


def sample(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model and a batch of two micro-batches; in float64 unless the model has to compute in less."""
    task, _, model_type = kind.partition("/")
    model, batch = tiny(task, model_type, batch=2 * ROWS)
    exact = {name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value for name, value in batch.items()}
    try:
        with torch.no_grad():
            model.double()(**part(exact, ROWS))
    except RuntimeError:
        return tiny(task, model_type, batch=2 * ROWS)
    return model, exact


def part(batch: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The first rows of a batch of 2 × ROWS; some types have several lines a row."""
    return {
        name: value[: value.shape[0] * rows // (2 * ROWS)] if isinstance(value, Tensor) and value.ndim else value
        for name, value in batch.items()
    }


def outcome(row: Row, program: Program, model: nn.Module, batch: Mapping[str, Any], mesh: Mesh, **options: Any) -> str:
    """How one mesh compares; where a batch may not be divided, how it compares undivided."""
    count = mesh.pp
    try:
        compilation = lower_captured(program, model, mesh, part(batch, ROWS), Options(weighted_sum, count, **options))
        reason = compilation.program.undivided if count * mesh.dp > 1 else ""
        if reason:
            compilation = lower_captured(program, model, mesh, part(batch, ROWS), Options(weighted_sum, **options))
        result = compared(compilation, model, part(batch, ROWS if reason else ROWS * count))
        if mesh.tp == 2:
            read_cuts(row, compilation, Blocks(program))
    except Exception as error:  # a row with its error, not a stop
        return told(error)
    return f"refused: {reason}{UNDIVIDED}" if reason and result == "equal" else result


def compared(compilation: Compilation, model: nn.Module, batch: Mapping[str, Any]) -> str:
    report = compare(model, compilation, batch)
    if report.ok:
        return "equal"
    errors = [*report.grad_errors.values(), *report.buffer_errors.values()]
    worst = max([report.loss_error, report.output_error, report.capture_error, *errors])
    return f"different: by {worst:.1e}, first {report.first_divergence or 'in the captured graph'}"


def told(error: Exception) -> str:
    text = " ".join(str(error).split())
    kept = isinstance(error, Refused) or (isinstance(error, CaptureError) and "autograd.Function" in error.what)
    return f"{'refused' if kept else 'error'}: {type(error).__name__}: {text}"[:400]


def read_blocks(row: Row, blocks: Blocks) -> None:
    names = blocks.program.parameters
    row.attention_and_mlp, row.layers = blocks.are_attention_and_mlp, blocks.summary()
    row.by_law = [f"{names[placeholder]}: {reason}" for placeholder, reason in blocks.by_law.items()]


def read_cuts(row: Row, compilation: Compilation, blocks: Blocks) -> None:
    """The share of block weights that are cut, and what all ranks hold of them together."""
    layouts, tp = compilation.sharded.layouts, compilation.mesh.tp
    total = sum(blocks.weights.values())
    cut = held = 0
    for placeholder, size in blocks.weights.items():
        layout = layouts[placeholder]
        assert isinstance(layout, Layout)
        cut += size if layout.is_cut else 0
        held += sum(math.prod(int(local_size(dim, place)) for dim in layout.dims) for place in range(tp)) if layout.is_cut else size * tp
    if total:
        row.share, row.held = round(cut / total, 4), round(held / total, 4)
    row.whole = [line(left) for left in compilation.plan.whole]


def line(left: Left) -> str:
    return f"{left.name}: {left.reason}" + (f" ({left.source})" if left.source else "")
