"""Optimizers: groups, what is refused and why, word for word, and norms, in one process."""

from __future__ import annotations

from typing import Any

import handmade
import pytest
import torch
from torch import nn, optim

from tpcompile.errors import InputError, Refused, TpcompileError
from tpcompile.runtime import optimizer as optimizers
from tpcompile.runtime.compiled import Compiled
from tpcompile.runtime.optimizer import Holds, refuse_mixing

NAMES = "ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, SGD"


def one() -> Compiled:
    return handmade.compiled(handmade.Tied(), "tp=1", handmade.batch())


def lines(error: pytest.ExceptionInfo[TpcompileError]) -> list[str]:
    return [line for line in str(error.value).split("\n") if not line.startswith("  from ")]


def test_groups_by_name_and_parameter() -> None:
    def choose(name: str, parameter: nn.Parameter) -> optimizers.Choice:
        if name == "spare.weight":
            return None
        return {"lr": 0.5} if parameter.ndim == 2 else "flat"

    compiled = one()
    groups = compiled.optimizer(optim.SGD, choose, lr=1.0).param_groups
    own = {p: name for name, p in compiled.named_parameters()}
    shown = [([own[p] for p in group["params"]], group["lr"], group.get("name")) for group in groups]
    assert shown == [(["embed.weight", "mix.weight"], 0.5, None), (["mix.bias"], 1.0, "flat"), (["spare.weight"], 1.0, None)]


def test_a_rank_without_parameters_of_a_group_has_it_all_the_same() -> None:
    model = handmade.Tied()
    choices = optimizers.choices(model, {"head.weight": "embed.weight"}, lambda name, p: {"lr": 1.0 / p.ndim}, "")
    groups = optimizers.grouped(choices, {"mix.bias": model.mix.bias})
    assert [(group["lr"], len(group["params"])) for group in groups] == [(0.5, 0), (1.0, 1)]


def test_parameters_that_are_left_to_another_optimizer() -> None:
    compiled = one()
    matrices = compiled.optimizer(optim.Muon, lambda name, p: None if p.ndim == 2 else False, lr=1.0)
    rest = compiled.optimizer(optim.SGD, lambda name, p: None if p.ndim < 2 else False, lr=1.0)
    assert [len(group["params"]) for group in (*matrices.param_groups, *rest.param_groups)] == [3, 1]
    with pytest.raises(InputError) as error:
        compiled.optimizer(optim.SGD, lambda name, p: False)
    assert lines(error)[0] == "no parameter is left for the optimizer"


@pytest.mark.parametrize(
    ("kind", "problem", "fix"),
    [
        (
            optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0),
            "SGD is an optimizer already, of parameters that are not this rank's",
            "pass the class, and its settings: SGD, lr=…",
        ),
        ("adamw", "'adamw' is no class of optimizers", "pass a class, such as torch.optim.AdamW"),
    ],
)
def test_what_is_no_class(kind: Any, problem: str, fix: str) -> None:
    with pytest.raises(InputError) as error:
        one().optimizer(kind)
    assert lines(error) == [problem, f"  at   compiled.optimizer({type(kind).__name__})", f"  fix  {fix}"]


def test_settings_that_the_class_does_not_know() -> None:
    with pytest.raises(InputError, match="unexpected keyword argument 'rate'") as error:
        one().optimizer(optim.SGD, rate=1.0)
    assert lines(error)[1:] == ["  at   compiled.optimizer(SGD)", "  fix  use what SGD takes"]


def test_a_group_that_is_none() -> None:
    with pytest.raises(InputError) as error:
        one().optimizer(optim.SGD, lambda name, p: 3, lr=1.0)  # type: ignore[arg-type, return-value]
    assert lines(error) == [
        "groups gave 3 for embed.weight",
        "  at   compiled.optimizer(SGD)",
        '  fix  return a mapping of settings such as {"weight_decay": 0.0}, the name of a group, None, or False to leave it out',
    ]


class Scaled(optim.AdamW):
    """Changes what an update is."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Named(optim.AdamW):
    """Changes its construction alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)


CUT, STAGES, ALL = Holds(("a.weight", "b.weight"), 1), Holds((), 2), Holds((), 1)


