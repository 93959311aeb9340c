"""Weights from safetensors on the disk: each rank reads its own slices, and a model on the meta device takes no other memory.

weights/model.safetensors                                        one file
weights/model.safetensors.index.json, model-00001-of-00003.…     several, with the file of every tensor
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tpcompile.errors import InputError, TpcompileError, several
from tpcompile.passes.emit import Piece
from tpcompile.runtime.checkpoint.boxes import Box, parts
from tpcompile.runtime.checkpoint.plain import dtype_name
from tpcompile.runtime.initial import Initial, Initialiser

INDEX, ONE = "model.safetensors.index.json", "model.safetensors"
READ_BYTES = 2**24
"""How much is read at a time: what loading needs beside the weights."""


class Weights:
    """The tensors of a directory, or of one file, by name. Raises InputError for what is not there or not readable."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open: dict[Path, Any] = {}
        self._files = dict(self._listed())

    def _listed(self) -> Iterable[tuple[str, Path]]:
        if self.path.is_dir() and (self.path / INDEX).is_file():
            try:
                listed = json.loads((self.path / INDEX).read_text(encoding="utf-8"))["weight_map"].items()
            except (ValueError, KeyError, AttributeError) as error:
                raise _bad(f"{self.path / INDEX} is damaged: {error}") from None
            return [(name, self.path / file) for name, file in listed]
        found = [self.path] if self.path.is_file() else [self.path / ONE] if (self.path / ONE).is_file() else []
        if not found:
            raise _bad(f"there is neither {ONE} nor {INDEX} in {self.path}")
        return [(name, file) for file in found for name in self._file(file).keys()]  # noqa: SIM118

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise _bad(f"{path} is missing") from None
            except (SafetensorError, OSError) as error:
                raise _bad(f"{path} is damaged: {error}") from None
        return self._open[path]

    def close(self) -> None:
        """Let go of the files; they are opened again where something is read."""
        self._open.clear()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def where(self, name: str) -> Path:
        return self._files[name]

    def slices(self, name: str) -> Any:
        try:
            return self._file(self._files[name]).get_slice(name)
        except SafetensorError:
            raise _bad(f"{self._files[name]} has no {name}") from None

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """A box of a tensor, into a tensor of its shape, a piece at a time."""
        given = self.slices(name)
        if not box.size:
            into.copy_(self._file(self._files[name]).get_tensor(name))
            return
        row = box.numel // box.size[0] * 8
        step = max(1, READ_BYTES // max(row, 1))
        rest = tuple(slice(a, b) for a, b in zip(box.start[1:], box.stop[1:], strict=True))
        for first in range(0, box.size[0], step):
            last = min(first + step, box.size[0])
            into[first:last].copy_(given[(slice(box.start[0] + first, box.start[0] + last), *rest)])

    def names_for(self, model: nn.Module) -> dict[str, str]:
        """`names_in`, once names, shapes and types fit. Raises InputError that names every tensor that does not."""
        stored, problems = names_in(self, model), list[TpcompileError]()
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
        for name, p in [*model.named_parameters(), *buffers]:
            if name not in stored:
                problems.append(_bad(f"{self.path} has no {name}"))
                continue
            where, given = self.where(stored[name]), self.slices(stored[name])
            dtype = _dtype(given)
            if list(given.get_shape()) != list(p.shape):
                problems.append(_bad(f"{where} has {stored[name]} in shape {list(given.get_shape())}, and the model in {list(p.shape)}"))
            elif torch.promote_types(dtype, p.dtype) != p.dtype:
                problems.append(
                    _bad(f"{where} has {stored[name]} in {dtype_name(dtype)}, which the model's {dtype_name(p.dtype)} cannot hold")
                )
        optional = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        extra = sorted(self.names - set(stored.values()))
        problems += [_bad(f"{self.where(n)} has {n}, and the model has not") for n in extra if not any(p.search(n) for p in optional)]
        if (error := several(problems)) is not None:
            raise error
        return stored


def _bad(what: str) -> InputError:
    return InputError(what, at="compile(weights=...)", fix="give safetensors with the names of the model's state dict")


# ------------------------------------------------------------------------------------------- into a rank's module


def source_of(weights: str | Path | Initial, model: nn.Module) -> Weights | Initialiser:
    """Where a model's values come from."""
    return Initialiser(model, weights.seed) if isinstance(weights, Initial) else Weights(weights)


def names_in(weights: Weights | Initialiser, model: nn.Module) -> dict[str, str]:
    """The name in the files for every name of the model that they have: a twin's, or one without the base model's prefix, serves too."""
    prefix, found = f"{getattr(model, 'base_model_prefix', '')}.", dict[str, str]()
    twins: dict[int, list[str]] = {}
    own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in own:
        twins.setdefault(id(tensor), []).append(name)
    for name, tensor in own:
        for other in (name, *twins[id(tensor)]):
            spelled = (other, other.removeprefix(prefix), prefix + other)
            if (stored := next((s for s in spelled if s in weights.names), None)) is not None:
                found.setdefault(name, stored)
    return found


def _dtype(given: Any) -> torch.dtype:
    """The element type of a slice."""
    name = given.get_dtype()
    kinds = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "C64": "complex64"}
    kinds |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)} | {f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)}
    if name not in kinds:
        raise _bad(f"there is no rule for tensors of type {name}")
    found: torch.dtype = getattr(torch, kinds[name])
    return found


