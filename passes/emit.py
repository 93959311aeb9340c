"""Make the modules that a rank runs: generated Python source, executed as it is printed, with the original parameter names."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor, fx, nn

from tpcompile import collectives
from tpcompile.errors import TpcompileError
from tpcompile.ir import PerRank, Program, Stage
from tpcompile.mesh import Mesh
from tpcompile.passes._parts import Part, arrange, layer_of
from tpcompile.passes._tree import Held, Tree, fill, local_piece
from tpcompile.passes._writer import write

Cut = tuple[int, Sequence[int]]
"""How a parameter is cut over the tensor axis: the dimension, and `bounds` as collectives understands them."""


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that a rank holds: index ranges along one dimension, in order; dim None: all of it."""

    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RankProgram:
    """What one rank runs: one module for each stage that it holds."""

    mesh: Mesh
    rank: int
    stages: tuple[Stage, ...]
    modules: tuple[nn.Module, ...]
    graphs: tuple[fx.Graph, ...]  # the stages' graphs with this rank's numbers
    sources: tuple[str, ...]
    parameters: Mapping[str, Piece]  # of all stages that the rank holds, by name in the user's model
    unused: tuple[str, ...]  # parameters that no graph uses: they get no gradient

    @property
    def coordinates(self) -> dict[str, int]:
        return self.mesh.coordinates(self.rank)

    @property
    def module(self) -> nn.Module:
        self._only_one("module")
        return self.modules[0]

    @property
    def graph(self) -> fx.Graph:
        self._only_one("graph")
        return self.graphs[0]

    @property
    def source(self) -> str:
        return "\n\n".join(self.sources)

    def _only_one(self, what: str) -> None:
        if len(self.stages) != 1:
            raise TpcompileError(f"rank {self.rank} holds {len(self.stages)} stages", at=f"program.{what}", fix=f"use program.{what}s")


def emit(
    stages: Sequence[Stage],
    program: Program,
    model: nn.Module,
    pieces: Mapping[str, Cut],
    mesh: Mesh,
    rank: int,
    device: torch.device | str = "cpu",
    *,
    held: Sequence[int] | None = None,
) -> RankProgram:
    """Make a rank's modules, one for each stage that it holds, from the graphs of all stages.

    before  %linear = aten.linear.default(%x, %p_h_0_fc_weight) : f32[8, 32@tp], path h.0.fc, and the same for h.1
    after   class Block(nn.Module):
                def forward(self, x):
                    return aten.linear.default(x, self.fc.weight)
            …   self.h = nn.ModuleList(Block(device) for _ in range(2))

    `pieces` has an entry for every parameter that is cut. `held` lists the stages of this rank by index; by default stage i is on
    pipeline coordinate i modulo pp. Parameters are copies; those of a model on the meta device stay there.
    """
    place = mesh.coordinates(rank)
    mine = [stage for stage in stages if (stage.index % mesh.pp == place["pp"] if held is None else stage.index in held)]
    graphs = tuple(_localize(stage.graph, place["tp"]) for stage in mine)
    paths = {name: source.path for name, source in program.sources.items()}
    parts = {stage.index: arrange(stage, paths, program.layers) for stage in stages}
    plan = _Plan(
        program, model, {n: _piece(c, mesh.tp, place["tp"]) for n, c in pieces.items()}, tuple(stages), parts, torch.device(device)
    )
    modules, sources, names = [], [], dict[str, Piece]()
    for stage, graph in zip(mine, graphs, strict=True):
        tree, twins = plan.tree(stage)
        local = replace(stage, graph=graph)
        by_name = {node.name: node for node in graph.nodes}
        renewed = tuple(Part(part.layer, tuple(by_name[node.name] for node in part.nodes)) for part in parts[stage.index])
        source = write(local, renewed, program, model, tree, twins, collectives.unbound("tp", place["tp"], mesh.tp), len(stages))
        modules.append(_execute(source, tree, twins))
        sources.append(source)
        names |= {name: plan.pieces.get(name, Piece()) for name, tensor in tree.tensors() if tensor.is_parameter}
    unused = tuple(name for name in names if name in plan.unused)
    return RankProgram(mesh, rank, tuple(mine), tuple(modules), graphs, tuple(sources), MappingProxyType(names), unused)


def _piece(cut: Cut, size: int, coordinate: int) -> Piece:
    return Piece(cut[0], tuple(collectives.held_by(cut[1], coordinate, size)))


