"""Gradients of whole parameters that tensor ranks have parts of, summed once a step: right whatever comes before an optimizer's step."""

from __future__ import annotations

import pytest
import summed_workers as workers
from training_workers import bert, gpt2

import tpcompile

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MESHES = ("dp=2,tp=2", "pp=2,tp=2")


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_add_up_over_steps(mesh: str) -> None:
    """Norms and biases of a BERT and a GPT-2, whose streams are cut along their positions."""
    for case in zip(*tpcompile.launch(workers.jobs, mesh, ((bert, mesh, 2), (gpt2, mesh, 2)), backend="recorded"), strict=True):
        for worst, later, small in case:
            assert worst <= 1e-6 and later >= 4, (worst, later)
            assert small[0] == small[2], "a step's calls do not depend on what came before"
            assert mesh.startswith("pp") or small[1] >= later, "a user's own backward sums each by itself"
