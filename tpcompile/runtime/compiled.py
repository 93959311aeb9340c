"""`tpcompile.compile` and the object that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

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
from tpcompile.errors import InputError, Refused, TpcompileError, caller
from tpcompile.history import History
from tpcompile.ir import Program
from tpcompile.mesh import Mesh
from tpcompile.passes.capture import matches
from tpcompile.passes.emit import RankProgram
from tpcompile.precision import check_precision
from tpcompile.runtime import batch as batches
from tpcompile.runtime import clip, fingerprint, scaling, zero1
from tpcompile.runtime import optimizer as optimizers
from tpcompile.runtime.agree import agree
from tpcompile.runtime.batch import Batch, Division
from tpcompile.runtime.checkpoint import SCALE, Checkpoints, Running, Stateful
from tpcompile.runtime.checkpoint.full import full_state_dict, save_pretrained
from tpcompile.runtime.checkpoint.together import on_first, together
from tpcompile.runtime.compiling import check_backend
from tpcompile.runtime.data_parallel import check_mode, settle
from tpcompile.runtime.engine import Capture, Engine, check_values
from tpcompile.runtime.groups import connect
from tpcompile.runtime.initial import Initial
from tpcompile.runtime.mark import placed
from tpcompile.runtime.recompute import check_recompute
from tpcompile.runtime.weights import fill, fill_buffers, source_of
from tpcompile.schedules import check_schedule


def compile(
    model: nn.Module,
    mesh: Mesh | DeviceMesh | str,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor | None = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    microbatches: int | None = None,
    split_batches: bool = True,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    data_parallel: str = "ddp",
    sequence_parallel: bool | Literal["regather"] = True,
    overlap: bool = True,
    overrides: Mapping[str, str] | None = None,
    dropout: str = "local",
    vocab_parallel: bool = True,
    outputs: Literal["all", "loss"] = "all",
    attention: Literal["normal", "written"] = "normal",
    dynamic: bool = True,
    recompute: str = "none",
    precision: Literal["bf16", "fp16"] | None = None,
    backend: str | None = None,
    weights: str | Path | Initial | None = None,
) -> Compiled:
    """Compile a model for a mesh of data × pipeline × tensor parallel ranks.

    No process group is needed: only running needs one. Raises InputError for arguments that fit neither each other nor the model,
    CaptureError where forward cannot be captured faithfully, and Refused for what would give other numbers than one device.

    - `model`: read and never changed. Its parameters may be on the meta device.
    - `mesh`: a Mesh, text such as "dp=2,pp=2,tp=2", or a torch DeviceMesh with these dimension names.
    - `example_inputs`: the whole batch or one replica's, as a tuple, a mapping or one tensor. Without them the model's `dummy_inputs`
      serve, else the first call.
    - `loss`: a function of (outputs, batch) that gives a scalar. Without it the output's `.loss` counts, or the output if it is a scalar.
    - `microbatches`: into how many parts a replica's rows are divided: 1 without a pipeline, else as many as stages.
    - `split_batches`: every rank passes the same whole batch and takes its replica's rows; False: every rank passes its replica's own.
    - `schedule`: in which order a pipeline works. "gpipe" and "1f1b" have one stage on each rank; "interleaved_1f1b", "looped_bfs" and
      "interleaved_zero_bubble" several, stage i being on rank i modulo pp; "zbv" and "dualpipev" two in a V, stages i and 2·pp - 1 - i on
      one rank. The last three run backward in halves. All give the same numbers.
    - `stages_per_rank`: how many stages a rank holds, where the schedule lets one choose: 2 by default.
    - `data_parallel`: what replicas share out. "ddp": nothing; "zero1": the optimizer's state; "zero2": also gradients and, between steps,
      parameters; "zero3": the same, and layers' parameters are gathered again for backward. `tpcompile.memory` has the bytes.
    - `sequence_parallel`: a tensor rank keeps its own positions of what stands between regions (norms, dropout, residual sums), and
      all-reduces become reduce-scatters and all-gathers: as many bytes, and less memory by the number of tensor ranks. With "regather",
      linear layers do not keep what they gathered, and gather it again in backward.
    - `overlap`: in backward of linear layers, the sum of their input's gradient over tensor ranks is under way while the gradients of their
      weights are computed; schedules that run backward in halves have the two apart anyway. False: one after the other, the same numbers.
      With sequence_parallel="regather" linear layers overlap both of their calls, whatever is said here.
    - `overrides`: what is done with parts of the model, by patterns of module paths as `explain()` prints them. A region stays "whole" or
      is "cut", a linear is cut by "column" or by "row". What mixes the rows of a micro-batch, and is refused where a batch is divided
      (in-batch contrast, a router's balance, the root of a mean), is accepted as "per micro-batch" by its module's path, its line as the
      refusal names it, "file.py:12", or a pattern of the line's text: it is computed in each micro-batch, and the batch's is their mean,
      over replicas too. That is not what one device computes.
    - `dropout`: how masks, and the numbers of `torch.rand`, `bernoulli` and their like, are drawn. "local": each rank draws those of its
      own pieces, keyed by the seed of `torch.manual_seed`, the step, the place in the model and the part of the batch; values that are
      whole on all tensor ranks have one mask there. "exact": a mask depends on the seed, the step, the place in the model and the
      element's index in the value of the whole batch, so that every mesh trains as one device does with the same option. "fast": as
      "local", but attention keeps its dropout inside its fused kernels, which draw from torch's own generator on each rank: only
      `torch.manual_seed` repeats it, and ranks with the same seed draw alike.
    - `attention`: "normal": attention that the model writes out becomes one operation, and a mask that is causal at all sizes an option of
      it, where that computes the same numbers; `explain()` says where it does not. "written": attention is left as it is.
    - `vocab_parallel`: tables of embeddings are cut by rows and heads by columns, and their loss is computed on cut scores.
    - `outputs`: "loss": a step returns nothing but the loss, and cut scores are never gathered.
    - `dynamic`: False: the sizes of the example are fixed, which compiles faster. A batch of other sizes is captured anew, and none is
      divided: a loss over it is refused where there are several replicas or micro-batches.
    - `recompute`: time for the memory of activations, by layers. "full": a layer keeps what it is given, and runs again in backward, with
      its collectives. "selective": of the core of its attention it keeps q, k and v alone, and scores, softmax and dropout run again.
    - `precision`: the model computes in "bf16" or "fp16". Its parameters stay in the type that they have, and are cast where they are
      used; floating inputs of forward are cast, buffers and what the model itself casts are not. Gradients are in the parameters' type,
      sums over tensor ranks in float32. With "fp16", `train_step` scales the loss and gives unscaled gradients; where those of any rank
      overflow, optimizers leave out their next step, on all ranks (`compiled.loss_scale`).
    - `backend`: one of torch.compile's backends, "inductor" for one: every stage's program is compiled through it, collectives included,
      when it first runs. What is compiled together, and where nothing is and why, is in `tpcompile.backend` and in `explain()`.
    - `weights`: a directory of safetensors, `model.safetensors` or several files with their index, or one file: each rank reads its own
      slices of it when it first runs, and nothing else, so that the model can be on the meta device. Names are those of its state dict.
      `tpcompile.Initial(seed)` instead gives a model on the meta device the values of its own initialisers, equal on every mesh.
    """
    if not isinstance(model, nn.Module):
        fix = "build the model first: torch.nn.Module with weights, or on the meta device"
        raise InputError(f"{model!r} is no model", at="compile", source=caller(), fix=fix)
    placed = Mesh.of(mesh)
    check_outputs(outputs)
    check_attention(attention, "compile")
    own, count = check_schedule(schedule, placed.pp, stages_per_rank, microbatches)
    options = Options(
        loss=loss,
        microbatches=count,
        split_batches=split_batches,
        schedule=schedule,
        stages_per_rank=own,
        data_parallel=check_mode(data_parallel),
        sequence_parallel=sequence_parallel,
        overlap=check_overlap(overlap, "compile"),
        overrides=dict(overrides or {}),
        dropout=check_dropout(dropout, "compile"),
        vocab_parallel=vocab_parallel,
        outputs=outputs,
        attention=attention,
        dynamic=dynamic,
        recompute=check_recompute(recompute, schedule, placed.pp),
        precision=check_precision(precision),
        backend=check_backend(backend),
    )
    compiled = Compiled(model, placed, options, mesh if isinstance(mesh, DeviceMesh) else None, weights)
    if example_inputs is None:
        example_inputs = getattr(model, "dummy_inputs", None)
    if example_inputs is not None:
        if isinstance(example_inputs, Tensor):
            example_inputs = (example_inputs,)
        positional = example_inputs if isinstance(example_inputs, tuple) else ()
        named = example_inputs if isinstance(example_inputs, Mapping) else {}
        compiled._capture(batches.computing_in(batches.bind(model.forward, positional, named), model.forward, precision))
    return compiled


class Evaluated(NamedTuple):
    """What `eval_step` returns."""

    loss: Tensor  # of the whole batch: a scalar, detached, the same on every rank
    outputs: Any  # the model's, for this replica's rows


class Compiled:
    """A compiled model: `model`, `mesh` and `options` are what it was made of, and it holds this rank's part.

    Explaining it and reading any rank's program need no process group. What runs, or reads this rank's parameters, needs one with as many
    processes as the mesh has ranks, connects to it at the first call, on all ranks, and raises InputError where there is none.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, options: Options, devices: DeviceMesh | None, weights: str | Path | Initial | None = None
    ) -> None:
        self._weights = None if weights is None else source_of(weights, model)
        self.model, self.mesh, self.options = model, mesh, options
        self._devices = devices
        self._division = Division.of(mesh, options.microbatches, options.split_batches)
        self._compilations: list[Compilation] = []
        self._captures: list[Capture] = []  # of the same numbers, once they run
        self._checked: set[tuple[object, ...]] = set()  # the sizes of batches whose parts go the whole batch's way
        self._engine: Engine | None = None
        self._program: RankProgram | None = None
        self._checkpoints = Checkpoints()
        self._measured: list[tuple[float, float]] = []  # of each rank of the pipeline: seconds of work, and of steps

    # ---------------------------------------------------------------------------------------- reading

    @property
    def compilation(self) -> Compilation:
        """What the compiler made of the first example inputs: programs, plan, stages, layouts. Raises InputError before there were any."""
        if not self._compilations:
            raise InputError(
                "the model is not captured yet: compile was given no example inputs",
                at="compiled",
                source=caller(),
                fix="pass example_inputs to tpcompile.compile, or run a step first",
            )
        return self._compilations[0]

    @property
    def history(self) -> History:
        """What every pass did, by the pass's name: a `History`. Raises InputError before the model is captured."""
        return self.compilation.history

    def explain(self, *, full: bool = False, devices_per_node: int | None = None, device_memory: float = 80.0) -> str:
        """The plan on one screen, of 60 lines of 120 columns: does the model fit, is it cut, what was left whole and why, what is sent.

        `full` has every stage, every tensor rank and every formula, in 160 columns. Tensor-parallel groups that cross nodes of
        `devices_per_node` devices are warned of; by default a node has as many ranks as the launcher started on this one, or 8.
        `device_memory`, in GiB, is what a device is taken to have. Raises InputError before the model is captured.
        """
        from tpcompile.inspect.explain import explain
        from tpcompile.inspect.grid import Bubble

        measured = [Bubble(*seconds) for seconds in self._measured]
        return explain(self.compilation, None, devices_per_node, measured, full=full, device_memory=device_memory)

    def html(self) -> str:
        """The model as layers × stages × ranks, every pass, every weight's strips and the schedule, as a page for a browser: one file of
        HTML that loads nothing. Needs no process group, and keeps no copies of weights. Raises InputError before the model is captured.
        """
        from tpcompile.inspect.page import page

        return page(self.compilation, self.model)

    def _repr_html_(self) -> str | None:
        """The page of `html()` in a frame, for notebooks; None before the first capture."""
        from tpcompile.inspect.page import embedded

        return embedded(self.html()) if self._compilations else None

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time the training steps inside: `explain()` then says which share of them the pipeline stood idle, beside what it predicts.

        A rank's work includes what its operators wait for other tensor ranks. Collective over the pipeline. Raises InputError without the
        mesh's processes.
        """
        with self._running("compiled.measure()").measure() as seconds:
            yield
        self._measured = seconds

    def program(self, rank: int | None = None) -> RankProgram:
        """What the rank `rank` of the mesh runs; by default this process's. Any can be read, and a process that runs gets its own.

        Raises InputError for a rank that the mesh does not have.
        """
        here = dist.get_rank() if dist.is_initialized() else 0
        if rank is None or rank == here:
            return self._own_program(here)
        if not 0 <= rank < self.mesh.size:
            at, fix = f"compiled.program(rank={rank})", f"use a rank from 0 to {self.mesh.size - 1}"
            raise InputError(f"mesh {self.mesh} has no rank {rank}", at=at, source=caller(), fix=fix)
        return self.compilation.rank_program(self.model, rank, torch.device("cpu"))

    def emit(self, directory: str | Path, *, formats: Sequence[str] = ()) -> None:
        """Write the programs of all ranks to a folder, `directory`: `stage_K.py`, `rank_NNN.safetensors`, `plan.txt`, `manifest.json`.

        The weights are those of the running program, once it has run, and else the model's; a model on the meta device that has not run
        gives programs without weights. A folder that a program was written to before is written anew, when all files of the new one are
        there: after an error it is as it was. Collective once it has run: rank 0 writes, and has the whole weights in memory meanwhile.
        Raises InputError for a folder with other files, for a format that is none, that holds weights which a model on the meta device
        lacks, or whose packages or compiler are missing; Refused for what a format cannot hold, such as random numbers in "onnx" and
        "aoti".

        `formats` adds forms of every rank's forward, which `tpcompile check build/` compares with the sources:

        - "onnx": `rank_NNN.onnx`; collectives are AllReduce and AllGather of the domain com.microsoft.
        - "pt2": `rank_NNN.pt2`, of `torch.export`; `tpcompile.export.pt2.load_pt2(file, groups)` gives the module.
        - "aoti": `rank_NNN.aoti.pt2`, native code by AOTInductor, for machines of this kind. Needs a C++ compiler.
        """
        from tpcompile.export.write import emit, with_values

        if self._engine is None:
            emit(self.compilation, self.model, Path(directory), formats)
            return
        values = self.full_state_dict()
        on_first(lambda: emit(self.compilation, with_values(self.model, values), Path(directory), formats))

    def _own_program(self, rank: int) -> RankProgram:
        if self._program is None or self._program.rank != rank:
            device = self._engine.groups.device if self._engine else torch.device("cpu")
            self._program = self.compilation.rank_program(self.model, rank, device)
        return self._program

    # ------------------------------------------------------------------------------------- parameters

    @property
    def module(self) -> nn.Module:
        """This rank's module, with the parameter names of the user's model.

        Raises TpcompileError on a rank that holds several stages: it has `modules`; InputError without the mesh's processes.
        """
        if len(modules := self.modules) > 1:
            raise TpcompileError(f"this rank holds {len(modules)} stages", at="compiled.module", fix="use compiled.modules")
        return modules[0]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """This rank's modules, one for each stage that it holds. Raises InputError without the mesh's processes."""
        return tuple(root.program for root in self._running("compiled.module").root.stages)

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, cut as the plan says. Raises InputError without the mesh's processes."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, by their names in the user's model. Raises InputError without the mesh's processes."""
        return self._running("compiled.named_parameters()").root.named_own_parameters()

    def optimizer(
        self,
        kind: type[torch.optim.Optimizer],
        groups: Callable[[str, nn.Parameter], optimizers.Choice] | None = None,
        *,
        elementwise: bool = False,
        **settings: Any,
    ) -> torch.optim.Optimizer:
        """An optimizer over this rank's trained parameters: `compiled.optimizer(torch.optim.AdamW, lr=3e-4)`. Collective.

        `settings` are those of `kind`, which may be any class of optimizers. `groups` is a function of (name, parameter), asked for every
        trained parameter of the model, by its qualified name and whole, that gives its group: a mapping of settings, such as
        `{"weight_decay": 0.0} if parameter.ndim < 2 else {}`; a name, which stands in `param_groups` as "name"; None; or False, to leave it
        to another optimizer. All ranks have the same groups, so that torch's schedulers of learning rates work.

        An optimizer that mixes the elements of a parameter (Adafactor, Muon), or of all (LBFGS), is Refused where ranks hold pieces of
        them, and so is a class that is not torch's own: `elementwise=True` promises that it treats every element by itself. Raises
        InputError for what is no class, for settings and groups that do not fit it, and without the mesh's processes.
        """
        call = f"compiled.optimizer({kind.__name__ if isinstance(kind, type) else type(kind).__name__})"
        found = optimizers.check_kind(kind, call)
        engine = self._running(call)
        choices = optimizers.choices(self.model, self.compilation.program.aliases, groups, call)
        optimizers.refuse_mixing(found, self._holds(choices), elementwise, call)
        chosen = optimizers.grouped(choices, dict(self.named_parameters()))
        fingerprint.compare({"optimizers": optimizers.described(found, chosen, settings)})
        if engine.scaler is not None:
            found = scaling.skipping(found, engine.scaler)
        along = engine.groups.along("dp")
        if self.options.data_parallel == "zero1" and along is not None:
            return zero1.made(found, chosen, settings, along, call)
        return optimizers.made(found, chosen, settings, call)

    def _holds(self, names: Iterable[str]) -> optimizers.Holds:
        """Which of these parameters are cut."""
        shared_out, cut = self.mesh.dp > 1 and self.options.data_parallel != "ddp", self.compilation.pieces()
        return optimizers.Holds(tuple(name for name in names if shared_out or name in cut), self.mesh.pp)

    @property
    def loss_scale(self) -> float | None:
        """With precision="fp16": what the next step multiplies its loss with for backward; else None.

        Raises InputError without the mesh's processes.
        """
        scaler = self._running("compiled.loss_scale").scaler
        return None if scaler is None else float(scaler.scale)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients, over all axes, as one device has it; the same on every rank. Collective.

        A scalar of the widest type of the model's parameters, float32 at least. Every parameter counts once, whichever ranks hold it,
        or copies or pieces of it. Without any gradient it is 0. `norm_type` is the p of the p-norm, or inf. Raises InputError without the
        mesh's processes.
        """
        engine = self._running("compiled.grad_norm()")
        counting = clip.Counting(engine.groups, self.compilation.pieces(), engine.homes)
        return clip.norm(dict(self.named_parameters()), counting, optimizers.dtype_of(self.model), float(norm_type))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients so that their norm over all axes is at most `max_norm`; returns the norm before. Collective.

        As `torch.nn.utils.clip_grad_norm_` on one device: factor max_norm / (norm + 1e-6) where that is below 1. Gradients of several
        `train_step`s have added up by then: a mean over so many steps is the caller's to divide. `norm_type` is that of `grad_norm`. With
        `error_if_nonfinite` a norm that is not finite raises TpcompileError on every rank, and leaves gradients as they are. Raises
        InputError without the mesh's processes.
        """
        total = self.grad_norm(norm_type)
        if error_if_nonfinite:
            clip.refuse_nonfinite(total, norm_type)
        clip.clip(dict(self.named_parameters()), total, float(max_norm))
        return total

    # ----------------------------------------------------------------------------------------- on disk

    def save(
        self,
        directory: str | Path,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        objects: Mapping[str, Stateful] | None = None,
        step: int | None = None,
        keep: int | None = None,
        wait: bool = True,
    ) -> Path | Future[Path]:
        """Write a checkpoint into a `directory` of checkpoints, and return its path. Collective; any mesh can load it.

        It holds parameters and buffers under the names of the user's model, what the `optimizer` keeps, the states of the learning-rate
        `scheduler` and of other `objects` (rank 0's), torch's generators, and the seed and step of dropout; gradients are not in it.
        `step`, by default the number of calls so far, names it, and comes back from `load`. All but the newest `keep` are removed.
        A checkpoint has its name only when all of it is on the disk: a process that is killed leaves the one before.
        With `wait=False` it is copied to the CPU and written in the background: the result is a future of the path. Wait for it before
        the process group is destroyed. All ranks must see the same directory. Raises InputError without the mesh's processes, and for a
        directory, an optimizer or an object that cannot be saved.
        """
        running = self._on_disk("compiled.save")
        named = self._kept(running.engine, scheduler, objects)
        return self._checkpoints.save(running, Path(directory), optimizer, named, step, keep, wait)

    def load(
        self,
        directory: str | Path,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        objects: Mapping[str, Stateful] | None = None,
        missing_ok: bool = False,
    ) -> int:
        """Take everything from a checkpoint, or from the newest of a `directory` of them; returns the step that it was saved with.

        It may have been saved on any mesh, or on one device. `optimizer`, `scheduler` and `objects` take the states that `save` was given
        under the same names. Each rank reads the boxes that it holds into tensors of its own, which take the old ones' place when all ranks
        have all of theirs. Without a checkpoint, `missing_ok` makes the result 0. Collective. Raises InputError, with the file and the
        key, for a checkpoint that is missing, cut short, of another model or of other types, and leaves everything as it was.
        """
        running = self._on_disk("compiled.load")
        named = self._kept(running.engine, scheduler, objects)
        return self._checkpoints.load(running, Path(directory), optimizer, named, missing_ok)

    def full_state_dict(self, *, everywhere: bool = False) -> dict[str, Tensor]:
        """Whole tensors on the CPU under the keys of the user's model, tied twins and saved buffers too; `model.load_state_dict` takes it.

        On rank 0, and an empty dictionary on the others; with `everywhere`, on all ranks. Collective. Raises InputError without the mesh's
        processes.
        """
        return full_state_dict(self._on_disk("compiled.full_state_dict"), everywhere=everywhere)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write whole weights to `directory` as the user's model does: through its `save_pretrained`, else one `model.safetensors`.

        Collective. Rank 0 writes, and has them in memory meanwhile. Raises InputError without the mesh's processes.
        """
        save_pretrained(self._on_disk("compiled.save_pretrained"), Path(directory))

    @staticmethod
    def _kept(engine: Engine, scheduler: Stateful | None, objects: Mapping[str, Stateful] | None) -> dict[str, Stateful]:
        """The objects that a checkpoint keeps, by name."""
        own: dict[str, Stateful | None] = {"scheduler": scheduler, SCALE: engine.scaler}
        return {**{name: thing for name, thing in own.items() if thing is not None}, **(objects or {})}

    def _on_disk(self, call: str) -> Running:
        engine = self._running(call)
        settle(engine.root)
        return Running(self.model, engine, tuple(self.named_parameters()), self._own_program(engine.groups.rank).parameters)

    # ---------------------------------------------------------------------------------------- running

    @placed("training")
    def train_step(self, *args: Any, **batch: Any) -> Tensor:
        """Forward and backward of a batch; returns its loss, detached and the same on every rank. Gradients add up in `.grad`.

        The batch is given by keywords, as the model's forward takes it: `compiled.train_step(**batch)`. Several steps before one of the
        optimizer add up their gradients, each of its own batch's loss: where their mean is wanted, the loss (or the learning rate)
        is the caller's to divide. A batch of other sizes, or another mode of the model, may be captured anew.

        Collective. Raises InputError for a batch that lacks inputs, has rows that cannot be divided, or differs between ranks, for a model
        without a loss, and without the mesh's processes; what `tpcompile.compile` raises where it is captured anew, and Refused where the
        new capture would cut a parameter otherwise.
        """
        capture, tensors = self._with_loss("train_step", args, batch, self.options.microbatches)
        assert self._engine is not None
        return self._engine.train(capture, tensors, self.options.microbatches)

    @placed("evaluation")
    def eval_step(self, *args: Any, **batch: Any) -> Evaluated:
        """Forward of a batch without gradients: `loss, outputs = compiled.eval_step(**batch)`.

        The loss is the whole batch's, detached and the same on every rank; the outputs are those of `compiled(**batch)`, for this
        replica's rows. The model runs in the mode in which it is: `model.eval()` before the call captures it anew, for evaluation, and
        `model.train()` turns back to the first capture. Gradients that wait for an optimizer stay as they are. Collective. Raises what
        `train_step` raises: InputError, or Refused where it is captured anew.
        """
        count = self.options.microbatches if self.mesh.pp > 1 else 1
        capture, tensors = self._with_loss("eval_step", args, batch, count)
        assert self._engine is not None
        return Evaluated(*self._engine.evaluate(capture, tensors, count))

    def _with_loss(self, method: str, args: tuple[Any, ...], batch: Batch, microbatches: int) -> tuple[Capture, dict[str, Tensor]]:
        """The capture for a batch that must give a loss, and the replica's rows."""
        if args:
            shown = ", ".join(f"a {type(arg).__name__}" for arg in args)
            given = args[0] if isinstance(args[0], Mapping) else {}
            fix = f"write compiled.{method}(**batch)" if given else f"name every argument: compiled.{method}(input_ids=…, labels=…)"
            raise InputError(f"a batch is given by keywords, not as {shown}", at=f"compiled.{method}", source=caller(), fix=fix)
        call = batches.describe(method, batch)
        self._check_labels(batch, call)
        capture, tensors = self._prepare(batch, call, microbatches)
        if capture.program.loss is None:
            raise InputError(
                "the model has no loss: its output is neither a scalar nor has a .loss",
                at=call,
                source=caller(),
                fix="pass loss= to tpcompile.compile, or the labels with the batch",
            )
        return capture, tensors

    @placed("forward")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for this replica's rows, in its own type. Without a pipeline it can be differentiated.

        With pp > 1 it is a forward without gradients; the output is on every rank. A loss is that of the whole batch. Collective. Raises
        InputError for a batch that forward does not take or that cannot be divided, and without the mesh's processes; Refused where a
        batch is captured anew and would cut a parameter otherwise.
        """
        batch = batches.bind(self.model.forward, args, kwargs)
        count = self.options.microbatches if self.mesh.pp > 1 else 1
        capture, tensors = self._prepare(batch, batches.describe("", batch).replace("(", "compiled(", 1), count)
        assert self._engine is not None
        return self._engine.forward(capture, tensors, count)

    def _running(self, call: str) -> Engine:
        """The engine, made when it is first needed. Collective."""
        if self._engine is None:
            if not self._compilations:
                raise InputError(
                    "no parameters yet: the model is captured at the first step, since compile was given no example inputs",
                    at=call,
                    source=caller(),
                    fix="pass example_inputs to tpcompile.compile, or run a step first",
                )
            self._start(call)
        assert self._engine is not None
        return self._engine

    def _start(self, call: str) -> None:
        groups = connect(self.mesh, self._devices, call)
        fingerprint.compare(fingerprint.given(self.model, self.mesh, self.options) | fingerprint.made(self.compilation))
        seed = [torch.initial_seed() & (2**62 - 1)]
        if groups.devices is not None:
            dist.broadcast_object_list(seed, src=0)
        first, program = self.compilation, self._own_program(groups.rank)
        if (source := self._weights) is not None:
            together(lambda: fill(program.modules, self.model, source, program.parameters, groups.device))
        for module in program.modules:
            check_values(module, call)
        modules = [module.to(groups.device) for module in program.modules]
        capture = self._own(0, first, program)
        self._engine = Engine(self.model, modules, capture, groups, seed[0], self.options)
        self._captures = [capture]

    @staticmethod
    def _own(number: int, compilation: Compilation, program: RankProgram) -> Capture:
        return Capture.of(number, compilation.program, compilation.stages, program.stages)

    # --------------------------------------------------------------------------------------- captures

    def _prepare(self, batch: Batch, call: str, microbatches: int) -> tuple[Capture, dict[str, Tensor]]:
        """The capture for a batch, and the replica's rows by placeholder name. All ranks take the same capture, or raise."""
        division = Division(self._division.replicas, microbatches, self.mesh.pp)
        batch = batches.computing_in(batch, self.model.forward, self.options.precision)
        if not self._compilations:
            self._capture(batch, call, division)
        engine = self._running(call)
        found = next((i for i, c in enumerate(self._compilations) if self._fits(c, batch, division)), len(self._compilations))
        given = {path: leaf for path, leaf in batches.leaves(batch).items() if isinstance(leaf, Tensor)}
        agree(engine.groups, found, call, given, everywhere=self.options.split_batches)
        if found == len(self._compilations):
            self._capture(batch, call, division)
            fingerprint.compare(fingerprint.made(self._compilations[found]))
        if found == len(self._captures):
            self._captures.append(self._adopted(engine, found))
        capture = self._captures[found]
        inputs = capture.program.inputs
        tensors = batches.flatten(batch, inputs, call)
        held = batches.rows_of(tensors, inputs, call)
        batches.check_rows(held, division, call)
        self._check_path(capture.program, tensors, held or 0, microbatches, call)
        replica = engine.groups.coordinates["dp"] if division.replicas > 1 else 0
        rows = batches.part(tensors, {name: i.batch_dim for name, i in inputs.items()}, replica, division.replicas)
        return capture, batches.to_device(rows, engine.groups.device)

    def _check_path(self, program: Program, tensors: Mapping[str, Tensor], held: int, microbatches: int, call: str) -> None:
        """Whether one device would take the capture's way for the whole batch; for every size but once."""
        sizes = (id(program), microbatches, *(tuple(tensor.shape) for tensor in tensors.values()))
        if sizes not in self._checked:
            rows = held if self.options.split_batches else held * self.mesh.dp
            refuse_other_path(program, tensors, rows, self.mesh, microbatches, call)
            self._checked.add(sizes)

    def _adopted(self, engine: Engine, number: int) -> Capture:
        """A later capture, running with the parameters of the first."""
        compilation = self._compilations[number]
        program = compilation.rank_program(self.model, engine.groups.rank, engine.groups.device)
        first = self._own_program(engine.groups.rank).parameters
        for name, piece in program.parameters.items():
            if name in first and first[name] != piece:
                raise Refused(
                    f"parameter {name} is cut differently than in the first capture of the model",
                    fix="compile a second object for these inputs",
                )
        if (source := self._weights) is not None:
            together(lambda: fill_buffers(program.modules, self.model, source, engine.groups.device))
        return self._own(engine.adopt(program.modules, program.stages), compilation, program)

    def _fits(self, compilation: Compilation, batch: Batch, division: Division) -> bool:
        """Whether a capture serves a batch, which it sees in the shape of one micro-batch."""
        program = compilation.program
        try:
            tensors = batches.flatten(batch, program.inputs, "")
        except InputError:
            return False
        dims = {name: i.batch_dim for name, i in program.inputs.items()}
        return self._suits(program, batches.structured(batch, program, batches.part(tensors, dims, 0, division.parts)))

    def _suits(self, program: Program, batch: Batch) -> bool:
        """Whether a program computes the model, as it is now, for a micro-batch."""
        return matches(program, batch, self.model)

    def _capture(self, batch: Batch, call: str = "", division: Division | None = None) -> None:
        """Lower the model for a batch of these shapes. The batch of a `call` must divide; example inputs may also be a part of one."""
        if division is not None and (rows := batches.guess_rows(batch)) is not None:
            batches.check_rows(rows, division, call)
        held = self._compilations[0].held() if self._compilations else None
        compilation = lower(self.model, self.mesh, batches.example(batch, division or self._division), self.options, held)
        refuse_division(compilation.program, self.mesh, self.options.microbatches, "compile")
        self._compilations.append(compilation)

    def _check_labels(self, batch: Batch, call: str) -> None:
        """Inputs that only the loss takes must be there: without them another capture would have no loss."""
        if not self._compilations or (program := self._compilations[0].program).loss is None:
            return
        given = batches.leaves(batch)
        missing = [i.path for i in program.inputs.values() if given.get(i.path) is None]
        if any(batches.is_target(path, self.model.forward) for path in missing):
            raise batches.missing(missing, call, loss=True)
