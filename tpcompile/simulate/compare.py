"""check: does the compiled model give the numbers of the untouched one?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.collectives import held_by, mix, take
from tpcompile.driver import (
    Compilation,
    Options,
    check_attention,
    check_dropout,
    check_outputs,
    check_overlap,
    lower,
    refuse_division,
    refuse_other_path,
)
from tpcompile.errors import InputError, caller
from tpcompile.ir import Program
from tpcompile.layout import TensorType
from tpcompile.mesh import Mesh
from tpcompile.passes.capture import bind_example, capture, matches
from tpcompile.passes.normalize import normalize
from tpcompile.runtime import batch as batches
from tpcompile.schedules import check_schedule
from tpcompile.simulate.buffers import buffer_errors
from tpcompile.simulate.distance import distance
from tpcompile.simulate.diverge import first_divergence
from tpcompile.simulate.lockstep import run
from tpcompile.simulate.reference import NoDropout, Reference, refuse_numbers, weighted_sum
from tpcompile.simulate.replay import Replay, flatten, rows, structured
from tpcompile.simulate.report import Report, Tolerance
from tpcompile.simulate.traffic import differences, promised

TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-10, 1e-9),
    torch.float32: Tolerance(1e-6, 1e-5),
    torch.bfloat16: Tolerance(2e-2, 5e-2),
    torch.float16: Tolerance(2e-3, 1e-2),
}
CASTS_INSIDE = Tolerance(1e-7, 1e-6)
"""For a float64 model that casts to float32 inside."""


def check(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | str,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    sequence_parallel: bool | Literal["regather"] = True,
    overlap: bool = True,
    overrides: Mapping[str, str] | None = None,
    dropout: str = "local",
    vocab_parallel: bool = True,
    outputs: Literal["all", "loss"] = "all",
    attention: Literal["normal", "written"] = "normal",
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    optimizer_settings: Mapping[str, Any] | None = None,
    steps: int = 1,
) -> Report:
    """Compile a model for a mesh, run all its ranks here in lockstep, and compare with the untouched model on the same batch.

    Compared are the loss, every output, every gradient, and every parameter and buffer after a step of an optimizer. A model without a
    loss is given one: its outputs times fixed weights, summed. No process group is needed. Tolerances follow the model's type. Raises
    what `tpcompile.compile` raises, InputError, CaptureError and Refused, and InputError for a model on the meta device.

    - `model`, `mesh`: as for `tpcompile.compile`.
    - `example_inputs`: the whole batch; without it the model's `dummy_inputs`.
    - `loss`, `microbatches`, `schedule`, `stages_per_rank`, `sequence_parallel`, `overlap`, `overrides`, `vocab_parallel`, `outputs`,
      `attention`: as for `tpcompile.compile`.
    - `dropout`: with "exact" dropout is compared too: the untouched model then runs under `tpcompile.testing.exact_dropout`. With "local"
      and "fast", whose masks no single device has, it is off on both sides.
    - `optimizer`: the class that makes the step, `torch.optim.SGD` by default.
    - `optimizer_settings`: its settings; for SGD a rate of 1 by default.
    - `steps`: after how many steps parameters are compared.
    """
    placed = Mesh.of(mesh)
    inputs = example_inputs if example_inputs is not None else getattr(model, "dummy_inputs", None)
    if inputs is None:
        raise InputError("no example inputs", at="check", source=caller(), fix="pass example_inputs")
    batch = bind_example(model, inputs)
    own, count = check_schedule(schedule, placed.pp, stages_per_rank, microbatches, "check")
    settings = dict(optimizer_settings or ({"lr": 1.0} if optimizer is torch.optim.SGD else {}))
    check_outputs(outputs)
    check_attention(attention, "check")
    options = Options(
        loss,
        count,
        schedule=schedule,
        stages_per_rank=own,
        sequence_parallel=sequence_parallel,
        overlap=check_overlap(overlap, "check"),
        overrides=dict(overrides or {}),
        dropout=check_dropout(dropout, "check"),
        vocab_parallel=vocab_parallel,
        outputs=outputs,
        attention=attention,
    )
    if any(p.is_meta for p in model.parameters()):
        raise InputError(
            "the model's parameters are on the meta device: there are no numbers to compare",
            at="check",
            source=caller(),
            fix="initialise it first",
        )
    compilation = _lower(model, placed, batch, options)
    return compare(model, compilation, batch, optimizer=optimizer, settings=settings, steps=steps)


def _lower(model: nn.Module, mesh: Mesh, batch: Mapping[str, Any], options: Options) -> Compilation:
    """Compile for the shape of one micro-batch; for a model without a loss, with a sum of its outputs."""
    division = batches.Division.of(mesh, options.microbatches, True)
    part = batches.example(batch, division)
    compilation = lower(model, mesh, part, options)
    inputs, call = compilation.program.inputs, batches.describe("check", batch).removeprefix("compiled.")
    tensors = flatten(compilation.program, batch)
    rows = batches.rows_of(tensors, inputs, call)
    batches.check_rows(rows, division, call)
    if compilation.program.loss is None:
        compilation = lower(model, mesh, part, replace(options, loss=weighted_sum))
    refuse_division(compilation.program, mesh, options.microbatches, "check")
    refuse_other_path(compilation.program, tensors, rows or 0, mesh, options.microbatches, call)
    return compilation


def compare(
    model: nn.Module,
    compilation: Compilation,
    batch: Mapping[str, Any],
    *,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    settings: Mapping[str, Any] | None = None,
    steps: int = 1,
) -> Report:
    """The untouched model beside a compilation of it, as `check` does."""
    settings = dict(settings or {"lr": 1.0})
    drops = compilation.options.dropout == "exact"
    if not drops:
        refuse_numbers(compilation.program)
    reference, replay = Reference(model, compilation.options.loss, dropout=drops), Replay(model, compilation, dropout=drops)
    mine, tolerance = reference.parameters(), tolerance_of(compilation.program)
    steppers = [
        optimizer([p for p in reference.model.parameters() if p.requires_grad], **settings),
        *replay.optimizers(optimizer, settings),
    ]
    for index in range(steps):
        for stepper in steppers:
            stepper.zero_grad()
        expected, outputs = reference.step(batch)
        loss, made = replay.step(batch)
        if index == 0:
            scale = max((float(p.grad.abs().max()) for p in mine.values() if p.grad is not None and p.grad.numel()), default=1.0) or 1.0
            grads = {name: p.grad.clone() for name, p in mine.items() if p.grad is not None}
            compared = outputs if compilation.options.outputs == "all" else []
            first = (expected, loss, _output_error(compilation.program, compared, made), dict(_grad_errors(replay, mine, scale)))
            captured = capture_error(model, compilation, batch, expected, grads, scale)
            moved = replay.wire.totals()
        for stepper in steppers:
            stepper.step()
    exact = optimizer is torch.optim.SGD
    errors, skipped = parameter_errors(replay, mine, grads, scale, exact)
    expected, loss, output_error, grad_errors = first
    report = Report(
        mesh=str(compilation.mesh),
        tolerance=tolerance,
        loss=float(expected),
        loss_error=_relative(loss, expected),
        output_error=output_error,
        grad_errors=grad_errors,
        parameter_errors=errors,
        buffer_errors=buffer_errors(replay, reference.model),
        skipped=skipped,
        capture_error=captured,
        parameter_tolerance=tolerance.gradient * max(1.0, scale * float(settings["lr"]))
        if exact
        else float(settings.get("lr", 1e-3)) * max(1e-6, tolerance.gradient),
        traffic=moved,
        traffic_errors=differences(promised(compilation, _sizes(compilation, batch)), moved),
        notes=("dropout was off in this comparison",) if compilation.captured.sites and not drops else (),
    )
    if report.ok:
        return report
    return replace(report, first_divergence=first_divergence(model, compilation, batch, tolerance.gradient))


def _sizes(compilation: Compilation, batch: Mapping[str, Any]) -> dict[Any, int]:
    """The sizes of one micro-batch."""
    program = compilation.program
    part = rows(program, flatten(program, batch), 0, compilation.mesh.dp * compilation.options.microbatches)
    return {symbol: part[name].shape[dim] for symbol, (name, dim) in program.symbols.items()}


def tolerance_of(program: Program) -> Tolerance:
    """By the type of the parameters; looser where a float64 program computes in float32 on the way."""
    kinds = [program.types[name] for name in program.parameters]
    dtypes = {kind.dtype for kind in kinds if isinstance(kind, TensorType) and kind.dtype.is_floating_point}
    coarsest = max((TOLERANCES[dtype] for dtype in dtypes), key=lambda tolerance: tolerance.gradient, default=TOLERANCES[torch.float32])
    inside = any(isinstance(kind, TensorType) and kind.dtype == torch.float32 for kind in program.types.values())
    tolerance = CASTS_INSIDE if inside and coarsest == TOLERANCES[torch.float64] else coarsest
    loss = program.types.get(program.loss or "")
    # a loss of type float32 is rounded to it on both sides: it cannot be expected to agree in its last two places
    places = 2 * torch.finfo(loss.dtype).eps if isinstance(loss, TensorType) else 0.0
    return Tolerance(max(tolerance.loss, places), tolerance.gradient)


def _relative(value: Tensor, expected: Tensor) -> float:
    return float((value.detach().double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0))


def _grad_errors(replay: Replay, mine: Mapping[str, nn.Parameter], scale: float) -> Iterable[tuple[str, float]]:
    """The worst element of every parameter's gradient, on any rank of any stage, in units of the model's largest gradient."""
    errors: dict[str, float] = {}
    for name, local, whole in _pairs(replay, mine, lambda p: p.grad):
        if whole is None:
            error = 0.0 if local is None or not local.numel() else float(local.abs().max())
        else:
            error = distance(torch.zeros_like(whole) if local is None else local, whole) / scale
        errors[name] = max(errors.get(name, 0.0), error)
    return errors.items()


def _pairs(
    replay: Replay, mine: Mapping[str, nn.Parameter], of: Callable[[Tensor], Tensor | None]
) -> Iterable[tuple[str, Tensor | None, Tensor | None]]:
    """Something of every piece of every parameter, beside the same piece of one device's."""
    cuts, tp = replay.compilation.pieces(), replay.compilation.mesh.tp
    for held in replay.pieces:
        for name, values in held.items():
            for coordinate, value in enumerate(values):
                whole = of(mine[name])
                if whole is not None and name in cuts:
                    whole = take(whole, cuts[name][0], held_by(cuts[name][1], coordinate, tp))
                yield name, of(value), whole