@pytest.mark.parametrize(
    ("kind", "holds", "problem", "fix"),
    [
        (
            optim.Adafactor,
            CUT,
            "Adafactor takes means over the rows and the columns of a matrix, and ranks hold pieces of a.weight and 1 others",
            f'use tp=1 with data_parallel="ddp", or an elementwise optimizer: {NAMES}',
        ),
        (
            optim.Muon,
            Holds(("a.weight",), 2),
            "Muon makes the update of a matrix orthogonal, and ranks hold pieces of a.weight",
            f'use tp=1 with data_parallel="ddp", or an elementwise optimizer: {NAMES}',
        ),
        (
            optim.LBFGS,
            STAGES,
            "LBFGS takes products over all parameters, and each of 2 stages holds its own parameters",
            f"use an elementwise optimizer: {NAMES}",
        ),
        (
            Scaled,
            CUT,
            "it is not known whether Scaled treats each element of a parameter by itself, and ranks hold pieces of a.weight and 1 others",
            f"pass elementwise=True if it does, or use one of {NAMES}",
        ),
    ],
)
def test_updates_that_mix_elements_are_refused(kind: Any, holds: Holds, problem: str, fix: str) -> None:
    with pytest.raises(Refused) as error:
        refuse_mixing(kind, holds, False, "here")
    assert lines(error) == [problem, "  at   here", f"  fix  {fix}"]
    refuse_mixing(kind, ALL, False, "here")
    refuse_mixing(kind, holds, True, "here")


def test_updates_that_do_not_are_not() -> None:
    for kind in (*optimizers.ELEMENTWISE, Named):
        refuse_mixing(kind, CUT, False, "here")
    for kind in optimizers.BY_PARAMETER:
        refuse_mixing(kind, STAGES, False, "here")


@pytest.mark.parametrize("kind", optimizers.ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_what_is_called_elementwise_is(kind: Any) -> None:
    """Two halves of a matrix step as the whole does."""
    torch.manual_seed(0)
    start = torch.randn(4, 6, dtype=torch.float64)
    whole = nn.Parameter(start.clone())
    halves = [nn.Parameter(half.clone()) for half in start.chunk(2, 1)]
    together, apart = kind([whole], lr=0.1), kind(halves, lr=0.1)
    for _ in range(3):
        grad = torch.randn(4, 6, dtype=torch.float64)
        whole.grad = grad
        for half, part in zip(halves, grad.chunk(2, 1), strict=True):
            half.grad = part.clone()
        together.step()
        apart.step()
    assert not torch.equal(whole, start)
    assert torch.allclose(torch.cat([half.detach() for half in halves], 1), whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, float("inf")])
def test_norms_are_those_of_torch(norm_type: float) -> None:
    compiled = one()
    assert compiled.grad_norm().item() == 0.0
    compiled.train_step(**handmade.batch())
    parameters = [nn.Parameter(p.detach()) for p in compiled.parameters() if p.grad is not None]
    for p, own in zip(parameters, (p for p in compiled.parameters() if p.grad is not None), strict=True):
        p.grad = own.grad.clone()  # type: ignore[union-attr]
    expected = torch.nn.utils.clip_grad_norm_(parameters, 0.1, norm_type)
    assert compiled.clip_grad_norm_(0.1, norm_type).item() == pytest.approx(expected.item(), rel=1e-14)
    for p, own in zip(parameters, (p for p in compiled.parameters() if p.grad is not None), strict=True):
        assert torch.allclose(own.grad, p.grad, rtol=1e-14, atol=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_norms_that_are_not_finite(value: float, norm_type: float) -> None:
    compiled = one()
    compiled.train_step(**handmade.batch())
    grad = dict(compiled.named_parameters())["mix.bias"].grad
    assert grad is not None
    grad[0] = value
    with pytest.raises(TpcompileError) as error:
        compiled.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
    assert lines(error) == [
        f"the gradients' norm of order {norm_type} is {value}",
        "  at   compiled.clip_grad_norm_(error_if_nonfinite=True)",
        "  fix  look for the step whose loss is not finite, or leave error_if_nonfinite out to scale by it all the same",
    ]
    assert grad[1].isfinite() and str(compiled.grad_norm(norm_type).item()) == str(value)


def test_a_norm_of_no_order() -> None:
    with pytest.raises(InputError) as error:
        one().grad_norm(0.0)
    assert lines(error) == ["norm_type=0.0", "  at   compiled.clip_grad_norm_", "  fix  use a number above 0, or inf"]
