"""Equal layers as one line.

blocks.0.mlp, blocks.1.mlp, blocks.2.mlp, head   →   blocks.0–2.mlp, head
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def split_layer(name: str, layers: Sequence[str]) -> tuple[str, str]:
    """A module path as its layer and the rest: "blocks.1.mlp" → ("blocks.1", "mlp"); outside of layers ("", name)."""
    inside = [layer for layer in layers if name == layer or name.startswith(f"{layer}.")]
    layer = max(inside, key=len, default="")
    return layer, name[len(layer) :].lstrip(".") if layer else name


def spell(layers: Iterable[str]) -> str:
    """["h.0", "h.1", "h.2", "h.5"] → "h.0–2, 5"."""
    stacks: dict[str, list[str]] = {}
    for layer in layers:
        stack, _, number = layer.rpartition(".")
        stacks.setdefault(stack, []).append(number)
    return ", ".join((f"{stack}." if stack else "") + _ranges(numbers) for stack, numbers in stacks.items())


def _ranges(numbers: list[str]) -> str:
    runs: list[list[str]] = []
    for number in numbers:
        if runs and number.isdecimal() and runs[-1][-1].isdecimal() and int(number) == int(runs[-1][-1]) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def fold(items: Iterable[T], name: Callable[[T], str], like: Callable[[T], Hashable], layers: Sequence[str]) -> list[tuple[str, T]]:
    """Items that are alike but for their layer, once, under a name that spells the layers; in the order of the first of each."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        layer, rest = split_layer(name(item), layers)
        key = (layer.rpartition(".")[0], rest, like(item)) if layer else (None, name(item), like(item))
        groups.setdefault(key, []).append(item)
    folded = []
    for group in groups.values():
        places = dict.fromkeys(split_layer(name(item), layers) for item in group)
        rest = next(iter(places))[1]
        spelled = ".".join(part for part in (spell(layer for layer, _ in places if layer), rest) if part)
        times = f" ×{len(group)}" if len(group) > len(places) else ""
        folded.append((spelled + times, group[0]))
    return folded
