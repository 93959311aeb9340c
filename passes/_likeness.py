"""Private to capture: what the code of a layer can see of Python's state, in a form that two layers can be compared by.

Numbers, strings, containers and plain objects are seen through, functions with what they enclose, a layer's own modules by their place
in it, tensors by being the same one. What cannot be seen into (an iterator, a generator of random numbers, an object that C code made)
is like nothing, itself included.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import functools
import logging
import re
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

VALUES = (bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice, re.Pattern)
TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
KNOWN = (types.ModuleType, logging.Logger, logging.LoggerAdapter, property, types.GetSetDescriptorType, types.MemberDescriptorType)
WRAPPERS = (types.WrapperDescriptorType, types.MethodWrapperType, types.MethodDescriptorType, types.ClassMethodDescriptorType)
CONTAINERS = (OrderedDict, defaultdict, dict, list, tuple, frozenset, set, deque)
LIMIT = 20_000
"""More values than this are not looked at: what holds them is like nothing."""

INNER = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"})
"""Attributes of every module, which `shape_of` compares."""

HEAP = 1 << 9
"""The flag of classes that are made while Python runs."""

LIBRARIES = ("torch", *sys.stdlib_module_names)


class Unlike:
    """What is like nothing else."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class Likeness:
    """Makes likenesses of values, as one layer sees them; `paths` are the layer's modules by identity. For one moment: it remembers."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        self.paths = paths
        self._seen: dict[int, Any] = {}
        self._held: list[Any] = []  # what was seen stays alive, so that its identity is its own
        self._count = 0

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in VALUES:
            return (kind, repr(value) if kind in (float, complex, range, slice) else value)
        if isinstance(value, TORCH) or kind in (torch.Size,):
            return (kind, str(value)) if kind is torch.Size else value
        if (key := id(value)) in self._seen:
            return self._seen[key]
        self._count += 1
        self._held.append(value)
        self._seen[key] = ("seen before", self._count)  # where it holds itself
        self._seen[key] = found = Unlike() if self._count > LIMIT else self._look(value, kind)
        return found

    def _look(self, value: Any, kind: type) -> Any:
        if isinstance(value, nn.Module):
            return ("module", self.paths[id(value)]) if id(value) in self.paths else ("stranger", id(value))
        if isinstance(value, (Tensor, *KNOWN, *WRAPPERS)):
            return (kind, id(value))
        if isinstance(value, type):
            return ("class", id(value))
        if isinstance(value, enum.Enum):
            return (kind, value.name)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return (kind, str(value.node.expr))
        if kind is types.FunctionType:
            inside = [self.of(cell.cell_contents) if _full(cell) else None for cell in value.__closure__ or ()]
            return (
                "function",
                id(value.__code__),
                self.of(value.__defaults__),
                self.of(value.__kwdefaults__),
                inside,
                self._items(vars(value)),
            )
        if kind is types.MethodType:
            return ("method", self.of(value.__func__), self.of(value.__self__))
        if kind is types.BuiltinFunctionType:
            owner = value.__self__
            return ("builtin", value.__name__, id(owner) if owner is None or isinstance(owner, types.ModuleType | type) else self.of(owner))
        if kind is functools.partial:
            return ("partial", self.of(value.func), self.of(value.args), self.of(value.keywords))
        if isinstance(value, functools._lru_cache_wrapper):
            return ("cached", self.of(value.__wrapped__))
        if kind in (staticmethod, classmethod):
            return (kind, self.of(value.__func__))
        if isinstance(value, Mapping | list | tuple | set | frozenset | deque) and (known := self._container(value, kind)) is not None:
            return known
        return self._object(value, kind)

    def _container(self, value: Any, kind: type) -> Any:
        """A container of one of Python's own kinds, or of a class derived from them, with the attributes that this adds."""
        base = next((base for base in CONTAINERS if isinstance(value, base)), None)
        if isinstance(value, types.MappingProxyType):
            return (kind, self._items(dict(value)))
        if base is None or (kind is not base and not _is_plain(kind, base)):
            return None
        added = self._items(getattr(value, "__dict__", {}))
        if issubclass(base, dict):
            made = self.of(value.default_factory) if isinstance(value, defaultdict) else None
            return (kind, self._items(value), made, added)
        parts = sorted(value, key=repr) if base in (set, frozenset) else value
        return (kind, [self.of(part) for part in parts], added)

    def _items(self, held: Mapping[Any, Any]) -> Any:
        return [(self.of(key), self.of(part)) for key, part in list(held.items())]

    def _object(self, value: Any, kind: type) -> Any:
        if not _is_plain(kind, object):
            return Unlike()
        slots = [name for base in kind.__mro__ for name in _slots(base)]
        held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        with contextlib.suppress(AttributeError):
            held |= object.__getattribute__(value, "__dict__")
        return (kind, self._items(held))


def _full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty cell raises)
    except ValueError:
        return False
    return True


def _slots(kind: type) -> Iterator[str]:
    names = vars(kind).get("__slots__", ())
    for name in (names,) if isinstance(names, str) else names:
        if name not in ("__dict__", "__weakref__"):
            yield f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


def _is_plain(kind: type, base: type) -> bool:
    """Whether all that an object of this class holds is in its attributes and in what `base` holds: no other class of its bases is C's."""
    made = [each for each in kind.__mro__ if each not in base.__mro__]
    slots = sum(len(list(_slots(each))) for each in made)
    return kind.__basicsize__ <= base.__basicsize__ + 8 * (slots + 2) and all(map(_is_pythons, made))


