"""First values for a model on the meta device, by its own initialisers, from a seed: the same on every mesh.

compiled = tpcompile.compile(blank, "dp=2,pp=2,tp=2", batch, weights=tpcompile.Initial(seed=0))

The initialisers run once on tensors without values, where they cost nothing, and what they do to each is written down. A rank then does it
again on the CPU for the parameters that it has a piece of, one whole parameter at a time, each with random numbers of its own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tpcompile.errors import InputError
from tpcompile.passes._blank import as_on_cpu
from tpcompile.passes._sight import generators
from tpcompile.runtime.checkpoint.boxes import Box

RESETS = ("reset_parameters", "_reset_parameters")
HOOK = "_init_weights"
TRUNCATED = "_no_grad_trunc_normal_"
"""Below torch.nn.init.trunc_normal_: it draws again what fell outside."""
FIX = "give its module reset_parameters(), or the model _init_weights(module); or initialise the model before, and save it for weights="


@dataclass(frozen=True)
class Initial:
    """Initialise a model on the meta device when it first runs: `compile(..., weights=Initial(seed))`.

    Every module's `reset_parameters()` is called, children before parents, and after it the `_init_weights(module)` of the nearest module
    around it that has one. A tied parameter is initialised by the module that names it first. The values depend on the seed and the
    parameter's name alone: they are equal on every mesh, and not those of `torch.manual_seed(seed)` and the model's constructor. Running
    raises InputError for a parameter or a buffer that no initialiser gives values.
    """

    seed: int = 0  # of all random numbers


@dataclass(frozen=True)
class _Done:
    """A call of an operation on tensors, and the memory that it read and wrote."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    reads: frozenset[int]
    writes: frozenset[int]


class _Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what is done to tensors without values. Writes to the memory in `others` do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done: list[_Done] = []
        self.others: frozenset[int] = frozenset()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        written = [given.get(a.name) for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self._note(func, args, kwargs, result, _memories(written))
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, written: frozenset[int]) -> None:
        reads = _memories((args, kwargs))
        writes = written | (_memories(result) - reads)  # what has memory of its own
        if writes and not writes & self.others:
            # a tensor with values is kept as it is now
            args, kwargs = tree_map(lambda t: t.clone() if isinstance(t, Tensor) and not _blank(t) else t, (args, kwargs))
            self.done.append(_Done(func, args, kwargs, result, reads, writes))

    @contextmanager
    def whole(self, module: Any, name: str) -> Iterator[None]:
        """While inside, a function that looks at values as it goes is one call: it writes its first argument. Torch may not have it."""
        own = getattr(module, name, None)

        def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not _blank(tensor):
                return own(tensor, *args, **kwargs)  # type: ignore[misc, no-any-return]
            self._note(own, (tensor, *args), kwargs, tensor, _memories(tensor))
            return tensor

        if own is None:
            yield
            return
        setattr(module, name, noted)
        try:
            yield
        finally:
            setattr(module, name, own)


