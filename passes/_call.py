"""The function that is exported: a model's call, and its loss, from a flat list of tensors to a flat list of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tpcompile.errors import CaptureError, InputError
from tpcompile.passes._reasons import user_code, user_line
from tpcompile.passes._state import State, no_buffer

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Leaves that hold no tensor."""


@dataclass(frozen=True)
class Found:
    """What the model returned while it was exported."""

    spec: pytree.TreeSpec
    places: tuple[int | None, ...]  # of every leaf, its place among the exported values; None for one that is no tensor
    constants: Mapping[int, Any]  # the leaves that are no tensors
    loss: int | None  # the place of the loss
    notes: tuple[str, ...]
    replaced: tuple[str, ...] = ()  # the buffers that forward puts another tensor in place of: these end the exported values
    exchanged: frozenset[str] = frozenset()  # the same of plain attributes, which cannot be kept


@dataclass
class Record:
    """What happened inside a call. Export puts the attributes of the call itself back, lists too, but knows nothing of this object."""

    found: Found | None = None
    refused: CaptureError | None = None
    notes: dict[str, None] = field(default_factory=dict)


class _Strangers(TorchFunctionMode):
    """Notice tensors that are not the model's, and that export takes for constants: such as want a gradient, or are written to."""

    def __init__(self, record: Record, state: State) -> None:
        super().__init__()
        self._record, self._state = record, state

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = args if all(isinstance(a, Tensor) for a in args) else pytree.tree_leaves((args, kwargs))
        if torch.is_grad_enabled() and any(type(leaf) in (Tensor, nn.Parameter) and leaf.requires_grad for leaf in leaves):
            self._record.refused = no_parameter()
            raise self._record.refused
        if name := self._state.written(function, leaves):
            self._record.refused = no_buffer(name)
            raise self._record.refused
        return function(*args, **(kwargs or {}))


def no_parameter() -> CaptureError:
    return CaptureError(
        "a tensor that requires a gradient is no parameter of the model: it would be taken for a constant",
        at=user_code(),
        source=user_line(),
        fix="keep it as an nn.Parameter attribute, or in an nn.ParameterList; a loss with parameters belongs into the model",
    )


class Call(nn.Module):
    """model(*args, **kwargs) and loss(outputs, batch), with the batch's tensors given one after the other."""

    def __init__(
        self,
        model: nn.Module,
        leaves: Sequence[Any],
        spec: pytree.TreeSpec,
        arguments: Callable[[Mapping[str, Any]], Arguments],
        loss: Callable[..., Any] | None,
    ) -> None:
        super().__init__()
        self.model = model
        self._leaves, self._spec, self._arguments = tuple(leaves), spec, arguments
        self._loss = (loss,)  # in a tuple: a loss that is a module must not become a part of the model
        self.record = Record()

    def forward(self, tensors: list[Tensor]) -> tuple[Any, ...]:
        before = State.of(self.model)
        with _Strangers(self.record, before):
            outputs, loss = self.run(tensors)
        found, values = _flat(outputs, loss)
        after = State.of(self.model)
        replaced = before.replaced(after)
        self.record.found = replace(found, replaced=tuple(replaced), exchanged=before.exchanged(after))
        return (*values, *replaced.values())

    def run(self, tensors: Sequence[Tensor]) -> tuple[Any, Tensor | None]:
        """What the model returns for these tensors, and the loss of it, as the user would call them."""
        rest = iter(tensors)
        batch = pytree.tree_unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves], self._spec)
        args, kwargs = self._arguments(batch)
        (given,) = self._loss
        outputs = self.model(*args, **kwargs)
        return outputs, _own_loss(outputs) if given is None else _scalar(given(outputs, batch))


def _own_loss(outputs: Any) -> Tensor | None:
    """The output's `.loss`, or the output itself if it is a scalar."""
    value = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
    return value if _is_scalar(value) else None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()


def _scalar(value: Any) -> Tensor:
    if _is_scalar(value):
        return value  # type: ignore[no-any-return]
    shown = f"a tensor of {value.ndim} dimensions, {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise InputError(
        f"the loss is {shown.replace('torch.', '')}", at="loss(outputs, batch)", source=user_line(), fix="return one floating-point number"
    )


def _flat(outputs: Any, loss: Tensor | None) -> tuple[Found, tuple[Any, ...]]:
    """What is exported: the loss first, then the tensors among the outputs, each once."""
    leaves, spec = _leaves(outputs)
    values: list[Any] = [] if loss is None else [loss]
    places: list[int | None] = []
    constants: dict[int, Any] = {}
    notes = []
    for index, (path, leaf) in enumerate(leaves):
        if isinstance(leaf, Tensor | torch.SymInt):
            place = next((i for i, value in enumerate(values) if value is leaf), len(values))
            if place == len(values):
                values.append(leaf)
            places.append(place)
            continue
        places.append(None)
        constants[index] = leaf if isinstance(leaf, PLAIN) else None
        if not isinstance(leaf, PLAIN):
            notes.append(f"output{pytree.keystr(path)} is left out: torch.export cannot return a {type(leaf).__name__}")
    return Found(spec, tuple(places), constants, None if loss is None else 0, tuple(notes)), tuple(values)


def _leaves(outputs: Any) -> tuple[list[tuple[Any, Any]], pytree.TreeSpec]:
    """The leaves of an output. Dataclasses that pytree does not know are made known to it."""
    while True:
        leaves, spec = pytree.tree_flatten_with_path(outputs)
        unknown = {type(leaf) for _, leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)}
        if not unknown:
            return leaves, spec
        for kind in unknown:
            pytree.register_dataclass(kind)
