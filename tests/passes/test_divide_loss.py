"""divide_loss: the parts' losses add up to the whole batch's, for every loss that can be divided; others are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_models import Tiny, before_and_after
from torch import Tensor, nn

from tpcompile.errors import Refused
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
    }


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0], dtype=torch.float64)


def tokens(scores: Tensor, batch: Mapping[str, Tensor], **settings: Any) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), **settings)


def each(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), batch["labels"], reduction="none")


def masked(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return ((scores - batch["target"]).square().mean(-1) * batch["mask"]).sum() / batch["mask"].sum()


DIVIDED: dict[str, Loss] = {
    "cross entropy": tokens,
    "another ignored label": lambda scores, batch: tokens(scores, batch | {"labels": batch["labels"].clamp(min=0)}, ignore_index=2),
    "class weights": lambda scores, batch: tokens(scores, batch, weight=WEIGHTS),
    "label smoothing": lambda scores, batch: tokens(scores, batch, label_smoothing=0.1),
    "sum": lambda scores, batch: tokens(scores, batch, reduction="sum"),
    "mse": lambda scores, batch: F.mse_loss(scores, batch["target"]),
    "l1 sum": lambda scores, batch: F.l1_loss(scores, batch["target"], reduction="sum"),
    "smooth l1": lambda scores, batch: F.smooth_l1_loss(scores, batch["target"]),
    "huber": lambda scores, batch: F.huber_loss(scores, batch["target"]),
    "binary": lambda scores, batch: F.binary_cross_entropy_with_logits(scores, batch["target"].sigmoid()),
    "mean": lambda scores, batch: (scores - batch["target"]).square().mean(),
    "mean of rows": lambda scores, batch: (scores - batch["target"]).square().mean((1, 2)).mean(),
    "masked mean": masked,
    "one label per row": lambda scores, batch: F.cross_entropy(scores.mean(1), batch["class_of"]),
    "mean of each row": lambda scores, batch: ((each(scores, batch) * batch["mask"]).sum(1) / batch["mask"].sum(1).clamp(min=1)).mean(),
    "focal": lambda scores, batch: ((1 - (-each(scores, batch)).exp()) ** 2 * each(scores, batch)).sum() / batch["mask"].sum(),
    "two losses": lambda scores, batch: tokens(scores, batch) + 0.3 * F.mse_loss(scores, batch["target"]),
    "a difference": lambda scores, batch: tokens(scores, batch) - masked(scores, batch) / 4,
    "times a number": lambda scores, batch: 2 * -tokens(scores, batch),
}


def program_of(loss: Loss, model: nn.Module | None = None) -> Program:
    given = {name: value[:2] for name, value in batch().items()}
    return divide_loss(normalize(capture((model or Model()).double().train(), given, loss=loss)))


@pytest.mark.parametrize("name", DIVIDED)
def test_parts_add_up(name: str) -> None:
    """The sum of three parts' losses, given the counts of the whole batch, is its loss."""
    torch.manual_seed(0)
    model = Model().double().train()
    loss = DIVIDED[name]
    program = program_of(loss, model)
    assert program.loss_reason == "" and program.loss is not None
    tensors = flatten(
        program, {name: value for name, value in batch().items() if name in {entry.path for entry in program.inputs.values()}}
    )
    counts = {count.name: counted(count.graph, model, program, tensors, 3) for count in program.counts}
    state = {key: model.get_parameter(path) for key, path in program.parameters.items()} | program.constants
    total = torch.zeros((), dtype=torch.float64)
    for index in range(3):
        given = {**rows(program, tensors, index, 3), **counts, **state}
        total = (
            total
            + run(program.graph, {node.name: [given[node.name]] for node in program.graph.find_nodes(op="placeholder")}, 1)[program.loss][0]
        )
    assert torch.allclose(total, loss(model(batch()["x"]), batch()), rtol=1e-12)


@pytest.mark.parametrize("name", ["cross entropy", "class weights", "label smoothing", "masked mean", "two losses"])
def test_gradients_on_replicas_and_micro_batches(name: str) -> None:
    torch.manual_seed(0)
    report = check(Model().double().train(), "dp=3", batch(), loss=DIVIDED[name], microbatches=1)
    assert report.ok, str(report)


def contrast(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    rows = F.normalize(scores.flatten(1), dim=-1)
    return F.cross_entropy(rows @ rows.t(), torch.arange(rows.shape[0]))


def balance(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """A router's: the square of a mean over the batch."""
    return scores.softmax(-1).mean((0, 1)).square().sum()


REFUSED: dict[str, tuple[Loss, str]] = {
    "in-batch contrast": (contrast, "aten.matmul.default at test_divide_loss.py:"),
    "rows for classes": (lambda scores, batch: F.cross_entropy(scores[:, 0].t(), torch.zeros(5, dtype=torch.long)), "aten.cross"),
    "median": (lambda scores, batch: (scores - batch["target"]).abs().median(), "aten.median.default at"),
    "router balance": (balance, "aten.mean.dim at"),
    "root of a mean": (lambda scores, batch: F.mse_loss(scores, batch["target"]).sqrt(), "aten.sqrt.default at"),
    "product of losses": (lambda scores, batch: tokens(scores, batch) * F.mse_loss(scores, batch["target"]), "aten.mul.Tensor at"),
    "spread over rows": (lambda scores, batch: ((scores - scores.mean(0)) ** 2).mean(), "aten.mean.dim at"),
    "a ratio by scores": (lambda scores, batch: scores.square().sum() / scores.abs().sum(), "aten.div.Tensor at"),
    "rows in another order": (lambda scores, batch: F.mse_loss(scores, batch["target"].flip(0)), "aten.flip.default at"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_says_why(name: str) -> None:
    loss, reason = REFUSED[name]
    program = program_of(loss)
    assert program.loss_reason.startswith(reason), program.loss_reason
    assert program.counts == ()


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
    assert lines[-1] == "  fix  use dp=1 and microbatches=1, or a loss that is a sum or a mean over tokens"


def test_golden(golden: Callable[..., None]) -> None:
    given = {"ids": torch.tensor([[0, 1, 4], [2, 2, 3]]), "labels": torch.tensor([[1, 4, 2], [2, 3, -100]])}
    program = normalize(capture(Tiny().double(), given))
    (count,) = divide_loss(program).counts
    golden(f"{before_and_after(divide_loss, program)}\n\n{count.name}\n{count.graph}", "divide_loss")
