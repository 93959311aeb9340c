"""Programs and stages straight from torch.export, with static sizes: tests of later passes need no other pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from tpcompile.ir import Boundary, Input, Program, Source, Stage
from tpcompile.layout import TensorType, whole


def program_of(model: nn.Module, inputs: Mapping[str, Tensor], layers: Sequence[str]) -> Program:
    """The model's graph; its first output is the loss."""
    exported = torch.export.export(model, (), dict(inputs), strict=False)
    parameters, buffers, constants = {}, {}, {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.PARAMETER:
            parameters[spec.arg.name] = str(spec.target)
        elif spec.kind == InputKind.BUFFER:
            buffers[spec.arg.name] = str(spec.target)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            constants[spec.arg.name] = exported.constants[str(spec.target)]
    used = {node.name for node in exported.graph.find_nodes(op="placeholder") if node.users}
    every = dict(model.named_parameters(remove_duplicate=False))
    first = {id(value): name for name, value in reversed(every.items())} | {id(every[n]): n for key, n in parameters.items() if key in used}
    nodes = list(exported.graph.nodes)
    return Program(
        graph=exported.graph,
        types={node.name: kind for node in nodes if (kind := _type(node.meta.get("val")))},
        sources={node.name: _source(node) for node in nodes if node.meta.get("nn_module_stack")},
        parameters={key: name for key, name in parameters.items() if first[id(every[name])] == name},
        buffers=buffers,
        constants=constants,
        inputs={name: Input(name, 0) for name in inputs},
        aliases={name: first[id(value)] for name, value in every.items() if first[id(value)] != name},
        symbols={},
        layers=tuple(layers),
        out_spec=None,
        loss=nodes[-1].args[0][0].name,
    )


def _type(value: Any) -> TensorType | tuple[TensorType, ...] | None:
    if isinstance(value, list | tuple):
        kinds = tuple(TensorType(part.dtype, tuple(part.shape)) for part in value if isinstance(part, Tensor))
        return kinds if len(kinds) == len(value) else None
    return TensorType(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else None


def _source(node: fx.Node) -> Source:
    path = next(reversed(node.meta["nn_module_stack"].values()))[0].partition("@")[0]
    trace = (node.meta.get("stack_trace") or "").strip().splitlines()
    return Source("model.py", 1, trace[-1].strip() if trace else "", path)


def copied(graph: fx.Graph, change: Callable[[fx.Graph, fx.Node, dict[fx.Node, fx.Node]], fx.Node | None]) -> fx.Graph:
    """A copy of a graph in which `change` may put a node of its own in another's place."""
    new, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        made[node] = change(new, node, made) or new.node_copy(node, made.__getitem__)
    return new


def stage_of(program: Program, graph: fx.Graph, index: int = 0, receives: Sequence[str] = (), sends: Sequence[str] = ()) -> Stage:
    held = {node.name for node in graph.find_nodes(op="placeholder")}

    def boundaries(names: Sequence[str]) -> tuple[Boundary, ...]:
        return tuple(Boundary(name, program.types[name], True, whole(*program.types[name].shape)) for name in names)  # type: ignore[arg-type, union-attr]

    return Stage(
        index,
        graph,
        boundaries(receives),
        boundaries(sends),
        tuple(name for name in (*program.inputs, "rng_key") if name in held),
        {key: name for key, name in program.parameters.items() if key in held},
        {key: name for key, name in program.buffers.items() if key in held},
        tuple(name for name in program.constants if name in held),
    )


def two_stages(program: Program, crossing: str) -> tuple[Stage, Stage]:
    """The program cut after a node that alone crosses; what depends on inputs only is computed on both sides."""
    nodes = list(program.graph.nodes)
    cut = next(node for node in nodes if node.name == crossing)
    before = {node for node in nodes[: nodes.index(cut) + 1] if node.op != "placeholder"}
    return (
        stage_of(program, _part(program.graph, [cut], None), 0, sends=[crossing]),
        stage_of(program, _part(program.graph, list(program.graph.output_node().args[0]), cut, before), 1, receives=[crossing]),
    )


def _part(graph: fx.Graph, outputs: Sequence[Any], received: fx.Node | None, before: set[fx.Node] | None = None) -> fx.Graph:
    needed, todo = set[fx.Node](), list(outputs)
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += [] if node is received else node.all_input_nodes
    new, made = fx.Graph(), dict[fx.Node, fx.Node]()
    if received is not None:
        made[received] = new.placeholder(received.name)
    for node in graph.nodes:
        if node in needed and node is not received:
            made[node] = new.node_copy(node, made.__getitem__)
    new.output(tuple(made[node] for node in outputs))
    return new