def _is_pythons(kind: type) -> bool:
    """Whether a class statement made a class, and not C."""
    parent = kind.__base__
    open_ended = "__dict__" in vars(kind) or "__slots__" in vars(kind) or (parent is not None and parent.__dictoffset__ != 0)
    return bool(kind.__flags__ & HEAP) and (open_ended or kind.__module__ in ("typing", "abc", "collections.abc"))


# ------------------------------------------------------------------------------------------------ of modules


def has_hooks(module: nn.Module) -> bool:
    held = vars(module)
    return any(held.get(name) for name in held if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")))


def shape_of(tree: Mapping[str, nn.Module]) -> Any:
    """Classes, modes, and the names and types of parameters and buffers, of a layer's modules by their paths in it."""
    return [(path, type(module), module.training, _held(module)) for path, module in tree.items()]


def _held(module: nn.Module) -> Any:
    tensors = (*module._parameters.items(), None, *module._buffers.items())
    kinds = [item and (item[0], item[1] is not None and kind_of(item[1])) for item in tensors]
    modules = [(name, child is None) for name, child in module._modules.items()]
    return kinds, modules, sorted(module._non_persistent_buffers_set)


def kind_of(tensor: Tensor) -> Any:
    """What can be asked of a tensor without its values."""
    sizes = [str(size) for size in (*tensor.shape, None, *tensor.stride(), tensor.storage_offset())]
    flags = (tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), isinstance(tensor, nn.Parameter), tensor._is_view())
    return sizes, tensor.dtype, tensor.device, tensor.layout, flags


# ------------------------------------------------------------------------- what code reads beside its arguments


class Globals:
    """The variables that the methods of some classes can read outside of what they are given: of their modules, and of classes."""

    def __init__(self, classes: Iterable[type]) -> None:
        self._places: dict[tuple[int, str], Mapping[str, Any]] = {}
        self._codes: set[int] = set()
        self._classes: dict[int, type] = {}
        self._functions: list[types.FunctionType] = []
        for kind in classes:
            self._add_class(kind)

    def likeness(self, likeness: Likeness) -> dict[str, Any]:
        """What all of them hold now, by name."""
        found = {f"{name} of {held.get('__name__')}": likeness.of(held.get(name)) for (_, name), held in self._places.items()}
        found |= {f"{kind.__name__}.{name}": likeness.of(value) for kind in self._classes.values() for name, value in _data(kind)}
        return found | {f"what {each.__qualname__} holds": likeness.of(each) for each in self._functions if each.__closure__ or vars(each)}

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) in self._classes or _is_library(base.__module__):
                continue
            self._classes[id(base)] = base
            for value in vars(base).values():
                self._add(value)

    def _add(self, value: Any) -> None:
        """Follow a value that code may call."""
        match value:
            case types.FunctionType():
                self._add_function(value)
            case types.MethodType() | staticmethod() | classmethod():
                self._add(value.__func__)
            case property():
                for part in (value.fget, value.fset):
                    self._add(part)
            case functools.partial():
                self._add(value.func)
            case functools._lru_cache_wrapper():
                self._add(value.__wrapped__)
            case Mapping() | list() | tuple():
                for part in list(value.values()) if isinstance(value, Mapping) else value:
                    if isinstance(part, types.FunctionType):
                        self._add_function(part)

    def _add_function(self, function: types.FunctionType) -> None:
        if id(function.__code__) in self._codes or _is_library(function.__module__ or ""):
            return
        self._codes.add(id(function.__code__))
        self._functions.append(function)
        self._add(getattr(function, "__wrapped__", None))
        for cell in function.__closure__ or ():
            if _full(cell):
                self._add(cell.cell_contents)
        self._add_names(_names(function.__code__), function.__globals__)

    def _add_names(self, names: set[str], held: Mapping[str, Any]) -> None:
        for name in sorted(names):
            if name not in held or (id(held), name) in self._places:
                continue
            value = held[name]
            if isinstance(value, types.ModuleType):
                if not _is_library(value.__name__):
                    self._places[(id(held), name)] = held
                    self._add_names(names, vars(value))
            elif isinstance(value, types.FunctionType):
                self._add_function(value)
                self._places[(id(held), name)] = held
            elif isinstance(value, type):
                if not _is_library(value.__module__) and not issubclass(value, nn.Module):
                    self._classes.setdefault(id(value), value)
                self._places[(id(held), name)] = held
            elif not isinstance(value, types.BuiltinFunctionType):
                self._places[(id(held), name)] = held
                self._add(value)


def _data(kind: type) -> Iterator[tuple[str, Any]]:
    """The attributes of a class that are no code."""
    for name, value in sorted(vars(kind).items()):
        code = isinstance(value, (types.FunctionType, staticmethod, classmethod, property, *KNOWN, *WRAPPERS, functools.cached_property))
        if not code and not (name.startswith("__") and name.endswith("__")) and not name.startswith("_abc_"):
            yield name, value


def _is_library(module: str) -> bool:
    """Whether code of a module is torch's or Python's own: it keeps nothing that a layer's result depends on."""
    return module.partition(".")[0] in LIBRARIES and module != "__main__"


def _names(code: types.CodeType) -> set[str]:
    """The names that a function's code, and functions that it makes, may read from its module."""
    found = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= _names(inner)
    return found - set(dir(builtins))
