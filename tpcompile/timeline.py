"""Everything that the ranks of a place along the pipeline hand to the process group in one step of training, in order: the plan of a step.

    before     all ranks agree on the batch; the loss counts are summed over dp, together
    schedule   forward and backward of every micro-batch, and what passes between stages
    after      gradients over dp; those of whole parameters that tensor ranks have parts of, over tp; those of weights that several stages
               hold, over pp; the loss over dp and to all stages

Without a pipeline the gradients' reduction overlaps the last backward: it has its own group, so only the order within it is said here.
Replicas that share out parameters gather them in the schedule's course (`tpcompile.sharing`). What an optimizer's step gathers after it,
where they share out its state alone, is in `Step.updated`, and what clipping adds up before that in `Step.clipped`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from sympy import Symbol
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from tpcompile.gradients import asked_for, trained, with_gradient
from tpcompile.ir import Boundary, Local, Program, Stage
from tpcompile.layout import Layout, Size, TensorType, local_size, product
from tpcompile.mesh import Mesh
from tpcompile.messages import Sent, StageMessages
from tpcompile.operation import op_name
from tpcompile.schedules import Await, Drop, Gather, Post, Reduce, Run, Transfer, Wait, Work, actions, place_of, stages_at
from tpcompile.sharing import SHARED_OUT, Parameter, Sharing, gathers_again

AGREEMENT = 3
"""Whole numbers that a rank shows to all others before a step."""
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""Bytes of gradients that torch's DistributedDataParallel reduces at once: its defaults, the first for the bucket that is ready first."""


@dataclass(frozen=True)
class Posted:
    """Sends and receives that begin together; with `wait` the rank stands still until they are done."""

    transfers: tuple[Sent, ...]
    wait: bool


Event = Sent | Posted | Await | Wait


