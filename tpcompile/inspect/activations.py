"""What a rank keeps of a micro-batch's forward for its backward, and how much it computes: each stage's graph, run on tensors without data.

Autograd itself is asked what it saves (`saved_tensors_hooks`), once for every storage; parameters and buffers are not counted. Attention
counts as the fused kernel that torch takes on a CPU: its operands, its result and one number for every row of scores. With
recompute="full" a layer keeps what it is given, with "selective" the core of its attention does; when it runs again, all that it saves is
there at once, but what was computed after it has been freed: `most`.

Operations that torch cannot run without data end the count, and the reason is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from tpcompile.collectives import unbound
from tpcompile.collectives.table import LINEARS
from tpcompile.cost import evaluate, node_flops
from tpcompile.driver import Compilation
from tpcompile.gradients import trained
from tpcompile.ir import PerRank, Stage, Type
from tpcompile.layout import Layout, Size, TensorType, local_size
from tpcompile.passes._cores import cores_of
from tpcompile.passes._parts import Part, arrange
from tpcompile.rules import op_name
from tpcompile.schedules import Run, actions

IDENTITIES = ("tpcompile.enter.default", "tpcompile.enter_later.default", "tpcompile.shared.default")
"""Operators that return a view of their operand."""


@dataclass(frozen=True)
class Kept:
    """Of one micro-batch on one tensor rank."""

    bytes: int = 0  # kept from forward to backward
    most: int = 0  # at any time: more, where a layer that runs again in backward saves more than what has been freed by then
    half: int = 0  # kept from the first half of backward to the second, where it is halved
    flops: int = 0  # of forward: 2 per multiply-add
    unknown: str = ""  # why it cannot be counted; then all numbers are 0


def of_stage(compilation: Compilation, stage: Stage, coordinate: int = 0) -> Kept:
    """What a tensor rank of a stage keeps of a micro-batch of the example's sizes."""
    program, local, sizes = compilation.program, compilation.local, compilation.sizes
    learned = {*trained(program), *(boundary.name for boundary in stage.receives if boundary.requires_grad)}
    shapes = {boundary.name: (boundary.type.dtype, boundary.shape(coordinate)) for boundary in stage.receives}
    for node in stage.graph.find_nodes(op="placeholder"):
        if node.name not in shapes:
            shapes[node.name] = _piece(program.types[node.name], local.layouts.get(node.name), coordinate)
    paths = {name: source.path for name, source in program.sources.items()}
    parts = arrange(stage, paths, program.layers)
    owner = _run_again(compilation.options.recompute, stage, parts)
    order = [node for part in parts for node in part.nodes]
    held = {*stage.parameters, *stage.buffers, *stage.constants}
    run = _Recording(owner, frozenset(held), unbound(local.axis, coordinate, local.parts), coordinate)
    known = {name: (dtype, tuple(evaluate(size, sizes) for size in shape)) for name, (dtype, shape) in shapes.items()}
    return run.of(order, stage.graph, known, learned)


def of_one_device(compilation: Compilation) -> Kept:
    """What one device keeps of a micro-batch, without recomputation."""
    program, sizes = compilation.program, compilation.sizes
    graph = program.graph
    known = {}
    for node in graph.find_nodes(op="placeholder"):
        dtype, shape = _piece(program.types[node.name], None, 0)
        known[node.name] = dtype, tuple(evaluate(size, sizes) for size in shape)
    held = frozenset({*program.parameters, *program.buffers, *program.constants})
    order = [node for node in graph.nodes if node.op == "call_function"]
    return _Recording({}, held, unbound("tp", 0, 1), 0).of(order, graph, known, trained(program))


def in_flight(compilation: Compilation, place: int, kept: Mapping[int, Kept]) -> int:
    """The most bytes that a rank keeps at once in a step, given what its stages keep of a micro-batch, by index.

    The first half of a backward frees what was saved after the last weight was used; the first stage's backward is all second half.
    """
    step = compilation.step
    now = most = 0
    for action in actions(step.schedule, place, step.mesh.pp, step.per_rank, step.microbatches):
        if not isinstance(action, Run):
            continue
        own = kept[action.stage]
        if action.work == "forward":
            now += own.bytes
            most = max(most, now)
            continue
        if action.work != "weight":
            most = max(most, now - own.bytes + own.most)
        left = 0 if action.work == "backward" or step.stages[action.stage].unhalved else own.half if action.stage else own.bytes
        if action.work == "weight":
            now -= left
        else:
            now -= own.bytes - left
    return most


def _run_again(how: str, stage: Stage, parts: Sequence[Part]) -> dict[str, str]:
    """node → what runs again in backward with it."""
    layers = [part for part in parts if part.layer]
    if how == "full":
        return {node.name: part.layer for part in layers for node in part.nodes}
    cores = [(f"{part.layer} {i}", core) for part in layers for i, core in enumerate(cores_of(stage, part.nodes))] if how != "none" else []
    return {node.name: name for name, core in cores for node in core}


def _piece(kind: Type, layout: Layout | tuple[Layout, ...] | None, coordinate: int) -> tuple[torch.dtype, tuple[Size, ...]]:
    assert isinstance(kind, TensorType)
    return kind.dtype, tuple(local_size(dim, coordinate) for dim in layout.dims) if isinstance(layout, Layout) else kind.shape


