"""The text of what flows between passes: one line per value, with its type and layout, collectives marked.

over tp=2
  %linear = aten.linear(%layer_norm, %p_fc_weight) : f32[b, s, 256@tp]
! %linear_1_sum = tpcompile.reduce(%linear_1_partial, "tp") : f32[b, s, 64]
  return [%linear_1_sum]

`tpcompile.parse` reads the text of a program, of a sharded one and of a local one back. An argument is

    %name                 a value                      1, -0.5, inf, nan, True, None     numbers and their like
    [a, b], (a, b)        a list, a tuple              "tp"                              text, as JSON spells it
    slice(a, b, None)     a slice                      f32, torch.strided                a type; what else torch names
    0|16032|32064         a number for each rank       cpu, cuda:1                       a device

and functions that are no operators stand with their module: operator.getitem. After `return`, the new values of buffers follow.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from tpcompile.element_types import dtypes
from tpcompile.ir import Cone, Local, PerRank, Plan, Program, Sharded, Source, Stage, Type, results
from tpcompile.layout import Layout, TensorType, size_of
from tpcompile.rules import op_name

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.complex64: "c64",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip

Layouts = Mapping[str, Layout | tuple[Layout, ...]]


@dataclass(frozen=True)
class Written:
    """A graph with all that its text says: what `parse` returns."""

    graph: fx.Graph
    types: Mapping[str, Type]
    layouts: Layouts = field(default_factory=dict)
    marks: Mapping[str, str] = field(default_factory=dict)  # value → how its gradient differs: "grad +tp"
    updates: tuple[str, ...] = ()  # buffers whose new values end the output
    axis: str = ""  # over which layouts are cut, where there are any
    parts: int = 0  # the ranks along it


def text(
    value: object, *, only: Collection[str] | None = None, sources: bool = False, within: Program | Sharded | Local | None = None
) -> str:
    """A program, a plan, or the stages, as text.

    `only` names the values to show; of regions and of what is left whole, the modules. With `sources`, the user's line stands over the
    values that come from it. `within` is what a stage, or what a pass found, belongs to: of it come a stage's types and sources.
    """
    if isinstance(value, (tuple, list)):
        between = "\n\n" if all(isinstance(part, Stage) for part in value) else "\n"
        return between.join(made for part in value if (made := text(part, only=only, sources=sources, within=within)))
    if (one := written(value, within)) is not None:
        lines = _sources(value, within) if sources else {}
        return "\n".join(_lines(one, only, lines))
    match value:
        case Plan():
            regions = [region_text(region) for region in value.regions if only is None or region.name in only]
            return "\n".join(
                [*regions, *(f"{left.name}: whole, {left.reason}" for left in value.whole if only is None or left.name in only)]
            )
        case Cone():
            return cone_text(value) if only is None or value.seed in only else ""
        case None:
            return ""
    return str(value)


def written(value: object, within: Program | Sharded | Local | None = None) -> Written | None:
    """What the text of a graph says; None for what has no graph."""
    match value:
        case Written():
            return value
        case Program():
            return Written(value.graph, value.types, updates=value.updates)
        case Sharded(program):
            marks = dict.fromkeys(value.entering, f"grad +{value.axis}")
            return Written(program.graph, program.types, value.layouts, marks, program.updates, value.axis, value.parts)
        case Local(program):
            return Written(value.graph, all_types(value), value.layouts, {}, program.updates, value.axis, value.parts)
        case Stage():
            if isinstance(within, Local):
                types = all_types(replace(within, graph=value.graph))
                return Written(value.graph, types, within.layouts, {}, value.updates, within.axis, within.parts)
            return Written(value.graph, {}, updates=value.updates)
    return None


def region_text(region: Any) -> str:
    weights = ", ".join(f"{name} {layout}" for name, layout in region.weights.items())
    return f"{region.name}: {region.kind} over {region.axis}, {weights}"


def cone_text(cone: Cone) -> str:
    if cone.columns:
        return f"%{cone.seed} ends {cone.kind}: columns {', '.join(cone.columns)}"
    if cone.kind == "vocabulary" and cone.layouts:
        return f"%{cone.seed} ends {cone.kind}: rows of {', '.join(cone.layouts)}"
    return f"%{cone.seed} ends no region: {cone.reason or 'no linear before it'}"


def origin_types(local: Local) -> dict[str, Type]:
    """The global types of a local graph's nodes: of the value that each is a piece of."""
    types = local.program.types
    return {node.name: types[origin] for node in local.graph.nodes if (origin := local.origins.get(node.name, node.name)) in types}


