"""Private to capture: what one call of a layer sees, and what of that its code reads."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as modules
from torch.utils import _pytree as pytree

from tpcompile.passes._likeness import INNER, Globals, Likeness, Unlike, kind_of, shape_of

FIELD = re.compile(r"_?fake_device|fake_mode|constant|pytype|dispatch_keys|real_tensor|_is_param|source|_\w+_memo(_vc|_epoch)?")
"""The attributes that export puts on a tensor."""


@dataclass
class Sight:
    """What one call of a layer sees."""

    shape: Any
    attributes: Mapping[tuple[str, str], Any]  # (path of a module in the layer, name)
    outside: Mapping[str, Any]
    arguments: Any
    tensors: tuple[Tensor, ...]  # given, and then held
    given: int
    versions: list[int]  # how often each was written to


@dataclass
class Reads:
    """What the code of a layer read while it was traced: attributes of its own modules, and of others with what they were like."""

    own: set[tuple[str, str]] = field(default_factory=set)  # (path of a module in the layer, name)
    others: list[tuple[nn.Module, str, Any]] = field(default_factory=list)


def see(tree: Mapping[str, nn.Module], outside: Globals, args: Any, kwargs: Any) -> Sight | str:
    """What a layer with these modules sees when it is called; or why that cannot be compared."""
    likeness = Likeness({id(module): path for path, module in tree.items()})
    leaves, spec = pytree.tree_flatten((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf in given:
        if not is_ordinary(leaf):
            return f"it is given a {type(leaf).__name__} that is none of the graph's, or has attributes"
    held = [t for module in tree.values() for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    if any(not isinstance(tensor, FakeTensor) for tensor in held):
        return "it holds a tensor that is none of the graph's"
    tensors = (*given, *held)
    kinds = [kind_of(leaf) if isinstance(leaf, Tensor) else likeness.of(leaf) for leaf in leaves]
    if _holds_unlike(kinds):
        return "it is given an object that cannot be compared"
    modes = (torch.is_grad_enabled(), *_autocast(), torch.get_default_dtype())
    arguments = (spec, kinds, _pattern(map(id, tensors)), _pattern(map(memory, tensors)), modes)
    attributes = {
        (path, name): likeness.of(value) for path, module in tree.items() for name, value in vars(module).items() if name not in INNER
    }
    return Sight(
        shape_of(tree), attributes, outside.likeness(likeness), arguments, tensors, len(given), [tensor._version for tensor in tensors]
    )


def _autocast() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda"))


def is_ordinary(tensor: Any) -> bool:
    """Whether a tensor is one of the graph's, and code has put no attribute on it."""
    return type(tensor) is FakeTensor and tensor.layout == torch.strided and all(map(FIELD.fullmatch, vars(tensor)))


def memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _pattern(keys: Any) -> list[int]:
    """For each key the place where it comes first."""
    first: dict[int, int] = {}
    return [first.setdefault(key, index) for index, key in enumerate(keys)]


def containers(value: Any) -> set[int]:
    """The identities of the containers in a value that may be changed."""
    found: set[int] = set()
    todo = [value]
    while todo:
        match todo.pop():
            case dict() as held:
                found.add(id(held))
                todo += held.values()
            case list() as held:
                found.add(id(held))
                todo += held
            case tuple() as held:
                todo += held
            case _:
                pass
    return found


def _holds_unlike(value: Any) -> bool:
    match value:
        case Unlike():
            return True
        case tuple() | list():
            return any(map(_holds_unlike, value))
    return False


def changed(before: Sight, after: Sight) -> str:
    """What a forward changes that the next could see; "" for nothing."""
    if before.shape != after.shape or before.attributes.keys() != after.attributes.keys():
        return "its modules"
    for key, value in before.attributes.items():
        if not _holds_unlike(value) and value != after.attributes[key]:
            return ".".join(key).lstrip(".")
    for name, value in before.outside.items():
        if not _holds_unlike(value) and value != after.outside[name]:
            return name
    if before.arguments != after.arguments or any(a is not b for a, b in zip(before.tensors, after.tensors, strict=True)):
        return "what it is given"
    return "a tensor in place" if before.versions != after.versions else ""


def differs(first: Sight, reads: Reads, sight: Sight, tree: Mapping[str, nn.Module]) -> bool:
    """Whether anything tells a call from the one that was traced."""
    if sight.arguments != first.arguments or sight.shape != first.shape or sight.outside != first.outside:
        return True
    for key in reads.own:
        if (key in first.attributes) != (key in sight.attributes) or first.attributes.get(key) != sight.attributes.get(key):
            return True
    likeness = Likeness({id(each): path for path, each in tree.items()})
    return any(likeness.of(vars(module).get(name)) != value for module, name, value in reads.others)


def looks_like(first: Sight, reads: Reads, module: nn.Module) -> bool:
    """Whether a layer has what was read of the first one."""
    tree = dict(module.named_modules(remove_duplicate=False))
    likeness = Likeness({id(each): path for path, each in tree.items()})
    if shape_of(tree) != first.shape:
        return False
    for path, name in reads.own:
        held, known = vars(tree[path]), first.attributes.get((path, name))
        if (name in held) != ((path, name) in first.attributes) or (name in held and likeness.of(held[name]) != known):
            return False
    return True


def incomparable(sight: Sight, reads: Reads) -> str:
    """What a forward read, or may have read, that cannot be compared; "" for nothing."""
    name = next((name for name in reads.own if _holds_unlike(sight.attributes.get(name))), None)
    if name is not None:
        return f"reads {'.'.join(name).lstrip('.')}"
    return next((f"may read {name}" for name, value in sight.outside.items() if _holds_unlike(value)), "")


def generators() -> Any:
    """The states of Python's and numpy's generators of random numbers."""
    return random.getstate(), sys.modules["numpy"].random.get_state()[1].tobytes() if "numpy" in sys.modules else None


@contextmanager
def reading(tree: Mapping[str, nn.Module], sight: Sight) -> Iterator[Reads]:
    """Note which attributes of modules are read."""
    reads = Reads()
    own = {id(module): path for path, module in tree.items()}
    everything: set[str] = set()
    strangers: dict[tuple[int, str], nn.Module] = {}
    inner = modules.__file__

    def read(module: nn.Module, name: str) -> Any:
        if name == "__dict__":
            if sys._getframe(1).f_code.co_filename != inner and id(module) in own:
                everything.add(own[id(module)])
        elif name not in INNER:
            if (path := own.get(id(module))) is not None:
                reads.own.add((path, name))
            else:
                strangers[id(module), name] = module
        return object.__getattribute__(module, name)

    if "__getattribute__" in vars(nn.Module):
        raise RuntimeError("torch.nn.Module has a __getattribute__ of its own")
    nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
    try:
        yield reads
    finally:
        del nn.Module.__getattribute__
    reads.own |= {key for key in sight.attributes if key[0] in everything}
    likeness = Likeness(own)
    reads.others += [(module, name, likeness.of(vars(module)[name])) for (_, name), module in strangers.items() if name in vars(module)]
