"""The same on a CUDA device: the checker, and an emitted program. Both run on the CPU too, so that they stay right without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tpcompile
from tpcompile.demo.model import gpt
from tpcompile.driver import Options, lower
from tpcompile.mesh import Mesh

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def made(device: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(97, (4, 12), generator=torch.Generator().manual_seed(0)).to(device)
    return gpt().double().to(device), {"input_ids": ids, "labels": ids.roll(1, 1)}


@pytest.mark.parametrize("device", DEVICES)
def test_the_checker(device: str) -> None:
    model, batch = made(device)
    tpcompile.testing.assert_parity(model, "pp=2,tp=2", batch)


@pytest.mark.parametrize("device", DEVICES)
def test_an_emitted_program(device: str) -> None:
    model, batch = made(device)
    program = lower(model, Mesh(), batch, Options()).rank_program(model, 0, device)
    counts = {"loss_count_0": float(batch["labels"].numel()), "replicas": 1.0}
    given = batch | {name: torch.tensor(count, dtype=torch.float64, device=device) for name, count in counts.items()}
    loss = program.module(**{name: given[name] for name in program.stages[0].inputs})[0]
    loss.backward()
    expected = model(**batch)["loss"]
    expected.backward()
    assert loss.device.type == device
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    gradients = {name: parameter.grad for name, parameter in program.module.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12)
