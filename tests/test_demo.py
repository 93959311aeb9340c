"""The demo, from its command, with real processes."""

from __future__ import annotations

import pytest
import torch

from tpcompile.cli import main
from tpcompile.demo.data import CHARACTERS, batches, encode, text
from tpcompile.demo.model import gpt
from tpcompile.demo.run import Trained, worst_loss


def test_the_text_ships_and_has_no_other_characters() -> None:
    assert len(text()) > 20_000
    assert encode(text()).max() < len(CHARACTERS) - 1


def test_labels_are_the_next_characters() -> None:
    (batch,) = batches(1, rows=3, length=10, vocabulary=97)
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])


def test_the_model_learns_alone() -> None:
    torch.manual_seed(0)
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in batches(8, rows=8, length=32, vocabulary=97):
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_a_loss_that_is_no_number_does_not_agree() -> None:
    alone = Trained((1.0, 2.0), {}, {})
    assert worst_loss([Trained((1.0, 2.5), {}, {}), alone], alone) == 0.5
    assert not worst_loss([alone, Trained((1.0, float("nan")), {}, {})], alone) <= 1e9


@pytest.mark.processes
@pytest.mark.slow
def test_the_demo_agrees(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--mesh", "pp=2,tp=2", "--steps", "3", "--device", "cpu"]) == 0
    out = capfd.readouterr().out
    for words in ("mesh  dp=1,pp=2,tp=2", "attention", "loss on one process", "the losses agree", "worst parameter difference", "in all"):
        assert words in out
