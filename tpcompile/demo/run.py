"""The demo: one model trained twice, on a mesh of processes and alone, and every number compared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpcompile
from tpcompile.demo.data import batches
from tpcompile.mesh import Mesh
from tpcompile.models import Batch, Sizes, load, vocabulary
from tpcompile.runtime.compiled import Compiled

TOLERANCE = {(torch.float64, torch.float64): 1e-9, (torch.float64, torch.float32): 1e-5, (torch.float32, torch.float32): 1e-4}
"""How far losses may differ at any step, by the type of the model and of its loss (some models make it in float32 whatever they are).

AdamW divides gradients by their size, so it grows rounding errors step by step: float32 leaves room for that, float64 needs next to none.
"""

OPTIMIZER, LR = torch.optim.AdamW, 3e-3


@dataclass(frozen=True)
class Work:
    """What both runs are given."""

    model: str
    mesh: str
    steps: int
    device: str
    dtype: torch.dtype
    sizes: Sizes
    microbatches: int | None = None


@dataclass(frozen=True)
class Trained:
    """What a run ends with: losses per step, parameters (of a rank: its pieces), and when each phase ended."""

    losses: tuple[float, ...]
    parameters: Mapping[str, Tensor]
    clock: Mapping[str, float]  # phase → seconds since the epoch, at its end
    dtype: torch.dtype = torch.float64  # of the loss


def build(work: Work) -> tuple[nn.Module, list[Batch]]:
    """The model and all batches; the same in every process. Dropout is off: it draws other masks on one device."""
    model, batch = load(work.model, work.sizes)
    model.to(dtype=work.dtype)
    if any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules()):
        model.eval()
    words = vocabulary(model)
    if words is None or set(batch) != {"input_ids", "labels"}:
        return model, [batch] * work.steps
    return model, list(batches(work.steps, work.sizes.rows, work.sizes.sequence, words))


def train_rank(work: Work) -> Trained:
    """One rank of the mesh. Rank 0 draws the progress bar."""
    clock = {"start the processes": time.time()}
    model, data = build(work)
    compiled = tpcompile.compile(model, work.mesh, data[0], microbatches=work.microbatches)
    optimizer = compiled.optimizer(OPTIMIZER, lr=LR)
    clock["compile on every rank"] = time.time()
    losses = []
    with _progress(enabled=torch.distributed.get_rank() == 0) as progress:
        for batch in progress.track(data, description="training on the mesh"):
            losses.append(compiled.train_step(**batch).item())
            optimizer.step()
            optimizer.zero_grad()
    clock[f"train {work.steps} steps on the mesh"] = time.time()
    return Trained(tuple(losses), {name: _plain(parameter) for name, parameter in compiled.named_parameters()}, clock)


def train_alone(work: Work) -> Trained:
    """The untouched model on one device."""
    model, data = build(work)
    model.to(work.device)
    optimizer = OPTIMIZER(model.parameters(), lr=LR)
    losses = []
    for batch in data:
        outputs = model(**{name: value.to(work.device) for name, value in batch.items()})
        loss = outputs["loss"]
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: _plain(parameter) for name, parameter in model.named_parameters()}
    return Trained(tuple(losses), parameters, {f"train {work.steps} steps on one process": time.time()}, loss.dtype)


def demo(work: Work, console: Console) -> bool:
    """Run both and print what happened; whether the losses agree."""
    clock = {"": time.time()}
    torch.set_num_threads(1)  # as every rank has
    mesh = Mesh.of(work.mesh)
    console.print(f"[bold]{work.model}[/] on {mesh.size} {work.device} processes, {mesh}, {str(work.dtype).removeprefix('torch.')}\n")
    model, data = build(work)
    compiled = tpcompile.compile(model, work.mesh, data[0], microbatches=work.microbatches)
    console.print(compiled.explain(), markup=False, highlight=False)
    clock["plan"] = time.time()
    ranks: list[Trained] = tpcompile.launch(train_rank, work.mesh, work, device=work.device)
    for phase in ranks[0].clock:
        clock[phase] = max(rank.clock[phase] for rank in ranks)
    clock["collect the results"] = time.time()
    alone = train_alone(work)
    clock |= alone.clock
    worst = max(worst_parameter(compiled, ranks, alone))
    clock["compare"] = time.time()
    console.print(losses(ranks[0], alone))
    difference, tolerance = worst_loss(ranks, alone), TOLERANCE[work.dtype, alone.dtype]
    console.print(f"worst parameter difference after {work.steps} steps: {worst[0]:.1e} ({worst[1]}, rank {worst[2]})")
    agree = difference <= tolerance
    verdict = "[green]the losses agree[/]" if agree else "[red]the losses differ[/]"
    console.print(f"worst loss difference: {difference:.1e}, {tolerance:.0e} allowed: {verdict}")
    console.print(phases(clock))
    return agree


def worst_loss(ranks: list[Trained], alone: Trained) -> float:
    """The largest difference over all steps and ranks."""
    differences = [abs(a - b) for rank in ranks for a, b in zip(rank.losses, alone.losses, strict=True)]
    return max(differences) if all(d == d for d in differences) else float("nan")


def worst_parameter(compiled: Compiled, ranks: list[Trained], alone: Trained) -> Iterator[tuple[float, str, int]]:
    """For every parameter of every rank: how far the rank's piece is from the same piece of the whole one."""
    for rank, trained in enumerate(ranks):
        pieces = compiled.program(rank).parameters
        for name, local in trained.parameters.items():
            whole = pieces[name].of(alone.parameters[name])
            yield (local - whole).abs().max().item() if whole.numel() else 0.0, name, rank


def losses(mesh: Trained, alone: Trained) -> Table:
    table = Table("step", "loss on the mesh", "loss on one process", "difference", box=None, header_style="bold", pad_edge=False)
    for step, (a, b) in enumerate(zip(mesh.losses, alone.losses, strict=True), 1):
        table.add_row(str(step), f"{a:.10f}", f"{b:.10f}", f"{abs(a - b):.1e}")
    for column in table.columns:
        column.justify = "right"
    return table


def phases(clock: Mapping[str, float]) -> Table:
    """Where the time went. Each phase ends at its clock and starts where the one before it ended."""
    table = Table("phase", "seconds", box=None, header_style="bold", pad_edge=False, title_justify="left")
    table.columns[1].justify = "right"
    times = list(clock.values())
    for phase, start, stop in zip(list(clock)[1:], times, times[1:], strict=False):
        table.add_row(phase, f"{stop - start:.1f}")
    table.add_row("in all", f"{times[-1] - times[0]:.1f}", style="bold")
    return table


def _plain(parameter: Tensor) -> Tensor:
    """A parameter's values on the CPU, without what an engine wraps it in."""
    value = parameter.detach()
    return (value.to_local() if isinstance(value, DTensor) else value).cpu()


def _progress(*, enabled: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, disable=not enabled)
