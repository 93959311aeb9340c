"""divide_loss: the parts' losses add up to the whole batch's, for every loss that can be divided; others are refused with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_models import Tiny, before_and_after
from torch import Tensor, fx, nn

import tpcompile
from tpcompile.errors import InputError, Refused
from tpcompile.ir import Program
from tpcompile.passes.capture import capture
from tpcompile.passes.divide_loss import divide_loss
from tpcompile.passes.normalize import normalize
from tpcompile.simulate import check
from tpcompile.simulate.lockstep import run
from tpcompile.simulate.replay import counted, flatten, rows

Loss = Callable[[Any, Mapping[str, Tensor]], Tensor]


class Model(nn.Module):
    """Scores [rows, 4, 5] of features [rows, 4, 3]; a running norm on request."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.score = nn.Linear(3, 5)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.score(x)
        return y if self.norm is None else self.norm(y.flatten(0, 1)).unflatten(0, y.shape[:2])


def batch() -> dict[str, Tensor]:
    """Six rows with four, three, two, one and no labels; the last has all again."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (6, 4), generator=generator)
    kept = torch.arange(4)[None] < torch.tensor([4, 3, 2, 1, 0, 4])[:, None]
    return {
        "x": torch.randn(6, 4, 3, generator=generator, dtype=torch.float64),
        "labels": labels.where(kept, -100),
        "target": torch.randn(6, 4, 5, generator=generator, dtype=torch.float64),
        "mask": kept.double(),
        "class_of": labels[:, 0],
        "items": torch.tensor(14),
    }


def part(count: int, first: int = 0) -> dict[str, Tensor]:
    """Some rows of the batch."""
    return {name: value[first : first + count] if value.dim() else value for name, value in batch().items()}


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0], dtype=torch.float64)


def tokens(scores: Tensor, batch: Mapping[str, Tensor], **settings: Any) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), **settings)


def each(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), batch["labels"], reduction="none")


def masked(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return ((scores - batch["target"]).square().mean(-1) * batch["mask"]).sum() / batch["mask"].sum()


def negatives(scores: Tensor, batch: Mapping[str, Tensor], **settings: Any) -> Tensor:
    """Log-probabilities and labels, one for each place."""
    return F.nll_loss(scores.log_softmax(-1).flatten(0, 1), batch["labels"].flatten(), **settings)


def divergence(scores: Tensor, batch: Mapping[str, Tensor], **settings: Any) -> Tensor:
    return F.kl_div(scores.log_softmax(-1), batch["target"].softmax(-1), **settings)


def z_loss(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return scores.logsumexp(-1).square().mean()


def seen(batch: Mapping[str, Tensor]) -> Tensor:
    """How many labels there are: a whole number."""
    return (batch["labels"] != -100).sum()


def errors(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """The squared error of each place, where the mask says so."""
    return (scores - batch["target"]).square().mean(-1) * batch["mask"]


def several(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Means over labels, over places, over the mask's places, over rows, and a sum; all of different numbers."""
    rows = (errors(scores, batch).sum(1) / batch["mask"].sum(1).clamp(min=1)).mean()
    focal = (each(scores, batch) ** 2).sum() / 7
    return 0.9 * tokens(scores, batch) + 1e-2 * z_loss(scores, batch) + masked(scores, batch) / 3 + rows - focal


def chosen(scores: Tensor, batch: Mapping[str, Tensor], **settings: Any) -> Tensor:
    """Only the places that have labels."""
    kept = batch["labels"] != -100
    return F.cross_entropy(scores[kept], batch["labels"][kept], **settings)


