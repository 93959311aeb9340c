"""`tpcompile.load`: a program on disk, at work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.collectives import Range
from tpcompile.driver import Options
from tpcompile.errors import InputError, caller
from tpcompile.export.outline import Outline, program_of, stages_of
from tpcompile.export.read import Saved
from tpcompile.ir import Program
from tpcompile.mesh import Mesh
from tpcompile.passes._guards import suits
from tpcompile.passes.emit import Piece, RankProgram
from tpcompile.runtime.batch import Batch, Division
from tpcompile.runtime.compiled import Compiled
from tpcompile.runtime.engine import Capture


def load(directory: str | Path, mesh: DeviceMesh | None = None) -> Loaded:
    """A program that `compiled.emit` wrote, for training or for its outputs: what `tpcompile.compile` returned, without the model.

    `directory` is what `emit` wrote. The program runs on the mesh that it was written for, in the mode (train or eval) in which it was
    compiled, on batches of the sizes that were left open; `mesh` is a torch DeviceMesh of that shape, where there is one already. Outputs
    that were objects are mappings.
    Only files that the manifest vouches for are read or executed, and nothing is unpickled. Raises InputError with the name of a file
    that is missing or changed, for a release of torch or tpcompile that did not write it, and for another mesh.
    """
    saved = Saved.open(directory)
    if mesh is not None and Mesh.of(mesh).sizes != saved.mesh.sizes:
        at = f"tpcompile.load({str(directory)!r})"
        raise InputError(f"the program is for mesh {saved.mesh}, not {Mesh.of(mesh)}", at=at, source=caller(), fix="emit it for this mesh")
    return Loaded(saved, mesh)


class Loaded(Compiled):
    """A program from disk. It has the methods of a compiled model but those below, which need the model: nothing is captured anew.

    A batch of sizes for which the program was not written is an InputError.
    """

    def __init__(self, saved: Saved, devices: DeviceMesh | None) -> None:
        super().__init__(Outline(saved.content), saved.mesh, Options(**saved.content["options"]), devices)
        self._saved = saved
        self._compilations.append(_Read(saved))  # type: ignore[arg-type]

    def explain(self, *, full: bool = False, devices_per_node: int | None = None, device_memory: float = 80.0) -> str:
        """The plan, as it was written with the program.

        `full`, `devices_per_node` and `device_memory` change nothing.
        """
        return (self._saved.directory / "plan.txt").read_text(encoding="utf-8")

    @property
    def history(self) -> Any:
        """Not for a program from disk: raises InputError."""
        raise InputError("the passes are not on disk", at="loaded.history", source=caller(), fix="compile the model to look at them")

    def emit(self, directory: str | Path, *, formats: Any = ()) -> None:
        """Not for a program from disk, to whatever `directory` and in whatever `formats`: raises InputError."""
        raise InputError("a program from disk is written already", at="loaded.emit", source=caller(), fix="copy its folder")

    def _own(self, number: int, compilation: Any, program: RankProgram) -> Capture:  # type: ignore[override]
        trained = frozenset(self._saved.content["program"]["trained"])
        return Capture.of(number, compilation.program, compilation.stages, program.stages, trained)

    def _suits(self, program: Program, batch: Batch) -> bool:
        """The mode is the one in which the model was compiled."""
        return suits(program, batch)

    def _capture(self, batch: Batch, call: str = "", division: Division | None = None) -> None:
        inputs = self.compilation.program.inputs
        kinds = {entry.path: self.compilation.program.types[name] for name, entry in inputs.items()}
        shown = ", ".join(f"{path} {getattr(kind, 'dtype', '')} {list(getattr(kind, 'shape', ()))}" for path, kind in kinds.items())
        what = "the program on disk is not for such a batch, and without the model there is no other"
        raise InputError(what, at=call, source=caller(), fix=f"a micro-batch is {shown}; or emit a program for these inputs")


class _Read:
    """What a compilation is asked for when it runs, from disk."""

    def __init__(self, saved: Saved) -> None:
        self._saved, self.mesh = saved, saved.mesh
        self.program, self.stages = program_of(saved), stages_of(saved)
        self._pieces = {name: kind for name, kind in saved.content["parameters"].items() if "dim" in kind}

    def pieces(self) -> dict[str, tuple[int, list[int]]]:
        """For every cut parameter the dimension, and `bounds` as collectives understand them."""
        flat = {name: [number for rank in kind["ranges"] for pair in rank for number in pair] for name, kind in self._pieces.items()}
        return {name: (kind["dim"], flat[name]) for name, kind in self._pieces.items()}

    def rank_program(self, model: nn.Module, rank: int, device: torch.device | str = "cpu") -> RankProgram:
        modules = self._saved.modules(rank, device)
        held = tuple(self.stages[index] for index in self._saved.stages(rank))
        sources = tuple((self._saved.directory / self._saved.content["stages"][stage.index]["file"]).read_text() for stage in held)
        place = self.mesh.coordinates(rank)["tp"]
        used = {name for stage in held for name in stage.parameters.values()}
        named = [name for module in modules for name, _ in module.named_parameters(remove_duplicate=False)]
        twins = {**self.program.aliases, **self._saved.content["twins"]}
        parameters = {name: self._piece(twins.get(name, name), place) for name in named}
        unused = tuple(name for name in parameters if twins.get(name, name) not in used)
        graphs = tuple(stage.graph for stage in held)
        return RankProgram(self.mesh, rank, held, modules, graphs, sources, MappingProxyType(parameters), unused)

    def _piece(self, name: str, place: int) -> Piece:
        kind: Mapping[str, Any] | None = self._pieces.get(name)
        ranges: list[Range] = [(start, stop) for start, stop in kind["ranges"][place]] if kind else []
        return Piece(kind["dim"], tuple(ranges)) if kind else Piece()
