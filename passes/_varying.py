"""Private to divide_loss: numbers that depend on how many rows there are, such as `x / x.shape[0]`: a part of the batch has others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.ir import Program
from tpcompile.layout import Layout, TensorType, cut_factors
from tpcompile.rules import RESHAPES, aten_names, op_name

SIZES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(aten_names("arange.default arange.start arange.start_step slice.Tensor"), ("end",)),
    **dict.fromkeys(aten_names("empty.memory_format expand.default full.default new_empty.default new_full.default"), ("size",)),
    **dict.fromkeys(aten_names("new_ones.default new_zeros.default ones.default zeros.default"), ("size",)),
    **dict.fromkeys(RESHAPES, ("size", "sizes", "shape")),
    "aten.repeat.default": ("repeats",),
    "aten.split_with_sizes.default": ("split_sizes",),
    "tpcompile.uniform.default": ("size",),
}
"""The arguments that are sizes of what is made, and nothing else."""


def refuse_counts(node: fx.Node, program: Program, rows: Collection[sympy.Basic]) -> None:
    """Raise LayoutError for a call that computes with the number of rows, or with one that only a run of the model gives."""
    for name, value in _arguments(node):
        for given in _nodes(value):
            size = program.types.get(given.name)
            if not isinstance(size, sympy.Expr) or name in SIZES.get(op_name(node), ()):
                continue
            if any(symbol in rows or symbol not in program.symbols for symbol in size.free_symbols):
                raise LayoutError("it computes with the number of rows")


def refuse_growth(layouts: Collection[Layout], kinds: Collection[TensorType], rows: Collection[sympy.Basic]) -> None:
    """Raise LayoutError for a value that has another size in a part of the batch, and not because it has fewer rows."""
    for layout, kind in zip(layouts, kinds, strict=True):
        for dim, size in zip(layout.dims, kind.shape, strict=True):
            if isinstance(size, sympy.Expr) and size.free_symbols & set(rows) and not cut_factors(dim):
                raise LayoutError("a dimension that grows with the batch, and does not count rows")


def _arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [declared.name for declared in node.target._schema.arguments]
    yield from zip(names, node.args, strict=False)
    yield from node.kwargs.items()


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _nodes(item)
