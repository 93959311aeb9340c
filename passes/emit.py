"""Make the modules that a rank runs: generated Python source, executed as it is printed, with the original parameter names."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import fx, nn

from tpcompile import collectives
from tpcompile.errors import TpcompileError
from tpcompile.graphs import copy_graph
from tpcompile.ir import PerRank, Program, Stage
from tpcompile.layout import Layout
from tpcompile.mesh import Mesh
from tpcompile.passes._holding import Holding, Piece
from tpcompile.passes._parts import arrange
from tpcompile.passes._tree import Tree, fill
from tpcompile.passes._writer import About, write

__all__ = ["Cut", "Piece", "RankProgram", "emit"]

Cut = tuple[int, Sequence[int]]
"""How a parameter is cut over the tensor axis: the dimension, and `bounds` as collectives understands them."""


@dataclass(frozen=True)
class RankProgram:
    """What one rank runs: one module for each stage that it holds."""

    mesh: Mesh  # that it was compiled for
    rank: int  # of this mesh
    stages: tuple[Stage, ...]  # that the rank holds, in their order
    modules: tuple[nn.Module, ...]  # one for each, with the parameter names of the user's model and this rank's pieces
    graphs: tuple[fx.Graph, ...]  # the stages' graphs with this rank's numbers
    sources: tuple[str, ...]  # the modules as Python
    parameters: Mapping[str, Piece]  # of all stages that the rank holds, by every name in the user's model
    unused: tuple[str, ...]  # parameters that no graph uses: they get no gradient

    @property
    def coordinates(self) -> dict[str, int]:
        """The rank's place on every axis."""
        return self.mesh.coordinates(self.rank)

    @property
    def module(self) -> nn.Module:
        """The module of a rank that holds one stage. Raises TpcompileError for one that holds several."""
        self._only_one("module")
        return self.modules[0]

    @property
    def graph(self) -> fx.Graph:
        """The graph of a rank that holds one stage. Raises TpcompileError for one that holds several."""
        self._only_one("graph")
        return self.graphs[0]

    @property
    def source(self) -> str:
        """All of the sources."""
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
    layouts: Mapping[str, Layout | tuple[Layout, ...]] | None = None,
    origins: Mapping[str, str] | None = None,
    held: Sequence[int] | None = None,
    cores: bool = False,
) -> RankProgram:
    """Make a rank's modules, one for each stage that it holds, from the graphs of all stages.

    before  %linear = aten.linear.default(%x, %p_h_0_fc_weight) : f32[8, 32@tp], path h.0.fc, and the same for h.1
    after   class Block(nn.Module):
                def forward(self, x):
                    return aten.linear.default(x, self.fc.weight)
            …   self.h = nn.ModuleList(Block(tp, device) for _ in range(2))

    `pieces` has an entry for every parameter that is cut. The source's comments show the `layouts` of nodes; `origins` names the
    program's node for those that a pass added. `held` lists this rank's stages by index: by default stage i is on pipeline
    coordinate i modulo pp. With `cores`, layers compute the core of their attention in a method `core`. Parameters are copies on
    `device`; those of a model on the meta device stay there.

    Buffers that forward updates are given to layers as arguments, and their new values are returned: the stage puts these in place as
    its last statements, as new tensors. So a layer may be run again in backward, and what backward reads is not written to.
    """
    place = mesh.coordinates(rank)
    mine = [stage for stage in stages if (stage.index % mesh.pp == place["pp"] if held is None else stage.index in held)]
    graphs = tuple(_localize(stage.graph, place["tp"]) for stage in mine)
    paths = {name: source.path for name, source in program.sources.items()}
    parts = {stage.index: arrange(stage, paths, program.layers) for stage in stages}
    local = {
        name: [Piece(dim, tuple(collectives.held_by(bounds, c, mesh.tp))) for c in range(mesh.tp)] for name, (dim, bounds) in pieces.items()
    }
    holding = Holding(program, model, local, tuple(stages), parts, place["tp"], torch.device(device))
    about = About(program, model, mesh.tp, layouts or {}, origins or {}, len(stages), cores)
    modules, sources, parameters = [], [], dict[str, Piece]()
    for stage in mine:
        tree, twins = holding.tree(stage)
        source = write(stage, parts[stage.index], tree, twins, about)
        modules.append(_execute(source, place["tp"], tree, twins).train(model.training))
        sources.append(source)
        own = {name: holding.piece(name) for name, tensor in tree.tensors() if tensor.is_parameter}
        parameters |= own | {twin: own[name] for twin, name in twins.items() if name in own}
    unused = tuple(name for name in parameters if name in holding.unused)
    return RankProgram(mesh, rank, tuple(mine), tuple(modules), graphs, tuple(sources), MappingProxyType(parameters), unused)


def _localize(graph: fx.Graph, coordinate: int) -> fx.Graph:
    """The graph with the numbers of one coordinate."""

    def number(leaf: object) -> object:
        return leaf.values[coordinate] if isinstance(leaf, PerRank) else leaf

    return copy_graph(graph, number)[0]


def _execute(source: str, coordinate: int, tree: Tree, twins: Mapping[str, str]) -> nn.Module:
    """Run the printed source and put the parameters in place. Tracebacks show its lines."""
    name = f"tpcompile_stage_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, object] = {"__name__": name}
    exec(compile(source, file, "exec"), namespace)
    module: nn.Module = namespace["Stage"](coordinate, device="meta")  # type: ignore[operator]
    fill(module, dict(tree.tensors()))
    for twin, canonical in twins.items():
        owner, _, name = twin.rpartition(".")
        first = module.get_submodule(canonical.rpartition(".")[0])
        setattr(module.get_submodule(owner), name, getattr(first, canonical.rpartition(".")[2]))
    return module