def chosen_errors(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    kept = batch["mask"].bool()
    return (scores[kept] - batch["target"][kept]).square()


def prior(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """What the classes' labels are of all labels of the batch, by the inputs alone."""
    counts = F.one_hot(batch["class_of"], 5).sum(0)
    return tokens(scores + ((counts + 1) / (counts + 1).sum()).log(), batch)


DIVIDED: dict[str, Loss] = {
    "cross entropy": tokens,
    "another ignored label": lambda scores, batch: tokens(scores, batch | {"labels": batch["labels"].clamp(min=0)}, ignore_index=2),
    "class weights": lambda scores, batch: tokens(scores, batch, weight=WEIGHTS),
    "label smoothing": lambda scores, batch: tokens(scores, batch, label_smoothing=0.1),
    "smoothing with class weights": lambda scores, batch: tokens(scores, batch, label_smoothing=0.1, weight=WEIGHTS),
    "probabilities": lambda scores, batch: F.cross_entropy(scores.flatten(0, 1), batch["target"].softmax(-1).flatten(0, 1), WEIGHTS),
    "probabilities of places": lambda scores, batch: F.cross_entropy(scores.transpose(1, 2), batch["target"].softmax(-1).transpose(1, 2)),
    "over places": lambda scores, batch: F.cross_entropy(scores.transpose(1, 2), batch["labels"]),
    "sum": lambda scores, batch: tokens(scores, batch, reduction="sum"),
    "sum by labels": lambda scores, batch: tokens(scores, batch, reduction="sum") / seen(batch),
    "sum by at least one": lambda scores, batch: tokens(scores, batch, reduction="sum") / seen(batch).clamp(min=1),
    "sum by labels in the batch": lambda scores, batch: tokens(scores, batch, reduction="sum") / batch["items"],
    "nll": negatives,
    "nll with class weights": lambda scores, batch: negatives(scores, batch, weight=WEIGHTS, ignore_index=-100),
    "nll over places": lambda scores, batch: F.nll_loss(scores.log_softmax(-1).transpose(1, 2), batch["labels"]),
    "nll of each": lambda scores, batch: negatives(scores, batch, reduction="none").sum() / seen(batch),
    "kl by rows": lambda scores, batch: divergence(scores, batch, reduction="batchmean"),
    "kl": lambda scores, batch: divergence(scores, batch, reduction="mean"),
    "kl sum": lambda scores, batch: divergence(scores, batch, reduction="sum"),
    "kl of each": lambda scores, batch: (divergence(scores, batch, reduction="none").sum(-1) * batch["mask"]).sum() / batch["mask"].sum(),
    "mse": lambda scores, batch: F.mse_loss(scores, batch["target"]),
    "mse of each": lambda scores, batch: (F.mse_loss(scores, batch["target"], reduction="none").mean(-1) * batch["mask"]).mean(),
    "mse broadcast": lambda scores, batch: F.mse_loss(scores, batch["target"][..., :1].expand(-1, -1, 5)),
    "l1": lambda scores, batch: F.l1_loss(scores, batch["target"]),
    "l1 sum": lambda scores, batch: F.l1_loss(scores, batch["target"], reduction="sum"),
    "smooth l1": lambda scores, batch: F.smooth_l1_loss(scores, batch["target"]),
    "huber": lambda scores, batch: F.huber_loss(scores, batch["target"]),
    "binary": lambda scores, batch: F.binary_cross_entropy_with_logits(scores, batch["target"].sigmoid()),
    "binary with weights": lambda scores, batch: F.binary_cross_entropy_with_logits(
        scores, batch["target"].sigmoid(), batch["mask"][..., None].expand(-1, -1, 5), pos_weight=WEIGHTS
    ),
    "binary of probabilities": lambda scores, batch: F.binary_cross_entropy(scores.sigmoid(), batch["target"].sigmoid()),
    "soft margin": lambda scores, batch: F.soft_margin_loss(scores, batch["target"].sign()),
    "hinge": lambda scores, batch: F.hinge_embedding_loss(scores, batch["target"].sign()),
    "margin": lambda scores, batch: F.margin_ranking_loss(scores[..., 0], scores[..., 1], batch["target"][..., 0].sign()),
    "cosine": lambda scores, batch: F.cosine_embedding_loss(scores[:, 0], batch["target"][:, 0], batch["target"][:, 1, 0].sign()),
    "triplet": lambda scores, batch: F.triplet_margin_loss(scores[:, 0], scores[:, 1], batch["target"][:, 2]),
    "poisson": lambda scores, batch: F.poisson_nll_loss(scores, batch["target"].square()),
    "labels of many": lambda scores, batch: F.multilabel_soft_margin_loss(scores[:, 0], batch["target"][:, 0].sigmoid()),
    "mean": lambda scores, batch: (scores - batch["target"]).square().mean(),
    "mean of rows": lambda scores, batch: (scores - batch["target"]).square().mean((1, 2)).mean(),
    "mean over rows, then places": lambda scores, batch: (scores - batch["target"]).square().mean(0).mean(1).sum(),
    "mean over rows kept": lambda scores, batch: ((scores - batch["target"]).square().mean((0, 1), keepdim=True) * WEIGHTS).sum(),
    "by rows": lambda scores, batch: scores.square().sum() / scores.shape[0],
    "by elements": lambda scores, batch: scores.square().sum() / scores.numel(),
    "by a tensor of rows": lambda scores, batch: scores.square().sum() / torch.tensor(scores.shape[0]),
    "by a number and rows": lambda scores, batch: scores.square().sum().div(3 * scores.shape[0] * scores.shape[1]),
    "rows weighed by their number": lambda scores, batch: (scores / scores.shape[0]).square().sum(),
    "masked mean": masked,
    "masked mean by at least one": lambda scores, batch: errors(scores, batch).sum() / batch["mask"].sum().clamp(min=1),
    "masked mean and a little": lambda scores, batch: errors(scores, batch).sum() / (batch["mask"].sum() + 1e-8),
    "masked mean of elements": lambda scores, batch: errors(scores, batch).sum() / (batch["mask"].sum() * 5),
    "mean by the mask's mean": lambda scores, batch: errors(scores, batch).mean() / batch["mask"].mean(),
    "mean by the mask's means": lambda scores, batch: (errors(scores, batch).mean(0) / batch["mask"].mean((0,))).sum(),
    "mask as a part of the batch": lambda scores, batch: (errors(scores, batch) * (batch["mask"] / batch["mask"].sum())).sum(),
    "by the root of a count": lambda scores, batch: errors(scores, batch).sum() / seen(batch).sqrt(),
    "by a number out of the graph": lambda scores, batch: errors(scores, batch).sum() / batch["mask"].sum().item(),
    "nothing without labels": lambda scores, batch: torch.where(seen(batch) > 0, tokens(scores, batch), torch.zeros(()).double()),
    "no mask, no loss": lambda scores, batch: errors(scores, batch).sum().masked_fill(batch["mask"].sum() == 0, 0.0),
    "a share of labels": lambda scores, batch: tokens(scores, batch) * (seen(batch) / batch["labels"].numel()),
    "classes by their number": prior,
    "chosen by a mask": chosen,
    "chosen by a mask, summed": lambda scores, batch: chosen(scores, batch, reduction="sum") / seen(batch),
    "chosen by a mask, each": lambda scores, batch: chosen(scores, batch, reduction="none").mean(),
    "chosen by a mask, errors": lambda scores, batch: chosen_errors(scores, batch).mean(),
    "chosen by a mask, by their number": lambda scores, batch: chosen_errors(scores, batch).sum() / chosen_errors(scores, batch).shape[0],
    "dot": lambda scores, batch: each(scores, batch).flatten().dot(batch["mask"].flatten()) / batch["mask"].sum(),
    "matrix product": lambda scores, batch: (batch["mask"].flatten() @ scores.flatten(0, 1).square() @ WEIGHTS) / batch["mask"].sum(),
    "einsum": lambda scores, batch: torch.einsum("bsc,bs->c", scores.square(), batch["mask"]).mul(WEIGHTS).sum() / seen(batch),
    "one label per row": lambda scores, batch: F.cross_entropy(scores.mean(1), batch["class_of"]),
    "mean of each row": lambda scores, batch: (errors(scores, batch).sum(1) / batch["mask"].sum(1).clamp(min=1)).mean(),
    "focal": lambda scores, batch: ((1 - (-each(scores, batch)).exp()) ** 2 * each(scores, batch)).sum() / batch["mask"].sum(),
    "z": z_loss,
    "two losses": lambda scores, batch: tokens(scores, batch) + 0.3 * F.mse_loss(scores, batch["target"]),
    "two losses, the same labels": lambda scores, batch: tokens(scores, batch).add(negatives(scores, batch), alpha=0.3),
    "several": several,
    "several in a stack": lambda scores, batch: torch.stack([tokens(scores, batch), masked(scores, batch), z_loss(scores, batch)]).mean(),
    "several in a row": lambda scores, batch: torch.cat([tokens(scores, batch)[None], masked(scores, batch).view(1)]) @ WEIGHTS[:2],
    "several in a python sum": lambda scores, batch: sum([tokens(scores, batch), masked(scores, batch)]),  # type: ignore[dict-item, return-value]
    "a difference": lambda scores, batch: tokens(scores, batch) - masked(scores, batch) / 4,
    "from a number": lambda scores, batch: 3 - tokens(scores, batch),
    "from a loss": lambda scores, batch: torch.rsub(tokens(scores, batch), masked(scores, batch), alpha=2),
    "times a number": lambda scores, batch: 2 * -tokens(scores, batch),
    "and a number": lambda scores, batch: tokens(scores, batch) + 1,
    "and what is in the model": lambda scores, batch: tokens(scores, batch) + WEIGHTS.sum(),
    "a number": lambda scores, batch: 0 * tokens(scores, batch) + seen(batch) / 3,
    "used twice": lambda scores, batch: tokens(scores, batch) + 0.5 * tokens(scores, batch).detach(),
}  # fmt: skip


def program_of(loss: Loss, model: nn.Module | None = None, rows: int = 2, accepted: tuple[str, ...] = ()) -> Program:
    """Of one row there is a witness, as in the driver."""
    model = (model or Model()).double().train()
    witness = normalize(capture(model, part(2 * rows), loss=loss)) if rows == 1 else None
    return divide_loss(normalize(capture(model, part(rows), loss=loss)), witness, accepted)


def shares(program: Program, model: nn.Module, given: Mapping[str, Tensor], parts: int) -> list[Tensor]:
    """What the parts of a batch give of its loss, told the counts of the whole batch."""
    assert program.loss_reason == "" and program.loss is not None
    tensors = flatten(program, {name: value for name, value in given.items() if name in {entry.path for entry in program.inputs.values()}})
    counts = {count.name: counted(count, model, program, tensors, parts, 1) for count in program.counts}
    state = {key: model.get_parameter(path) for key, path in program.parameters.items()} | program.constants
    made = []
    for index in range(parts):
        feed = {**rows(program, tensors, index, parts), **counts, **state}
        values = run(program.graph, {node.name: [feed[node.name]] for node in program.graph.find_nodes(op="placeholder")}, 1)
        made.append(values[program.loss][0])
    return made


ALONE = """by rows|by elements|by a number and rows|rows weighed by their number|cross entropy|over places|kl by rows|mse|mean of rows
mean over rows, then places|mean over rows kept|masked mean and a little|mean by the mask's means|mask as a part of the batch
by a number out of the graph|nothing without labels|classes by their number|chosen by a mask|chosen by a mask, errors
einsum|several|several in a stack|from a number"""
"""Losses that are also tried with one row to a part: there the batch is a dimension of one, and the number of rows the number 1."""

PARTS = [*((name, 3) for name in DIVIDED), *((name, 6) for name in ALONE.replace("\n", "|").split("|"))]


@pytest.mark.parametrize(("name", "parts"), PARTS)
def test_parts_add_up(name: str, parts: int) -> None:
    """The shares of parts, some of which have no label at all, add up to the loss of the batch, and so do their gradients."""
    torch.manual_seed(0)
    model = Model().double().train()
    loss = DIVIDED[name]
    program = program_of(loss, model, 6 // parts)
    total = torch.stack(shares(program, model, batch(), parts)).sum()
    expected = loss(model(batch()["x"]), batch())
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    mine, theirs = (torch.autograd.grad(value, list(model.parameters())) for value in (total, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["cross entropy", "several", "masked mean and a little", "several in a stack", "mean of rows", "and a number"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_counts_are_rounded_to_float32_at_most(name: str, dtype: torch.dtype) -> None:
    """In half precision 257 labels would count as 256, and the sum of many losses would be infinite."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 5, (257, 4), generator=generator).where(torch.arange(4)[None] == 0, -100)
    given = {
        "x": torch.randn(257, 4, 3, generator=generator).to(dtype),
        "labels": labels,
        "target": torch.full((257, 4, 5), 20.0, dtype=dtype),
        "mask": (labels != -100).to(dtype),
        "items": torch.tensor(257),
    }
    program = divide_loss(normalize(capture(model, {k: v[:2] if v.dim() else v for k, v in given.items()}, loss=DIVIDED[name])))
    (total,) = shares(program, model, given, 1)
    expected = DIVIDED[name](model(given["x"]), given)
    assert total.dtype == dtype
    torch.testing.assert_close(total.float(), expected.float(), rtol=8 * torch.finfo(dtype).eps, atol=0)
    own = {count.name for count in program.counts} - {node.name for node in users_of_totals(program)}
    assert {program.types[name].dtype for name in own} == {torch.float32}  # type: ignore[union-attr]


def users_of_totals(program: Program) -> list[fx.Node]:
    """Counts that the user's own graph has, in the type in which it has them."""
    found = [node for node in program.graph.find_nodes(op="placeholder") if node.name.startswith("loss_count")]
    return [node for node in found if program.types[node.name].dtype != torch.float32]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["cross entropy", "class weights", "label smoothing", "masked mean", "several", "classes by their number"])
def test_gradients_on_replicas_and_micro_batches(name: str) -> None:
    torch.manual_seed(0)
    for microbatches in (1, 2):  # two rows to each, and one
        report = check(Model().double().train(), "dp=3", batch(), loss=DIVIDED[name], microbatches=microbatches)
        assert report.ok, str(report)


def contrast(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    rows = F.normalize(scores.flatten(1), dim=-1)
    return F.cross_entropy(rows @ rows.t(), torch.arange(rows.shape[0]))


def balance(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """A router's: the square of a mean over the batch."""
    return scores.softmax(-1).mean((0, 1)).square().sum()


def best(scores: Tensor) -> Tensor:
    return scores.argmax(-1).flatten()


REFUSED: dict[str, tuple[Loss, str]] = {
    "in-batch contrast": (contrast, "aten.matmul.default at test_divide_loss.py:LINE: rows meet other rows"),
    "rows for classes": (lambda scores, batch: F.cross_entropy(scores[:, 0].t(), torch.zeros(5, dtype=torch.long)), "aten.cross"),
    "labels in another order": (
        lambda scores, batch: F.cross_entropy(scores.flatten(0, 1), batch["labels"].t().flatten()),
        "aten.cross_entropy_loss.default at test_divide_loss.py:LINE: two uses of a value need it cut in different ways",
    ),
    "labels of unlike sizes": (
        lambda scores, batch: F.cross_entropy(scores.flatten(0, 1), batch["class_of"][:, None].expand(-1, 4).t().flatten()),
        "aten.cross_entropy_loss.default at test_divide_loss.py:LINE: operands of unlike sizes",
    ),
    "labels by scores": (
        lambda scores, batch: F.cross_entropy(scores.flatten(0, 1), best(scores)),
        "aten.cross_entropy_loss.default at test_divide_loss.py:LINE: its labels or class weights depend on parameters: "
        "how many are not ignored is not known before",
    ),
    "median": (lambda scores, batch: (scores - batch["target"]).abs().median(), "aten.median.default at test_divide_loss.py:LINE: no rule"),
    "worst row": (lambda scores, batch: each(scores, batch).sum(1).max(), "aten.max.default at test_divide_loss.py:LINE: aten.max"),
    "router balance": (balance, "aten.square.default at test_divide_loss.py:LINE: it is not linear in a sum over the batch's rows"),
    "root of a mean": (
        lambda scores, batch: F.mse_loss(scores, batch["target"]).sqrt(),
        "aten.sqrt.default at test_divide_loss.py:LINE: it is not linear in a sum over the batch's rows",
    ),
    "perplexity": (lambda scores, batch: tokens(scores, batch).exp(), "aten.exp.default at test_divide_loss.py:LINE: it is not linear"),
    "at least": (lambda scores, batch: tokens(scores, batch).clamp(min=0.1), "aten.clamp.default at test_divide_loss.py:LINE: it is not"),
    "greater of two": (
        lambda scores, batch: torch.maximum(tokens(scores, batch), masked(scores, batch)),
        "aten.maximum.default at test_divide_loss.py:LINE: it is not linear in a sum over the batch's rows",
    ),
    "product of losses": (lambda scores, batch: tokens(scores, batch) * F.mse_loss(scores, batch["target"]), "aten.mul.Tensor at"),
    "loss by a loss": (lambda scores, batch: masked(scores, batch) / tokens(scores, batch), "aten.div.Tensor at"),
    "loss for each row": (
        lambda scores, batch: (tokens(scores, batch) * batch["mask"]).mean(),
        "aten.mul.Tensor at test_divide_loss.py:LINE: it brings a sum over the rows back to the rows",
    ),
    "spread over rows": (
        lambda scores, batch: ((scores - scores.mean(0)) ** 2).mean(),
        "aten.sub.Tensor at test_divide_loss.py:LINE: it brings a sum over the rows back to the rows",
    ),
    "a ratio by scores": (lambda scores, batch: scores.square().sum() / scores.abs().sum(), "aten.div.Tensor at"),
    "by how many are right": (
        lambda scores, batch: tokens(scores, batch, reduction="sum") / (best(scores) == batch["labels"].flatten()).sum(),
        "aten.div.Tensor at test_divide_loss.py:LINE: it is not linear in a sum over the batch's rows",
    ),
    "chosen by scores": (
        lambda scores, batch: scores[scores > 0].square().mean(),
        "aten.mean.default at test_divide_loss.py:LINE: it is a mean of a number of elements that is not known before",
    ),
    "by the greatest number": (
        lambda scores, batch: scores.square().sum() / batch["target"].max(),
        "aten.max.default at test_divide_loss.py:LINE: aten.max.default needs this dimension whole",
    ),
    "by the rows' root": (
        lambda scores, batch: scores.square().sum() / scores.shape[0] ** 0.5,
        "aten.div.Tensor at test_divide_loss.py:LINE: it computes with a number that depends on how many rows there are",
    ),
    "by one row less": (lambda scores, batch: scores.square().sum() / (scores.shape[0] - 1), "aten.div.Tensor at test_divide_loss.py:LINE"),
    "whole numbers of a sum": (lambda scores, batch: tokens(scores, batch).long() * scores.mean(), "aten.to.dtype at"),
    "a share of whole numbers": (
        lambda scores, batch: scores.mean() * 0 + ((best(scores) == batch["labels"].flatten()).sum() + 1),
        "aten.add.Tensor at test_divide_loss.py:LINE: it adds to a whole number what cannot be shared out",
    ),
    "rows in another order": (
        lambda scores, batch: F.mse_loss(scores, batch["target"].flip(0)),
        "aten.flip.default at test_divide_loss.py:LINE: aten.flip.default needs this dimension whole",
    ),
    "an affine map of a sum": (
        lambda scores, batch: F.linear(scores.mean((0, 1)), batch["target"].new_ones(1, 5), batch["target"].new_ones(1)).sum(),
        "aten.linear.default at test_divide_loss.py:LINE: it is not linear in a sum over the batch's rows",
    ),
    "no loss at all": (lambda scores, batch: scores.flatten()[:1].sum(), "aten.slice.Tensor at"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_says_why(name: str) -> None:
    loss, reason = REFUSED[name]
    for count in (2, 1) if name in ("in-batch contrast", "router balance", "spread over rows", "by one row less") else (2,):
        program = program_of(loss, rows=count)
        assert re.sub(r"(?<=py:)\d+", "LINE", program.loss_reason).startswith(reason), program.loss_reason
        assert program.counts == ()


def balanced(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return tokens(scores, batch) + 0.1 * balance(scores, batch)


ACCEPTED: dict[str, tuple[Loss, Loss, Loss, str]] = {
    "router balance": (balanced, tokens, lambda scores, batch: 0.1 * balance(scores, batch), "def balanced*"),
    "in-batch contrast": (contrast, lambda scores, batch: 0 * scores.sum(), contrast, "def contrast*"),
    "contrast and a mean": (
        lambda scores, batch: masked(scores, batch) - contrast(scores, batch) / 2,
        masked,
        lambda scores, batch: -contrast(scores, batch) / 2,
        "*contrast(scores, batch) / 2*",
    ),
    "root of a mean": (
        lambda scores, batch: F.mse_loss(scores, batch["target"]).sqrt() * 2 + 1,
        lambda scores, batch: 0 * scores.sum() + 1,
        lambda scores, batch: F.mse_loss(scores, batch["target"]).sqrt() * 2,
        "test_divide_loss.py:*",
    ),
}  # fmt: skip
"""A loss, what of it is divided, what is accepted per micro-batch, and the pattern that accepts it."""


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted_is_the_mean_over_the_parts(name: str) -> None:
    loss, divided, mixing, pattern = ACCEPTED[name]
    torch.manual_seed(0)
    model = Model().double().train()
    assert program_of(loss, model).loss_reason
    for parts in (3, 6):
        made = shares(program_of(loss, model, 6 // parts, (pattern,)), model, batch(), parts)
        size = 6 // parts
        own = [part(size, index * size) for index in range(parts)]
        expected = divided(model(batch()["x"]), batch()) + torch.stack([mixing(model(rows["x"]), rows) for rows in own]).mean()
        torch.testing.assert_close(torch.stack(made).sum(), expected, rtol=1e-12, atol=1e-12)
        mine, theirs = (torch.autograd.grad(value, list(model.parameters())) for value in (torch.stack(made).sum(), expected))
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_what_is_accepted_by_the_options() -> None:
    given = {name: value for name, value in part(4).items() if name != "items"}
    accepted = {"def balanced*": "per micro-batch"}
    compiled = tpcompile.compile(Model().double(), "dp=2", given, loss=balanced, overrides=accepted)
    assert compiled.compilation.program.loss_reason == ""
    with pytest.raises(Refused, match=r'overrides=\{"test_divide_loss\.py:\d+": "per micro-batch"\}'):
        tpcompile.compile(Model().double(), "dp=2", given, loss=balanced)
    with pytest.raises(InputError) as error:
        tpcompile.compile(Model().double(), "dp=2", given, loss=tokens, overrides=accepted)
    assert error.value.what == "overrides name nothing that mixes the rows of a micro-batch: 'def balanced*'"
    assert error.value.fix == "leave it out"


class Multiplied(Model):
    """A mean that is divided, times what mixes rows."""

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        spread = scores.softmax(-1).mean((0, 1)).square().sum()
        error = scores.square().mean()
        return error * spread


def test_a_product_with_what_is_accepted_is_not_accepted_with_it() -> None:
    """The mean of products is no product of means: the product has to be accepted by itself."""
    program = normalize(capture(Multiplied().double(), {"x": batch()["x"][:2]}))

    def reason(*accepted: str) -> str:
        return divide_loss(program, accepted=accepted).loss_reason

    assert reason().startswith("aten.square.default at test_divide_loss.py:")
    assert re.fullmatch(
        r"aten\.mul\.Tensor at test_divide_loss\.py:\d+: it is not linear in a sum over the batch's rows", reason("spread = *")
    )
    assert reason("spread = *", "return error * spread") == ""


def test_what_is_captured_otherwise_for_more_rows_is_refused() -> None:
    """A number of rows that was made a tensor is a constant of the capture of one row."""
    program = program_of(DIVIDED["by a tensor of rows"], rows=1)
    assert program.loss_reason.endswith(": with another number of rows the model computes something else"), program.loss_reason


def test_statistics_of_the_batch_are_refused() -> None:
    try:
        program = program_of(tokens, Model(nn.BatchNorm1d(5, track_running_stats=False)))
    except Exception as error:  # capture may refuse them before
        assert "batch" in str(error).lower()
        return
    assert program.loss_reason.startswith("aten.batch_norm.default at")


def test_a_refusal_is_raised_where_it_matters() -> None:
    """On one replica and one micro-batch such a loss trains; on two it is an error with the user's line."""
    given = {"x": batch()["x"], "target": batch()["target"]}

    def loss(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.mse_loss(scores, batch["target"]).sqrt()

    assert check(Model().double(), "dp=1", given, loss=loss).ok
    with pytest.raises(Refused) as error:
        check(Model().double(), "dp=2", given, loss=loss)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("the loss of a batch is not the sum of its parts' losses: aten.sqrt.default at test_divide_loss.py:")
    assert lines[1] == "  at   check(dp=2, microbatches=1)"
    assert re.fullmatch(
        r"  fix  use dp=1 and microbatches=1, or a loss that is linear in sums and means over rows, or "
        r'overrides=\{"test_divide_loss\.py:\d+": "per micro-batch"\} to take micro-batches' + "' mean",
        lines[-1],
    )


def test_golden(golden: Callable[..., None]) -> None:
    given = {"ids": torch.tensor([[0, 1, 4], [2, 2, 3]]), "labels": torch.tensor([[1, 4, 2], [2, 3, -100]])}
    program = normalize(capture(Tiny().double(), given))
    counts = "\n\n".join(f"{count.name}\n{count.graph}" for count in divide_loss(program).counts)
    golden(f"{before_and_after(divide_loss, program)}\n\n{counts}", "divide_loss")