@torch.no_grad()
def fill(
    modules: Iterable[nn.Module], model: nn.Module, weights: Weights | Initialiser, pieces: Mapping[str, Piece], device: torch.device
) -> None:
    """Give a rank's modules their pieces of the weights, in memory of their own; what is tied stays tied.

    Buffers that no file has are computed by the model's own initialiser, where they are on the meta device.
    """
    stored = weights.names_for(model)
    for module in modules:
        made: dict[int, nn.Parameter] = {}
        for path, part in module.named_modules():
            for name, p in part.named_parameters(recurse=False, remove_duplicate=False):
                full = f"{path}.{name}".lstrip(".")
                if id(p) not in made:
                    shape = tuple(model.get_parameter(full).shape)
                    new = torch.empty(p.shape, dtype=p.dtype, device=device)
                    for piece in parts(pieces[full], shape, new):
                        weights.read(stored[full], piece.box, piece.local(piece.box).of(new))
                    made[id(p)] = nn.Parameter(new, requires_grad=p.requires_grad)
                part.register_parameter(name, made[id(p)])
    fill_buffers(modules, model, weights, device)
    weights.close()


@torch.no_grad()
def fill_buffers(modules: Iterable[nn.Module], model: nn.Module, weights: Weights | Initialiser, device: torch.device) -> None:
    """Values for the buffers of modules: from the files, else from the model, else computed by its initialiser."""
    stored, computed = names_in(weights, model), dict[str, dict[str, Tensor]]()
    for module in modules:
        for path, part in module.named_modules():
            for name, buffer in part.named_buffers(recurse=False):
                full = f"{path}.{name}".lstrip(".")
                if full in stored:
                    value = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
                    weights.read(stored[full], Box((0,) * buffer.dim(), tuple(buffer.shape)), value)
                elif buffer.is_meta:
                    if path not in computed:
                        computed[path] = compute_buffers(model, path)
                    value = computed[path][name].to(device)
                else:
                    continue
                part._buffers[name] = value


def compute_buffers(model: nn.Module, path: str) -> dict[str, Tensor]:
    """The buffers that one module of a model on the meta device starts with, by the model's own `_init_weights`.

    Raises InputError for a buffer that it does not set.
    """
    owner, own = copy.copy(model.get_submodule(path)), dict[str, Tensor]()
    for name, buffer in owner._buffers.items():
        if buffer is not None:
            own[name] = torch.full(buffer.shape, _unset(buffer.dtype), dtype=buffer.dtype)
    owner.__dict__["_buffers"] = dict(own)
    owner.__dict__["_parameters"] = {n: p if p is None else nn.Parameter(torch.empty_like(p)) for n, p in owner._parameters.items()}
    start = getattr(model, "_init_weights", None)
    if callable(start):
        with torch.random.fork_rng(devices=[]):
            start(owner)
    found = {name: value for name, value in owner._buffers.items() if value is not None}
    for name, value in found.items():
        unset = value.isnan() if value.is_floating_point() else value == _unset(value.dtype)
        if value.is_meta or value.dtype == torch.bool or unset.any():
            raise InputError(
                f"buffer {f'{path}.{name}'.lstrip('.')} is on the meta device, in no file, and not set by the model's initialiser",
                at="compile(weights=...)",
                fix="build the model's parameters alone on the meta device, or make the buffer persistent",
            )
    return found


def _unset(dtype: torch.dtype) -> float:
    """A value that no initialiser would leave."""
    if dtype.is_floating_point:
        return float("nan")
    return 0 if dtype in (torch.bool, torch.complex64, torch.complex128) else torch.iinfo(dtype).min
