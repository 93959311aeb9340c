"""A checkpoint on its way into memory."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpcompile.errors import TpcompileError, several
from tpcompile.runtime.checkpoint.files import bad
from tpcompile.runtime.checkpoint.plain import decode, dtype_name, dtype_of
from tpcompile.runtime.checkpoint.shares import Running, Share, of_buffers, of_generators, of_parameters, places_of, whole_share


class Stateful(Protocol):
    """An object that a checkpoint keeps: numbers, texts, and lists, tuples and dictionaries of them, the same on every rank."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Loaded:
    """What a checkpoint has for this rank, in tensors of its own, until all of it is there: then it takes the old one's place."""

    def __init__(
        self,
        running: Running,
        path: Path,
        description: Mapping[str, Any],
        optimizer: torch.optim.Optimizer | None,
        objects: Mapping[str, Stateful],
    ) -> None:
        self._running, self._description, self._optimizer = running, description, optimizer
        self._tensors: dict[str, Any] = description["tensors"]
        self._check_model(path)
        self._parameters = [(share, _fresh(share)) for share in of_parameters(running) if 0 not in share.shape]
        self._buffers = [(share, _fresh(share)) for share in of_buffers(running) if 0 not in share.shape]
        self._check_types(path)
        self._generators = self._own_generators()
        self._states: list[tuple[nn.Parameter, dict[str, Any]]] = []
        self._settings: list[dict[str, Any] | None] = []
        self._kept: list[Share] = []
        if optimizer is not None:
            self._read_optimizer(path, optimizer)
        self._before: list[tuple[Stateful, dict[str, Any]]] = []
        self._objects = {name: (thing, self._object(path, name)) for name, thing in objects.items()}

    @property
    def shares(self) -> list[Share]:
        fresh = [new for _, new in (*self._parameters, *self._buffers)]
        return [*fresh, *self._kept, *self._generators.values()]

    def _check_model(self, path: Path) -> None:
        """Whether the checkpoint's model is this one, by names and shapes."""
        first, model = self._running.first_names, self._running.model
        own = {f"model.{first[name]}": tuple(p.shape) for name, p in model.named_parameters() if 0 not in p.shape}
        stored = {name: tuple(tensor["shape"]) for name, tensor in self._tensors.items() if name.startswith("model.")}
        buffers = {f"model.{first[name]}" for name, _ in model.named_buffers(remove_duplicate=False)}
        problems = [bad(f"{path} has no {name}") for name in own if name not in stored]
        problems += [bad(f"{path} has {name}, and the model has not") for name in stored if name not in own and name not in buffers]
        for name, shape in own.items():
            if stored.get(name, shape) != shape:
                problems.append(bad(f"{path} has {name} in shape {list(stored[name])}, and the model in {list(shape)}"))
        _raise(problems)

    def _check_types(self, path: Path) -> None:
        problems = []
        for share, _ in self._parameters + self._buffers:
            stored = self._tensors.get(share.name)
            if stored is None:
                problems.append(bad(f"{path} has no {share.name}"))
            elif tuple(stored["shape"]) != share.shape:
                problems.append(bad(f"{path} has {share.name} in shape {stored['shape']}, and the model in {list(share.shape)}"))
            elif stored["dtype"] != dtype_name(share.tensor.dtype):
                problems.append(bad(f"{path} has {share.name} in {stored['dtype']}, and the model in {dtype_name(share.tensor.dtype)}"))
        _raise(problems)

    def _own_generators(self) -> dict[str, Share]:
        """Where to read the states of this rank's generators: from a mesh of as many ranks, else they stay as they are."""
        groups = self._running.engine.groups
        ranks = sum(name.startswith("generator.cpu.") for name in self._tensors)
        found = of_generators(groups.device, groups.rank) if ranks == groups.mesh.size else []
        return {share.name: _fresh(share) for share in found if share.name in self._tensors}

    def _read_optimizer(self, path: Path, optimizer: torch.optim.Optimizer) -> None:
        if not self._description["has_optimizer"]:
            raise bad(f"{path} was saved without an optimizer")
        places = places_of(self._running, optimizer)
        keys: dict[str, list[str]] = {}
        for name in self._tensors:
            if name.startswith("optimizer."):
                owner, _, key = name.removeprefix("optimizer.").rpartition(".")
                keys.setdefault(owner, []).append(key)
        for group in optimizer.param_groups:
            self._settings.append(self._group_settings(path, [places[id(p)].name for p in group["params"]]))
            for p in group["params"]:
                name = places[id(p)].name
                state = {key: decode(value) for key, value in self._description["values"].get(name, {}).items()}
                for key in keys.get(name, ()):
                    state[key] = self._state(f"optimizer.{name}.{key}", p, places[id(p)], group)
                if state:
                    self._states.append((p, state))

    def _group_settings(self, path: Path, names: Sequence[str]) -> dict[str, Any] | None:
        """The settings of the group in which the checkpoint has these parameters."""
        groups = [group for group in self._description["groups"] if not set(names).isdisjoint(group["parameters"])]
        if not names or not groups:
            return None
        if len(groups) > 1:
            one = next(name for name in names if name in groups[0]["parameters"])
            other = next(name for name in names if name not in groups[0]["parameters"])
            raise bad(f"{path} has {one} and {other} in two groups of the optimizer, which has them in one")
        return {key: decode(value) for key, value in groups[0]["settings"].items()}

    def _state(self, name: str, p: nn.Parameter, place: Share, group: Mapping[str, Any]) -> Tensor:
        """An empty tensor for a part of the optimizer's state, which the plan will fill."""
        stored = self._tensors[name]
        dtype, shape = dtype_of(stored["dtype"]), tuple(stored["shape"])
        if shape == place.shape:
            empty = torch.empty_like(place.tensor, dtype=dtype)
            self._kept.append(Share(name, empty, shape, place.parts))
            if isinstance(p, DTensor):
                return DTensor.from_local(empty, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
            return empty
        if shape:
            raise bad(f"the checkpoint has {name} in shape {list(shape)}, and the parameter has {list(place.shape)}")
        on_device = group.get("capturable") or group.get("fused")
        number = torch.empty((), dtype=dtype, device=place.tensor.device if on_device else "cpu")
        self._kept.append(whole_share(name, number))
        return number

    def _object(self, path: Path, name: str) -> dict[str, Any]:
        if name not in self._description["objects"]:
            raise bad(f"{path} was saved without {name}")
        found: dict[str, Any] = decode(self._description["objects"][name])
        return found

    def restore_objects(self) -> None:
        """Give schedulers and the like their states; `undo` takes them away again."""
        self._before = [(thing, copy.deepcopy(thing.state_dict())) for thing, _ in self._objects.values()]
        for name, (thing, state) in self._objects.items():
            try:
                thing.load_state_dict(state)
            except Exception as error:
                raise bad(f"{name} does not take its state from the checkpoint: {error}") from error

    def undo(self) -> None:
        for thing, state in self._before:
            thing.load_state_dict(state)

    @torch.no_grad()
    def commit(self) -> None:
        """Everything is there, and nothing below fails."""
        for old, new in self._parameters:
            old.tensor.copy_(new.tensor)
        root, first = self._running.engine.root, self._running.first_names
        values = {new.name: new.tensor for _, new in self._buffers}
        for name, _ in list(root.named_state({name for name in first if f"model.{first[name]}" in values})):
            root.restore(name, values[f"model.{first[name]}"])
        for name, share in self._generators.items():
            torch.set_rng_state(share.tensor) if ".cpu." in name else torch.cuda.set_rng_state(share.tensor)
        clock = self._description["clock"]
        self._running.engine.clock = clock["seed"], clock["steps"]
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        self._optimizer.state.update(dict(self._states))
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            group.update(settings or {})


def _fresh(share: Share) -> Share:
    return share.like(torch.empty_like(share.tensor, memory_format=torch.contiguous_format))


def _raise(problems: Iterable[TpcompileError]) -> None:
    if (error := several(problems)) is not None:
        raise error