def all_types(local: Local) -> dict[str, Type]:
    """Those of `origin_types`, and of what the passes added: a partial sum's, of which the layout says the sizes."""
    found, elements = origin_types(local), dtypes(local, local.graph)
    for node in local.graph.nodes:
        layout = local.layouts.get(node.name)
        if node.name not in found and node.name in elements and isinstance(layout, Layout):
            found[node.name] = TensorType(elements[node.name], tuple(size_of(dim) for dim in layout.dims))
    return found


def program_of(value: object) -> Program | None:
    """The program that a value of the passes is, or is made of."""
    match value:
        case Program():
            return value
        case Sharded(program) | Local(program):
            return program
    return None


def _sources(value: object, within: Program | Sharded | Local | None) -> dict[str, Source]:
    """The user's line of every value, by the name of its node."""
    whole = value if program_of(value) is not None else within
    if (program := program_of(whole)) is None:
        return {}
    found = dict(program.sources)
    if isinstance(whole, Local):
        found |= {name: found[origin] for name, origin in whole.origins.items() if origin in found}
    return found


def _lines(one: Written, only: Collection[str] | None, sources: Mapping[str, Source]) -> Iterable[str]:
    if one.axis:
        yield f"over {one.axis}={one.parts}"
    last: tuple[str, int] | None = None
    for node in one.graph.nodes:
        if only is not None and node.name not in only:
            continue
        if (source := sources.get(node.name)) is not None and (source.file, source.line) != last:
            last = source.file, source.line
            yield f"  # {source.file.rpartition('/')[2]}:{source.line}  {source.code}"
        yield from _line(node, one)


def _line(node: fx.Node, one: Written) -> Iterable[str]:
    kind = type_text(one.types.get(node.name), one.layouts.get(node.name))
    ending = f" : {kind}" if kind else ""
    ending += f" {one.marks[node.name]}" if node.name in one.marks else ""
    match node.op:
        case "placeholder":
            yield f"  %{node.name}{ending}"
        case "output":
            values: Any = node.args[0]
            returned = values[: -len(one.updates)] if one.updates else values
            yield f"  return {argument_text(list(returned) if isinstance(returned, tuple) else returned)}"
            for name, value in results(one.graph, one.updates)[1].items():
                yield f"  {name} = %{value.name}"
        case _:
            arguments = [*map(argument_text, node.args), *(f"{key}={argument_text(arg)}" for key, arg in node.kwargs.items())]
            name = target_text(node)
            mark = "!" if name.startswith("tpcompile.") else " "
            yield f"{mark} %{node.name} = {name}({', '.join(arguments)}){ending}"


def target_text(node: fx.Node) -> str:
    """aten.linear; operator.getitem for a function that is no operator."""
    if isinstance(node.target, torch._ops.OpOverload):
        return op_name(node).removesuffix(".default")
    module = getattr(node.target, "__module__", "") or ""
    name = getattr(node.target, "__name__", str(node.target))
    return f"{module.lstrip('_')}.{name}" if module else name


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


def argument_text(value: object) -> str:
    """An argument, as the module's text lists them."""
    match value:
        case fx.Node():
            return f"%{value.name}"
        case PerRank(values):
            return "|".join(map(argument_text, values))
        case list():
            return f"[{', '.join(map(argument_text, value))}]"
        case tuple():
            return f"({', '.join(map(argument_text, value))}{',' * (len(value) == 1)})"
        case slice():
            return f"slice({', '.join(map(argument_text, (value.start, value.stop, value.step)))})"
        case torch.dtype():
            return DTYPES.get(value, str(value))
        case str():
            return json.dumps(value, ensure_ascii=False)
        case complex():
            return f"complex({value.real!r}, {value.imag!r})"
    return str(value)