def parameter_errors(
    replay: Replay, mine: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor], scale: float, exact: bool
) -> tuple[dict[str, float], int]:
    """Differences of parameters after the steps, and how many elements were left out.

    An optimizer that divides by the size of a gradient makes a full step of a gradient that is zero but for rounding. Unless the
    optimizer is exact, elements whose gradient is under 1e-6 of the model's largest are left out.
    """
    errors: dict[str, float] = {}
    skipped = 0
    cuts, tp = replay.compilation.pieces(), replay.compilation.mesh.tp
    for name, whole in {name: mine[name] for held in replay.pieces for name in held}.items():
        for held in replay.pieces:
            for coordinate, local in enumerate(held.get(name, [])):
                ranges = held_by(cuts[name][1], coordinate, tp) if name in cuts else None
                apart = (local.detach() - (take(whole, cuts[name][0], ranges) if ranges is not None else whole).detach()).abs()
                if not exact and name in grads:
                    small = grads[name].abs() < 1e-6 * scale
                    small = take(small, cuts[name][0], ranges) if ranges is not None else small
                    skipped += int(small.sum())
                    apart = apart.masked_fill(small, 0.0)
                errors[name] = max(errors.get(name, 0.0), float(apart.max()) if apart.numel() else 0.0)
    return errors, skipped


