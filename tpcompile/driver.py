"""The compiler, read aloud: which pass follows which, and what each made."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from sympy import Symbol
from torch import Tensor, nn

from tpcompile import timeline
from tpcompile.backend import Unit, unit
from tpcompile.cost import flops_at
from tpcompile.errors import InputError, Refused, caller
from tpcompile.history import History, Log
from tpcompile.ir import Local, Plan, Program, Sharded, Stage
from tpcompile.laws.ranks import check_rank
from tpcompile.layout import Layout, TensorType, bounds, cut_factors
from tpcompile.mesh import Mesh
from tpcompile.messages import run_again, stage_messages
from tpcompile.passes._dropout import drops
from tpcompile.passes._parts import arrange
from tpcompile.passes._units import units
from tpcompile.passes.attend import attend
from tpcompile.passes.capture import capture, other_path
from tpcompile.passes.cast import cast
from tpcompile.passes.delay import delay
from tpcompile.passes.detect import detect
from tpcompile.passes.divide_loss import divide_loss
from tpcompile.passes.emit import RankProgram, emit
from tpcompile.passes.keep_loss import keep_loss
from tpcompile.passes.normalize import normalize
from tpcompile.passes.optimize import optimize
from tpcompile.passes.place_dropout import place_dropout
from tpcompile.passes.plan import plan
from tpcompile.passes.propagate import propagate
from tpcompile.passes.rewrite import rewrite
from tpcompile.passes.sequence import sequence
from tpcompile.passes.split import split
from tpcompile.precision import computing_in, held_types
from tpcompile.rules import op_name
from tpcompile.schedules import SCHEDULES
from tpcompile.verify import verify

ACCEPTED = "per micro-batch"
"""The override of what may mix the rows of a micro-batch."""


@dataclass(frozen=True)
class Options:
    """How to compile: the keywords of `tpcompile.compile`."""

    loss: Callable[..., Tensor] | None = None
    microbatches: int = 1
    split_batches: bool = True
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    data_parallel: str = "ddp"
    overrides: Mapping[str, str] = field(default_factory=dict)
    dropout: str = "local"  # or "exact", "fast"
    sequence_parallel: bool | Literal["regather"] = True
    overlap: bool = True
    vocab_parallel: bool = True
    outputs: Literal["all", "loss"] = "all"
    attention: Literal["normal", "written"] = "normal"
    dynamic: bool = True
    recompute: str = "none"  # or "full", "selective"
    precision: str | None = None  # or "bf16", "fp16"
    backend: str | None = None  # one of torch.compile's

    def parts(self, mesh: Mesh) -> int:
        """In how many parts a batch's rows are divided."""
        return mesh.dp * self.microbatches

    def joining(self, mesh: Mesh) -> dict[str, bool]:
        """Which linears `optimize` joins with collectives. A schedule that runs backward in halves wants both kinds of gradients apart."""
        halves = mesh.pp > 1 and SCHEDULES[self.schedule].halves
        return {"overlap": self.overlap and not halves, "gather_again": self.sequence_parallel == "regather"}

    def graphs(self, mesh: Mesh, stage: Stage) -> Unit:
        """What the graphs of a stage hold that a backend compiles."""
        how = {name: getattr(self, name) for name in ("schedule", "data_parallel", "recompute")}
        return unit(self.backend, len(stage.layers), pp=mesh.pp, dp=mesh.dp, **how)


def check_outputs(outputs: str) -> None:
    """Raises InputError for a value of `outputs` that is none."""
    if outputs not in ("all", "loss"):
        raise InputError(f"outputs={outputs!r}", at="compile", source=caller(), fix='use outputs="all" or outputs="loss"')


def check_overlap(overlap: object, call: str) -> bool:
    """Raises InputError for a value of `overlap` that is none."""
    if not isinstance(overlap, bool):
        what = f"overlap={overlap!r} is neither True nor False"
        raise InputError(what, at=f"{call}(overlap={overlap!r})", source=caller(), fix="use overlap=True or overlap=False")
    return overlap


def check_attention(attention: str, call: str) -> None:
    """Raises InputError for a value of `attention` that is none."""
    if attention not in ("normal", "written"):
        fix = 'use attention="normal" or attention="written"'
        raise InputError(f"there is no attention {attention!r}", at=f"{call}(attention={attention!r})", source=caller(), fix=fix)


