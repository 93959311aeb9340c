"""All ranks of every stage and replica in this process: the numbers that a step would give on as many devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from tpcompile.collectives import held_by, mix, take
from tpcompile.driver import Compilation
from tpcompile.errors import InputError
from tpcompile.ir import Count, Program, results
from tpcompile.layout import TensorType
from tpcompile.simulate.lockstep import Values, run, send
from tpcompile.simulate.wire import Wire
from tpcompile.timeline import shared_weights, summed_later

Pieces = dict[str, list[Tensor]]
"""A stage's parameters by qualified name: one local piece for every coordinate of the tensor axis."""


def flatten(program: Program, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The batch's tensors by placeholder."""
    found: dict[str, Tensor] = {}
    for name, entry in program.inputs.items():
        value: Any = batch
        for part in entry.path.split("."):
            value = (
                value[int(part)]
                if isinstance(value, (tuple, list))
                else value[part]
                if isinstance(value, Mapping)
                else getattr(value, part)
            )
        found[name] = value
    return found


def rows(program: Program, tensors: Mapping[str, Tensor], index: int, parts: int) -> dict[str, Tensor]:
    """One of `parts` equal consecutive parts of the batch's rows; what has no rows stays as it is."""
    made = {}
    for name, tensor in tensors.items():
        dim = program.inputs[name].batch_dim
        if dim is None:
            made[name] = tensor
            continue
        if tensor.shape[dim] % parts:
            raise InputError(
                f"a batch of {tensor.shape[dim]} rows cannot be divided into {parts} equal parts",
                at="check",
                fix=f"use a multiple of {parts} rows",
            )
        made[name] = tensor.chunk(parts, dim)[index]
    return made


def structured(program: Program, tensors: Mapping[str, Tensor], batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with these tensors in their places."""
    paths = {program.inputs[name].path: tensor for name, tensor in tensors.items()}

    def rebuild(value: Any, path: str) -> Any:
        if path in paths:
            return paths[path]
        if isinstance(value, Mapping):
            return {key: rebuild(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(rebuild(item, f"{path}.{index}") for index, item in enumerate(value))
        return value

    made = rebuild(dict(batch), "")
    assert isinstance(made, dict)
    return made


@dataclass
class Replay:
    """A compiled model's parameters on all ranks of one replica, and a step of them.

    Replicas differ in their rows alone: their gradients are averaged into the one set of pieces, as the data-parallel engine does.
    """

    model: nn.Module
    compilation: Compilation
    dropout: bool = False
    pieces: list[Pieces] = field(default_factory=list)  # for each stage
    buffers: list[Pieces] = field(default_factory=list)  # those that forward updates, for each stage, after each part of the rows
    wire: Wire = field(default_factory=Wire)  # what the ranks of one replica hand to each other, since the last step began
    seed: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        state = dict(self.model.named_parameters(remove_duplicate=False))
        cuts, tp = self.compilation.pieces(), self.compilation.mesh.tp
        for stage in self.compilation.stages:
            held: Pieces = {}
            for name in stage.parameters.values():
                values = []
                for coordinate in range(tp):
                    value = state[name].detach()
                    if name in cuts:
                        value = take(value, cuts[name][0], held_by(cuts[name][1], coordinate, tp))
                    values.append(value.clone().requires_grad_(state[name].requires_grad))
                held[name] = values
            self.pieces.append(held)
            self.buffers.append({name: [self.model.get_buffer(name).clone()] * tp for name in stage.updates})

    def step(self, batch: Mapping[str, Any]) -> tuple[Tensor, list[tuple[Any, ...]]]:
        """Forward and backward of a batch: the loss, and the outputs of every part of its rows. Gradients add up in the pieces.

        All parts find the buffers as they were before, and leave in `buffers` what they make of them.
        """
        mesh, program = self.compilation.mesh, self.compilation.program
        parts = self.compilation.options.parts(mesh)
        tensors = flatten(program, batch)
        self.wire.moved.clear()
        counts = self.counts(tensors)
        total, outputs = torch.zeros(()), []
        updated: list[Pieces] = [{name: [] for name in held} for held in self.buffers]
        for index in range(parts):
            wire = self.wire if index < self.compilation.options.microbatches else Wire()
            values = self.forward(rows(program, tensors, index, parts), counts, index, wire)
            self.collect(updated, values)
            returned = values[-1]["output"]
            losses = [output[0] for output in returned]
            torch.autograd.backward(losses, [torch.full_like(loss, 1 / mesh.dp) for loss in losses])
            total = total + losses[0].detach() / mesh.dp
            outputs.append(tuple(value.detach() for value in returned[0]))
        self.note_gradients()
        self.sum_later()
        self.tie()
        self.note_loss(total)
        self.buffers = updated
        self.steps += 1
        return total, outputs

    def collect(self, updated: Sequence[Pieces], values: Sequence[Mapping[str, Values]]) -> None:
        """Note the new values of all stages' buffers."""
        for stage, held, made in zip(self.compilation.stages, updated, values, strict=True):
            for name, node in results(stage.graph, stage.updates)[1].items():
                held[name] += [value.detach() for value in made[node.name]]

    def forward(
        self, tensors: Mapping[str, Tensor], counts: Mapping[str, Tensor], index: int = 0, wire: Wire | None = None
    ) -> list[dict[str, Values]]:
        """Every value of every stage on one part of the rows."""
        tp, received, wire = self.compilation.mesh.tp, dict[str, Values](), wire or Wire()
        made = []
        for number, stage in enumerate(self.compilation.stages):
            feed = self.feed(number, tensors, counts, index) | received
            place, peer = (self.compilation.step.place_of(index) for index in (number, number + 1))
            values = run(stage.graph, feed, tp, dropout=self.dropout, wire=wire, stage=place)
            names = [boundary.name for boundary in stage.sends]
            moved = {name: (wire.line(place, name, "pp"), wire.line(peer, name, "pp")) for name in names}
            received = {name: send(*moved[name], values[name]) if place != peer else values[name] for name in names}
            made.append(values)
        return made

    def feed(self, number: int, tensors: Mapping[str, Tensor], counts: Mapping[str, Tensor], index: int) -> dict[str, Values]:
        stage, program, tp = self.compilation.stages[number], self.compilation.program, self.compilation.mesh.tp
        given: dict[str, Tensor] = {**tensors, **counts, **program.constants, "rng_key": self.key(index)}
        given |= {placeholder: self.model.get_buffer(name) for placeholder, name in stage.buffers.items()}
        feed: dict[str, Values] = {name: [given[name]] * tp for name in (*stage.inputs, *stage.buffers, *stage.constants)}
        feed |= {placeholder: list(self.pieces[number][name]) for placeholder, name in stage.parameters.items()}
        held = self.buffers[number]
        feed |= {placeholder: held[name][-tp:] for placeholder, name in stage.buffers.items() if name in held}
        return feed

    def key(self, index: int) -> Tensor:
        """The key of dropout for one part of the rows."""
        return torch.tensor([mix(self.seed, self.steps), index, self.compilation.options.parts(self.compilation.mesh)])

    def counts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the loss needs to know of the whole batch."""
        program, mesh = self.compilation.program, self.compilation.mesh
        parts = mesh.dp * self.compilation.options.microbatches
        found = {count.name: counted(count, self.model, program, tensors, parts, mesh.dp) for count in program.counts}
        summed = [found[count.name].double().flatten() for count in program.counts if count.graph is not None]
        for place in range(mesh.pp) if mesh.dp > 1 and summed else ():
            self.wire.note(place, "dp", "step", "all_reduce", "counts", torch.cat(summed))
        return found

    def tie(self) -> None:
        """Sum the gradients of a parameter that several stages hold, as they do over their ranks."""
        names = {name for held in self.pieces for name in held}
        for name in names:
            holders = [held[name] for held in self.pieces if name in held]
            for same in zip(*holders, strict=True) if len(holders) > 1 else ():
                grads = [piece.grad for piece in same if piece.grad is not None]
                for piece in same if grads else ():
                    piece.grad = torch.stack(grads).sum(0)

    def sum_later(self) -> None:
        """Sum the gradients of whole parameters of which every tensor rank has a part, all of a rank's at once."""
        step, mine = self.compilation.step, dict[tuple[int, torch.dtype], list[Tensor]]()
        for stage, held in zip(self.compilation.stages, self.pieces, strict=True):
            for name in summed_later(stage):
                if grads := [piece.grad for piece in held[name] if piece.grad is not None]:
                    mine.setdefault((step.place_of(stage.index), grads[0].dtype), []).append(grads[self.wire.rank])
                    total = torch.stack(grads).sum(0)
                    for piece in held[name]:
                        piece.grad = total.clone()
        for (place, _), parts in mine.items():
            self.wire.note(place, "tp", "step", "all_reduce", "gradients", *parts)

    def note_gradients(self) -> None:
        """What replicas give to each other, and stages that hold the same weight."""
        mesh, step, shared = self.compilation.mesh, self.compilation.step, dict[tuple[int, str], Tensor]()
        holders = {name: {step.place_of(stage) for stage in held} for name, held in shared_weights(self.compilation.stages).items()}
        for stage, held in enumerate(self.pieces):
            place = step.place_of(stage)
            grads = {name: g for name, pieces in held.items() if (g := pieces[self.wire.rank].grad) is not None}
            for dtype in dict.fromkeys(grad.dtype for grad in grads.values()) if mesh.dp > 1 else ():
                self.wire.note(place, "dp", "backward", "all_reduce", "gradients", *(g for g in grads.values() if g.dtype == dtype))
            shared |= {(place, name): grad for name, grad in grads.items() if len(holders.get(name, ())) > 1}
        for (place, name), grad in shared.items():
            self.wire.note(place, "pp", "backward", "all_reduce", name, grad)

    def note_loss(self, total: Tensor) -> None:
        """The loss goes from where the last stage is, summed over replicas, to all."""
        mesh = self.compilation.mesh
        if mesh.dp > 1:
            self.wire.note(self.compilation.step.place_of(len(self.pieces) - 1), "dp", "step", "all_reduce", "loss", total.double())
        for place in range(mesh.pp) if mesh.pp > 1 else ():
            self.wire.note(place, "pp", "step", "broadcast", "loss", total.double())

    def optimizers(self, kind: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> Iterator[torch.optim.Optimizer]:
        """One optimizer for every rank of every stage."""
        for held in self.pieces:
            for coordinate in range(self.compilation.mesh.tp):
                if mine := [pieces[coordinate] for pieces in held.values() if pieces[coordinate].requires_grad]:
                    yield kind(mine, **settings)


def counted(count: Count, model: nn.Module, program: Program, tensors: Mapping[str, Tensor], parts: int, replicas: int) -> Tensor:
    """A number of the whole batch, part by part."""
    kind, graph = program.types[count.name], count.graph
    assert isinstance(kind, TensorType)
    if graph is None:
        return torch.tensor(replicas, dtype=kind.dtype)
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    found = []
    for index in range(parts):
        given = rows(program, tensors, index, parts)
        values = [
            given[n] if n in given else program.constants[n] if n in program.constants else model.get_buffer(program.buffers[n])
            for n in names
        ]
        found.append(torch.as_tensor(fx.Interpreter(fx.GraphModule({}, graph)).run(*values)).double())
    return torch.stack(found).sum(0).to(kind.dtype)
