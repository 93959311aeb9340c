"""Emitted modules through torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tpcompile.driver import Options
from tpcompile.errors import InputError, caller
from tpcompile.ir import Stage
from tpcompile.mesh import Mesh


def check_backend(name: str | None) -> str | None:
    """Raises InputError for a backend that torch.compile does not have."""
    if name is None or name in (known := torch._dynamo.list_backends(exclude_tags=())):
        return name
    fix = f"use one of {', '.join(known)}, or None"
    raise InputError(f"torch.compile has no backend {name!r}", at=f"compile(backend={name!r})", source=caller(), fix=fix)


def compile_module(module: nn.Module, stage: Stage, options: Options, mesh: Mesh) -> None:
    """Let an emitted module of a stage run through the options' backend, from now on. It compiles when it first runs.

    Modules, their names and their hooks stay what they are: it is the forwards that are replaced.
    """
    through: Any = {"backend": options.backend}
    match options.graphs(mesh, stage).of:
        case "layer":
            for path in stage.layers:
                layer = module.get_submodule(path)
                layer.forward = torch.compile(layer.forward, **through)
        case "stage":
            module.forward = torch.compile(module.forward, **through)
        case None:
            pass
