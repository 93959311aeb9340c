"""ZeRO: what a rank holds, and what it says to the other replicas."""

from __future__ import annotations

import parallel_workers as workers
import pytest
import torch
from parity_models import compiled
from sympy import Rational

import tpcompile
from tpcompile.inspect.calls import calls
from tpcompile.layout import TensorType, product, symbol
from tpcompile.sharing import Parameter, Sharing


@pytest.mark.processes
@pytest.mark.slow
def test_zero_memory() -> None:
    """Between steps, of parameters, gradients and optimizer, as the formulas say; and nothing else of any size is alive."""
    whole: dict[int, int] = {}
    for rank in tpcompile.launch(workers.sizes, "dp=2", ("ddp", "zero1", "zero2", "zero3")):
        for found in rank:
            for measured, expected in ((found.parameters, found.expected.parameters), (found.gradients, found.expected.gradients)):
                assert measured == pytest.approx(expected, rel=0.02), found
            assert found.optimizer == pytest.approx(found.expected.optimizer, rel=0.02), found
            assert found.alive == pytest.approx(found.expected.between, rel=0.02), found
            whole.setdefault(found.replica, found.alive)
            share = {"ddp": 1, "zero1": 3 / 4, "zero2": 1 / 2, "zero3": 1 / 2}[found.mode]
            assert found.alive == pytest.approx(share * whole[found.replica], rel=0.02), found


def test_zero2_volume() -> None:
    """Two times the parameters, as a ring tends to for many replicas: once for parameters, once for gradients. All rows divide by four."""
    made = compiled("gpt2", "dp=4", data_parallel="zero2")
    elements = 0
    for place in made.stages[0].parameters:
        kind = made.program.types[place]
        assert isinstance(kind, TensorType)
        elements += int(product(kind.shape))
    found = {row.call: row for row in calls(made, made.stages[0]) if row.axis == "dp" and row.direction != "step"}
    assert set(found) == {"all_gather", "reduce_scatter"}
    for row in found.values():
        assert row.sent.subs(symbol("dp"), 4) == Rational(3, 4) * elements * 8  # type: ignore[union-attr]


def test_zero2_volume_of_100_billion() -> None:
    """In 16 bits, 200 GB of parameters and 200 GB of gradients."""
    sharing = Sharing([Parameter((10**5, 10**6), torch.bfloat16, "", True)], [], 100, False, False)
    (gathered,), (reduced,) = sharing.forward(), sharing.backward(last=True)
    assert 100 * gathered.elements * 2 == reduced.elements * 2 == 200 * 10**9
