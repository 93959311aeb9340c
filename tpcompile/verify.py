"""The laws that a program must obey. `verify` returns its argument, so that it can stand anywhere in the driver."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from torch import fx

from tpcompile.collectives.table import LINEARS
from tpcompile.errors import VerifyError
from tpcompile.factors import LayoutError
from tpcompile.ir import Local, Program, Sharded, Stage, results
from tpcompile.laws.pipeline import check_pipeline
from tpcompile.laws.places import broken, line_of
from tpcompile.laws.shapes import check_shapes
from tpcompile.laws.slices import check_slices
from tpcompile.laws.stages import check_stages
from tpcompile.laws.wiring import check_wiring
from tpcompile.layout import Cut, Dim, Even, Layout, TensorType, cut_factors, fits, same, size_of, whole_dim
from tpcompile.linear import is_linear
from tpcompile.operation import Op
from tpcompile.rules import ALONG, forward, op_name, view_op, wants_of
from tpcompile.timeline import Step

Value = TypeVar("Value", Program, Sharded, Local, Stage, Step)


def verify(value: Value, known: Sharded | None = None) -> Value:
    """Check a value between two passes. Raises VerifyError, naming the node, the law and the user's line.

    Of a program with layouts, only that is looked at which `known`, the same program as it was verified before, has otherwise.
    """
    match value:
        case Program():
            _check_program(value)
        case Sharded():
            _check_sharded(value, known if known is not None and known.program is value.program else None)
        case Local():
            _check_local(value)
        case Stage():
            value.graph.lint()
        case Step():
            _check_step(value)
    return value


def _check_step(step: Step) -> None:
    """The finished program, which runs: its stages obey the laws of gradients and partial sums as the whole does, and all others."""
    local = step.local
    entered = entered_values(local.graph, local.layouts, _carrying(local.program, local.graph, local.origins))
    for stage in step.stages:
        received = {boundary.name for boundary in stage.receives if boundary.requires_grad}
        own = replace(local, graph=stage.graph, program=replace(local.program, updates=stage.updates))
        _check_local(own, received, received & {node.name for node in entered})
    _check_homes(step)
    check_slices(local)
    check_wiring(local)
    check_shapes(local, step.sizes)
    check_stages(local, step.stages)
    check_pipeline(step)


def _check_homes(step: Step) -> None:
    """Every buffer that the program updates is updated by a stage, and by every stage that reads it: another would read what it was."""
    for name in step.local.program.updates:
        if not any(name in stage.updates for stage in step.stages):
            raise VerifyError(f"no stage has the new value of {name}")
        for stage in step.stages:
            if name in stage.buffers.values() and name not in stage.updates:
                raise VerifyError(f"stage {stage.index} reads {name} and has not its new value")


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
    _check_updates(program)


def _check_updates(program: Program) -> None:
    """A buffer's new value has the buffer's type, and no gradient that a next step's backward would follow into this one's graph."""
    if not program.updates:
        return
    held, flowing = {name: placeholder for placeholder, name in program.buffers.items()}, _carrying(program, program.graph)
    for name, value in results(program.graph, program.updates)[1].items():
        if name in held and program.types[held[name]] != program.types[value.name]:
            raise VerifyError(f"{value.name} is the new value of {name} and is a {program.types[value.name]}")
        if value in flowing:
            raise VerifyError(f"{value.name} is the new value of {name} and carries a gradient")


def _check_sharded(sharded: Sharded, known: Sharded | None) -> None:
    """Every operation, applied to its operands as it needs them, makes its declared layout: the other direction of the rules.

    A row-cut linear must make a partial sum over the axis and nothing cut. A value's layout must have its sizes.
    """
    program = sharded.program
    for node in program.graph.nodes:
        declared = sharded.layouts.get(node.name)
        if known is not None and _alike(sharded, known, node):
            continue
        if isinstance(declared, Layout):
            _check_sizes(sharded, node, declared)
            _check_item(sharded, node, declared)
        try:
            wants = wants_of(node, program.types, sharded.layouts, sharded.rows)
            if not wants or declared is None:
                continue
            ins = sharded.rows.get(node.name, [want for _, want in wants])
            expected = list(declared) if isinstance(declared, tuple) else [declared]
            made = forward(view_op(node, program.types), ins, expected, end=node.name in sharded.rows or op_name(node) in ALONG)
        except LayoutError as error:
            raise _broken(sharded, node, str(error)) from None
        if node.name in sharded.rows:
            expected = [Layout(tuple(map(_scattered, layout.dims)), (sharded.axis,)) for layout in expected]
        if not all(fits(a, b) for a, b in zip(made, expected, strict=True)):
            raise _broken(sharded, node, f"makes {', '.join(map(str, made))} and is declared {', '.join(map(str, expected))}")


def _alike(sharded: Sharded, known: Sharded, node: fx.Node) -> bool:
    """Whether a node and its operands have the same layouts in both."""
    same_row = known.rows.get(node.name) is sharded.rows.get(node.name)
    return same_row and all(known.layouts.get(n.name) is sharded.layouts.get(n.name) for n in (node, *node.all_input_nodes))


def _scattered(dim: Dim) -> Dim:
    """A dimension of a partial sum before it is reduced and scattered along its positions."""
    return whole_dim(size_of(dim)) if all(isinstance(factor.cut, Even) for factor in cut_factors(dim)) else dim


def _check_sizes(sharded: Sharded, node: fx.Node, layout: Layout) -> None:
    kind = sharded.program.types[node.name]
    if isinstance(kind, TensorType) and tuple(size_of(dim) for dim in layout.dims) != kind.shape:
        raise _broken(sharded, node, f"has layout {layout} and shape {list(kind.shape)}")


def _check_item(sharded: Sharded, node: fx.Node, layout: Layout) -> None:
    """An item of several outputs is that output."""
    if node.op != "call_function" or op_name(node) != "getitem":
        return
    parent, index = node.args
    made = sharded.layouts.get(parent.name) if isinstance(parent, fx.Node) else None
    if isinstance(made, tuple) and isinstance(index, int) and not same(made[index], layout):
        raise _broken(sharded, node, f"is {made[index]} and is declared {layout}")


def _broken(sharded: Sharded, node: fx.Node, law: str) -> VerifyError:
    source = sharded.program.sources.get(node.name)
    return VerifyError(f"{node.name} = {op_name(node)}: {law}", at=node.format_node() or "", source=str(source) if source else "")


def _check_local(local: Local, received: Collection[str] = (), inside: Collection[str] = ()) -> None:
    """Partial sums are reduced once before anything else reads them; and so are gradients, on their way back.

    What a region uses whole has there, on every rank, a part of its gradient: it must have entered. What enters is used by regions alone:
    elsewhere its gradient is whole already. A parameter of which several ranks hold one piece sums its gradient over them.
    `received` are the values with a gradient that a stage gets from the one before, `inside` those of them that have entered there.
    """
    local.graph.lint()
    flowing, names = _carrying(local.program, local.graph, local.origins, received), local.program.nodes()
    entered = entered_values(local.graph, local.layouts, flowing, inside)
    for name, value in results(local.graph, local.program.updates)[1].items():
        layout = local.layouts.get(value.name)
        if isinstance(layout, Layout) and not layout.is_whole:
            raise broken(local, value, f"is the new value of {name}, which every rank holds whole, and is {_state(layout)}")
    for node in local.graph.nodes:
        if node.op == "call_function" and node.name in names and local.origins.get(node.name) != node.name:
            raise broken(local, node, "has the name of a value of the whole program, and is no piece of it")
        if node.op == "call_function" and op_name(node) != "getitem":
            try:
                _check_collective(local, node)
                for operand in node.all_input_nodes:
                    _check_use(local, node, operand, operand in flowing, entered)
            except VerifyError as error:
                raise VerifyError(error.what, at=node.format_node() or "", source=line_of(local, node)) from None


def _carrying(
    program: Program, graph: fx.Graph, origins: Mapping[str, str] = MappingProxyType({}), received: Collection[str] = ()
) -> frozenset[fx.Node]:
    """The nodes of a program's graph, global or local, through which a gradient may reach a parameter, here or on a stage before."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        kind = program.types.get(origins.get(node.name, node.name))
        real = not isinstance(kind, TensorType) or kind.dtype.is_floating_point or kind.dtype.is_complex
        made = node.op == "call_function" and op_name(node) != "aten.detach.default" and any(o in found for o in node.all_input_nodes)
        if real and (made or node.name in received or node.name in program.parameters):
            found.add(node)
    return frozenset(found)


