"""torch.export around a model and its loss: what it is given, what it makes, and why it fails."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from tpcompile.errors import CaptureError, InputError, caller

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Leaves of an output that are the same for every batch."""


@dataclass(frozen=True)
class Found:
    """What the model returned while it was exported."""

    spec: pytree.TreeSpec
    places: tuple[int | None, ...]  # of every leaf, its place among the exported values; None for one that is no tensor
    constants: Mapping[int, Any]  # the leaves that are no tensors
    loss: int | None  # the place of the loss
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Exported:
    program: ExportedProgram
    found: Found
    notes: tuple[str, ...]


class _Record:
    """Where a call leaves what it found: export puts the module's own attributes back, lists too."""

    found: Found | None = None


class Call(nn.Module):
    """model(**arguments) and loss(outputs, batch) as a function of a flat list of tensors, with a flat list of tensors as its value."""

    def __init__(self, model: nn.Module, batch: pytree.TreeSpec, leaves: Sequence[Any], arguments: Callable[[dict[str, Any]], Any], loss: Any) -> None:
        super().__init__()
        self.model = model
        self._batch, self._leaves, self._arguments = batch, list(leaves), arguments
        self._loss = (loss,)  # in a tuple: a loss that is a module must not become a part of the model
        self.record = _Record()

    def forward(self, tensors: list[Tensor]) -> tuple[Any, ...]:
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        batch = pytree.tree_unflatten(leaves, self._batch)
        args, kwargs = self._arguments(batch)
        outputs = self.model(*args, **kwargs)
        loss = self._loss[0](outputs, batch) if self._loss[0] is not None else _own_loss(outputs)
        _check_scalar(loss, given=self._loss[0] is not None)
        return self._flat(outputs, loss)

    def _flat(self, outputs: Any, loss: Tensor | None) -> tuple[Any, ...]:
        leaves, spec = _flatten(outputs)
        values: list[Any] = [] if loss is None else [loss]
        places: list[int | None] = []
        constants, notes = {}, []
        for (path, leaf), index in zip(leaves, range(len(leaves)), strict=True):
            same = [i for i, value in enumerate(values) if value is leaf]
            places.append(None)
            if isinstance(leaf, Tensor | torch.SymInt):
                places[-1] = same[0] if same else len(values)
                values += [] if same else [leaf]
            elif isinstance(leaf, PLAIN):
                constants[index] = leaf
            else:
                constants[index] = None
                notes.append(f"the output's {pytree.keystr(path)} is left out: torch.export cannot return a {type(leaf).__name__}")
        self.record.found = Found(spec, tuple(places), constants, None if loss is None else 0, tuple(notes))
        return tuple(values)


def _flatten(outputs: Any) -> tuple[list[tuple[Any, Any]], pytree.TreeSpec]:
    """The leaves of an output. Dataclasses that pytree does not know are made known to it."""
    while True:
        leaves, spec = pytree.tree_flatten_with_path(outputs)
        unknown = {type(leaf) for _, leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)}
        if not unknown:
            return leaves, spec
        for kind in unknown:
            pytree.register_dataclass(kind)


def _own_loss(outputs: Any) -> Tensor | None:
    """The output's `.loss`, or the output itself if it is a scalar."""
    value = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
    return value if isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point() else None


def _check_scalar(loss: Any, *, given: bool) -> None:
    if given and not (isinstance(loss, Tensor) and loss.ndim == 0 and loss.is_floating_point()):
        shown = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise InputError(f"loss returned {shown}", at="loss(outputs, batch)", source=caller(), fix="return one number: a mean or a sum over the batch")


# ------------------------------------------------------------------------------------------------- running


@dataclass
class _Watch:
    """What happened inside the model that its graph does not show."""

    refused: CaptureError | None = None
    notes: dict[str, None] = field(default_factory=dict)


