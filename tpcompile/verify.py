"""The laws that a program must obey. `verify` returns its argument, so that it can stand anywhere in the driver."""

from __future__ import annotations

from typing import TypeVar

from torch import fx

from tpcompile.errors import VerifyError
from tpcompile.factors import LayoutError
from tpcompile.ir import Local, Program, Sharded, Stage
from tpcompile.layout import Layout, TensorType, fits, size_of
from tpcompile.rules import forward, op_name, view_op, wants_of

Value = TypeVar("Value", Program, Sharded, Local, Stage)


def verify(value: Value) -> Value:
    """Check a value between two passes. Raises VerifyError, naming the node, the law and the user's line."""
    match value:
        case Program():
            _check_program(value)
        case Sharded():
            _check_sharded(value)
        case Local():
            _check_local(value)
        case Stage():
            value.graph.lint()
    return value


def _check_program(program: Program) -> None:
    """Every value has a type; every placeholder is a parameter, a buffer, a constant, an input or an extra input."""
    program.graph.lint()
    known = {
        *program.parameters,
        *program.buffers,
        *program.constants,
        *program.inputs,
        *(count.name for count in program.counts),
        "rng_key",
    }
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name not in known:
            raise VerifyError(f"placeholder {node.name} is neither state nor input")
        if node.op not in ("placeholder", "call_function", "output"):
            raise VerifyError(f"{node.name} is a {node.op}")
    if program.loss is not None and program.loss not in program.nodes():
        raise VerifyError(f"the loss {program.loss} is not in the graph")


def _check_sharded(sharded: Sharded) -> None:
    """Every operation, applied to its operands as it needs them, makes its declared layout: the other direction of the rules.

    A row-cut linear must make a partial sum over the axis and nothing cut. A value's layout must have its sizes.
    """
    program = sharded.program
    for node in program.graph.nodes:
        declared = sharded.layouts.get(node.name)
        if isinstance(declared, Layout):
            _check_sizes(sharded, node, declared)
        wants = wants_of(node, program.types, sharded.layouts, sharded.rows)
        if not wants or declared is None:
            continue
        ins = sharded.rows.get(node.name, [want for _, want in wants])
        expected = list(declared) if isinstance(declared, tuple) else [declared]
        try:
            made = forward(view_op(node, program.types), ins, expected)
        except LayoutError as error:
            raise _broken(sharded, node, str(error)) from None
        if node.name in sharded.rows:
            expected = [Layout(layout.dims, (sharded.axis,)) for layout in expected]
        if not all(fits(a, b) for a, b in zip(made, expected, strict=True)):
            raise _broken(sharded, node, f"makes {', '.join(map(str, made))} and is declared {', '.join(map(str, expected))}")


def _check_sizes(sharded: Sharded, node: fx.Node, layout: Layout) -> None:
    kind = sharded.program.types[node.name]
    if isinstance(kind, TensorType) and tuple(size_of(dim) for dim in layout.dims) != kind.shape:
        raise _broken(sharded, node, f"has layout {layout} and shape {list(kind.shape)}")


def _broken(sharded: Sharded, node: fx.Node, law: str) -> VerifyError:
    source = sharded.program.sources.get(node.name)
    return VerifyError(f"{node.name} = {op_name(node)}: {law}", at=node.format_node() or "", source=str(source) if source else "")


def _check_local(local: Local) -> None:
    """Partial sums are reduced before anything else reads them, and a parameter that ranks share is summed over them."""
    local.graph.lint()
    for node in local.graph.nodes:
        layout = local.layouts.get(node.name)
        if not isinstance(layout, Layout) or not layout.partial:
            continue
        for user in node.users:
            if op_name(user) not in ("tpcompile.reduce.default", "aten.add.Tensor", "aten.sub.Tensor"):
                raise VerifyError(f"{user.name} reads {node.name}, a partial sum that is not reduced")
            out = local.layouts.get(user.name)
            if op_name(user) != "tpcompile.reduce.default" and (not isinstance(out, Layout) or out.partial != layout.partial):
                raise VerifyError(f"{user.name} adds {node.name}, a partial sum, to a whole value")
