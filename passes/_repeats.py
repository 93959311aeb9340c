"""Private to capture: which modules of a model may be layers that are alike, before any of them is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

SMALLEST = 4
"""A layer has at least so many modules: of smaller ones an operation costs as much as what it stands for."""


def siblings_in(model: nn.Module) -> dict[int, list[nn.Module]]:
    """The layers that may have others like them: of lists and sequences, the modules of a class and of parameters that come three times."""
    found: dict[int, list[nn.Module]] = {}
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            kinds: dict[object, list[nn.Module]] = {}
            for child in container.children():
                sizes = tuple((name, held.shape) for name, held in child.named_parameters())
                kinds.setdefault((type(child), sizes), []).append(child)
            for like in kinds.values():
                if len(like) >= 3 and sum(1 for _ in like[0].modules()) >= SMALLEST:
                    found |= {id(child): like for child in like if id(child) not in found}
    return found


def lone_in(model: nn.Module, siblings: Mapping[int, object]) -> frozenset[int]:
    """The modules that may be called more than once, and that have no layers with others like them: those are seen by themselves."""
    above: set[str] = set()
    for path, module in model.named_modules():
        words = path.split(".") if id(module) in siblings else []
        above.update(".".join(words[:count]) for count in range(len(words)))
    sizes: Counter[str] = Counter()
    for path, _ in model.named_modules():
        words = path.split(".")
        sizes.update(".".join(words[:count]) for count in range(1, len(words) + 1))
    return frozenset(
        id(module)
        for path, module in model.named_modules()
        if path and path not in above and id(module) not in siblings and sizes[path] >= SMALLEST
    )