@dataclass(frozen=True)
class Compilation:
    """Everything that the compiler made of a model for a mesh."""

    mesh: Mesh
    options: Options
    captured: Program
    program: Program
    plan: Plan
    sharded: Sharded
    local: Local
    stages: tuple[Stage, ...]
    step: timeline.Step
    history: History

    @property
    def sizes(self) -> Mapping[Symbol, int]:
        """The values of the program's symbols in a micro-batch of the example."""
        return self.step.sizes

    def rank_program(self, model: nn.Module, rank: int, device: torch.device | str = "cpu") -> RankProgram:
        """The modules that a rank runs, with its own pieces of the model's parameters."""
        tables: dict[str, Any] = {"layouts": self.local.layouts, "origins": self.local.origins}
        tables["cores"] = self.options.recompute == "selective"
        tables["held"] = [stage.index for stage in self.step.stages_at(self.mesh.coordinates(rank)["pp"])]
        with _without_collecting():
            made = emit(self.stages, self.program, model, self.pieces(), self.mesh, rank, torch.device(device), **tables)
            for stage, module, graph in zip(made.stages, made.modules, made.graphs, strict=True):
                held = dict(module.named_parameters(remove_duplicate=False))
                check_rank(self.local, stage, graph, made.coordinates["tp"], held)
        return made

    def held(self) -> dict[str, Layout]:
        """How every parameter is held, by its qualified name."""
        placed = {name: self.sharded.layouts[placeholder] for placeholder, name in self.program.parameters.items()}
        return {name: layout for name, layout in placed.items() if isinstance(layout, Layout)}

    def pieces(self) -> dict[str, tuple[int, list[int]]]:
        """For every cut parameter the dimension that is cut and who holds what, as `bounds` of collectives."""
        found: dict[str, tuple[int, list[int]]] = {}
        for placeholder, name in self.program.parameters.items():
            layout = self.sharded.layouts[placeholder]
            assert isinstance(layout, Layout)
            for dim, places in enumerate(layout.dims):
                if cut_factors(places):
                    found[name] = (dim, bounds(places, self.mesh.tp))
        return found


def check_dropout(how: str, call: str) -> str:
    """Raises InputError unless `how` is a way in which masks are drawn."""
    if how not in ("local", "exact", "fast"):
        fix = 'use dropout="local", "exact" or "fast"'
        raise InputError(f"there is no dropout {how!r}", at=f"{call}(dropout={how!r})", source=caller(), fix=fix)
    return how