TAKES = {
    "reduce": "a partial sum",
    "reduce_max": "a partial maximum",
    "enter": "a whole value",
    "enter_later": "a whole value",
    "enter_linear": "a whole value",
    "local_slice": "a whole value",
    "gather": "a cut value",
    "seq_gather": "a cut value",
    "kept_linear": "a cut value",
    "seq_linear": "a cut value",
    "seq_scatter": "a partial sum",
    "seq_slice": "a whole value",
    "seq_whole": "a cut value",
    "shared": "a cut value",
}
"""What a collective takes."""


def _check_collective(local: Local, node: fx.Node) -> None:
    wanted = TAKES.get(op_name(node).removeprefix("tpcompile.").removesuffix(".default"))
    have = local.layouts.get(node.all_input_nodes[0].name) if wanted else None
    if isinstance(have, Layout) and _state(have) != wanted:
        raise VerifyError(f"{node.name} = {op_name(node)}: {node.all_input_nodes[0].name} is {_state(have)}, and should be {wanted}")


def _state(layout: Layout) -> str:
    if layout.partial or layout.highest:
        return "a partial sum" if layout.partial else "a partial maximum"
    return "a cut value" if layout.is_cut else "a whole value"


ENTERS = ("tpcompile.enter.default", "tpcompile.enter_later.default", "tpcompile.seq_gather.default")
"""What makes a whole value, or one that becomes whole, ready for uses that see a part of its gradient."""


