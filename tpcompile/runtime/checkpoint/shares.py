"""What a rank has of the state that a checkpoint keeps: tensors with their places, by names that no mesh changes.

model.<name>                  parameters and buffers, by the first of their names in the user's model
optimizer.<name>.<key>        what the optimizer keeps for a parameter: of its shape, in its places; or a single number
generator.<device>.<rank>     the state of torch's generator on every rank
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpcompile.errors import InputError, caller
from tpcompile.passes.emit import Piece
from tpcompile.runtime.checkpoint.boxes import Part, parts, whole
from tpcompile.runtime.checkpoint.plain import encode
from tpcompile.runtime.data_parallel import local
from tpcompile.runtime.engine import Engine


@dataclass(frozen=True)
class Share:
    """One tensor of this rank, and which boxes of a whole tensor it is."""

    name: str
    tensor: Tensor  # the rank's own, plain
    shape: tuple[int, ...]  # of the whole
    parts: tuple[Part, ...]

    def like(self, tensor: Tensor) -> Share:
        return Share(self.name, tensor, self.shape, self.parts)


@dataclass(frozen=True)
class Running:
    """A compiled model at work on this rank."""

    model: nn.Module
    engine: Engine
    parameters: tuple[tuple[str, nn.Parameter], ...]  # of all stages that this rank holds
    pieces: Mapping[str, Piece]  # by every name of a parameter

    @property
    def first_names(self) -> Mapping[str, str]:
        """Every name of a parameter or buffer → the first of its names in the user's model."""
        found, first = {}, dict[int, str]()
        for name, tensor in tensors(self.model):
            found[name] = first.setdefault(id(tensor), name)
        return found


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A model's parameters and buffers under all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def of_parameters(running: Running) -> list[Share]:
    """This rank's parameters. A weight that several of its stages hold is there as often."""
    first, found = running.first_names, []
    for name, p in running.parameters:
        shape = tuple(running.model.get_parameter(name).shape)
        found.append(Share(f"model.{first[name]}", local(p.detach()), shape, parts(running.pieces[name], shape, p.detach())))
    return found


def of_buffers(running: Running) -> list[Share]:
    """The buffers of this rank that the model's state dict has, or that forward changes: whole on every rank that has them."""
    first = running.first_names
    saved = {first[name] for name in running.model.state_dict(keep_vars=True) if name in first}
    held = dict(running.engine.root.named_state(saved))
    return [whole_share(f"model.{first[name]}", value) for name, value in held.items()]


def whole_share(name: str, tensor: Tensor) -> Share:
    box = whole(tensor.shape)
    return Share(name, tensor.detach(), tuple(tensor.shape), (Part(box, box.start),))


# ------------------------------------------------------------------------------------------------- the optimizer


@dataclass(frozen=True)
class Kept:
    """What this rank's optimizer keeps: tensors, other values by parameter and key, and the settings of its groups."""

    shares: tuple[Share, ...]
    values: Mapping[str, Mapping[str, Any]]
    groups: tuple[tuple[Mapping[str, Any], tuple[str, ...]], ...]  # settings, and the names of the parameters


def places_of(running: Running, optimizer: torch.optim.Optimizer) -> dict[int, Share]:
    """The optimizer's parameters by their ids, under the first of their names: what this rank's optimizer has of each may be a shard.

    Raises InputError for one that is not the compiled model's.
    """
    first, found = running.first_names, dict[int, Share]()
    names = {id(p): name for name, p in running.parameters}
    shards = {id(own.part): id(own.whole) for own in getattr(optimizer, "_owned", ())}
    for group in optimizer.param_groups:
        for place, p in enumerate(group["params"]):
            if (name := names.get(shards.get(id(p), id(p)))) is None:
                raise InputError(
                    f"the optimizer's parameter {place} of shape {list(p.shape)} is not one of the compiled model's",
                    at=f"optimizer={type(optimizer).__name__}(...)",
                    source=caller(),
                    fix="make it with compiled.optimizer(...), and pass that one",
                )
            shape = tuple(running.model.get_parameter(name).shape)
            found[id(p)] = Share(first[name], local(p.detach()), shape, parts(running.pieces[name], shape, p.detach()))
    return found


def of_optimizer(running: Running, optimizer: torch.optim.Optimizer) -> Kept:
    """Raises InputError for state that is neither of a parameter's shape nor a single number: its place is not known."""
    places = places_of(running, optimizer)
    shares: list[Share] = []
    values: dict[str, dict[str, Any]] = {}
    for p, state in optimizer.state.items():
        name = places[id(p)].name
        for key, value in state.items():
            where = f"optimizer.{name}.{key}"
            if not isinstance(value, Tensor):
                values.setdefault(name, {})[key] = encode(value, where)
            elif local(value).shape == local(p).shape and isinstance(value, DTensor) == isinstance(p, DTensor):
                shares.append(Share(where, local(value.detach()), places[id(p)].shape, places[id(p)].parts))
            elif value.dim() == 0 and not isinstance(value, DTensor):
                shares.append(whole_share(where, value))
            else:
                raise InputError(
                    f"{where} has shape {list(value.shape)} for a parameter of local shape {list(p.shape)}: its place is not known",
                    at="compiled.save(optimizer=...)",
                    source=caller(),
                    fix="use an optimizer whose state has the parameters' shapes, or save without it",
                )
    groups = []
    for group in optimizer.param_groups:
        settings = {key: encode(value, f"optimizer group's {key}") for key, value in group.items() if key != "params"}
        groups.append((settings, tuple(places[id(p)].name for p in group["params"])))
    return Kept(tuple(shares), values, tuple(groups))


def together_in_groups(everyone: Iterable[tuple[tuple[Mapping[str, Any], tuple[str, ...]], ...]]) -> list[dict[str, Any]]:
    """The groups of all ranks as one list: those with equal settings are one."""
    found: list[dict[str, Any]] = []
    for groups in everyone:
        for settings, names in groups:
            same = next((group for group in found if group["settings"] == settings), None)
            if same is None:
                found.append(same := {"settings": settings, "parameters": []})
            same["parameters"] += [name for name in names if name not in same["parameters"]]
    return found


# --------------------------------------------------------------------------------------------- random numbers


def of_generators(device: torch.device, rank: int) -> list[Share]:
    """The states of torch's own generators on this rank: that of the CPU, and its GPU's."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return [whole_share(f"generator.{kind}.{rank}", state) for kind, state in states.items()]