def _localize(graph: fx.Graph, coordinate: int) -> fx.Graph:
    """The graph with the numbers of one coordinate."""

    def number(leaf: object) -> object:
        return leaf.values[coordinate] if isinstance(leaf, PerRank) else leaf

    local, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        new[node] = local.node_copy(node, new.__getitem__)
        new[node].args = fx.node.map_aggregate(new[node].args, number)  # type: ignore[assignment,arg-type]
        new[node].kwargs = fx.node.map_aggregate(new[node].kwargs, number)  # type: ignore[assignment,arg-type]
    return local


@dataclass(frozen=True)
class _Plan:
    """Which stage holds which of the model's tensors."""

    program: Program
    model: nn.Module
    pieces: Mapping[str, Piece]
    stages: tuple[Stage, ...]
    parts: Mapping[int, tuple[Part, ...]]
    device: torch.device
    users: Mapping[str, tuple[int, ...]] = field(init=False)  # qualified name → the stages that use it
    unused: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        users: dict[str, tuple[int, ...]] = {}
        for stage in self.stages:
            for placeholder in stage.graph.find_nodes(op="placeholder"):
                name = stage.parameters.get(placeholder.name) or stage.buffers.get(placeholder.name)
                if name and placeholder.users:
                    users[name] = (*users.get(name, ()), stage.index)
        every = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        object.__setattr__(self, "users", users)
        object.__setattr__(self, "unused", frozenset(n for n in every if n not in users and n not in self.program.aliases))

    def tree(self, stage: Stage) -> tuple[Tree, dict[str, str]]:
        """A stage's tensors at their original places, and the twins that are other names of them."""
        tree, twins = Tree(), dict[str, str]()
        for path, owner in self.model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
                if tensor is None:
                    continue
                canonical = self.program.aliases.get(prefix + name)
                if stage.index in self._homes(prefix + name, canonical, name not in owner._non_persistent_buffers_set):
                    if canonical:
                        tree.at(path)
                        twins[prefix + name] = canonical
                    else:
                        tree.at(path).held[name] = self._held(prefix + name, tensor, name not in owner._non_persistent_buffers_set)
        for placeholder in stage.constants:
            tree.held[placeholder] = Held(self._moved(self.program.constants[placeholder]), is_parameter=False, persistent=False)
        return tree, twins

    def _homes(self, name: str, canonical: str | None, persistent: bool) -> tuple[int, ...]:
        """The stages that hold a tensor: those that use it. A twin is where its module runs, the unused where its layer does."""
        if canonical is None:
            if name in self.users or not persistent:
                return self.users.get(name, ())
            return (self._layer_stage(name),)
        holders = self.users.get(canonical) or (self._layer_stage(canonical),)
        owner = name.rpartition(".")[0]
        running = [index for index in holders if self._runs(index, owner)]
        return tuple(running) or holders[:1]

    def _runs(self, index: int, path: str) -> bool:
        sources = self.program.sources
        nodes = [node for part in self.parts[index] for node in part.nodes]
        return any(node.name in sources and layer_of(sources[node.name].path, [path]) for node in nodes)

    def _layer_stage(self, name: str) -> int:
        layer = layer_of(name, self.program.layers)
        found = (index for index, parts in self.parts.items() if any(part.layer == layer for part in parts))
        return next(found, self.stages[0].index) if layer else self.stages[0].index

    def _held(self, name: str, tensor: Tensor, persistent: bool) -> Held:
        is_parameter = isinstance(tensor, nn.Parameter)
        piece = self.pieces.get(name, Piece()) if name in self.users else Piece()
        value = tensor.detach()
        if piece.dim is not None:
            value = local_piece(value, piece.dim, piece.ranges)
        return Held(self._moved(value).requires_grad_(is_parameter and tensor.requires_grad), is_parameter, persistent)

    def _moved(self, value: Tensor) -> Tensor:
        return value.detach().to(value.device if value.is_meta else self.device, copy=True)


def _execute(source: str, tree: Tree, twins: Mapping[str, str]) -> nn.Module:
    """Run the printed source and put the parameters in place. Tracebacks show its lines."""
    name = f"tpcompile_stage_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, object] = {"__name__": name}
    exec(compile(source, file, "exec"), namespace)
    module: nn.Module = namespace["Stage"](device="meta")  # type: ignore[operator]
    fill(module, dict(tree.tensors()))
    for twin, canonical in twins.items():
        owner, _, name = twin.rpartition(".")
        first = module.get_submodule(canonical.rpartition(".")[0])
        setattr(module.get_submodule(owner), name, getattr(first, canonical.rpartition(".")[2]))
    return module.train(True)
