"""Which tensor-parallel groups do not fit on one node."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tpcompile.mesh import Mesh

_SHOWN = 3


def devices_per_node(given: int | None) -> int:
    """As given, else as many as the launcher started here, else 8."""
    return given or int(os.environ.get("LOCAL_WORLD_SIZE", "8"))


def warning(mesh: Mesh, per_node: int) -> str:
    """A warning that names the tensor groups whose ranks are on several nodes; "" if there are none."""
    crossing = [group for group in mesh.groups("tp") if len({rank // per_node for rank in group}) > 1]
    if not crossing:
        return ""
    named = ", ".join(_spell(group) for group in crossing[:_SHOWN])
    more = f" and {len(crossing) - _SHOWN} more" if len(crossing) > _SHOWN else ""
    return f"warning: tensor groups cross nodes of {per_node} ranks, and slow down every layer: ranks {named}{more}"


def _spell(group: Sequence[int]) -> str:
    """(4, 5, 6) → "4–6"; (0, 2) → "0+2"."""
    first, last = group[0], group[-1]
    return f"{first}–{last}" if list(group) == list(range(first, last + 1)) else "+".join(map(str, group))