def export(call: Call, tensors: Sequence[Tensor], dynamic: Sequence[frozenset[int]]) -> Exported:
    """Export with these dimensions dynamic, if that fails with only the rows dynamic, and then with none.

    Raises CaptureError with the reason of the last attempt and the user's line.
    """
    attempts = [list(dynamic), [dims & {0} for dims in dynamic], [frozenset[int]() for _ in dynamic]]
    kept = [attempt for i, attempt in enumerate(attempts) if attempt not in attempts[:i]]
    for number, dims in enumerate(kept):
        watch = _Watch()
        try:
            program = _attempt(call, tensors, dims, watch)
        except (CaptureError, InputError):
            raise
        except Exception as error:
            if watch.refused is not None:
                raise watch.refused from error
            if number == len(kept) - 1:
                raise CaptureError(
                    f"torch.export cannot capture {type(call.model).__name__}: {reason_of(error)}",
                    at=code_of(error),
                    source=line_of(error),
                    fix="rewrite this line so that it does not depend on values, or compile the part of the model without it",
                ) from error
        else:
            found = call.record.found
            assert found is not None
            return Exported(program, found, (*watch.notes, *found.notes))
    raise AssertionError("unreachable")


def _attempt(call: Call, tensors: Sequence[Tensor], dims: Sequence[frozenset[int]], watch: _Watch) -> ExportedProgram:
    shapes = [{dim: Dim.AUTO for dim in sorted(wanted)} for wanted in dims]
    with torch.enable_grad(), _watching(watch):
        return torch.export.export(call, (list(tensors),), dynamic_shapes=(shapes,), strict=False)


@contextmanager
def _watching(watch: _Watch) -> Iterator[None]:
    """Notice every autograd.Function: export keeps its forward and drops its backward."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            watch.notes["the model's own activation checkpointing is left out"] = None
            return args[0](*args[2:])
        if not cls.__module__.startswith("torch.") and _needs_backward((args, kwargs)):
            watch.refused = _own_backward(cls)
            raise watch.refused
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _needs_backward(arguments: Any) -> bool:
    leaves = pytree.tree_leaves(arguments)
    return torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def _own_backward(cls: type) -> CaptureError:
    frame = user_frame()
    return CaptureError(
        f"{cls.__qualname__} is an autograd.Function: torch.export would keep its forward and lose its backward",
        at=linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() if frame else "",
        source=f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "",
        fix="write it with torch operations, or as a torch.library.custom_op with register_autograd",
    )


# --------------------------------------------------------------------------------------------- where and why


def is_user_file(name: str) -> bool:
    """Whether a file is neither torch's, ours nor made by a machine."""
    path = Path(name)
    return not name.startswith("<") and "torch" not in path.parts and path.parent != Path(__file__).parent and path.name != "contextlib.py"


def user_frame() -> FrameType | None:
    """The innermost frame of the user's code."""
    import sys

    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _innermost(error: BaseException) -> tuple[str, int] | None:
    """File and line of the innermost frame of the user's model that an error passed through."""
    found, trace = None, error.__traceback__
    seen_call = False
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        seen_call = seen_call or trace.tb_frame.f_code is Call.forward.__code__
        if seen_call and is_user_file(name):
            found = name, trace.tb_lineno
        trace = trace.tb_next
    if found is None and error.__cause__ is not None:
        return _innermost(error.__cause__)
    return found


def line_of(error: BaseException) -> str:
    found = _innermost(error)
    return f"{Path(found[0]).name}:{found[1]}" if found else caller()


def code_of(error: BaseException) -> str:
    found = _innermost(error)
    return linecache.getline(*found).strip() if found else ""


def reason_of(error: BaseException) -> str:
    """The first line of an error, without what is only of use to torch's developers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    first = first.split(" (unhinted:")[0].rstrip(". ")
    return first if len(first) <= 200 else first[:199] + "…"


def refuse(what: str, source: Any, fix: str) -> NoReturn:
    """Raise CaptureError at the line of a graph node."""
    raise CaptureError(what, at=source.code if source else "", source=str(source) if source else caller(), fix=fix)
