"""Dropout by global index in an eager model: the masks that a program compiled with dropout="exact" draws, without compiling anything.

While it is on, torch's own dropout operator is another function, also where torch calls it inside attention. Dropouts are numbered as they
run: the sites of a compiled program. What activation checkpointing runs again has the numbers that it had before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint

from tpcompile import collectives

_library: Any = torch.library.Library
KEYS = ("AutogradCPU", "AutogradCUDA", "CPU", "CUDA")


@contextmanager
def exact_dropout(seed: int | None = None, *, step: int = 0) -> Iterator[None]:
    """Within, an untouched model drops what one compiled with `dropout="exact"` drops in its call number `step`, counted from 0.

    `seed` is by default that of torch's generator, as for a compiled model when it first runs. A forward and its backward may both be
    within, or the forward alone; each forward needs its own. The batch is the whole batch. Attention is computed without fused kernels.
    """
    masks = _Masks(torch.initial_seed() & (2**62 - 1) if seed is None else seed, step)
    with masks.drawn():
        yield


class _Masks:
    """The masks of one forward."""

    def __init__(self, seed: int, step: int) -> None:
        self.key = torch.tensor([collectives.mix(seed, step), 0, 1])
        self.site = 0
        self.on = False

    def drop(self, x: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0:
            return x
        self.site += 1
        return collectives.dropout_at(x, p, self.key.to(x.device), self.site - 1)  # type: ignore[no-any-return]

    def drop_(self, x: Tensor, p: float, train: bool) -> Tensor:
        return x if not train or p == 0 else x.mul_(self.drop(torch.ones_like(x), p, train))

    @contextmanager
    def drawn(self) -> Iterator[None]:
        if self.on:
            yield
            return
        self.on, library = True, _library("aten", "IMPL")
        for key in KEYS:
            library.impl("dropout", self.drop, key)
            library.impl("dropout_", self.drop_, key)
        try:
            with sdpa_kernel(SDPBackend.MATH), self._repeated():
                yield
        finally:
            self.on = False
            library._destroy()

    def again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What runs a part of the forward once more, from the site that is next now."""
        start = self.site

        def repeated(*args: Any, **kwargs: Any) -> Any:
            here, self.site = self.site, start
            try:
                with self.drawn():
                    return function(*args, **kwargs)
            finally:
                self.site = here

        return repeated

    @contextmanager
    def _repeated(self) -> Iterator[None]:
        """Have activation checkpointing, of both kinds, recompute with `again`."""
        module: Any = checkpoint
        plain, apply = module._checkpoint_without_reentrant_generator, module.CheckpointFunction.apply

        def generator(function: Callable[..., Any], *rest: Any, **kwargs: Any) -> Any:
            return plain(self.again(function), *rest, **kwargs)

        def applied(function: Callable[..., Any], *rest: Any) -> Any:
            runs, again = [function], self.again(function)
            return apply(lambda *args: (runs.pop() if runs else again)(*args), *rest)

        module._checkpoint_without_reentrant_generator = generator
        module.CheckpointFunction.apply = applied
        try:
            yield
        finally:
            module._checkpoint_without_reentrant_generator = plain
            del module.CheckpointFunction.apply  # its base class has it