def _output_error(program: Program, expected: list[Any], made: list[tuple[Any, ...]]) -> float:
    """The outputs of all parts of the rows, put together, beside the untouched model's. Relative to each output's largest element."""
    position = {name: index for index, name in enumerate(program.returned())}
    worst = 0.0
    for leaf, name in zip(expected, program.outputs, strict=bool(expected)):
        if name is None or name == program.loss or not isinstance(leaf, Tensor):
            continue
        parts = [values[position[name]] for values in made]
        whole = parts[0] if parts[0].shape == leaf.shape else _joined(parts, leaf)
        size = float(leaf.abs().max()) if leaf.is_floating_point() and leaf.numel() else 1.0
        worst = max(worst, distance(whole, leaf) / max(size, 1.0))
    return worst


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    dims = [d for d in range(like.dim()) if sum(part.shape[d] for part in parts) == like.shape[d]]
    return torch.cat(parts, dims[0]) if dims else parts[0]


def capture_error(
    model: nn.Module, compilation: Compilation, batch: Mapping[str, Any], expected: Tensor, grads: Mapping[str, Tensor], scale: float
) -> float:
    """The captured graph, whole and on one device, beside the untouched model: what cutting is not to blame for."""
    program, drops = compilation.captured, compilation.options.dropout == "exact"
    if not matches(program, structured(program, flatten(program, batch), batch), model):
        program = capture(model, batch, loss=compilation.options.loss)
    program = normalize(program, "exact") if drops else program
    state = dict(model.named_parameters(remove_duplicate=False))
    leaves = {name: state[name].detach().clone().requires_grad_(state[name].requires_grad) for name in program.parameters.values()}
    given: dict[str, Tensor] = {**rows(program, flatten(program, batch), 0, 1), **program.constants}
    given |= {placeholder: leaves[name] for placeholder, name in program.parameters.items()}
    given |= {placeholder: model.get_buffer(name) for placeholder, name in program.buffers.items()}
    given["rng_key"] = torch.tensor([mix(0, 0), 0, 1])
    assert program.loss is not None
    with nullcontext() if drops else NoDropout():
        loss = run(program.graph, {name: [value] for name, value in given.items()}, 1, dropout=drops)[program.loss][0]
    loss.backward()
    worst = _relative(loss, expected)
    for name, leaf in leaves.items():
        if name in grads or leaf.grad is not None:
            zero = torch.zeros_like(leaf)
            worst = max(worst, distance(zero if leaf.grad is None else leaf.grad, grads.get(name, zero)) / scale)
    return worst
