"""The user's own `torch.autograd.Function`s, kept as operators: torch.export would inline their forward and lose their backward.

    y = GeLUFunction.apply(x)        in the model
    %y = tpcompile_functions.ge_lu_function_x3fa2c1(%x)        in the graph

An operator stands for one way of calling a Function: arguments that are no tensors are part of it, written where they stand among the
`Operand`s. All that it does, forward and backward, is `apply`: what `ctx` holds, which inputs need a gradient and which outputs have
none is the user's and torch's own business. What capture has proved of a Function is its `rule`.
"""

from __future__ import annotations

import hashlib
import keyword
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils import _pytree as pytree

NAMESPACE = "tpcompile_functions"

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Arguments whose text says all of them."""

_APPLY = Function.__dict__["apply"]
_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Operand:
    """Where a call has its operand of this number."""

    index: int


@dataclass(frozen=True, eq=False)
class Kept:
    """One way of calling a Function, and what is known of it."""

    function: type[Function]
    args: tuple[Any, ...]  # of `apply`, with Operand(i) for a tensor or a symbolic size
    kwargs: dict[str, Any]
    sizes: tuple[bool, ...]  # for every operand, whether it is a size
    outputs: tuple[int, ...] | None  # the places of tensors in the tuple that it returns; None: it returns one tensor
    rule: str = ""  # what it does to cut dimensions, as in the table of rules
    reason: str = ""  # why it has no rule
    random: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def stem(self) -> str:
        """The name as that of a value: GeLUFunction → ge_lu_function."""
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", self.name).lower()
        plain = re.sub(r"[^a-z0-9_]", "_", words).strip("_")
        return f"{plain}_function" if keyword.iskeyword(plain) or not plain[:1].isalpha() else plain

    def call(self, operands: Sequence[Any]) -> Tensor | list[Tensor]:
        """What the operator computes: the tensors that `apply` returns."""
        device = next(operand.device for operand in operands if isinstance(operand, Tensor))

        def given(leaf: Any) -> Any:
            if isinstance(leaf, Operand):
                return operands[leaf.index]
            return device if isinstance(leaf, torch.device) else leaf

        args, kwargs = pytree.tree_map(given, (self.args, self.kwargs))
        made = apply(self.function, *args, **kwargs)
        found = [made] if self.outputs is None else [made[place] for place in self.outputs]
        if any(
            torch._is_functional_tensor(value) for value in found
        ):  # an operator whose result shares memory must say so; this one cannot
            found = [value.clone() if _shares(value, operands) else value for value in found]
        return found[0] if self.outputs is None else found


def apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    """`function.apply` as torch defines it, whatever watches it now."""
    return _APPLY.__get__(None, function)(*args, **kwargs)


def importable(function: type[Function]) -> bool:
    """Whether a program in a file can import the Function by its module and name, and call its `apply`."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    own = function.__mro__[: function.__mro__.index(Function)]
    return found is function and not any("apply" in base.__dict__ for base in own)


def _shares(value: Tensor, operands: Sequence[Any]) -> bool:
    memory = {operand.untyped_storage()._cdata for operand in operands if isinstance(operand, Tensor)}
    return value.untyped_storage()._cdata in memory


# --- operators

_known: dict[tuple[Any, ...], torch._ops.OpOverload] = {}
_kept: dict[torch._ops.OpOverload, Kept] = {}


def kept(target: object) -> Kept | None:
    """What an operator stands for; None for any other target of a call."""
    return _kept.get(target) if isinstance(target, torch._ops.OpOverload) else None


def operator(way: Kept) -> torch._ops.OpOverload:
    """The operator of one way of calling a Function. Its name depends on what it says alone, so that all ranks have the same."""
    facts = (way.sizes, way.outputs, way.rule, bool(way.reason), way.random)
    text = f"{way.function.__module__}:{way.function.__qualname__} {_text((way.args, way.kwargs))} {facts}"
    opaque = tuple(id(leaf) for leaf in pytree.tree_leaves((way.args, way.kwargs)) if not isinstance(leaf, (Operand, *PLAIN)))
    key = (way.function, text, opaque)
    if key not in _known:
        _known[key] = _define(way, text)
        _kept[_known[key]] = way
    return _known[key]


def _define(way: Kept, text: str) -> torch._ops.OpOverload:
    short = f"{way.stem}_x{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    taken = {other._opname for other in _kept}
    name = next(name for name in (short, *(f"{short}_{i}" for i in range(1, len(taken) + 1))) if name not in taken)  # a class defined anew
    arguments = ", ".join(f"{'SymInt' if size else 'Tensor'} a{i}" for i, size in enumerate(way.sizes))
    tags = (torch.Tag.nondeterministic_seeded,) if way.random else ()

    def run(*operands: Any) -> Tensor | list[Tensor]:
        return way.call(operands)

    _library.define(f"{name}({arguments}) -> Tensor{'' if way.outputs is None else '[]'}", tags=tags)
    _library.impl(f"{name}", run, "Autograd")
    _library.impl(f"{name}", run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", run, lib=_library)
    found: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return found


def _text(value: Any) -> str:
    """Arguments as text that is the same in every process."""
    match value:
        case Operand(index):
            return f"%{index}"
        case dict():
            return "{" + ", ".join(f"{_text(key)}: {_text(item)}" for key, item in value.items()) + "}"
        case tuple() | list():
            return f"{type(value).__name__}({', '.join(map(_text, value))})"
        case value if isinstance(value, PLAIN):
            return repr(value)
    return f"<{type(value).__module__}.{type(value).__qualname__}>"
