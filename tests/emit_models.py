"""Small models for the emission tests, and a hand-made cut of their MLPs, where worker processes can import them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from exported import copied, program_of, stage_of
from torch import Tensor, fx, nn

from tpcompile import collectives
from tpcompile.ir import PerRank, Program, Stage
from tpcompile.mesh import Mesh
from tpcompile.passes.emit import RankProgram, emit


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
    """An embedding tied to the head, equal layers in a ModuleList, a mask that all of them take."""

    def __init__(self, layers: int = 2, size: int = 4, inner: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, size)
        self.h = nn.ModuleList(Block(size, inner) for _ in range(layers))
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.register_buffer("hidden", torch.tensor(3.0), persistent=False)
        self.head = nn.Linear(size, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        mask = (torch.arange(ids.shape[1], device=ids.device) % 3 != 1)[:, None].to(x_dtype(self))
        x = self.embed(ids) * self.hidden
        for layer in self.h:
            x = layer(x, mask)
        logits = self.head(x) * self.scale[0]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def x_dtype(model: Tiny) -> torch.dtype:
    return model.embed.weight.dtype


def tiny(layers: int = 2) -> Tiny:
    torch.manual_seed(0)
    return Tiny(layers).double()


def batch() -> dict[str, Tensor]:
    return {"ids": torch.tensor([[0, 1, 4], [2, 2, 3]]), "labels": torch.tensor([[1, 4, 2], [2, 3, 0]])}


def tiny_program(model: Tiny) -> Program:
    return program_of(model, batch(), [f"h.{index}" for index in range(len(model.h))])


BOUNDS = [0, 3, 3, 5]
"""Five columns on two ranks: 3 and 2."""


def cut_in_two(program: Program) -> tuple[Stage, dict[str, tuple[int, Sequence[int]]]]:
    """Every MLP column- and row-cut on two ranks; a view of the cut value shows a number that differs by rank."""
    pieces: dict[str, tuple[int, Sequence[int]]] = {}
    held = {key: name for key, name in program.parameters.items() if ".up." in name or ".down." in name}

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        pieces.update({held[s.name]: (int(".down." in held[s.name]), BOUNDS) for s in node.all_input_nodes if s.name in held})
        names = [held.get(source.name, "") for source in node.all_input_nodes]
        if any(".up.weight" in name for name in names):
            x = node.all_input_nodes[0]
            entered = graph.create_node("call_function", collectives.enter, (made[x], "tp"), name=f"{x.name}_enter")
            column = graph.node_copy(node, lambda source: entered if source is x else made[source])
            return graph.call_function(torch.ops.aten.view.default, (column, [2, 3, PerRank((3, 2))]))
        if any(".down.weight" in name for name in names):
            partial = graph.create_node(
                "call_function", node.target, *fx.map_arg((node.args, node.kwargs), made.__getitem__), name=f"{node.name}_partial"
            )
            return graph.create_node("call_function", collectives.reduce, (partial, "tp"), name=node.name)
        return None

    return stage_of(program, copied(program.graph, change)), pieces


def emitted(model: Tiny, rank: int) -> RankProgram:
    program = tiny_program(model)
    stage, pieces = cut_in_two(program)
    return emit([stage], program, model, pieces, Mesh(tp=2), rank)


def agrees_with_eager(rank: int, size: int, group: str) -> None:
    """A worker: both ranks together compute what the model does, gradients included, compiled or not."""
    model = tiny()
    program = emitted(model, rank)
    collectives.bind(program.module, {"tp": group})
    eager_loss, eager_logits = model(**batch())
    eager_loss.backward()
    whole = dict(model.named_parameters())
    for module in (program.module, torch.compile(program.module, fullgraph=True, backend="aot_eager")):
        program.module.zero_grad()
        loss, logits = module(**batch())
        loss.backward()
        assert torch.allclose(loss, eager_loss, atol=1e-12) and torch.allclose(logits, eager_logits, atol=1e-12)
        for name, parameter in program.module.named_parameters():
            expected = whole[name].grad
            if expected is None:
                assert name in program.unused and parameter.grad is None
            else:
                assert torch.allclose(parameter.grad, program.parameters[name].of(expected), atol=1e-12), name  # type: ignore[arg-type]