def entered_values(
    graph: fx.Graph, layouts: Mapping[str, object], flowing: Collection[fx.Node], inside: Collection[str] = ()
) -> frozenset[fx.Node]:
    """Whole values whose gradient is a partial sum: what enters, here or before (`inside`), and what operations on it make whole."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.name in inside or op_name(node) in ENTERS or _of_joined(node, layouts):
            found.add(node)
        elif node in flowing and op_name(node) not in CONVERSIONS and any(operand in found for operand in node.all_input_nodes):
            layout = layouts.get(node.name)
            if isinstance(layout, Layout) and layout.is_whole:
                found.add(node)
    return frozenset(found)


def _of_joined(node: fx.Node, layouts: Mapping[str, object]) -> bool:
    """Whether a node is the whole result of a linear layer that is joined with what its value enters by."""
    layout = layouts.get(node.name)
    made = op_name(node) == "getitem" and op_name(node.all_input_nodes[0]) in LINEARS
    return made and isinstance(layout, Layout) and layout.is_whole


def _check_use(local: Local, node: fx.Node, operand: fx.Node, flows: bool, entered: frozenset[fx.Node]) -> None:
    have, name = local.layouts.get(operand.name), op_name(node)
    if not isinstance(have, Layout):
        return
    inside = name == "tpcompile.local_slice.default" or (name not in CONVERSIONS and _on_pieces(local.layouts.get(node.name)))
    if have.highest and name != "tpcompile.reduce_max.default":
        raise VerifyError(f"{node.name} reads {operand.name}, a partial maximum that is not reduced")
    if have.partial and name not in ("tpcompile.reduce.default", "tpcompile.seq_scatter.default"):
        _check_waiting(local, node, operand)
    inside |= node in entered and name not in CONVERSIONS
    if name in LINEARS and operand is node.args[0]:
        inside = False
    if inside and flows and have.is_whole and operand not in entered:
        raise VerifyError(f"{node.name} works on pieces and reads {operand.name} whole: its gradient is a partial sum, and is not reduced")
    if operand in entered and not inside:
        raise VerifyError(f"{node.name} works on whole values and reads {operand.name}: its gradient would be counted by every rank")
    if operand.name in local.program.parameters and _overlaps(have) and name != "tpcompile.shared.default":
        raise VerifyError(f"{node.name} reads {operand.name}, of which several ranks hold one piece: its gradient is not summed over them")


def _check_waiting(local: Local, node: fx.Node, operand: fx.Node) -> None:
    """What reads a partial sum is linear in it, and makes a partial sum."""
    out = local.layouts.get(node.name)
    operands = tuple(o for o in _tensors((node.args, node.kwargs)) if o.name in local.layouts)
    states = [local.layouts[o.name] for o in operands]
    held = [position for position, state in enumerate(states) if isinstance(state, Layout) and state.partial]
    if not is_linear(Op(op_name(node), node, operands, (), ()), held):
        raise VerifyError(f"{node.name} reads {operand.name}, a partial sum that is not reduced")
    if not isinstance(out, Layout) or not out.partial:
        raise VerifyError(f"{node.name} makes a whole value of {operand.name}, a partial sum")


def _tensors(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


CONVERSIONS = tuple(
    f"tpcompile.{name}.default"
    for name in ("enter", "enter_later", "gather", "reduce", "reduce_max", "seq_gather", "seq_scatter", "seq_slice", "seq_whole", "shared")
)


def _on_pieces(layout: Layout | tuple[Layout, ...] | None) -> bool:
    return any(not part.is_whole for part in (layout if isinstance(layout, tuple) else (layout,)) if part is not None)


def _overlaps(layout: Layout) -> bool:
    return any(isinstance(factor.cut, Cut) and factor.cut.overlaps for dim in layout.dims for factor in cut_factors(dim))
