"""What the runtime has to know of a model and its program, from a manifest alone: names, shapes, sizes; no values and no graph."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from tpcompile.errors import InputError
from tpcompile.export.files import MANIFEST, digest
from tpcompile.export.manifest import element_type
from tpcompile.export.numbers import decode
from tpcompile.export.read import Saved
from tpcompile.ir import Boundary, Count, Guards, Input, Program, Stage
from tpcompile.layout import Layout, Size, TensorType, symbol


class Outline(nn.Module):
    """A model's parameters and buffers on the meta device, under all of their names, and the arguments of its forward."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__()
        held: dict[str, Tensor] = {}
        for name, kind in content["parameters"].items():
            empty = torch.empty(kind["shape"], dtype=element_type(kind["dtype"]), device="meta")
            held[name] = nn.Parameter(empty, requires_grad=kind["trained"])
        for name, kind in content["buffers"].items():
            held[name] = torch.empty(kind["shape"], dtype=element_type(kind["dtype"]), device="meta")
        held |= {twin: held[first] for twin, first in content["twins"].items()}
        for name, tensor in held.items():
            path, _, own = name.rpartition(".")
            owner = self._made(path)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(own, tensor)
            else:
                kind = content["buffers"][content["twins"].get(name, name)]
                owner.register_buffer(own, tensor, persistent=kind["saved"])
        kinds = {kind.name: kind for kind in inspect._ParameterKind}
        given = [inspect.Parameter(name, kinds[kind]) for name, kind in content["program"]["forward"].items()]

        def forward(*args: Any, **kwargs: Any) -> Any:
            raise InputError("the model itself is not on disk, only its programs", at="forward", fix="call the loaded program")

        forward.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
        self.forward = forward

    def _made(self, path: str) -> nn.Module:
        owner: nn.Module = self
        for part in filter(None, path.split(".")):
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        return owner


@dataclass(frozen=True)
class Crossing(Boundary):
    """A boundary whose local shapes are known for every tensor rank."""

    shapes: tuple[tuple[Size, ...], ...] = ()

    def shape(self, coordinate: int) -> tuple[Size, ...]:
        return self.shapes[coordinate]


def program_of(saved: Saved) -> Program:
    """The program of a manifest. Its graph says what is returned, and nothing of how it is computed."""
    content = saved.content["program"]
    kinds = {name: _type(kind) for name, kind in (*content["inputs"].items(), *content["returned"].items())}
    kinds |= {count["name"]: _type(count) for count in content["counts"]}
    inputs = {name: Input(entry["path"], entry["batch_dim"]) for name, entry in content["inputs"].items()}
    loss = content["loss"]["name"] if content["loss"] else None
    leaves, spec = pytree.tree_flatten(_outputs(content["outputs"]))
    taken = _taken(content, content["values"])
    other = content["other_rows"]
    functions = saved.namespace("counts.py") if any(count["computed"] for count in content["counts"]) else {}
    graphs = {count["name"]: fx.Tracer().trace(functions[count["name"]]) for count in content["counts"] if count["computed"]}
    counts = (Count(count["name"], graphs.get(count["name"])) for count in content["counts"])
    return Program(
        graph=_graph(saved, inputs, list(content["returned"]), content["updates"]),
        types=kinds,
        sources={},
        parameters={},
        buffers={},
        constants=saved.tensors("counts.safetensors"),
        inputs=inputs,
        aliases=content["aliases"],
        layers=(),
        out_spec=spec,
        loss=loss,
        outputs=tuple(leaf.name if isinstance(leaf, _Named) else None for leaf in leaves),
        output_constants={place: leaf.value for place, leaf in enumerate(leaves) if isinstance(leaf, _Constant)},
        counts=tuple(counts),
        updates=tuple(content["updates"]),
        random=content["random"],
        witness=None if other is None else _witness(inputs, other),
        **taken,
    )


def stages_of(saved: Saved) -> tuple[Stage, ...]:
    """The stages of a manifest: what they take, give and hold."""
    return tuple(_stage(index, content) for index, content in enumerate(saved.content["stages"]))


def _stage(index: int, content: Mapping[str, Any]) -> Stage:
    graph = fx.Graph()
    for placeholder, name in content["parameters"].items():
        node = graph.placeholder(placeholder)
        if name in content["summed_later"]:
            graph.call_function(torch.ops.tpcompile.enter_later.default, (node, "tp"))
    graph.output(())
    return Stage(
        index,
        graph,
        tuple(map(_crossing, content["receives"])),
        tuple(map(_crossing, content["sends"])),
        tuple(content["inputs"]),
        content["parameters"],
        content["buffers"],
        (),
        tuple(content["updates"]),
        content["unhalved"],
        tuple(content["layers"]),
        tuple(content["units"]),
    )


def _crossing(content: Mapping[str, Any]) -> Crossing:
    shapes = tuple(tuple(map(decode, shape)) for shape in content["shapes"])
    kind = TensorType(element_type(content["dtype"]), shapes[0])
    return Crossing(content["name"], kind, content["requires_grad"], Layout(()), shapes)


def _type(content: Mapping[str, Any]) -> TensorType:
    return TensorType(element_type(content["dtype"]), tuple(map(decode, content["shape"])))


def _taken(content: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    ranges = {symbol(name): tuple(between) for name, between in content["ranges"].items()}
    conditions = tuple(map(decode, content["conditions"]))
    return {
        "symbols": {symbol(name): tuple(place) for name, place in content["symbols"].items()},
        "guards": Guards(frozenset(), frozenset(), values, ranges, conditions),
    }


def _witness(inputs: Mapping[str, Input], content: Mapping[str, Any]) -> Program:
    graph = fx.Graph()
    graph.output(())
    none: Mapping[str, Any] = MappingProxyType({})
    return Program(
        graph=graph, types=none, sources=none, parameters=none, buffers=none, constants=none, inputs=inputs, aliases=none, layers=(),
        out_spec=None, loss=None, **_taken(content, none),
    )  # fmt: skip


def _graph(saved: Saved, inputs: Mapping[str, Input], returned: list[str], updates: list[str]) -> fx.Graph:
    """What is returned; and the manifest's hash, since all ranks compare their graphs."""
    graph = fx.Graph()
    known = {name: graph.placeholder(name) for name in dict.fromkeys([*inputs, *returned])}
    graph.placeholder(f"manifest_{digest(saved.directory / MANIFEST)}")
    graph.output((*(known[name] for name in returned), *(graph.placeholder(f"updated_{place}") for place, _ in enumerate(updates))))
    return graph


@dataclass(frozen=True)
class _Named:
    name: str


@dataclass(frozen=True)
class _Constant:
    value: Any


def _outputs(content: Mapping[str, Any]) -> Any:
    match content:
        case {"tensor": str(name)}:
            return _Named(name)
        case {"value": value}:
            return _Constant(value)
        case {"mapping": dict(items)}:
            return {key: _outputs(item) for key, item in items.items()}
        case {"list": list(items)}:
            return [_outputs(item) for item in items]
        case {"tuple": list(items)}:
            return tuple(_outputs(item) for item in items)
    raise InputError(f"{content!r} is no output", at="manifest.json", fix="emit the program again")
