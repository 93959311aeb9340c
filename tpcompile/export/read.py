"""A program on disk, read back: only files that the manifest vouches for are executed or read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from tpcompile.errors import InputError, TpcompileError, caller, several
from tpcompile.export.files import read_manifest
from tpcompile.mesh import Mesh


@dataclass(frozen=True)
class Saved:
    """A program on disk, whose files have been checked."""

    directory: Path
    content: dict[str, Any]  # of the manifest

    @classmethod
    def open(cls, directory: Path | str, call: str = "tpcompile.load") -> Saved:
        """Raises InputError naming the file that is missing or changed, or the version that differs."""
        return cls(Path(directory), read_manifest(Path(directory), call))

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(self.content["mesh"])

    def stages(self, rank: int) -> list[int]:
        """The stages that a rank holds, by index."""
        return list(self._rank(rank)["stages"])

    def modules(self, rank: int, device: torch.device | str = "cpu") -> tuple[nn.Module, ...]:
        """A rank's modules with its weights, one for each stage that it holds, in the mode in which the model was compiled.

        Raises InputError for a rank that the mesh does not have, for a program without weights, and for weights that do not fit.
        """
        place, weights = self.mesh.coordinates(rank), self.weights(rank)
        made = []
        for index in self.stages(rank):
            stage = self.content["stages"][index]
            module: nn.Module = self.namespace(stage["file"])["Stage"](place["tp"], device=device)
            _fill(module, weights, self._rank(rank)["weights"])
            made.append(module.train(self.content["training"]))
        return tuple(made)

    def weights(self, rank: int) -> dict[str, Tensor]:
        """A rank's tensors by name, on the CPU."""
        file = self._rank(rank)["weights"]
        if file is None:
            raise InputError(
                "the program was written without weights: its model was on the meta device",
                at=f"tpcompile.load({str(self.directory)!r})",
                source=caller(),
                fix="emit it from a model that has values",
            )
        return load_tensors(self._bytes(file))

    def tensors(self, file: str) -> dict[str, Tensor]:
        """The tensors of a file that need not be there."""
        return load_tensors(self._bytes(file)) if file in self.content["files"] else {}

    def namespace(self, file: str) -> dict[str, Any]:
        """What a source file defines."""
        source = self._bytes(file).decode()
        found: dict[str, Any] = {"__name__": f"tpcompile_saved_{Path(file).stem}"}
        exec(compile(source, str(self.directory / file), "exec"), found)
        return found

    def _rank(self, rank: int) -> dict[str, Any]:
        for entry in self.content["ranks"]:
            if entry["rank"] == rank:
                return dict(entry)
        raise InputError(f"the program has no rank {rank}", at=str(self.directory), source=caller(), fix=f"its mesh is {self.mesh}")

    def _bytes(self, file: str) -> bytes:
        """A file's content, which is what the manifest says."""
        expected = self.content["files"].get(file)
        if expected is None:
            raise InputError(f"the manifest does not name {file}", at=str(self.directory), source=caller(), fix="emit the program again")
        content = (self.directory / file).read_bytes()
        if hashlib.sha256(content).hexdigest() != expected:
            raise InputError(f"{self.directory / file} has changed since it was checked", at="tpcompile.load", source=caller())
        return content


def _fill(module: nn.Module, weights: dict[str, Tensor], file: str) -> None:
    problems: list[TpcompileError] = []
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            value = weights.get(name)
            if value is None:
                problems.append(InputError(f"{name} is missing", at=file, fix="emit the program again"))
            elif (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
                what = f"{name} is {value.dtype} {list(value.shape)}, and {tensor.dtype} {list(tensor.shape)} in the source"
                problems.append(InputError(what, at=file, fix="emit the program again"))
            else:
                tensor.copy_(value)
    if error := several(problems):
        raise error