@dataclass
class _Recording:
    """A graph that runs on tensors without data, while what autograd saves is noted, layer by layer."""

    owner: Mapping[str, str]  # node → the layer, or the core of its attention, that runs again in backward
    held: frozenset[str]  # placeholders that are there anyway
    axis: str
    coordinate: int
    layer: str = ""
    place: int = 0  # of the node that runs
    saved: dict[str, dict[int, int]] = field(default_factory=dict)  # layer → storage → bytes
    since: dict[int, int] = field(default_factory=dict)  # storage → the place of the first node that saves it
    alive: list[Tensor] = field(default_factory=list)  # so that no two storages have one address

    def of(
        self,
        order: Sequence[fx.Node],
        graph: fx.Graph,
        shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        learned: Iterable[str],
    ) -> Kept:
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
                return self._run(order, graph, shapes, frozenset(learned))
        except Exception as error:
            return Kept(unknown=f"{type(error).__name__}: {str(error).splitlines()[0][:80]}" if str(error) else type(error).__name__)

    def _run(
        self,
        order: Sequence[fx.Node],
        graph: fx.Graph,
        shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        learned: frozenset[str],
    ) -> Kept:
        values: dict[str, Any] = {}
        types: dict[str, Any] = {}
        there: set[int] = set()
        for node in graph.find_nodes(op="placeholder"):
            dtype, shape = shapes[node.name]
            values[node.name] = torch.empty(shape, dtype=dtype, requires_grad=node.name in learned and dtype.is_floating_point)
            types[node.name] = TensorType(dtype, shape)
            if node.name in self.held:
                there.add(_key(values[node.name]))
        flops, given, ends = 0, dict[str, dict[int, int]](), dict[str, int]()
        weights, last = self.held & learned, -1  # the values that weights alone make, and the last place where they meet others
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            for self.place, node in enumerate(order):
                self.layer = self.owner.get(node.name, "")
                made = values[node.name] = self._call(node, values)
                types[node.name] = pytree.tree_map_only(Tensor, lambda t: TensorType(t.dtype, tuple(t.shape)), made)
                flops += _flops(node, types)
                operands = {operand.name for operand in node.all_input_nodes}
                weights |= {node.name} if operands and operands <= weights else frozenset()
                last = self.place if operands & weights else last
                if self.layer:
                    noted, ends[self.layer] = given.setdefault(self.layer, {}), self.place
                    for operand in node.all_input_nodes:
                        if self.owner.get(operand.name, "") != self.layer:
                            noted |= self._noted(_storages(values[operand.name]))
        return self._count(there, given, ends, last, flops)

    def _count(self, there: set[int], given: Mapping[str, dict[int, int]], ends: Mapping[str, int], last: int, flops: int) -> Kept:
        """`given` is what layers that run again keep, `ends` the place of their last node, `last` that of the last that has a weight.

        What is saved after a node is gone when backward has come to it.
        """
        kept, again = dict[int, int](), dict[str, int]()
        for layer, saved in self.saved.items():
            if layer in given:
                again[layer] = sum(size for key, size in saved.items() if key not in there and key not in given[layer])
            else:
                kept |= saved
        for noted in given.values():
            kept |= noted
        kept = {key: size for key, size in kept.items() if key not in there}

        def before(place: int) -> int:
            return sum(size for key, size in kept.items() if self.since[key] <= place)

        total = sum(kept.values())
        return Kept(total, max([total, *(before(ends[layer]) + size for layer, size in again.items())]), before(last), flops)

    def _noted(self, storages: dict[int, int]) -> dict[int, int]:
        """The same, with a note of when autograd first saved them."""
        for key in storages:
            self.since.setdefault(key, self.place)
        return storages

    def _keep(self, tensor: Tensor) -> Tensor:
        self.alive.append(tensor)
        self.saved.setdefault(self.layer, {}).update(self._noted(_storages(tensor)) if not self.layer else _storages(tensor))
        return tensor

    def _call(self, node: fx.Node, values: Mapping[str, Any]) -> Any:
        args, kwargs = (self._local(given, values) for given in (node.args, node.kwargs))
        if op_name(node) in IDENTITIES:
            return args[0].view_as(args[0])
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        return target(*args, **kwargs)

    def _local(self, given: Any, values: Mapping[str, Any]) -> Any:
        """Arguments as this coordinate has them."""
        match given:
            case fx.Node():
                return values[given.name]
            case PerRank(numbers):
                return numbers[self.coordinate]
            case torch.device():
                return torch.device("cpu")
            case str():
                return self.axis if given == self.axis.partition(":")[0] else given
            case list() | tuple():
                return [self._local(item, values) for item in given]
            case dict():
                return {key: self._local(item, values) for key, item in given.items()}
            case slice():
                return slice(*(self._local(item, values) for item in (given.start, given.stop, given.step)))
        return given


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storages(value: Any) -> dict[int, int]:
    return {_key(leaf): leaf.untyped_storage().nbytes() for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}


def _flops(node: fx.Node, types: Mapping[str, Any]) -> int:
    if op_name(node) in LINEARS:
        outs: Sequence[TensorType] = types[node.name]
        weights: Sequence[Any] = node.args[-2]  # type: ignore[assignment]
        return sum(2 * _size(out) * int(types[weight.name].shape[-1]) for out, weight in zip(outs, weights, strict=True))
    if op_name(node) == "getitem" and op_name(node.all_input_nodes[0]) in LINEARS:
        return 0
    return int(node_flops(node, types))


def _size(kind: TensorType) -> int:
    size = 1
    for length in kind.shape:
        size *= int(length)
    return size
