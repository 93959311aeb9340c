"""Sizes and conditions as JSON, and back. Nothing that is read is evaluated as code.

b·(s + 1)       ["Mul", "b", ["Add", "s", 1]]
s // 2          ["torch.FloorDiv", "s", 2]
"""

from __future__ import annotations

from typing import Any

import sympy
from torch.utils._sympy import functions

from tpcompile.errors import InputError
from tpcompile.layout import symbol


def encode(value: Any) -> Any:
    """A whole number, a symbolic size, or a condition on sizes, in lists, strings and numbers."""
    if isinstance(value, (bool, int)):
        return value
    if isinstance(value, sympy.Symbol):
        return value.name
    if isinstance(value, sympy.Integer):
        return int(value)
    if isinstance(value, sympy.Rational):
        return ["Rational", int(value.p), int(value.q)]
    if value in (sympy.true, sympy.false):
        return bool(value)
    ours = "torch." if type(value).__module__ == functions.__name__ else ""
    return [ours + type(value).__name__, *map(encode, value.args)]


def decode(value: Any) -> Any:
    """What `encode` was given. Raises InputError for what it never writes."""
    if isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return symbol(value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        known, name = (functions, value[0][6:]) if value[0].startswith("torch.") else (sympy, value[0])
        kind = getattr(known, name, None)
        if isinstance(kind, type) and issubclass(kind, sympy.Basic):
            return kind(*map(decode, value[1:]))
    raise InputError(f"{value!r} is no size", at="manifest.json", fix="emit the program again")
