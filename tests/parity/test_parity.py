"""The compiled model beside the untouched one, for every family on every mesh: loss, outputs, all gradients, parameters after a step."""

from __future__ import annotations

import pytest
import torch
from parity_models import compiled, made

from tpcompile.simulate import Report, compare
from tpcompile.simulate.report import Tolerance

MESHES = ("tp=2", "tp=3", "tp=4", "pp=2", "dp=2", "pp=2,tp=2", "dp=2,pp=2,tp=2")
MODELS = ("gpt", "encoder", "gpt2", "gpt2 exact", "llama", "neox", "bert")
CASTS = ("gpt2", "llama", "neox")
"""Models that cast to float32 inside, in their loss, norms or rotary tables."""


def agrees(report: Report) -> Report:
    assert report.ok, f"\n{report}"
    return report


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_one_step_of_sgd_in_float64(name: str, mesh: str) -> None:
    model, batch, _ = made(name)
    report = agrees(compare(model, compiled(name, mesh), batch))
    rounded = 2 * torch.finfo(torch.float32).eps  # a loss of type float32 on both sides
    assert report.tolerance == (Tolerance(rounded, 1e-6) if name in CASTS else Tolerance(1e-10, 1e-9))
    assert report.grad_errors.keys() >= {key for key, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("name", "mesh"), [("llama14on2", "tp=4"), ("llama24on3", "tp=4"), ("llama6on3", "tp=2"), ("llama6on3", "tp=4"), ("llama4on1", "tp=3")]
)
def test_key_value_heads_that_ranks_share_unevenly(name: str, mesh: str) -> None:
    model, batch, _ = made(name)
    compilation = compiled(name, mesh)
    assert len([region for region in compilation.plan.regions if region.kind == "attention"]) == 2
    agrees(compare(model, compilation, batch))


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,tp=2"])
def test_parameters_that_are_not_trained(mesh: str) -> None:
    """Where nothing before is trained, no gradient goes back: neither over the tensor ranks nor to the stage before."""
    model, batch, _ = made("frozen")
    report = agrees(compare(model, compiled("frozen", mesh), batch))
    assert not any(total.axis == "pp" and total.direction == "backward" and total.call == "send" for total in report.traffic)


@pytest.mark.parametrize(
    ("name", "mesh"), [("gpt", "dp=2,pp=2,tp=2"), ("gpt2 exact", "tp=3"), ("llama exact", "pp=2,tp=2"), ("bert", "dp=2,pp=2,tp=2")]
)
def test_three_steps_of_adamw_in_float64(name: str, mesh: str) -> None:
    model, batch, _ = made(name)
    report = agrees(compare(model, compiled(name, mesh), batch, optimizer=torch.optim.AdamW, settings={"lr": 1e-3}, steps=3))
    assert report.parameter_tolerance == pytest.approx(1e-9)
    assert report.skipped < 0.5 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "mesh"), [("gpt", "tp=3"), ("gpt2", "dp=2,pp=2,tp=2"), ("encoder", "tp=2"), ("llama", "tp=4")])
def test_one_step_of_sgd_in_float32(name: str, mesh: str) -> None:
    model, batch, _ = made(name, torch.float32)
    report = agrees(compare(model, compiled(name, mesh, torch.float32), batch))
    assert report.tolerance == Tolerance(1e-6, 1e-5)
