"""Symbols: one name for equal sizes of different inputs, `b` for the rows, `s`, `s1`, … for the rest.

input_ids [s72, s70], labels [s97, s38]   →   input_ids [b, s], labels [b, s]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tpcompile.ir import Type
from tpcompile.layout import Size, TensorType, symbol
from tpcompile.passes._exact import exact, whole_quotients


@dataclass(frozen=True)
class Symbols:
    """`names` maps export's symbols to ours; `places` ours to the number of the input, and the dimension, that it measures.

    `quotients` of ours are whole numbers wherever what export took for granted holds.
    """

    names: Mapping[sympy.Symbol, sympy.Symbol]
    places: Mapping[sympy.Symbol, tuple[int, int]]
    batch_dims: tuple[int | None, ...]
    quotients: tuple[sympy.Expr, ...] = ()

    def size(self, value: Any) -> Size:
        """A size in our symbols. What export knows no symbol for (a number of values that are not zero) keeps its name."""
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            plain: Size = value
            return plain
        expression = value.node.expr
        unknown = {s: symbol(s.name) for s in expression.free_symbols if s not in self.names}
        found = exact(expression.xreplace({**self.names, **unknown}), self.quotients)
        return int(found) if found.is_Integer else found

    def type(self, value: Any) -> Type | None:
        match value:
            case Tensor():
                return TensorType(value.dtype, tuple(self.size(size) for size in value.shape))
            case tuple() | list():
                kinds = [self.type(item) for item in value]
                return tuple(kind for kind in kinds if isinstance(kind, TensorType))
            case torch.SymInt() | torch.SymFloat() | torch.SymBool() | int() | float():
                return self.size(value)
            case _:
                return None


def name_symbols(examples: Sequence[Tensor], shapes: Sequence[Sequence[Any]]) -> Symbols:
    """Name the symbolic sizes of inputs, given export's `shapes` of them and the examples' own."""
    firsts = [example.shape[0] for example in examples if example.ndim]
    rows = Counter(firsts).most_common(1)[0][0] if firsts else None
    inner = {str(size) for shape in shapes for size in shape[1:] if isinstance(size, torch.SymInt)}
    batch_dims = tuple(
        0 if example.ndim and example.shape[0] == rows and str(shape[0]) not in inner else None
        for example, shape in zip(examples, shapes, strict=True)
    )
    names: dict[sympy.Symbol, sympy.Symbol] = {}
    places: dict[sympy.Symbol, tuple[int, int]] = {}
    by_group: dict[Any, sympy.Symbol] = {}  # what makes sizes equal → their symbol
    for index, (example, shape) in enumerate(zip(examples, shapes, strict=True)):
        for dim, size in enumerate(shape):
            if not isinstance(size, torch.SymInt) or not size.node.expr.is_Symbol:
                continue
            group = "b" if dim == 0 and batch_dims[index] == 0 else (dim, example.shape[dim])
            known = names.get(size.node.expr) or by_group.get(group)
            if known is None:
                number = sum(name.name != "b" for name in places)
                known = symbol("b" if group == "b" else f"s{number or ''}")
            names.setdefault(size.node.expr, known)
            by_group.setdefault(group, known)
            places.setdefault(known, (index, dim))
    guards = {guard.expr.xreplace(names): None for environment in _environments(shapes) for guard in environment.guards}
    return Symbols(names, places, batch_dims, whole_quotients(guard for guard in guards if guard.free_symbols <= places.keys()))


def _environments(shapes: Sequence[Sequence[Any]]) -> list[ShapeEnv]:
    """Where export keeps what it took for granted."""
    return list({id(s.node.shape_env): s.node.shape_env for shape in shapes for s in shape if isinstance(s, torch.SymInt)}.values())
