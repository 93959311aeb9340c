"""Emission: what the modules compute, what they are called, and what their source looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from tpcompile.ir import Boundary, Input, Program, Source, Stage, TensorType
from tpcompile.mesh import Mesh
from tpcompile.passes.emit import emit


class Block(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, inner)
        self.down = nn.Linear(inner, size, bias=False)
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * mask


class Tiny(nn.Module):
    """Embedding, equal layers in a ModuleList, a tied head, and a mask that all layers take."""

    def __init__(self, layers: int = 2, size: int = 4, inner: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, size)
        self.h = nn.ModuleList(Block(size, inner) for _ in range(layers))
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.register_buffer("hidden", torch.tensor(3.0), persistent=False)
        self.head = nn.Linear(size, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        mask = (torch.arange(ids.shape[1], device=ids.device) % 3 != 1)[:, None].float()
        x = self.embed(ids) * self.hidden
        for layer in self.h:
            x = layer(x, mask)
        logits = self.head(x) * self.scale[0]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def program_of(model: nn.Module, inputs: Mapping[str, Tensor], layers: Sequence[str]) -> Program:
    """A Program from torch.export, with static sizes."""
    exported = torch.export.export(model, (), dict(inputs), strict=False)
    parameters, buffers, constants = {}, {}, {}
    for spec in exported.graph_signature.input_specs:
        place = {InputKind.PARAMETER: parameters, InputKind.BUFFER: buffers}.get(spec.kind)
        if place is not None:
            place[spec.arg.name] = spec.target
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            constants[spec.arg.name] = exported.constants[spec.target]
    every = dict(model.named_parameters(remove_duplicate=False))
    used = {node.name for node in exported.graph.find_nodes(op="placeholder") if node.users}
    names = {id(every[name]): name for key, name in parameters.items() if key in used}
    names = {id(value): name for name, value in reversed(every.items())} | names
    parameters = {key: name for key, name in parameters.items() if names[id(every[name])] == name}
    nodes = list(exported.graph.nodes)
    return Program(
        graph=exported.graph,
        types={n.name: TensorType(n.meta["val"].dtype, tuple(n.meta["val"].shape)) for n in nodes if isinstance(n.meta.get("val"), Tensor)},
        sources={n.name: source_of(n) for n in nodes if n.meta.get("nn_module_stack")},
        parameters=parameters,
        buffers=buffers,
        constants=constants,
        inputs={name: Input(name, 0) for name in inputs},
        aliases={name: names[id(value)] for name, value in every.items() if names.get(id(value), name) != name},
        symbols={},
        layers=tuple(layers),
        out_spec=None,
        loss=nodes[-1].args[0][0].name,
    )


def source_of(node: fx.Node) -> Source:
    path = next(reversed(node.meta["nn_module_stack"].values()))[0]
    line = (node.meta.get("stack_trace") or "").strip().splitlines()
    return Source("model.py", 1 + len(line) * 0, line[-1].strip() if line else "", path)


def whole_stage(program: Program) -> Stage:
    """The program as one stage, on one tensor rank."""
    return stage_of(program, 0, program.graph)


def stage_of(program: Program, index: int, graph: fx.Graph, receives: Sequence[str] = (), sends: Sequence[str] = ()) -> Stage:
    used = {node.name for node in graph.find_nodes(op="placeholder")}

    def boundaries(names: Sequence[str]) -> tuple[Boundary, ...]:
        return tuple(Boundary(name, program.types[name], True) for name in names)  # type: ignore[arg-type]

    return Stage(
        index,
        graph,
        boundaries(receives),
        boundaries(sends),
        tuple(name for name in used if name in program.inputs),
        {key: name for key, name in program.parameters.items() if key in used},
        {key: name for key, name in program.buffers.items() if key in used},
        tuple(name for name in program.constants if name in used),
    )


def batch() -> dict[str, Tensor]:
    return {"ids": torch.tensor([[0, 1, 4], [2, 2, 3]]), "labels": torch.tensor([[1, 4, 2], [2, 3, 0]])}


@pytest.fixture
def model() -> Tiny:
    torch.manual_seed(0)
    return Tiny().double()


def test_numbers_and_names(model: Tiny) -> None:
    program = program_of(model, batch(), ["h.0", "h.1"])
    made = emit([whole_stage(program)], program, model, {}, Mesh(), 0)
    loss, logits = made.module(**batch())
    loss.backward()
    eager_loss, eager_logits = model(**batch())
    eager_loss.backward()
    assert torch.equal(loss, eager_loss) and torch.equal(logits, eager_logits)
    assert list(made.module.state_dict()) == list(model.state_dict())
    print(made.source)
