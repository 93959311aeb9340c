"""Which stage holds which of the model's tensors, and which part of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tpcompile.collectives import length
from tpcompile.ir import PerRank, Program, Stage
from tpcompile.passes._parts import Part, layer_of
from tpcompile.passes._tree import Held, Tree


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that a rank holds: index ranges along one dimension, in order; dim None: all of it."""

    dim: int | None = None  # of the whole parameter
    ranges: tuple[tuple[int, int], ...] = ()  # [start, stop), as they lie in the piece

    def of(self, value: Tensor) -> Tensor:
        """A rank's part of `value`, a tensor of the whole parameter's shape."""
        if self.dim is None:
            return value
        pieces = [value.narrow(self.dim, start, stop - start) for start, stop in self.ranges if stop > start]
        return torch.cat(pieces or [value.narrow(self.dim, 0, 0)], self.dim)


class Holding:
    """The model's parameters and buffers over its stages.

    A stage holds what its graph uses or updates. A tied twin is another name of that, on the stages where the twin's module runs. What
    no graph uses is held whole where the layer that it belongs to runs, or by the first stage.
    """

    def __init__(
        self,
        program: Program,
        model: nn.Module,
        pieces: Mapping[str, Sequence[Piece]],
        stages: tuple[Stage, ...],
        parts: Mapping[int, tuple[Part, ...]],
        coordinate: int,
        device: torch.device,
    ) -> None:
        self._program, self._model, self._pieces, self._coordinate, self._device = program, model, pieces, coordinate, device
        self._first = stages[0].index
        self._users: dict[str, tuple[int, ...]] = {}  # qualified name → the stages whose graphs use it
        for stage in stages:
            for placeholder in stage.graph.find_nodes(op="placeholder"):
                name = stage.parameters.get(placeholder.name) or stage.buffers.get(placeholder.name)
                if name and placeholder.users:
                    self._users[name] = (*self._users.get(name, ()), stage.index)
            for name in stage.updates:
                if stage.index not in self._users.get(name, ()):
                    self._users[name] = (*self._users.get(name, ()), stage.index)
        self._runs = {  # stage → the module paths that run on it
            index: {program.sources[node.name].path for part in own for node in part.nodes if node.name in program.sources}
            for index, own in parts.items()
        }
        self._twins = {**self._same(), **program.aliases}
        names = (name for name, _, is_parameter, _ in self._tensors() if is_parameter)
        self.unused = frozenset(name for name in names if name not in self._users and name not in self._twins)

    def piece(self, name: str) -> Piece:
        """What the rank holds of a parameter."""
        return self._pieces[name][self._coordinate] if name in self._pieces and name in self._users else Piece()

    def _shape(self, name: str, tensor: Tensor) -> tuple[int | PerRank, ...]:
        """The local shape of a parameter on all tensor ranks."""
        shape: list[int | PerRank] = list(tensor.shape)
        pieces = self._pieces.get(name, ()) if name in self._users else ()
        for dim in {piece.dim for piece in pieces if piece.dim is not None}:
            lengths = tuple(length(piece.ranges) for piece in pieces)
            shape[dim] = lengths[0] if len(set(lengths)) == 1 else PerRank(lengths)
        return tuple(shape)

    def tree(self, stage: Stage) -> tuple[Tree, dict[str, str]]:
        """A stage's tensors at their original places, and the twins that are other names of them."""
        tree, twins = Tree(), dict[str, str]()
        for name, tensor, is_parameter, persistent in self._tensors():
            path, _, own = name.rpartition(".")
            if stage.index not in self._homes(name, is_parameter or persistent):
                continue
            if name in self._twins:
                tree.at(path)
                twins[name] = self._twins[name]
                continue
            value = self._copy(self.piece(name).of(tensor.detach()))
            value.requires_grad_(is_parameter and tensor.requires_grad)
            tree.at(path).held[own] = Held(value, is_parameter, persistent, self._shape(name, tensor))
        for placeholder in stage.constants:
            value = self._copy(self._program.constants[placeholder])
            tree.held[placeholder] = Held(value, is_parameter=False, persistent=False, shape=tuple(value.shape))
        return tree, twins

    def _tensors(self) -> Iterator[tuple[str, Tensor, bool, bool]]:
        """Every name of every tensor of the model: name, tensor, whether it is a parameter, whether it is in the state dict."""
        for path, owner in self._model.named_modules(remove_duplicate=False):
            for is_parameter, tensors in ((True, owner._parameters), (False, owner._buffers)):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        yield f"{path}.{name}".lstrip("."), tensor, is_parameter, name not in owner._non_persistent_buffers_set

    def _same(self) -> dict[str, str]:
        """Names of one and the same tensor, each with the name that is used, or with the first."""
        names: dict[int, str] = {}
        for name, tensor, *_ in self._tensors():
            if id(tensor) not in names or (name in self._users and names[id(tensor)] not in self._users):
                names[id(tensor)] = name
        return {name: names[id(tensor)] for name, tensor, *_ in self._tensors() if names[id(tensor)] != name}

    def _homes(self, name: str, saved: bool) -> tuple[int, ...]:
        """The stages that hold a name."""
        if name not in self._twins:
            return self._users.get(name) or ((self._layer_home(name),) if saved else ())
        holders = self._users.get(self._twins[name]) or ((self._layer_home(self._twins[name]),) if saved else ())
        owner = name.rpartition(".")[0]
        return tuple(index for index in holders if any(layer_of(path, [owner]) for path in self._runs[index])) or holders[:1]

    def _layer_home(self, name: str) -> int:
        """The first stage that runs the layer of a tensor."""
        layer = layer_of(name, self._program.layers)
        return next((index for index, paths in self._runs.items() if layer and any(layer_of(path, [layer]) for path in paths)), self._first)

    def _copy(self, value: Tensor) -> Tensor:
        return value.detach().to(value.device if value.is_meta else self._device, copy=True)
