"""Random numbers by global index in an eager model: those that a program compiled with dropout="exact" draws, without compiling anything.

While it is on, torch's own dropout and random operators are other functions, also where torch calls them inside attention. Their calls are
numbered as they run: the sites of a compiled program. What activation checkpointing runs again has the numbers that it had before.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint

from tpcompile import collectives
from tpcompile.errors import Refused, caller

_library: Any = torch.library.Library
Dropout = Callable[[Tensor, float, bool], Tensor]

ALPHA = 1.7580993408473766
"""The negative of what SELU tends to on the left: Klambauer et al., Self-Normalizing Neural Networks (2017), section 2."""


@contextmanager
def exact_dropout(seed: int | None = None, *, step: int = 0) -> Iterator[None]:
    """Within, an untouched model drops what one compiled with `dropout="exact"` drops in its call number `step`, counted from 0.

    `seed` is by default that of torch's generator, as for a compiled model when it first runs. A forward and its backward may both be
    within, or the forward alone; each forward needs its own. The batch is the whole batch. Attention is computed without fused kernels.
    Raises Refused, when the model draws them, for random numbers that have no such place.
    """
    numbers = _Numbers(torch.initial_seed() & (2**62 - 1) if seed is None else seed, step)
    with numbers.drawn():
        yield


class _Numbers:
    """The numbers of one forward."""

    def __init__(self, seed: int, step: int) -> None:
        self.key = torch.tensor([collectives.mix(seed, step), 0, 1])
        self.site = 0
        self.on = False

    def next(self) -> int:
        self.site += 1
        return self.site - 1

    def drop(self, x: Tensor, p: float, train: bool) -> Tensor:
        return collectives.dropout_at(x, p, self.key.to(x.device), self.next()) if train and p > 0 else x

    def drop_features(self, x: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0:
            return x
        numbers = self.rand([*x.shape[:2], *[1] * (x.dim() - 2)], dtype=x.dtype, device=x.device)
        return x * ((numbers >= p).to(x.dtype) * (0.0 if p >= 1 else 1 / (1 - p)))

    def drop_alpha(self, x: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0 or p >= 1:
            return x * 0.0 if train and p >= 1 else x
        scale = 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
        kept = (self.like(x) >= p).to(x.dtype)
        return x * kept * scale + (kept - (1 - p)) * ALPHA * scale

    def rand(self, size: Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
        key = self.key.to(device or "cpu")
        return collectives.uniform(size, key, self.next(), dtype=dtype or torch.get_default_dtype())  # type: ignore[no-any-return]

    def like(self, x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return self.rand(x.shape, dtype=dtype or x.dtype, device=x.device)

    def between_(self, x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Tensor:
        _own(generator)
        return x.copy_(self.like(x) * (high - low) + low)

    def exponential_(self, x: Tensor, rate: float = 1.0, *, generator: Any = None) -> Tensor:
        _own(generator)
        return x.copy_((-torch.log1p(-self.like(x))).clamp_min(torch.finfo(x.dtype).eps / 2) / rate)

    def randn(self, size: Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
        uniform = self.rand(size, dtype=dtype, device=device)
        return torch.erfinv(uniform * 2.0 + (2.0 ** -collectives.DIGITS[uniform.dtype] - 1)) * 2**0.5

    def randn_like(self, x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return self.randn(x.shape, dtype=dtype or x.dtype, device=x.device)

    def normal_(self, x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
        _own(generator)
        return x.copy_(self.randn_like(x) * std + mean)

    def bernoulli_(self, x: Tensor, p: float = 0.5, *, generator: Any = None) -> Tensor:
        _own(generator)
        return x.copy_(self.like(x) < p)

    def bernoulli_of(self, p: Tensor, *, generator: Any = None) -> Tensor:
        _own(generator)
        return (self.like(p) < p).to(p.dtype)

    @contextmanager
    def drawn(self) -> Iterator[None]:
        if self.on:
            yield
            return
        self.on, library = True, _library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # that what torch has is overridden
            self._register(library)
        try:
            with sdpa_kernel(SDPBackend.MATH), self._repeated():
                yield
        finally:
            self.on = False
            library._destroy()

    def _register(self, library: Any) -> None:
        drops: dict[str, Dropout] = {"dropout": self.drop, "feature_dropout": self.drop_features, "alpha_dropout": self.drop_alpha}
        draws: dict[str, Callable[..., Tensor]] = {"rand": self.rand, "rand_like": self.like, "bernoulli": self.bernoulli_of}
        draws |= {"uniform_": self.between_, "bernoulli_.float": self.bernoulli_, "exponential_": self.exponential_}
        draws |= {"randn": self.randn, "randn_like": self.randn_like, "normal_": self.normal_}
        for device in ("CPU", "CUDA"):
            for name, work in drops.items():
                for key in (device, f"Autograd{device}"):
                    library.impl(name, work, key)
                    library.impl(f"{name}_", _in_place(work), key)
            for name, draw in draws.items():
                library.impl(name, draw, device)

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


def _in_place(work: Dropout) -> Dropout:
    return lambda x, p, train: x.copy_(work(x.clone(), p, train)) if train and p > 0 else x


def _own(generator: Any) -> None:
    if generator is not None:
        fix = "leave the generator out; or, where it makes a batch, make that outside of exact_dropout"
        raise Refused("random numbers of an own generator have no key", at="exact_dropout", source=caller(), fix=fix)
