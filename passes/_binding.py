"""A user's batch and the signature of the model's forward."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tpcompile.errors import InputError, TpcompileError, several
from tpcompile.passes._call import PLAIN, Arguments
from tpcompile.passes._reasons import user_line

Batch = Mapping[str, Any]

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
NAMED = (*POSITIONAL, inspect.Parameter.KEYWORD_ONLY)

CACHE = "use_cache"
"""A flag of forward that asks for a cache of keys and values in the output: of no use in a step, and torch.export cannot return it."""


def bind_example(model: nn.Module, example: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Example inputs by the names of forward's arguments. Raises InputError for more positional ones than forward takes."""
    if isinstance(example, Mapping):
        return dict(example)
    names = [name for name, p in inspect.signature(model.forward).parameters.items() if p.kind in POSITIONAL]
    if len(example) > len(names):
        raise InputError(
            f"{len(example)} example inputs for {len(names)} positional arguments",
            at=signature(model),
            source=user_line(),
            fix=f"pass at most {len(names)}, or a dict" if names else "pass a dict",
        )
    return dict(zip(names, example, strict=False))


def check_names(model: nn.Module, batch: Batch, *, with_loss: bool) -> None:
    """Whether forward can be called with a batch. Raises InputError that names what is missing and what does not belong."""
    parameters = inspect.signature(model.forward).parameters
    at, line = signature(model), user_line()
    problems: list[TpcompileError] = []
    spare = [name for name, p in parameters.items() if p.kind in NAMED and name not in batch]
    if not with_loss and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        for name in batch:
            if name not in parameters or parameters[name].kind not in NAMED:
                near = difflib.get_close_matches(name, spare, n=1)
                fix = f"rename it to {near[0]!r}, or leave it out" if near else "leave it out, or pass loss= that reads it"
                problems.append(InputError(f"forward takes no {name!r}", at=at, source=line, fix=fix))
    for path, leaf in leaves(batch)[0]:
        if not isinstance(leaf, (Tensor, *PLAIN, Enum)):
            fix = "pass tensors, or make its type known with torch.utils._pytree.register_pytree_node"
            problems.append(InputError(f"{path!r} is a {type(leaf).__name__}, which may hold tensors", at=at, source=line, fix=fix))
    for name in spare:
        if parameters[name].default is inspect.Parameter.empty:
            what = f"forward needs {name!r}, which the batch does not have"
            problems.append(InputError(what, at=at, source=line, fix=f"add {name!r} to the batch"))
    if error := several(problems):
        raise error


def arguments(model: nn.Module, batch: Batch, *, with_loss: bool) -> Arguments:
    """What forward is called with: with a loss, names that forward does not list are for the loss alone."""
    parameters = inspect.signature(model.forward).parameters
    first = [name for name, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY and name in batch]
    rest = {name: value for name, value in batch.items() if name not in first and (not with_loss or name in parameters)}
    if CACHE in parameters and CACHE not in batch:
        rest[CACHE] = False
    return tuple(batch[name] for name in first), rest


def signature(model: nn.Module) -> str:
    """ "Tiny.forward(input_ids, labels=None)" """
    shown = []
    for name, p in inspect.signature(model.forward).parameters.items():
        stars = "*" if p.kind is inspect.Parameter.VAR_POSITIONAL else "**" if p.kind is inspect.Parameter.VAR_KEYWORD else ""
        shown.append(f"{stars}{name}" if p.default is inspect.Parameter.empty else f"{name}={p.default!r}")
    return f"{type(model).__name__}.forward({', '.join(shown)})"


def leaves(batch: Batch) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    """Everything in a batch by its dotted path: {"past": [{"key": k}]} has "past.0.key"."""
    found, spec = pytree.tree_flatten_with_path(dict(batch))
    return [(".".join(_step(key) for key in path), leaf) for path, leaf in found], spec


def _step(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