@dataclass(frozen=True)
class Step:
    """A step of training: how the batch is divided, and what each stage says in one micro-batch."""

    mesh: Mesh
    schedule: str
    microbatches: int
    local: Local
    stages: tuple[Stage, ...]
    messages: tuple[StageMessages, ...]
    sizes: Mapping[Symbol, int]  # of the example's micro-batch
    data_parallel: str = "ddp"
    units: tuple[tuple[str, ...], ...] = ()  # of every stage, where replicas share out parameters

    @property
    def per_rank(self) -> int:
        """How many stages a rank holds."""
        return len(self.stages) // self.mesh.pp

    def place_of(self, stage: int) -> int:
        """The place along the pipeline axis of the rank that holds a stage."""
        return place_of(self.schedule, stage, self.mesh.pp)

    def stages_at(self, place: int) -> tuple[Stage, ...]:
        """The stages that a rank holds."""
        return tuple(self.stages[index] for index in stages_at(self.schedule, place, self.mesh.pp, len(self.stages)))

    def timeline(self, place: int, tp: int = 0) -> tuple[Event, ...]:
        """What a rank at a place along the pipeline does, in order; its tensor coordinate says of which pieces it has gradients."""
        return tuple(self._events(place, tp))

    def _events(self, place: int, tp: int) -> Iterator[Event]:
        mesh = self.mesh
        if mesh.size > 1:
            yield Sent("all", "step", "all_gather", "batch", torch.int64, AGREEMENT)
        if counted := self._counted():
            yield Sent("dp", "step", "all_reduce", "counts", torch.float64, counted)
        sharing = {stage.index: self._sharing(stage.index, tp) for stage in self.stages_at(place)}
        done = dict.fromkeys(sharing, 0)
        for action in actions(self.schedule, place, mesh.pp, self.per_rank, self.microbatches):
            match action:
                case Run(work, microbatch, stage):
                    done[stage] += work in ("backward", "input")
                    if (parts := sharing[stage]) is not None and work != "weight":
                        yield from parts.forward() if work == "forward" else parts.backward(done[stage] == self.microbatches)
                    yield from (replace(message, microbatch=microbatch, stage=stage) for message in self._said(stage, work))
                case Post(transfers, wait):
                    if found := tuple(sent for transfer in transfers for sent in _transferred(self.stages[transfer.stage], transfer, tp)):
                        yield Posted(found, wait)
                case Await() | Wait():
                    yield action
                case Gather(stage):
                    if (parts := sharing[stage]) is not None:
                        yield from parts.ahead()
                case Drop(stage):
                    if (parts := sharing[stage]) is not None:
                        parts.drop()
                case Reduce(stage):
                    if (parts := sharing[stage]) is not None:
                        yield from parts.end()
                    yield from self._reduced(stage, tp)
        yield from self._rest(place, tp)
        yield from self._summed(place, tp)
        yield from self._shared(place, tp)
        yield from self._loss(place)

    def clipped(self) -> Iterator[Sent]:
        """What `clip_grad_norm_` hands over: the sum of every rank's part of the norm, or for the largest gradient two numbers."""
        if self.mesh.size > 1:
            yield Sent("all", "clipping", "all_reduce", "norm", torch.float64, 1)

    def updated(self, at: int, tp: int = 0) -> Iterator[Sent]:
        """What an optimizer's step hands over, under zero1: the rows of every parameter that this replica has stepped, several at once."""
        if self.mesh.dp == 1 or self.data_parallel != "zero1":
            return
        held = {place for stage in self.stages_at(at) for place in stage.parameters} & trained(self.local.program)
        by_type = defaultdict[torch.dtype, list[tuple[int, int]]](list)  # bytes of the whole piece, elements of the rows
        for place in (place for place in self.local.program.parameters if place in held):
            dtype, shape = self._kind(place).dtype, self._piece(place, tp)
            if shape:
                row = int(product(shape[1:]))
                by_type[dtype].append((int(shape[0]) * row * dtype.itemsize, -(-int(shape[0]) // self.mesh.dp) * row))
        for dtype, sizes in by_type.items():
            for elements in _filled(sizes, BUCKET):
                yield Sent("dp", "update", "all_gather", "parameters", dtype, elements)

    def _said(self, stage: int, work: Work) -> tuple[Sent, ...]:
        messages = self.messages[stage]
        return {"forward": messages.forward, "backward": messages.backward, "input": messages.input, "weight": messages.weight}[work]

    def _counted(self) -> Size:
        """How many numbers of the whole batch the replicas add up."""
        program, total = self.local.program, 0
        for count in program.counts if self.mesh.dp > 1 else ():
            kind = program.types[count.name]
            assert isinstance(kind, TensorType)
            total += product(kind.shape) if count.graph is not None else 0
        return total

    def _reduced(self, stage: int, tp: int) -> Iterator[Sent]:
        """The gradients of a stage over the replicas."""
        if self.mesh.dp > 1:
            sizes = self._sizes(self.stages[stage], tp)
            if self.data_parallel not in SHARED_OUT:
                scalars = self._scalars(self.stages[stage])
                taken = {name: size for name, size in sizes.items() if self.mesh.pp == 1 or name not in scalars}
                made = _joined("dp", "backward", taken) if self.mesh.pp > 1 else _buckets(taken)
                yield from (replace(sent, stage=stage) for sent in made)

    def _rest(self, place: int, tp: int) -> Iterator[Sent]:
        """The gradients of parameters without dimensions, which torch's engine does not take where it shards, and under a pipeline."""
        if self.mesh.dp > 1 and (self.data_parallel in SHARED_OUT or self.mesh.pp > 1):
            scalars = {name for stage in self.stages_at(place) for name in self._scalars(stage)}
            yield from (Sent("dp", "backward", "all_reduce", name, *size) for name, size in self._own(place, tp).items() if name in scalars)

    def _summed(self, place: int, tp: int) -> Iterator[Sent]:
        """The gradients of whole parameters that tensor ranks have parts of."""
        names = dict.fromkeys(name for stage in self.stages_at(place) for name in summed_later(stage))
        sizes = self._own(place, tp) if names else {}
        yield from _joined("tp", "step", {name: sizes[name] for name in names if name in sizes})

    def _shared(self, place: int, tp: int) -> Iterator[Sent]:
        """The gradients of weights that stages on several ranks hold, over these."""
        shared = {name: tuple(sorted({self.place_of(stage) for stage in held})) for name, held in shared_weights(self.stages).items()}
        here = {name: places for name, places in shared.items() if len(places) > 1 and place in places}
        sizes = self._own(place, tp) if here else {}
        for name, places in here.items():
            if name in sizes:
                dtype, elements = sizes[name]
                yield Sent("pp", "backward", "all_reduce", name, dtype, elements, places)

    def _sizes(self, stage: Stage, tp: int) -> dict[str, tuple[torch.dtype, Size]]:
        """The type and the size of every gradient of a stage, before replicas share it out."""
        asked = reduced(self.local.program, stage)
        return {name: (self._kind(place).dtype, product(self._piece(place, tp))) for place, name in asked.items()}

    def _own(self, place: int, tp: int) -> dict[str, tuple[torch.dtype, Size]]:
        """The type and the size of what the first replica has of every gradient, over all stages of a place along the pipeline."""
        return {name: self._held(stage, name, size, tp) for stage in self.stages_at(place) for name, size in self._sizes(stage, tp).items()}

    def _scalars(self, stage: Stage) -> set[str]:
        return {name for place, name in stage.parameters.items() if not self._kind(place).shape}

    def _sharing(self, index: int, tp: int) -> Sharing | None:
        """What replicas gather and reduce, where they share out parameters and gradients."""
        mesh, program, stage = self.mesh, self.local.program, self.stages[index]
        if mesh.dp == 1 or self.data_parallel not in SHARED_OUT:
            return None
        asked, units = reduced(program, stage), self.units[index]
        held = []
        for place, name in stage.parameters.items():
            unit = next((unit for unit in units if name.startswith(f"{unit}.")), "")
            held.append(Parameter(self._piece(place, tp), self._kind(place).dtype, unit, place in asked))
        return Sharing(held, units, mesh.dp, gathers_again(self.data_parallel, self.schedule, mesh.pp), mesh.pp > 1)

    def _kind(self, placeholder: str) -> TensorType:
        kind = self.local.program.types[placeholder]
        assert isinstance(kind, TensorType)
        return kind

    def _piece(self, placeholder: str, tp: int) -> tuple[Size, ...]:
        """The shape of a tensor rank's piece of a parameter."""
        layout = self.local.layouts.get(placeholder)
        return tuple(local_size(dim, tp) for dim in layout.dims) if isinstance(layout, Layout) else self._kind(placeholder).shape

    def _held(self, stage: Stage, name: str, size: tuple[torch.dtype, Size], tp: int) -> tuple[torch.dtype, Size]:
        """Of a gradient, what the first replica has."""
        if self.mesh.dp == 1 or self.data_parallel not in SHARED_OUT:
            return size
        place = next(place for place, held in stage.parameters.items() if held == name)
        if not (shape := self._kind(place).shape):
            return size
        layout = self.local.layouts.get(place)
        rows = int(local_size(layout.dims[0], tp)) if isinstance(layout, Layout) else int(shape[0])
        return size[0], size[1] // rows * -(-rows // self.mesh.dp)

    def _loss(self, place: int) -> Iterator[Sent]:
        """The loss, in float64: over replicas where the last stage is, then from there to all."""
        if self.mesh.dp > 1 and place == self.place_of(len(self.stages) - 1):
            yield Sent("dp", "step", "all_reduce", "loss", torch.float64, 1)
        if self.mesh.pp > 1:
            yield Sent("pp", "step", "broadcast", "loss", torch.float64, 1, tuple(range(self.mesh.pp)))


def _filled(sizes: Iterable[tuple[int, int]], most: int) -> Iterator[int]:
    """The elements that are gathered at once, of parameters given by bytes and elements: as many as make up no more than `most` bytes."""
    held = elements = 0
    for size, own in sizes:
        if held and held + size > most:
            yield elements
            held = elements = 0
        held, elements = held + size, elements + own
    if elements:
        yield elements


def _transferred(stage: Stage, transfer: Transfer, tp: int) -> Iterator[Sent]:
    """What a transfer carries: the values of a boundary; on the way back, the gradients of those that have one."""
    outward = (transfer.call == "send") == (transfer.direction == "forward")
    boundaries: tuple[Boundary, ...] = stage.sends if outward else stage.receives
    for boundary in boundaries:
        if transfer.direction == "forward" or boundary.requires_grad:
            kind = boundary.type
            elements, ends = product(boundary.shape(tp)), (transfer.peer,)
            yield Sent("pp", transfer.direction, transfer.call, boundary.name, kind.dtype, elements, ends, transfer.microbatch, stage.index)


def reduced(program: Program, stage: Stage) -> dict[str, str]:
    """The parameters of a stage that get a gradient in a step: placeholder → qualified name."""
    roots = [node.name for node in program.graph.output_node().all_input_nodes if program.loss in (None, node.name)]
    having = with_gradient(program.graph, trained(program), program.types)
    asked = asked_for(program.graph, roots, having)
    return {place: name for place, name in stage.parameters.items() if place in asked}


def summed_later(stage: Stage) -> tuple[str, ...]:
    """The parameters, by qualified name, whose gradient is a part of a sum over the tensor ranks when a step's last backward is done."""
    entering = {node.all_input_nodes[0].name for node in stage.graph.nodes if op_name(node) == "tpcompile.enter_later.default"}
    return tuple(name for place, name in stage.parameters.items() if place in entering)


def shared_weights(stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """Qualified parameter names that stand on more than one stage, with those stages."""
    holders: dict[str, list[int]] = defaultdict(list)
    for stage in stages:
        for name in sorted(set(stage.parameters.values())):
            holders[name].append(stage.index)
    return {name: tuple(held) for name, held in sorted(holders.items()) if len(held) > 1}


def _joined(axis: str, direction: str, sizes: Mapping[str, tuple[torch.dtype, Size]]) -> Iterator[Sent]:
    """Gradients in one tensor for each type, as torch's `replicate` joins those of a pipeline's stage."""
    totals = defaultdict[torch.dtype, Size](int)
    for dtype, elements in sizes.values():
        totals[dtype] += elements
    for dtype, elements in totals.items():
        yield Sent(axis, direction, "all_reduce", "gradients", dtype, elements)


def _buckets(sizes: Mapping[str, tuple[torch.dtype, Size]]) -> Iterator[Sent]:
    """Without one, DistributedDataParallel joins gradients in buckets, roughly in the order in which backward makes them."""
    named = list(sizes.values())[::-1]
    tensors = [torch.empty(int(elements), dtype=dtype, device="meta") for dtype, elements in named]
    buckets, _ = _compute_bucket_assignment_by_size(tensors, [FIRST_BUCKET, BUCKET]) if tensors else ([], [])
    for held in buckets:
        elements: Size = sum(named[index][1] for index in held)
        yield Sent("dp", "backward", "all_reduce", "gradients", named[held[0]][0], elements)
