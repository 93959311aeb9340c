"""Which parts of an emitted program go through torch.compile, one graph each, with their collectives; or why none do.

    stage     a stage's forward, of a dozen layers at most: compiling takes time for each
    layer     each class of layers, once; what is between layers runs eagerly. In deeper stages, and where something happens between layers
              that is in no graph: replicas gather and reduce by layers, and a layer that runs again in backward is run by a checkpoint

torch's own regions that are compiled once inside a larger graph (torch.compiler.nested_compile_region) would do for deep stages; but in
torch 2.13 Inductor makes wrong gradients of regions that hold collectives.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tpcompile.sharing import SHARED_OUT, WHOLE_BACKWARD

DEEP = 12
"""Layers of a stage that are compiled as one graph, at most."""


class Unit(NamedTuple):
    """What one compiled graph holds; without one, `reason` says why, where a backend was asked for."""

    of: Literal["stage", "layer"] | None
    reason: str = ""


def unit(backend: str | None, layers: int, *, schedule: str, pp: int, dp: int, data_parallel: str, recompute: str) -> Unit:
    """What is compiled through a backend of a stage of so many layers, for these options."""
    if backend is None:
        return Unit(None)
    if pp > 1 and schedule not in WHOLE_BACKWARD:
        return Unit(None, f"schedule {schedule} divides backward in two, and that of a compiled graph is one piece")
    if recompute == "selective":
        return Unit(None, "the core of attention that runs again in backward is a part of a layer's graph")
    between = recompute == "full" or (dp > 1 and (pp == 1 or data_parallel in SHARED_OUT))
    return Unit("layer" if layers and (between or layers > DEEP) else "stage")
