"""Layers that keep less for backward, and run forward again there.

    "full"        a layer keeps what it is given alone; its collectives run again too
    "selective"   of the core of its attention a layer keeps q, k and v alone: scores, softmax and dropout run again

torch's non-reentrant checkpoints do both. Dropout and other random numbers have keys, so that a second run draws the same.
Source of the second: V. Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022), section 5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint

from tpcompile.errors import InputError, Refused, caller
from tpcompile.sharing import WHOLE_BACKWARD

KINDS = ("none", "full", "selective")
CORE = re.compile(r"core(_\d+)?")
"""The methods of an emitted layer that compute cores of attention."""


def check_recompute(how: str, schedule: str, pp: int) -> str:
    """Raises InputError for a way of recomputing that there is not, and Refused under schedules for which no test has shown it right."""
    at = f"compile(recompute={how!r})"
    if how not in KINDS:
        raise InputError(f"there is no recompute {how!r}", at=at, source=caller(), fix='use recompute="none", "full" or "selective"')
    if how != "none" and pp > 1 and schedule not in WHOLE_BACKWARD:
        what = f"schedule {schedule} divides backward in two, and each half would run forward again"
        raise Refused(what, at=at, source=caller(), fix=f'use recompute="none", or schedule="{WHOLE_BACKWARD[0]}"')
    return how


def recompute(module: nn.Module, layers: Sequence[str], how: str, *, borrows: bool, draws: bool) -> None:
    """Let these layers of an emitted module run again in backward, from now on.

    A module that `borrows` its parameters has them only while its forward runs. With `draws`, something draws from torch's own generator,
    whose state is then set back for the second run.
    """
    for path in layers if how != "none" else ():
        layer = module.get_submodule(path)
        for name in ["forward"] if how == "full" else [name for name in dir(type(layer)) if CORE.fullmatch(name)]:
            setattr(layer, name, _Again(layer, getattr(layer, name), borrows, draws))


class _Again:
    """A layer's forward, or the core of its attention, as a checkpoint."""

    def __init__(self, layer: nn.Module, body: Callable[..., Any], borrows: bool, draws: bool) -> None:
        self._layer, self._body, self._borrows = layer, body, borrows
        # no early stop: which collectives run again must not depend on what autograd keeps
        self._settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws, "early_stop": False}

    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._body(*args)
        run = self._body
        if self._borrows:
            run = partial(self._with, dict(self._layer.named_parameters()))
        return checkpoint(run, *args, **self._settings)

    def _with(self, parameters: dict[str, Any], *args: Any) -> Any:
        with _reparametrize_module(self._layer, parameters):
            return self._body(*args)
