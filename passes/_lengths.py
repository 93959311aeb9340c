"""Private to passes: sizes that are known only at run time, as nodes of a graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import sympy
import torch
from torch import fx

from tpcompile.factors import LayoutError
from tpcompile.ir import Program


def symbol_nodes(graph: fx.Graph, program: Program, expression: sympy.Expr | int, made: Mapping[str, fx.Node]) -> fx.Node | int:
    """Nodes that compute a size from the inputs' sizes."""
    match expression:
        case int() | sympy.Integer():
            return int(expression)
        case sympy.Symbol():
            name, dim = program.symbols[expression]
            return graph.call_function(torch.ops.aten.sym_size.int, (made[name], dim))
        case sympy.Add() | sympy.Mul():
            parts = [symbol_nodes(graph, program, part, made) for part in expression.args]
            total = parts[0]
            for part in parts[1:]:
                total = graph.call_function(operator.add if isinstance(expression, sympy.Add) else operator.mul, (total, part))
            return total
    raise LayoutError(f"a size that is {expression}")
