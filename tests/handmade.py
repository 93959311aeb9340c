"""A two-stage model lowered by hand: the runtime's tests need no compiler, and disagree with none.

stage 0   embedding (tied) → linear → tanh
stage 1   head (tied) → cross-entropy, a mean over the labels that are not ignored
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tpcompile.ir import Boundary, Count, Input, Program, Stage
from tpcompile.layout import TensorType, symbol, whole
from tpcompile.mesh import Mesh
from tpcompile.passes.emit import Piece, RankProgram
from tpcompile.runtime import compiled as compiled_module
from tpcompile.runtime.compiled import Compiled, compile

VOCABULARY, WIDTH = 11, 6


class Tied(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.spare = nn.Linear(2, 2, bias=False, dtype=dtype)  # no graph uses it

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.mix(self.embed(input_ids))))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1)), "logits": logits}


class First(nn.Module):
    def __init__(self, model: Tied) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding.from_pretrained(model.embed.weight.detach().clone(), freeze=False), nn.Linear(WIDTH, WIDTH)
        self.mix.weight, self.mix.bias = _copy(model.mix.weight), _copy(model.mix.bias)
        self.spare = nn.Linear(2, 2, bias=False)
        self.spare.weight = _copy(model.spare.weight)

    def forward(self, *, input_ids: Tensor) -> tuple[Tensor]:
        return (torch.tanh(self.mix(self.embed(input_ids))),)


class Second(nn.Module):
    def __init__(self, model: Tied) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(model.embed.weight.detach().clone(), freeze=False)

    def forward(self, z: Tensor, *, labels: Tensor | None = None, **counts: Tensor) -> tuple[Tensor, ...]:
        logits = F.linear(z, self.embed.weight)
        if labels is None:
            return (logits,)
        total = F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), reduction="sum")
        return total / counts["count_0"] * counts["replicas"], logits


class Both(nn.Module):
    def __init__(self, model: Tied) -> None:
        super().__init__()
        first = First(model)
        self.embed, self.mix, self.spare = first.embed, first.mix, first.spare

    def forward(self, *, input_ids: Tensor, **rest: Tensor) -> tuple[Tensor, ...]:
        (z,) = First.forward(self, input_ids=input_ids)
        return Second.forward(self, z, **rest)


def _copy(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)


# ------------------------------------------------------------------------------------------------- graphs

PARAMETERS = {"p_embed": "embed.weight", "p_mix_weight": "mix.weight", "p_mix_bias": "mix.bias"}
B, S = symbol("b"), symbol("s")


def program(model: Tied, static: int | None, labels: bool, random: bool) -> Program:
    """`static`: the sequence length that capture fixed; None: dynamic."""
    dtype, s = model.embed.weight.dtype, static or S
    graph = fx.Graph()
    names = [*PARAMETERS, "input_ids", *(["labels", "count_0", "replicas"] if labels else [])]
    node = {name: graph.placeholder(name) for name in names}
    x = graph.call_function(F.embedding, (node["input_ids"], node["p_embed"]))
    z = graph.call_function(torch.tanh, (graph.call_function(F.linear, (x, node["p_mix_weight"], node["p_mix_bias"])),))
    made = {"logits": graph.call_function(F.linear, (z, node["p_embed"]))}
    types = {"input_ids": TensorType(torch.int64, (B, s)), made["logits"].name: TensorType(dtype, (B, s, VOCABULARY))}
    if labels:
        total = graph.call_function(F.cross_entropy, (made["logits"], node["labels"]), {"reduction": "sum"})
        mean = graph.call_function(torch.div, (total, node["count_0"]))
        made = {"loss": graph.call_function(torch.mul, (mean, node["replicas"])), **made}
        scalars = ("count_0", "replicas", made["loss"].name)
        types |= {"labels": TensorType(torch.int64, (B, s)), **dict.fromkeys(scalars, TensorType(dtype, ()))}
    graph.output(tuple(made.values()))
    inputs = {name: Input(name, 0) for name in ("input_ids", "labels") if name in node}
    return Program(
        graph=graph,
        types=types,
        sources={},
        parameters=PARAMETERS,
        buffers={},
        constants={},
        inputs=inputs,
        aliases={"head.weight": "embed.weight"},
        symbols={B: ("input_ids", 0), **({} if static else {S: ("input_ids", 1)})},
        layers=(),
        out_spec=pytree.tree_structure(dict.fromkeys(made, 0)),
        loss=made["loss"].name if labels else None,
        outputs=tuple(value.name for value in made.values()),
        counts=(Count("count_0", _count()), Count("replicas", None)) if labels else (),
        random=random,
    )


def _count() -> fx.Graph:
    graph = fx.Graph()
    kept = graph.call_function(torch.ne, (graph.placeholder("labels"), -100))
    graph.output(graph.call_function(torch.sum, (kept,)))
    return graph


def stages(program: Program, pp: int, dtype: torch.dtype) -> tuple[Stage, ...]:
    inputs = tuple(name for name in ("labels", "count_0", "replicas") if program.loss)
    if pp == 1:
        return (Stage(0, program.graph, (), (), ("input_ids", *inputs), PARAMETERS, {}, ()),)
    s = program.types["input_ids"].shape[1]
    z = Boundary("z", TensorType(dtype, (B, s, WIDTH)), True, whole(B, s, WIDTH))
    head = {"p_embed": "embed.weight"}
    return Stage(0, program.graph, (), (z,), ("input_ids",), PARAMETERS, {}, ()), Stage(1, program.graph, (z,), (), inputs, head, {}, ())


@dataclass
class Lowered:
    """What the driver would return."""

    mesh: Mesh
    program: Program
    stages: tuple[Stage, ...]
    options: Any = None
    history: dict[str, Any] = field(default_factory=dict)

    def held(self) -> dict[str, Any]:
        return {}

    def pieces(self) -> dict[str, Any]:
        return {}

    def rank_program(self, model: Tied, rank: int, device: torch.device) -> RankProgram:
        place = self.mesh.coordinates(rank)["pp"]
        module = Both(model) if self.mesh.pp == 1 else (First, Second)[place](model)
        mine = self.stages[place]
        pieces = {name: Piece() for name, _ in module.named_parameters()}
        module = module if model.embed.weight.is_meta else module.to(device)
        return RankProgram(self.mesh, rank, (mine,), (module,), (mine.graph,), ("",), pieces, ("spare.weight",))


def lower(
    model: Tied, mesh: Mesh, batch: Mapping[str, Any], options: Any, held: Any = None, *, static: bool = False, random: bool = False
) -> Lowered:
    found = program(model, batch["input_ids"].shape[1] if static else None, "labels" in batch, random)
    return Lowered(mesh, found, stages(found, mesh.pp, model.embed.weight.dtype), options)


def matches(program: Program, batch: Mapping[str, Any], model: nn.Module) -> bool:
    s = program.types["input_ids"].shape[1]
    same = set(batch) == {i.path for i in program.inputs.values()}
    return same and (not isinstance(s, int) or batch["input_ids"].shape[1] == s)


def compiled(model: Tied, mesh: str, *args: Any, static: bool = False, **settings: Any) -> Compiled:
    """tpcompile.compile with the hand-made compiler in its place."""
    compiled_module.lower = lambda *a: lower(*a, static=static)
    compiled_module.matches = matches
    return compile(model, mesh, *args, **settings)


def batch(rows: int = 8, length: int = 5, seed: int = 0) -> dict[str, Tensor]:
    """Rows with very different numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    labels = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    kept = torch.arange(length)[None] < torch.arange(rows)[:, None] % (length + 1)
    return {"input_ids": ids, "labels": labels.where(kept, -100)}
