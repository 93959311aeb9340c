"""How many bytes of training state a rank holds: parameters, their gradients, and the optimizer's state, in every mode of data parallelism.

With Ψ the elements of the rank's parameters, w their bytes each, k the optimizer's numbers for each (2 for Adam) and n replicas:

            parameters     gradients      optimizer      gathered besides, in a step       whole gradients besides, in a step
    ddp     w Ψ            w Ψ            k w Ψ          – ; pp > 1: w Ψ                   – ; pp > 1: w Ψ
    zero1   w Ψ            w Ψ            k w Ψ / n      – ; pp > 1: w Ψ                   – ; pp > 1: w Ψ
    zero2   w Ψ / n        w Ψ / n        k w Ψ / n      w Ψ                               those of two units; m > 1: w Ψ
    zero3   w Ψ / n        w Ψ / n        k w Ψ / n      root and two units; pp > 1: w Ψ   those of two units; m > 1: w Ψ

The first three are held between steps (gradients until they are set to None). A share of 1 / n is exact only where n divides the rows of
every parameter: a replica holds ⌈rows / n⌉ rows of each, the last ones fewer, and all of what has no rows. A unit is a layer; its gradients
wait whole until they are reduced, while the next are computed. With m > 1 micro-batches they are reduced once, with the last: until then
all of them are whole; and a pipeline's schedule keeps parameters gathered from their first backward on. torch's `replicate`, which reduces
a pipeline's gradients where nothing is cut, works on a copy of the parameters and gives back other gradients than it has added up.

Source: S. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models" (2020), section 5, whose 2Ψ + 2Ψ + KΨ
are these with w = 2; there zero2 keeps whole parameters between steps too, where torch's fully_shard does not.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Held:
    """A parameter as a tensor rank of a stage holds it. `unit` is the layer that it belongs to, "" for the root.

    A `twin` is held by an earlier stage of the same rank too, whose gradient is theirs together, and is stepped. Its own lies in one tensor
    with others', and stays.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = True
    unit: str = ""
    twin: bool = False

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def share(self, replicas: int, replica: int) -> int:
        """Bytes of the rows that a replica holds where they are shared out."""
        if not self.shape:
            return self.bytes
        rows, most = self.shape[0], -(-self.shape[0] // replicas)
        count = max(min(most, rows - replica * most), 0)
        return count * math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int  # at most, in a step, besides `parameters`
    unreduced: int  # at most, in a step, besides `gradients`

    @property
    def between(self) -> int:
        """Between steps, before gradients are dropped."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def most(self) -> int:
        """In a step; activations come on top."""
        return self.between + self.gathered + self.unreduced


def memory(
    held: Iterable[Held], mode: str, replicas: int, replica: int = 0, *, pipeline: bool = False, microbatches: int = 1, moments: int = 2
) -> Memory:
    """What a rank holds under a mode of data parallelism ("ddp", "zero1", "zero2", "zero3"); the formulas stand in this module's text.

    `moments` are the optimizer's numbers for each element of a trained parameter, in the parameter's type: 2 for Adam, 1 for SGD with
    momentum, 0 without. The numbers of steps that some optimizers keep for each parameter are left out.
    """
    parameters = list(held)
    cut = mode in ("zero2", "zero3") and replicas > 1

    def total(some: Iterable[Held], shared: bool) -> int:
        return sum(p.share(replicas, replica) if shared else p.bytes for p in some)

    trained = [p for p in parameters if p.trained]
    stepped = [p for p in trained if not p.twin]
    units = defaultdict[str, int](int)
    gradients = defaultdict[str, int](int)
    for p in parameters:
        units[p.unit] += p.bytes
        gradients[p.unit] += p.bytes if p.trained else 0
    gathered = unreduced = 0
    if cut:
        again = mode == "zero3" and not pipeline
        gathered = units[""] + _two(units) if again else sum(units.values())
        unreduced = sum(gradients.values()) if pipeline or microbatches > 1 else sum(sorted(gradients.values())[-2:])
    elif pipeline and replicas > 1:
        gathered, unreduced = sum(units.values()), sum(gradients.values())
    state = moments * total(stepped, replicas > 1 and mode != "ddp")
    return Memory(total(parameters, cut), total(trained, cut), state, gathered, unreduced)


def _two(units: dict[str, int]) -> int:
    """The two largest layers: one that runs, and one that is gathered ahead."""
    return sum(sorted(size for name, size in units.items() if name)[-2:])
