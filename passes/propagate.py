"""propagate: a layout for every value of the program, and for its gradient."""

from __future__ import annotations

from tpcompile.ir import Plan, Program, Sharded
from tpcompile.layout import Layout, TensorType, whole
from tpcompile.passes._entering import differentiable, entering


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
    return Sharded(program, plan, axis, parts, layouts, rows, entering(program, layouts, rows, differentiable(program)))
