"""Memory of the loss of a large vocabulary: what a rank has at once, and what it keeps for backward, falls by the number of tensor ranks.

A rank's module runs alone, on a process group that moves nothing: its numbers mean nothing, its sizes everything. Bytes are those of the
storages that are alive after each operation.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import one_of
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import tpcompile
from tpcompile import collectives

WORDS, HIDDEN, ROWS, LENGTH = 4096, 8, 4, 16


class Words(nn.Module):
    """A head over many words. Its scores are in float64, as the hidden states are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.up(x)).flatten(0, 1), labels.flatten())


@dataclass
class Alive(TorchDispatchMode):
    """The bytes of what operations have made, and is alive."""

    now: int = 0
    peak: int = 0
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage())._cdata not in self.seen | given:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return made

    def gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


@dataclass
class Used:
    peak: int
    kept: int


def used(parts: int, **options: Any) -> Used:
    """Of forward and backward on the first of so many tensor ranks."""
    torch.manual_seed(0)
    model = Words().double()
    rows = {"x": torch.randn(ROWS, LENGTH, HIDDEN, dtype=torch.float64), "labels": torch.randint(WORDS, (ROWS, LENGTH))}
    module = tpcompile.compile(model, f"tp={parts}", rows, **options).program(0).module
    names = module.forward.__code__.co_varnames[1 : module.forward.__code__.co_argcount]
    given = {**rows, "replicas": torch.tensor(1.0, dtype=torch.float64)}
    given |= {name: torch.tensor(float(ROWS * LENGTH), dtype=torch.float64) for name in names if name.startswith("loss_count")}
    kept: dict[int, int] = {}
    own = {p.untyped_storage()._cdata for p in module.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with one_of(parts) as name:
        collectives.bind(module, {"tp": name})
        with Alive() as alive, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            (loss,) = module(**{name: given[name] for name in names})
            loss.backward()
    return Used(alive.peak, sum(kept.values()))


KEPT, PEAK = 2, 4
"""In units of the scores that a rank has: on one device these are 1 and 3, the logarithms of the softmax and two gradients beside them."""


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_it_falls_by_the_number_of_ranks(parts: int) -> None:
    """To within what does not depend on the vocabulary: hidden states, and a few numbers for each token."""
    alone, cut, uncut = used(1), used(parts), used(parts, vocab_parallel=False)
    scores, rest = ROWS * LENGTH * WORDS * 8, ROWS * LENGTH * 8 * (4 * HIDDEN + 40)
    assert scores <= alone.kept <= scores + rest and 3 * scores <= alone.peak <= 3 * scores + rest
    assert cut.kept <= KEPT * scores / parts + rest and cut.peak <= PEAK * scores / parts + rest, (alone, cut)
    assert uncut.kept >= scores and uncut.peak >= 3 * scores, "a whole vocabulary gains nothing"
