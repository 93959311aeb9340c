"""Private to the passes that give values their layouts: which whole values have, where they are used, a partial sum for a gradient."""

from __future__ import annotations

from collections.abc import Mapping

from tpcompile.ir import Program
from tpcompile.layout import Even, Layout, TensorType, cut_factors, same
from tpcompile.rules import addend, op_name, wants_of

Layouts = Mapping[str, Layout | tuple[Layout, ...]]


def differentiable(program: Program) -> frozenset[str]:
    """The values through which a gradient may flow: computed from a parameter, in floating point, not detached."""
    flowing = set(program.parameters)
    for node in program.graph.nodes:
        if (
            node.op == "call_function"
            and op_name(node) != "aten.detach.default"
            and any(operand.name in flowing for operand in node.all_input_nodes)
        ):
            kind = program.types.get(node.name)
            kinds = kind if isinstance(kind, tuple) else (kind,)
            if any(isinstance(part, TensorType) and (part.dtype.is_floating_point or part.dtype.is_complex) for part in kinds):
                flowing.add(node.name)
    return frozenset(flowing)


def entering(program: Program, layouts: Layouts, rows: Mapping[str, tuple[Layout, ...]], flowing: frozenset[str]) -> frozenset[str]:
    """Values that an operation on pieces uses whole: each rank sees a part of their gradient only."""
    found: set[str] = set()
    for node in program.graph.nodes:
        for operand, want in wants_of(node, program.types, layouts, rows):
            have = layouts[operand.name]
            if operand.name not in flowing or not isinstance(have, Layout) or have.partial:
                continue
            if not (have.is_cut and same(have, want)) and not (have.is_whole and along_positions(want)):
                found.add(operand.name)
        added = addend(node) if node.name in rows else None
        out = layouts.get(node.name)
        if added is not None and isinstance(out, Layout) and out.is_cut and added.name in flowing:
            found.add(added.name)
    return frozenset(found)


def along_positions(layout: Layout) -> bool:
    """Whether a value is cut along its positions, as in the stretches between regions."""
    return any(isinstance(factor.cut, Even) for dim in layout.dims for factor in cut_factors(dim))
