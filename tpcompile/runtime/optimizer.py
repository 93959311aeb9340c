"""Optimizers over the parameters that a rank holds, in groups that are the same on every rank.

    groups(name, parameter)   of the whole parameter: {"weight_decay": 0.0}, a group's name, None for the settings given to all,
                              or False to leave it to another optimizer

Every rank has every group, if need be an empty one, so that schedulers of learning rates treat all ranks alike.

What a rank holds of a parameter may be a piece. An update that treats each element by itself is the same on pieces; one that mixes the
elements of a parameter (means over rows, products of matrices), or of several, is not, and is refused where it would see less.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn, optim
from torch.optim.optimizer import Optimizer

from tpcompile.errors import InputError, Refused, caller

Choice = Mapping[str, Any] | str | Literal[False] | None
"""What a function of groups may return for a parameter."""

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
"""torch's optimizers in which an element's update depends on this element's gradients alone, and on the number of steps."""

BY_PARAMETER: Mapping[type[Optimizer], str] = {
    optim.Adafactor: "takes means over the rows and the columns of a matrix",
    optim.Muon: "makes the update of a matrix orthogonal",
}
"""Those in which it depends on the whole parameter, and how."""


@dataclass(frozen=True)
class Holds:
    """How much a rank sees of the trained parameters: what an optimizer that mixes elements has to know."""

    pieces: tuple[str, ...]  # the parameters that are cut, over tp or dp
    pp: int

    @property
    def reason(self) -> str:
        if self.pieces:
            others = f" and {len(self.pieces) - 1} others" if len(self.pieces) > 1 else ""
            return f"ranks hold pieces of {self.pieces[0]}{others}"
        return f"each of {self.pp} stages holds its own parameters" if self.pp > 1 else ""


def check_kind(kind: object, call: str) -> type[Optimizer]:
    """Raises InputError unless `kind` is a class of optimizers."""
    if isinstance(kind, type) and issubclass(kind, Optimizer):
        return kind
    if isinstance(kind, Optimizer):
        what = f"{type(kind).__name__} is an optimizer already, of parameters that are not this rank's"
        raise InputError(what, at=call, source=caller(), fix=f"pass the class, and its settings: {type(kind).__name__}, lr=…")
    raise InputError(f"{kind!r} is no class of optimizers", at=call, source=caller(), fix="pass a class, such as torch.optim.AdamW")


def refuse_mixing(kind: type[Optimizer], holds: Holds, promised: bool, call: str) -> None:
    """Raise Refused for an optimizer whose update of what a rank holds would not be one device's. `promised`: it is elementwise."""
    mine = _known(kind)
    if promised or mine in ELEMENTWISE or not holds.reason:
        return
    if mine is not None and mine in BY_PARAMETER:
        if not holds.pieces:
            return
        what, fix = f"{kind.__name__} {BY_PARAMETER[mine]}, and {holds.reason}", 'use tp=1 with data_parallel="ddp"'
        raise Refused(what, at=call, source=caller(), fix=f"{fix}, or an elementwise optimizer: {_names()}")
    if mine is optim.LBFGS:
        what = f"LBFGS takes products over all parameters, and {holds.reason}"
        raise Refused(what, at=call, source=caller(), fix=f"use an elementwise optimizer: {_names()}")
    raise Refused(
        f"it is not known whether {kind.__name__} treats each element of a parameter by itself, and {holds.reason}",
        at=call,
        source=caller(),
        fix=f"pass elementwise=True if it does, or use one of {_names()}",
    )


def _known(kind: type[Optimizer]) -> type[Optimizer] | None:
    """torch's class whose update an optimizer makes, if it is one, or changes nothing but its construction."""
    for base in kind.__mro__:
        if base in ELEMENTWISE or base in BY_PARAMETER or base is optim.LBFGS:
            return base
        if any(not (name.startswith("__") and name.endswith("__")) for name in vars(base)):
            return None
    return None


def _names() -> str:
    return ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))


def choices(
    model: nn.Module, aliases: Mapping[str, str], choose: Callable[[str, nn.Parameter], Choice] | None, call: str
) -> dict[str, dict[str, Any]]:
    """The settings of every trained parameter that the optimizer takes, by its name, in the order of the model; the same on every rank.

    `aliases` maps a tied twin's name to the name that counts. A group's name stands in its settings as "name".
    """
    found: dict[str, dict[str, Any]] = {}
    for twin, parameter in model.named_parameters():
        name = aliases.get(twin, twin)
        if parameter.requires_grad and name not in found:
            chosen = choose(name, parameter) if choose else None
            if chosen is not False:
                found[name] = _settings(chosen, name, call)
    if not found:
        raise InputError("no parameter is left for the optimizer", at=call, source=caller(), fix="train some, and let groups keep some")
    return found


def grouped(chosen: Mapping[str, Mapping[str, Any]], own: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """torch's parameter groups, of those parameters that are this rank's `own`; every rank has all groups, some of them empty."""
    found: dict[str, dict[str, Any]] = {}
    for name, settings in chosen.items():
        group = found.setdefault(repr(sorted(settings.items())), {**settings, "params": []})
        if name in own:
            group["params"].append(own[name])
    return list(found.values())


def _settings(chosen: object, name: str, call: str) -> dict[str, Any]:
    match chosen:
        case None:
            return {}
        case str():
            return {"name": chosen}
        case Mapping() if "params" not in chosen:
            return {str(key): value for key, value in chosen.items()}
    raise InputError(
        f"groups gave {chosen!r} for {name}",
        at=call,
        source=caller(),
        fix='return a mapping of settings such as {"weight_decay": 0.0}, the name of a group, None, or False to leave it out',
    )


def described(kind: type[Optimizer], groups: list[dict[str, Any]], settings: Mapping[str, Any]) -> str:
    """What must be the same on all ranks, as text."""
    shown = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return re.sub(r" at 0x[0-9a-f]+", "", f"{kind.__module__}.{kind.__qualname__} {dict(settings)} {shown}")


def made(kind: type[Optimizer], groups: list[dict[str, Any]], settings: Mapping[str, Any], call: str) -> Optimizer:
    """The optimizer. Settings and parameters that it does not take are an InputError."""
    build: Callable[..., Optimizer] = kind
    try:
        return build(groups, **settings)
    except (TypeError, ValueError) as error:
        raise InputError(str(error), at=call, source=caller(), fix=f"use what {kind.__name__} takes") from error


def inner(step: Any, optimizer: Any, closure: Any = None) -> Any:
    """The step of a class below, as part of another: torch runs a step's hooks for the outer one alone."""
    return step.__wrapped__(optimizer, closure) if getattr(step, "hooked", False) else step(closure)


def dtype_of(model: nn.Module) -> torch.dtype:
    """The type in which a norm over all gradients is given: the widest of the parameters', float32 at least."""
    found = torch.float32
    for p in model.parameters():
        if p.is_floating_point():
            found = torch.promote_types(found, p.dtype)
    return found
