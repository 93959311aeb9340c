"""Private to divide_loss: which buffers' new values depend on how a batch is divided.

Every micro-batch starts from the buffers as they were before the step, so a value that is computed from them alone, such as a counter
plus one, is the same after any of them, and after the whole batch on one device. A mean over rows is not.
"""

from __future__ import annotations

from torch import fx

from tpcompile.ir import Program, results
from tpcompile.layout import TensorType
from tpcompile.rules import argument, op_name


def update_reason(program: Program) -> str:
    """Why the buffers after a batch are not those after any part of its rows, with the user's line; "" when they are."""
    told = _telling(program)
    for name, value in results(program.graph, program.updates)[1].items():
        source: object = program.sources.get(value.name, "")
        at = f" at {source}" if source else ""
        if value in told:
            return f"{name} takes its new value from all rows of a batch{at}"
        if _is_fixed(program):
            return f"{name} takes its new value{at} in a program for a fixed number of rows, which the value may depend on"
    return ""


def _is_fixed(program: Program) -> bool:
    """Whether the number of rows is a number, which the graph does not tell from others."""
    shapes = [(program.types[name], entry.batch_dim) for name, entry in program.inputs.items()]
    return any(dim is not None and isinstance(kind, TensorType) and isinstance(kind.shape[dim], int) for kind, dim in shapes)


def _telling(program: Program) -> set[fx.Node]:
    """The values that may differ between parts of a batch: what depends on its rows, their number, or the key of random numbers."""
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        entry = program.inputs.get(node.name)
        if node.op == "placeholder":
            differs = node.name == "rng_key" or (entry is not None and entry.batch_dim is not None)
        elif op_name(node) == "aten.sym_size.int" and node.args[0].op == "placeholder":
            entry = program.inputs.get(node.args[0].name)
            differs = entry is not None and argument(node, "dim") == entry.batch_dim
        else:
            differs = any(operand in found for operand in node.all_input_nodes)
        if differs:
            found.add(node)
    return found