def lower(
    model: nn.Module, mesh: Mesh, batch: Mapping[str, Any], options: Options, held: Mapping[str, Layout] | None = None
) -> Compilation:
    """Compile a model for one micro-batch's shapes, from capture to stages. Needs no process group and no device but the model's own.

    `held` are the layouts that an earlier compilation of the model gave to its parameters, by qualified name: they stay.
    """
    log, types = Log(), held_types(model)
    if _put_off:
        gc.collect()
        _put_off.clear()
    with _without_collecting(), computing_in(model, options.precision):
        captured = verify(log.run("capture", None, lambda: capture(model, batch, loss=options.loss, dynamic=options.dynamic)))
        return lower_captured(captured, model, mesh, batch, options, log, held, types)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """A compile makes many objects, and drops few: looking for cycles among them takes a sixth of its time.

    What a large one leaves counts as old, so that the next allocation does not look through all of it. What was garbage by then waits
    for the next full collection, which is made before another compile, since an earlier program may be part of it.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if gc.get_count()[0] > MANY and not gc.get_freeze_count():  # what somebody has frozen stays so
                gc.freeze()
                gc.unfreeze()
                _put_off.append(True)
            gc.enable()


MANY = 200_000
"""So many new objects take longer to look through than a compile of a small model takes."""

_put_off: list[bool] = []
"""Whether a full collection is due."""


def lower_captured(
    captured: Program,
    model: nn.Module,
    mesh: Mesh,
    batch: Mapping[str, Any],
    options: Options,
    log: Log | None = None,
    held: Mapping[str, Layout] | None = None,
    types: Mapping[str, torch.dtype] | None = None,
) -> Compilation:
    """Compile what was captured with this batch: all passes but the first. One capture serves any number of meshes.

    `types` are those in which ranks hold the parameters, by qualified name, where the model computes in others.
    """
    log = log or Log()
    spelled = verify(log.run("normalize", captured, lambda: normalize(captured, options.dropout)))
    normal = verify(log.run("attend", spelled, lambda: attend(spelled))) if options.attention == "normal" else spelled
    _refuse_random(normal, mesh)
    witness = _witness(model, batch, normal, options, mesh)
    accepted = [name for name, wish in options.overrides.items() if wish == ACCEPTED]
    needed = verify(log.run("keep_loss", normal, lambda: keep_loss(normal))) if options.outputs == "loss" else normal
    divided = verify(log.run("divide_loss", needed, lambda: replace(divide_loss(needed, witness, accepted), witness=witness)))
    program = verify(log.run("place_dropout", divided, lambda: place_dropout(divided, options.parts(mesh), witness)))
    wishes = {name: wish for name, wish in options.overrides.items() if wish != ACCEPTED}
    cones = log.run("detect", program, lambda: detect(program))
    given: Any = {"vocab_parallel": options.vocab_parallel, "held": held}
    chosen = log.run("plan", cones, lambda: plan(program, cones, "tp", mesh.tp, wishes, **given))
    sharded = verify(log.run("propagate", program, lambda: propagate(program, chosen, "tp", mesh.tp)))
    _refuse_whole_draws(sharded)
    delayed = verify(log.run("delay", sharded, lambda: delay(sharded)), known=sharded)
    sharded = verify(log.run("sequence", delayed, lambda: sequence(delayed)), known=delayed) if options.sequence_parallel else delayed
    rewritten = verify(log.run("rewrite", sharded, lambda: rewrite(sharded)))
    local = verify(log.run("optimize", rewritten, lambda: optimize(rewritten, **options.joining(mesh))))
    if options.precision is not None:
        optimized, wide = local, dict(types or {})
        local = verify(log.run("cast", optimized, lambda: cast(optimized, wide)))
        program = local.program
    loads, own = costs(program, batch), options.stages_per_rank
    cut = log.run("split", local, lambda: split(local, mesh.pp, loads, own))
    stages = tuple(verify(with_layers(stage, program)) for stage in cut)
    step = verify(step_of(local, stages, mesh, options, sizes_of(program, batch)))
    return Compilation(mesh, options, captured, program, chosen, sharded, local, stages, step, History(log.steps))


def with_layers(stage: Stage, program: Program) -> Stage:
    """A stage that knows which layers the emitted module has."""
    parts = arrange(stage, {name: source.path for name, source in program.sources.items()}, program.layers)
    layers = tuple(dict.fromkeys(part.layer for part in parts if part.layer))
    return replace(stage, layers=layers, units=units(stage, program, parts))


def step_of(local: Local, stages: tuple[Stage, ...], mesh: Mesh, options: Options, sizes: Mapping[Symbol, int]) -> timeline.Step:
    """What the ranks of every stage say to each other in a step, in the order in which the emitted modules run."""
    paths = {name: source.path for name, source in local.program.sources.items()}
    parts = [arrange(stage, paths, local.program.layers) for stage in stages]
    orders = [[node.name for part in own for node in part.nodes] for own in parts]
    messages = tuple(stage_messages(local, stage, order) for stage, order in zip(stages, orders, strict=True))
    if options.recompute == "full":
        runs = [[{node.name for node in part.nodes} for part in own if part.layer] for own in parts]
        messages = tuple(run_again(local, *each) for each in zip(stages, messages, runs, strict=True))
    layers = tuple(stage.units for stage in stages)
    return timeline.Step(mesh, options.schedule, options.microbatches, local, stages, messages, sizes, options.data_parallel, layers)


def _refuse_random(program: Program, mesh: Mesh) -> None:
    """Random numbers that have no key are drawn from each process's own generator: ranks would not agree on them."""
    for node in program.graph.nodes if mesh.size > 1 else ():
        tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
        if torch.Tag.nondeterministic_seeded in tags and op_name(node) not in ("aten.scaled_dot_product_attention.default",):
            raise Refused(
                f"{op_name(node)} draws random numbers that ranks would not share",
                at=f"compile(mesh {mesh})",
                source=str(program.sources.get(node.name, "")),
                fix="write it with torch.rand or torch.bernoulli, pass the random tensor in with the batch, or use one rank",
            )


