"""Private to passes: sizes that are known only at run time, as nodes of a graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import lru_cache

import sympy
import torch
from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.ir import Draft, Program
from tpcompile.layout import Size

USUAL = 512
"""What a symbolic size is taken to be where sizes are compared."""


@lru_cache(maxsize=4096)
def usual(size: Size) -> int:
    """A size with all of its symbols as usual."""
    return size if isinstance(size, int) else int(sympy.sympify(size).subs(dict.fromkeys(size.free_symbols, USUAL)))


def symbol_nodes(
    graph: fx.Graph, program: Program, expression: sympy.Expr | int, made: Mapping[str, fx.Node], name: str | None = None
) -> fx.Node | int:
    """Nodes that compute a size from the inputs' sizes; `name` is theirs, where the graph's own names are taken."""
    match expression:
        case int() | sympy.Integer():
            return int(expression)
        case sympy.Symbol():
            measured, dim = program.symbols[expression]
            return graph.create_node("call_function", torch.ops.aten.sym_size.int, (made[measured], dim), name=name)
        case sympy.Add() | sympy.Mul():
            parts = [symbol_nodes(graph, program, part, made, name) for part in expression.args]
            total = parts[0]
            for part in parts[1:]:
                work = operator.add if isinstance(expression, sympy.Add) else operator.mul
                total = graph.create_node("call_function", work, (total, part), name=name)
            return total
    raise LayoutError(f"a size that is {expression}")


def size_node(draft: Draft, size: Size) -> fx.Node | int:
    """The same in a draft: a number, or new nodes with their types. Raises LayoutError for a size that the inputs do not give."""
    if isinstance(size, int):
        return size
    known = set(draft.graph.nodes)
    made = symbol_nodes(draft.graph, draft.program, sympy.sympify(size), draft.nodes)
    for new in draft.graph.nodes:
        if new not in known:
            draft.types[new.name] = size
    return made
