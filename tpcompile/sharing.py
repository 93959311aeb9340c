"""What replicas say to each other in a step when they share out parameters and gradients (ZeRO 2 and 3): torch's `fully_shard`.

    zero2           forward 0: gather root, a, b     …     last backward: scatter b, a, root
    zero3           forward i: gather a, b           backward i: gather b, a          last backward: scatter b, a, root
                    of the first also root

A unit is the root or a layer. Its parameters are gathered by one all-gather, unless they are there, and its gradients reduced by one
reduce-scatter, once in a step. Under zero3 a layer's parameters are dropped after its forward, and after its backward, except that
a schedule keeps them from a backward on, until the next forward. The layer before is gathered ahead, while a layer's backward runs.

Rows are cut into as many equal pieces as there are replicas, the last ones filled up: that is what travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tpcompile.layout import Size, product
from tpcompile.messages import Sent

SHARED_OUT = ("zero2", "zero3")
"""The modes in which replicas hold parts of parameters and gradients."""
WHOLE_BACKWARD = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs")
"""The schedules under which parameters may be gathered anew for backward; those that divide it in two would find no gradients."""


def gathers_again(mode: str, schedule: str, pp: int) -> bool:
    """Whether layers' parameters are dropped after forward, and gathered again for backward."""
    return mode == "zero3" and (pp == 1 or schedule in WHOLE_BACKWARD)


@dataclass(frozen=True)
class Parameter:
    """A parameter as a tensor rank holds it."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    unit: str
    reduced: bool  # whether it gets a gradient


@dataclass
class Sharing:
    """The gathers and reductions of one rank in one step, in order. `units` are the stage's layers, in the order in which they run."""

    parameters: Sequence[Parameter]
    units: Sequence[str]
    replicas: int
    again: bool  # zero3
    pipeline: bool
    there: set[str] = field(default_factory=set)

    def ahead(self) -> Iterator[Sent]:
        """What a schedule with several stages on a rank gathers before it needs it."""
        for unit in ("", *self.units):
            yield from self._gather(unit, "forward")

    def drop(self) -> None:
        self.there.clear()

    def forward(self) -> Iterator[Sent]:
        yield from self.ahead()
        if self.again:
            self.there -= set(self.units)

    def backward(self, last: bool) -> Iterator[Sent]:
        order = [unit for unit in reversed(self.units) if self.again]
        ahead = [sent for unit in order for sent in self._gather(unit, "backward")]
        scattered = [list(self._scatter(unit)) for unit in reversed(self.units)]
        if last and not self.pipeline:
            for place, sent in enumerate(scattered):
                yield from ahead[:2] if place == 0 else ahead[place + 1 : place + 2]
                yield from sent
            yield from self._scatter("")
        else:
            yield from ahead
            if self.again and not self.pipeline:
                self.there -= set(self.units)

    def end(self) -> Iterator[Sent]:
        """What a schedule leaves to its end."""
        for unit in ("", *self.units) if self.pipeline else ():
            yield from self._scatter(unit)

    def _gather(self, unit: str, direction: str) -> Iterator[Sent]:
        held = list(self._cut(unit))
        if held and unit not in self.there:
            self.there.add(unit)
            dtype = held[0].dtype if len({p.dtype for p in held}) == 1 else torch.uint8
            elements = sum(self._rows(p) * (p.dtype.itemsize // dtype.itemsize) for p in held)
            yield Sent("dp", direction, "all_gather", f"parameters of {unit or 'the root'}", dtype, elements)

    def _scatter(self, unit: str) -> Iterator[Sent]:
        held = [p for p in self._cut(unit) if p.reduced]
        if held:
            elements = self.replicas * sum(self._rows(p) for p in held)
            yield Sent("dp", "backward", "reduce_scatter", f"gradients of {unit or 'the root'}", held[0].dtype, elements)

    def _cut(self, unit: str) -> Iterable[Parameter]:
        return (p for p in self.parameters if p.shape and (p.unit if p.unit in self.units else "") == unit)

    def _rows(self, p: Parameter) -> int:
        """The elements of a replica's rows, filled up."""
        return -(-int(p.shape[0]) // self.replicas) * int(product(p.shape[1:]))