class Initialiser:
    """The values of a model that has none. Raises InputError for an initialiser that does not run without values."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed, self._model = seed, copy.deepcopy(model)  # an initialiser may mark what it has set
        self._last: tuple[str, Tensor] | None = None
        notes, self._own = _Notes(), dict[str, Tensor]()
        with torch.random.fork_rng(devices=[]), torch.no_grad(), as_on_cpu(self._model) as mode:
            own = [*self._model.named_parameters(), *self._model.named_buffers()]
            self._own = {name: tensor for name, tensor in own if _blank(tensor)}
            first = {_memory(tensor): name.rpartition(".")[0] for name, tensor in reversed(self._own.items())}
            for path, module, start in _starts(self._model):
                notes.others = frozenset(_memory(p) for p in module.parameters(recurse=False) if _blank(p) and first[_memory(p)] != path)
                drawn = generators()
                try:
                    with mode or nullcontext(), notes, notes.whole(nn.init, TRUNCATED):
                        start()
                    if drawn != generators():
                        raise ValueError("it draws random numbers from Python or numpy, which differ from rank to rank")
                except Exception as error:
                    raise InputError(
                        f"{path or 'the model'} is not initialised without values: {type(error).__name__}: {error}",
                        at="compile(weights=Initial())",
                        fix=FIX,
                    ) from error
        self._done = notes.done

    @cached_property
    def names(self) -> frozenset[str]:
        """The parameters, and the buffers that some initialiser sets."""
        written = frozenset().union(*(done.writes for done in self._done))
        buffers = {name for name, _ in self._model.named_buffers()}
        return frozenset(name for name, tensor in self._own.items() if name not in buffers or _memory(tensor) in written)

    def names_for(self, model: nn.Module) -> dict[str, str]:
        """The name here for every parameter and buffer: a tied one's first. Raises InputError for a parameter that has values."""
        for name, p in model.named_parameters():
            if not p.is_meta:
                raise InputError(
                    f"parameter {name} has values, which an initialisation would overwrite",
                    at="compile(weights=Initial())",
                    fix='build the whole model on the meta device (with torch.device("meta"): ...), or leave out weights=',
                )
        first: dict[int, str] = {}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {name: first.setdefault(id(tensor), name) for name, tensor in named if first.get(id(tensor), name) in self.names}

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """A box of a parameter's values, into a tensor of its shape."""
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made
            self._last = name, self._made(name)
        into.copy_(self._last[1][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))])

    def close(self) -> None:
        self._last = None

    def _made(self, name: str) -> Tensor:
        """One whole tensor, by what was done to it and to what that read. Raises InputError where some of its elements are never set."""
        target = self._own[name]
        needed, steps = {_memory(target)}, list[_Done]()
        for done in reversed(self._done):
            if done.writes & needed:
                needed |= done.reads | done.writes
                steps.append(done)
        memory: dict[int, torch.UntypedStorage] = {}

        def real(value: Any) -> Any:
            return _over(memory, value) if _blank(value) else value

        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:7]))
            for done in reversed(steps):
                result = done.run(*tree_map(real, done.args), **tree_map(real, done.kwargs))
                for meta, value in zip(tree_leaves(done.result), tree_leaves(result), strict=True):
                    if _blank(meta) and _memory(meta) not in done.reads:
                        _over(memory, meta).copy_(value)
        value = _over(memory, target)
        unset = value.isnan() if value.is_floating_point() else torch.tensor(not steps)
        if unset.any():
            raise InputError(f"{name} is set by no initialiser of the model", at="compile(weights=Initial())", fix=FIX)
        return value


def _starts(module: nn.Module, path: str = "", hook: Callable[[nn.Module], Any] | None = None) -> Iterator[tuple[str, nn.Module, Any]]:
    """What initialises the modules, children before their parents."""
    hook = getattr(module, HOOK, hook)
    for name, child in module.named_children():
        yield from _starts(child, f"{path}.{name}".lstrip("."), hook)
    for name in RESETS:
        if callable(reset := getattr(module, name, None)):
            yield path, module, reset
    if callable(hook):
        own = hook
        yield path, module, lambda: own(module)


def _blank(value: object) -> bool:
    return isinstance(value, FakeTensor)


def _memory(tensor: Tensor) -> int:
    """What tensors over the same memory have in common."""
    return int(tensor.untyped_storage()._cdata)


def _memories(values: Any) -> frozenset[int]:
    return frozenset(_memory(value) for value in tree_leaves(values) if _blank(value))


def _over(memory: dict[int, torch.UntypedStorage], meta: Tensor) -> Tensor:
    """A tensor on the CPU as one without values. Its memory is not a number before it is set: all its bits are one."""
    key = _memory(meta)
    if key not in memory:
        memory[key] = torch.full((meta.untyped_storage().nbytes(),), 255, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=meta.dtype).set_(memory[key], meta.storage_offset(), meta.size(), meta.stride())
