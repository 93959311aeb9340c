"""propagate: a layout for every value of the program, and for its gradient."""

from __future__ import annotations

from tpcompile.ir import Plan, Program, Sharded
from tpcompile.layout import Layout, TensorType, same, whole
from tpcompile.rules import op_name, wants_of


def propagate(program: Program, plan: Plan, axis: str, parts: int) -> Sharded:
    """Give every value its layout: the regions' values are cut, all others whole; and find whose gradients are partial.

    before  %x : f32[b, s, 64], %w : f32[256, 64], %y = linear(%x, %w) : f32[b, s, 256]
    after   %x : f32[b, s, 64] grad +tp, %w : f32[256@tp, 64], %y = linear(%x, %w) : f32[b, s, 256@tp]
    """
    layouts: dict[str, Layout | tuple[Layout, ...]] = {}
    for name, kind in program.types.items():
        if isinstance(kind, TensorType):
            layouts[name] = whole(*kind.shape)
        elif isinstance(kind, tuple):
            layouts[name] = tuple(whole(*part.shape) for part in kind)
    rows: dict[str, tuple[Layout, ...]] = {}
    for region in plan.regions:
        layouts.update(region.layouts)
        rows.update(region.rows)
    sharded = Sharded(program, plan, axis, parts, layouts, rows, frozenset())
    return Sharded(program, plan, axis, parts, layouts, rows, entering(sharded, differentiable(program)))


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


def entering(sharded: Sharded, flowing: frozenset[str]) -> frozenset[str]:
    """Values that a cut operation uses whole: each rank sees a part of their gradient only."""
    found: set[str] = set()
    for node in sharded.program.graph.nodes:
        for operand, want in wants_of(node, sharded.program.types, sharded.layouts, sharded.rows):
            have = sharded.layouts[operand.name]
            if operand.name in flowing and isinstance(have, Layout) and not (have.is_cut and same(have, want)):
                found.add(operand.name)
    return frozenset(found)
