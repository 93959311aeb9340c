"""What a rank is loaded with: bytes of training state and of activations, FLOPs, and the bytes that it sends; and on other meshes.

needs    of this mesh, place by place along the pipeline, as compiled
guess    of another mesh, from this one: what is cut over tp is cut there, stages are as even as whole layers allow, and a micro-batch
         keeps  w + c / tp  bytes, as it does on one device and here
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tpcompile.driver import Compilation
from tpcompile.gradients import trained
from tpcompile.inspect import activations, memory
from tpcompile.inspect.activations import Kept
from tpcompile.inspect.calls import Calls, calls, known, value
from tpcompile.layout import Layout, TensorType, product
from tpcompile.memory import Held, Memory
from tpcompile.memory import memory as state
from tpcompile.mesh import Mesh
from tpcompile.passes._parts import layer_of
from tpcompile.schedules import SCHEDULES, place_of

ALL_AT_ONCE = ("gpipe", "looped_bfs")
"""The schedules that run all forwards before the first backward."""


@dataclass(frozen=True)
class Place:
    """The ranks at one place along the pipeline: bytes, and FLOPs of forward of one micro-batch."""

    place: int
    stages: tuple[int, ...]
    state: Memory
    activations: int
    flops: int

    @property
    def most(self) -> int:
        return self.state.most + self.activations


@dataclass(frozen=True)
class Load:
    """What the ranks of a compiled model are loaded with. Everything is worked out when it is asked for, once."""

    compilation: Compilation

    @cached_property
    def kept(self) -> Mapping[int, Kept]:
        """Of a micro-batch, by stage."""
        return {stage.index: activations.of_stage(self.compilation, stage) for stage in self.compilation.stages}

    @cached_property
    def calls(self) -> Mapping[int, tuple[tuple[Calls, int, int, int], ...]]:
        """By stage, the calls that its ranks make in a step, with their number, the bytes given to them, and those sent in a ring."""
        found = {}
        for stage in self.compilation.stages:
            sizes = known(self.compilation, stage)
            made = calls(self.compilation, stage)
            found[stage.index] = tuple((one, value(one.count, sizes), value(one.bytes, sizes), value(one.sent, sizes)) for one in made)
        return found

    @cached_property
    def unknown(self) -> str:
        """Why activations are not counted; "" where they are."""
        return next((one.unknown for one in (*self.kept.values(), self.alone) if one.unknown), "")

    @cached_property
    def alone(self) -> Kept:
        """Of a micro-batch on one device."""
        return activations.of_one_device(self.compilation)

    @cached_property
    def whole(self) -> Memory:
        """The training state of one device."""
        return state(self._parameters(1), "ddp", 1)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        step, made = self.compilation.step, []
        for place in range(step.mesh.pp):
            stages = step.stages_at(place)
            total = memory.of_stages(self.compilation, stages)
            flying = activations.in_flight(self.compilation, place, self.kept)
            made.append(Place(place, tuple(s.index for s in stages), total, flying, sum(self.kept[s.index].flops for s in stages)))
        return tuple(made)

    @property
    def most(self) -> Place:
        """The place whose ranks hold most."""
        return max(self.places, key=lambda one: one.most)

    @cached_property
    def flops(self) -> int:
        """Of a step, on the rank that computes most: a backward counts as two forwards, and runs one again where all layers do."""
        passes = 4 if self.compilation.options.recompute == "full" else 3
        return max((one.flops for one in self.places), default=0) * passes * self.compilation.options.microbatches

    @cached_property
    def sent(self) -> Mapping[str, int]:
        """The bytes that a rank sends in a step over each axis, where its groups run rings: of the place that sends most over it."""
        step, totals = self.compilation.step, defaultdict[str, dict[int, int]](lambda: defaultdict(int))
        for stage, made in self.calls.items():
            for one, _, _, sent in made:
                totals[one.axis][place_of(step.schedule, stage, step.mesh.pp)] += sent
        return {axis: max(places.values()) for axis, places in totals.items()}

    # ----------------------------------------------------------------------------------------- other meshes

    def _parameters(self, tp: int) -> list[Held]:
        """All parameters as a tensor rank would hold them, as far as their sizes go."""
        program, layouts = self.compilation.program, self.compilation.local.layouts
        asked, found = trained(program), []
        for placeholder, name in program.parameters.items():
            kind, layout = program.types[placeholder], layouts.get(placeholder)
            assert isinstance(kind, TensorType)
            cut = isinstance(layout, Layout) and layout.is_cut
            elements = math.ceil(int(product(kind.shape)) / (tp if cut else 1))
            found.append(Held((elements,), kind.dtype, placeholder in asked, layer_of(name, program.layers)))
        return found

    def guess(self, mesh: Mesh, mode: str) -> int:
        """The bytes of the rank that would hold most on another mesh, for the same batch in as many micro-batches, or one a stage."""
        options, parameters = self.compilation.options, self._parameters(mesh.tp)
        micro = max(options.microbatches, mesh.pp)
        made = state(parameters, mode, mesh.dp, pipeline=mesh.pp > 1, microbatches=micro)
        flying = 1 if mesh.pp == 1 else micro if options.schedule in ALL_AT_ONCE else min(mesh.pp, micro)
        rows = options.microbatches * self.compilation.mesh.dp / (micro * mesh.dp)
        layers = max(len(self.compilation.program.layers), 1)
        ran = math.ceil(layers / mesh.pp) / layers if layers >= mesh.pp else 1 / mesh.pp
        return round(made.most * _share(parameters, mesh.pp) + self._kept(mesh.tp) * rows * flying * ran)

    def _kept(self, tp: int) -> float:
        """Bytes of a micro-batch of the example's size, over all stages of a tensor rank."""
        here, ranks = sum(one.bytes for one in self.kept.values()), self.compilation.mesh.tp
        if ranks == 1:
            return float(here)
        cut = (self.alone.bytes - here) / (1 - 1 / ranks) if self.compilation.options.recompute == "none" else 0.0
        return max(here - cut / ranks, 0.0) + max(cut, 0.0) / tp

    def fitting(self, bytes: int, per_node: int) -> list[Mesh]:
        """For every number of tensor ranks on a node the smallest mesh that would fit into so many bytes a device, the smallest first."""
        mesh, layers = self.compilation.mesh, max(len(self.compilation.program.layers), 1)
        found = []
        for tp in _powers(per_node) if mesh.tp > 1 else [1]:
            for pp in _stages(layers // SCHEDULES[self.compilation.options.schedule].per_rank or 1):
                other = Mesh(dp=mesh.dp, pp=pp, tp=tp)
                if self.guess(other, self.compilation.options.data_parallel) <= bytes:
                    found.append(other)
                    break
        return sorted(found, key=lambda one: (one.size, -one.tp))


def _share(parameters: Sequence[Held], stages: int) -> float:
    """The largest part of all bytes where layers in a row are cut into stages as evenly as can be; the first and the last have the rest."""
    units = defaultdict[str, int](int)
    for one in parameters:
        units[one.unit] += one.bytes
    rest = units.pop("", 0)
    row = [rest // 2, *units.values(), rest - rest // 2]
    total = sum(row)
    if stages == 1 or len(row) <= stages or not total:
        return 1 / stages
    low, high = max(row), total
    while low < high:
        limit = (low + high) // 2
        count, held = 1, 0
        for size in row:
            count, held = (count, held + size) if held + size <= limit else (count + 1, size)
        low, high = (low, limit) if count <= stages else (limit + 1, high)
    return low / total


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


def _stages(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, …"""
    return sorted({size for power in _powers(most) for size in (power, 3 * power // 2) if 1 <= size <= most})
