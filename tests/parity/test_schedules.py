"""The checker runs stages where each schedule places them: values, and what ranks hand to each other."""

from __future__ import annotations

import pytest
from parity_models import made

import tpcompile


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble"])
def test_several_stages_on_a_rank(schedule: str) -> None:
    model, batch, loss = made("gpt2")
    report = tpcompile.check(model, "pp=2,tp=2", batch, loss=loss, schedule=schedule)
    assert report.ok, report
    sends = {(total.stage, total.direction): total.count for total in report.traffic if total.call == "send"}
    turns = 1 if schedule == "zbv" else 2  # boundaries that rank 0 sends over, and 1 for rank 1: a V sends nothing where it turns
    assert sends[0, "forward"] == sends[1, "backward"] == turns * sends[1, "forward"] == turns * sends[0, "backward"] > 0, sends
