"""Whether all ranks compiled the same program: a difference is an error that says what differs, never a hang."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata

import torch
import torch.distributed as dist
from torch import nn

from tpcompile.driver import Compilation, Options
from tpcompile.errors import InputError, several
from tpcompile.mesh import Mesh

_FIXES = {
    "versions": "install the same versions of tpcompile and torch on all ranks",
    "mesh": "give every rank the same mesh",
    "options": "call tpcompile.compile with the same arguments on all ranks",
    "graph": "build the same model and pass example inputs of the same shapes on all ranks",
    "plan": "compile with the same tpcompile on all ranks",
    "optimizers": "pass the same class, settings and groups to compiled.optimizer on all ranks",
    "parameter shapes": "build the same model on all ranks",
    "parameter values": "call torch.manual_seed with the same seed on all ranks before the model is built, or load the same weights",
}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compare(parts: Mapping[str, str]) -> None:
    """Compare named parts of this rank's compilation with all others'. Collective over all processes.

    Raises InputError on every rank if a part differs, naming the part and the ranks on each side.
    """
    if not dist.is_initialized():
        return
    mine = {name: digest(text) for name, text in parts.items()}
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    if error := difference(everyone):
        raise error


def difference(everyone: Sequence[Mapping[str, str]]) -> InputError | None:
    """What differs among the digests of all ranks, by name; None if nothing does."""
    problems = []
    for name in dict.fromkeys(name for digests in everyone for name in digests):
        sides: dict[str, list[int]] = defaultdict(list)
        for rank, digests in enumerate(everyone):
            sides[digests.get(name, "nothing")].append(rank)
        if len(sides) > 1:
            at = "; ".join(f"{_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}" for value, ranks in sides.items())
            problems.append(InputError(f"the ranks differ in their {name}", at=at, fix=_FIXES.get(name, "compile the same on all ranks")))
    found = several(problems)
    assert found is None or isinstance(found, InputError)
    return found


def _ranks(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] → "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    spelled = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {spelled}"


def given(model: nn.Module, mesh: Mesh, options: Options) -> dict[str, str]:
    """What all ranks must have been given alike, as text."""
    loss = f"{options.loss.__module__}.{getattr(options.loss, '__qualname__', type(options.loss).__qualname__)}" if options.loss else None
    shown = {name: value for name, value in vars(options).items() if name != "loss"}
    return {
        "versions": f"torch {torch.__version__}, tpcompile {_version()}",
        "mesh": str(mesh),
        "options": f"{shown} loss={loss}",
        "optimizers": "pass the same class, settings and groups to compiled.optimizer on all ranks",
        "parameter shapes": shapes(model),
        "parameter values": values(model),
    }


def made(compilation: Compilation) -> dict[str, str]:
    """What all ranks must have compiled alike, as text."""
    return {"graph": str(compilation.program.graph), "plan": "\n".join(str(stage.graph) for stage in compilation.stages)}


def _version() -> str:
    try:
        return metadata.version("tpcompile")
    except metadata.PackageNotFoundError:
        return "not installed"


def shapes(model: nn.Module) -> str:
    """Names, shapes and element types of a model's state, as text."""
    state = [*model.named_parameters(), *model.named_buffers()]
    return "\n".join(f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in state)


def values(model: nn.Module) -> str:
    """A checksum of every parameter and buffer that has values, as text."""
    state = [*model.named_parameters(), *model.named_buffers()]
    return "\n".join(f"{name} {_checksum(tensor)}" for name, tensor in state if not tensor.is_meta)


def _checksum(tensor: torch.Tensor) -> str:
    """Equal for equal elements, whatever the device."""
    return str(torch.hash_tensor(bits(tensor)).item()) if tensor.numel() else "empty"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as whole numbers, in one dimension."""
    flat = tensor.detach().contiguous().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