def _refuse_whole_draws(sharded: Sharded) -> None:
    """Attention that keeps its own dropout must be cut: of a whole value, each tensor rank would drop something else."""
    for node in sharded.program.graph.nodes if sharded.parts > 1 else ():
        layout = sharded.layouts.get(node.name)
        if drops(node) and isinstance(layout, Layout) and not layout.is_cut:
            raise Refused(
                "attention that is whole on all tensor ranks would draw other numbers on each, for the dropout inside it",
                at='compile(dropout="fast")',
                source=str(sharded.program.sources.get(node.name, "")),
                fix='use dropout="local"',
            )


def _witness(model: nn.Module, batch: Mapping[str, Any], program: Program, options: Options, mesh: Mesh) -> Program | None:
    """For a program of one row that is to run on several parts of a batch, the same model captured with that row twice."""
    entries = {entry.path: entry.batch_dim for name, entry in program.inputs.items() if _rows(program, name) == 1}
    placed = options.dropout == "exact" and program.random
    if (program.loss is None and not placed) or not entries or options.parts(mesh) == 1:
        return None

    def doubled(value: Any, path: str) -> Any:
        match value:
            case Tensor() if (dim := entries.get(path)) is not None:
                return torch.cat([value, value], dim)
            case Mapping():
                return {key: doubled(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
            case tuple() | list():
                return type(value)(doubled(item, f"{path}.{index}") for index, item in enumerate(value))
        return value

    more = normalize(capture(model, doubled(dict(batch), ""), loss=options.loss, dynamic=options.dynamic), options.dropout)
    return attend(more) if options.attention == "normal" else more


def _rows(program: Program, name: str) -> object:
    kind, dim = program.types[name], program.inputs[name].batch_dim
    return kind.shape[dim] if isinstance(kind, TensorType) and dim is not None else None


def refuse_division(program: Program, mesh: Mesh, microbatches: int, call: str) -> None:
    """Raise Refused where a batch is divided and must not be: its parts do not make up the loss, or the buffers, of the whole."""
    if program.undivided and mesh.dp * microbatches > 1:
        fix = "use dp=1 and microbatches=1" + (' with schedule="gpipe"' if mesh.pp > 1 else "")
        other = (
            "put what learns from a batch's statistics into eval mode"
            if program.update_reason
            else f"a loss that is linear in sums and means over rows, or overrides={_accepting(program)} to take micro-batches' mean"
        )
        raise Refused(program.undivided, at=f"{call}(dp={mesh.dp}, microbatches={microbatches})", source=caller(), fix=f"{fix}, or {other}")


def refuse_other_path(program: Program, tensors: Mapping[str, Tensor], rows: int, mesh: Mesh, microbatches: int, call: str) -> None:
    """Raise Refused where a batch of so many rows is divided that one device would compute in another way than its parts."""
    parts = mesh.dp * microbatches
    if parts > 1 and (condition := other_path(program.witness or program, tensors, rows)):
        raise Refused(
            f"the model does not do for {rows} rows what it does for {rows // parts}, for which it takes {condition} for granted",
            at=call,
            source=caller(),
            fix="use dp=1 and microbatches=1, or a model that does the same for any number of rows",
        )


def _accepting(program: Program) -> str:
    """The override that accepts what keeps a loss from being divided."""
    line = re.search(r" at (\S+:\d+)", program.loss_reason)
    return f'{{"{line[1] if line else "*"}": "{ACCEPTED}"}}'


def sizes_of(program: Program, batch: Mapping[str, Any]) -> dict[Symbol, int]:
    """The values of a program's symbols in a batch."""
    sizes: dict[Symbol, int] = {}
    for symbol, (placeholder, dim) in program.symbols.items():
        value: Any = batch
        for part in program.inputs[placeholder].path.split("."):
            value = value[int(part)] if isinstance(value, (tuple, list)) else value[part]
        sizes[symbol] = int(value.shape[dim])
    return sizes


def costs(program: Program, batch: Mapping[str, Any]) -> dict[str, int]:
    """Forward FLOPs of every node at this batch's sizes."""
    return flops_at(program, sizes_of(program, batch))
