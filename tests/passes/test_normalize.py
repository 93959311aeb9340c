"""normalize: one spelling per operation; and the numbers stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_models import before_and_after
from torch import Tensor, nn

from tpcompile.errors import Refused
from tpcompile.ir import Program
from tpcompile.passes.capture import capture
from tpcompile.passes.normalize import normalize
from tpcompile.rules import op_name
from tpcompile.simulate.lockstep import run

Compare = Callable[..., None]


class Spelled(nn.Module):
    """One operation in the spelling under test, between two linears."""

    def __init__(self, work: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.work = work
        self.first = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self.first(x)).sum()


def program_of(work: Callable[[Tensor], Tensor]) -> Program:
    return capture(Spelled(work).double().train(), {"x": torch.randn(2, 3, 8, dtype=torch.float64)})


def names(program: Program) -> list[str]:
    return [op_name(node) for node in program.graph.nodes if node.op == "call_function"]


CASES: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    # what the user writes, what it must become, what must be gone
    "chunk": (lambda x: torch.cat([a.exp() for a in x.chunk(3, -1)]), "aten.split_with_sizes.default", "aten.chunk.default"),
    "split": (lambda x: torch.cat([a.exp() for a in x.split(4, -1)]), "aten.split_with_sizes.default", "aten.split.Tensor"),
    "tensor_split": (lambda x: torch.cat(x.tensor_split(3, -1)), "aten.split_with_sizes.default", "aten.tensor_split.sections"),
    "gate": (lambda x: F.glu(x, -1) * F.glu(x, 2), "aten.split_with_sizes.default", "aten.glu.default"),
    "slices": (lambda x: x[..., :8].exp() * x[..., 8:].sum(), "aten.split_with_sizes.default", "aten.slice.Tensor"),
    "slices in three": (lambda x: x[..., 8:] * x[..., :4] * x[..., 4:8], "aten.split_with_sizes.default", "aten.slice.Tensor"),
    "repeat": (
        lambda x: x.unflatten(2, (3, 4))[:, :, :, None].expand(-1, -1, -1, 2, -1).flatten(2, 3),
        "aten.repeat_interleave.self_int",
        "aten.expand.default",
    ),
    "tiles": (lambda x: x.repeat(1, 1, 2), "aten.flatten.using_ints", "aten.repeat.default"),
    "tiles of a new dimension": (lambda x: x.repeat(3, 2, 1, 1), "aten.flatten.using_ints", "aten.repeat.default"),
    "tiles along two dimensions": (lambda x: x.repeat(2, 1, 3) * torch.arange(36), "aten.flatten.using_ints", "aten.repeat.default"),
    "tiles before": (lambda x: x.repeat(2, 1, 1, 1), "aten.expand.default", "aten.repeat.default"),
    "cast": (lambda x: x.to(torch.float64) * 2, "aten.mul.Tensor", "aten.to.dtype"),
    "type_as": (lambda x: x.exp().type_as(x), "aten.exp.default", "aten.type_as.default"),
    "view_as": (lambda x: x.exp().view_as(x.transpose(1, 2).contiguous()), "aten.reshape.default", "aten.view_as.default"),
    "squeeze": (lambda x: x[:, None].exp().squeeze(), "aten.squeeze.dims", "aten.squeeze.default"),
    "squeeze of nothing": (lambda x: x.exp().squeeze(1), "aten.exp.default", "aten.squeeze.dim"),
    "slice of all": (lambda x: x.exp()[:, :, :], "aten.exp.default", "aten.slice.Tensor"),
    "entries": (
        lambda x: x[torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1]), (x[..., 0] > 0).long() - 1],
        "aten.gather.default",
        "aten.index.Tensor",
    ),
    "dropout": (lambda x: F.dropout(x, 0.25), "tpcompile.dropout.default", "aten.dropout.default"),
    "dropout of nothing": (lambda x: F.dropout(x.exp(), 0.0), "aten.exp.default", "aten.dropout.default"),
    "attention with dropout": (
        lambda x: F.scaled_dot_product_attention(*(a[:, None] for a in x.chunk(3, -1)), dropout_p=0.5, is_causal=True),
        "tpcompile.dropout.default",
        "aten.scaled_dot_product_attention.default",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_spelling(name: str) -> None:
    work, there, gone = CASES[name]
    captured = program_of(work)
    normal = normalize(captured)
    assert gone in names(captured), "the case does not try what it says"
    assert there in names(normal) and gone not in names(normal)


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_gradients_stay(name: str) -> None:
    """With nothing dropped, the same loss and the same gradients to the last place or so."""
    captured = program_of(_without_dropout(name))
    normal = normalize(program_of(CASES[name][0]))
    results = [_loss_and_gradients(program) for program in (captured, normal)]
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*results, strict=True))


def _without_dropout(name: str) -> Callable[[Tensor], Tensor]:
    match name:
        case "dropout":
            return lambda x: x
        case "attention with dropout":
            return lambda x: F.scaled_dot_product_attention(*(a[:, None] for a in x.chunk(3, -1)), is_causal=True)
    return CASES[name][0]


def _loss_and_gradients(program: Program) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    given = {
        "x": torch.randn(2, 3, 8, generator=generator, dtype=torch.float64),
        "p_first_weight": torch.randn(12, 8, generator=generator, dtype=torch.float64).requires_grad_(),
        "p_first_bias": torch.randn(12, generator=generator, dtype=torch.float64).requires_grad_(),
        "rng_key": torch.zeros(3, dtype=torch.int64),
    }
    assert program.loss is not None
    loss = run(program.graph, {node.name: [given[node.name]] for node in program.graph.find_nodes(op="placeholder")}, 1)[program.loss][0]
    return [loss.detach(), *torch.autograd.grad(loss, [given["p_first_weight"], given["p_first_bias"]])]


class Attends(nn.Module):
    """Attention over [rows, length, heads · 6], given as torch wants it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = (x.unflatten(-1, (-1, 6)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads, mask, **self.settings).sum()


ATTENTION = [{}, {"is_causal": True}, {"scale": 0.7}, {"enable_gqa": True}, {"mask": "bool"}, {"mask": "float"}]


@pytest.mark.parametrize("settings", ATTENTION, ids=str)
def test_attention_spelled_out_is_torchs(settings: dict[str, Any]) -> None:
    """Attention with dropout is spelled out; with nothing dropped it is what torch computes without dropout."""
    settings = dict(settings)
    kind = settings.pop("mask", None)
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": 24, "k": 12, "v": 12} if settings.get("enable_gqa") else {"q": 24, "k": 24, "v": 24}
    batch = {name: torch.randn(2, 3, size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}
    if kind:
        mask = torch.rand(2, 1, 3, 3, generator=generator) > 0.5
        batch["mask"] = mask if kind == "bool" else mask.double()
    normal = normalize(capture(Attends(dropout_p=0.5, **settings), batch))
    key = {"rng_key": torch.zeros(3, dtype=torch.int64)}
    assert normal.random and normal.loss is not None
    made = run(normal.graph, {name: [value] for name, value in {**batch, **key}.items()}, 1)[normal.loss][0]
    assert torch.allclose(made, Attends(**settings)(**batch), rtol=1e-12)


def test_attention_over_heads_that_are_not_known_is_refused() -> None:
    class Direct(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True).sum()

    heads = {"q": 4, "k": 2, "v": 2}
    captured = capture(Direct(), {name: torch.randn(3, count, 5, 6) for name, count in heads.items()})
    with pytest.raises(Refused, match=r"^attention with dropout, over heads whose number or size is known only when it runs\n"):
        normalize(captured)


def test_golden(golden: Compare) -> None:
    def work(x: Tensor) -> Tensor:
        a, b = x[..., :8], x[..., 8:]
        y = F.dropout(a.exp(), 0.5) * b.repeat(1, 1, 2)
        return y.squeeze(1).to(torch.float64)

    golden(before_and_after(normalize, program_of(work)), "normalize")


def test_slices_that_leave_a_gap_stay() -> None:
    assert names(normalize(program_of(lambda x: x[..., :4] * x[..., 8:]))).count("aten.slice.Tensor") == 2


def test_fast_attention_keeps_its_dropout() -> None:
    fast = normalize(program_of(CASES["attention with dropout"][0]), "fast")
    assert not fast.random and "aten.scaled_dot_product_attention.default" in names(fast)


def test_dropout_by_global_index_in_its_place() -> None:
    exact = normalize(program_of(lambda x: F.dropout(F.dropout(x, 0.0).cos(), 0.5) * CASES["attention with dropout"][0](x).sum()), "exact")
    sites = [node.args[3] for node in exact.graph.nodes if op_name(node) == "tpcompile.dropout_at.default"]
    assert exact.random and sites == [0, 1] and "tpcompile.dropout.default" not in names(exact)


def test_only_dropout_takes_the_key() -> None:
    assert not normalize(program_of(lambda x: x.exp())).random
    normal = normalize(program_of(lambda x: F.dropout(F.dropout(x, 0.5), 0.5)))
    sites = [node.args[3] for node in normal.graph.nodes if op_name(node) == "tpcompile.dropout.default"]
    assert normal.random and sites == [0, 1]
