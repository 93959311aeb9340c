"""The text of what flows between passes: one line per value, with its type and layout, collectives marked.

  %linear = aten.linear(%layer_norm, %p_fc_weight) : f32[b, s, 256@tp]
! %linear_1_sum = reduce(%linear_1_partial, "tp") : f32[b, s, 64]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tpcompile.ir import Cone, Local, Plan, Program, Sharded, Stage, Type, results
from tpcompile.layout import Layout, TensorType
from tpcompile.rules import op_name

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.complex64: "c64",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def text(value: object) -> str:
    """A program, a plan, or the stages, as text."""
    match value:
        case Program():
            return graph_text(value.graph, value.types, {}, updates=value.updates)
        case Sharded(program):
            marks = dict.fromkeys(value.entering, f"grad +{value.axis}")
            return graph_text(program.graph, program.types, value.layouts, marks, program.updates)
        case Local(program):
            return graph_text(value.graph, origin_types(value), value.layouts, updates=program.updates)
        case Stage():
            return graph_text(value.graph, {}, {}, updates=value.updates)
        case Plan():
            return "\n".join([*map(region_text, value.regions), *(f"{left.name}: whole, {left.reason}" for left in value.whole)])
        case Cone():
            if value.columns:
                return f"%{value.seed} ends {value.kind}: columns {', '.join(value.columns)}"
            if value.kind == "vocabulary" and value.layouts:
                return f"%{value.seed} ends {value.kind}: rows of {', '.join(value.layouts)}"
            return f"%{value.seed} ends no region: {value.reason or 'no linear before it'}"
        case tuple() | list():
            return (
                "\n\n".join(text(part) for part in value) if all(isinstance(part, Stage) for part in value) else "\n".join(map(text, value))
            )
        case None:
            return ""
    return str(value)


def region_text(region: Any) -> str:
    weights = ", ".join(f"{name} {layout}" for name, layout in region.weights.items())
    return f"{region.name}: {region.kind} over {region.axis}, {weights}"


def origin_types(local: Local) -> dict[str, Type]:
    """The global types of a local graph's nodes: of the value that each is a piece of."""
    types = local.program.types
    return {node.name: types[origin] for node in local.graph.nodes if (origin := local.origins.get(node.name, node.name)) in types}


def graph_text(
    graph: fx.Graph,
    types: Mapping[str, Type],
    layouts: Mapping[str, Layout | tuple[Layout, ...]],
    marks: Mapping[str, str] | None = None,
    updates: Sequence[str] = (),
) -> str:
    """Every node of a graph on a line; after what is returned, the new values of the buffers named in `updates`."""
    return "\n".join(_lines(graph, types, layouts, marks or {}, updates))


def _lines(
    graph: fx.Graph,
    types: Mapping[str, Type],
    layouts: Mapping[str, Layout | tuple[Layout, ...]],
    marks: Mapping[str, str],
    updates: Sequence[str],
) -> Iterable[str]:
    for node in graph.nodes:
        kind = type_text(types.get(node.name), layouts.get(node.name))
        ending = f" : {kind}" if kind else ""
        ending += f" {marks[node.name]}" if node.name in marks else ""
        match node.op:
            case "placeholder":
                yield f"  %{node.name}{ending}"
            case "output":
                values: Any = node.args[0]
                yield f"  return {_argument(values[: -len(updates)] if updates else values)}"
                for name, value in results(graph, updates)[1].items():
                    yield f"  {name} = %{value.name}"
            case _:
                name = op_name(node)
                arguments = [*map(_argument, node.args), *(f"{key}={_argument(arg)}" for key, arg in node.kwargs.items())]
                mark = "!" if name.startswith("tpcompile.") else " "
                yield f"{mark} %{node.name} = {name.removesuffix('.default')}({', '.join(arguments)}){ending}"


def type_text(kind: Type | None, layout: Layout | tuple[Layout, ...] | None = None) -> str:
    """`f32[b, s, 4@tp·16]`; without a layout, the sizes."""
    match kind:
        case None:
            return ""
        case TensorType(dtype, shape):
            if isinstance(layout, Layout):
                return f"{DTYPES.get(dtype, str(dtype))}{layout}"
            return f"{DTYPES.get(dtype, str(dtype))}[{', '.join(map(str, shape))}]"
        case tuple():
            parts = layout if isinstance(layout, tuple) else (None,) * len(kind)
            return f"({', '.join(type_text(k, part) for k, part in zip(kind, parts, strict=True))})"
    return str(kind)


def _argument(value: object) -> str:
    match value:
        case fx.Node():
            return f"%{value.name}"
        case list() | tuple():
            return f"[{', '.join(map(_argument, value))}]"
        case torch.dtype():
            return DTYPES.get(value, str(value))
        case str():
            return f'"{value}"'
    return str(value)
