"""Three steps of AdamW with clipping, accumulation, groups and a scheduler on real processes: every rank beside one device."""

from __future__ import annotations

from functools import cache

import parallel_workers as workers
import pytest
from parallel_workers import Case, Found

import tpcompile

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MODES = ("ddp", "zero1", "zero2", "zero3")
MESHES: dict[str, tuple[Case, ...]] = {
    mesh: tuple(Case(model, mesh, mode) for model in ("llama", "gpt2") for mode in MODES) for mesh in ("dp=2", "dp=2,tp=2", "dp=2,pp=2")
}
AGAIN = (("ddp", "full"), ("ddp", "selective"), ("zero3", "full"), ("zero2", "selective"))
for mesh in ("dp=2,tp=2", "dp=2,pp=2"):
    MESHES[mesh] += tuple(Case("llama", mesh, mode, recompute=how) for mode, how in AGAIN)
MESHES["dp=2,pp=2"] += tuple(Case("gpt2", "dp=2,pp=2", mode, schedule="gpipe") for mode in ("zero1", "zero3"))
MESHES["dp=2,pp=2"] += tuple(
    Case(model, "dp=2,pp=2", mode, microbatches=4, schedule=schedule)
    for model, mode, schedule in (
        ("llama of 4", "zero2", "interleaved_1f1b"),
        ("gpt2 of 4", "zero3", "looped_bfs"),
        ("gpt2 of 4", "zero2", "interleaved_zero_bubble"),
        ("gpt2 of 4", "zero3", "zbv"),
        ("llama of 4", "zero1", "dualpipev"),
    )
)
MESHES["dp=2"] += tuple(Case("llama", "dp=2", mode, microbatches=2) for mode in MODES)


@cache
def results(mesh: str) -> list[list[Found]]:
    """Of every case, what each rank found."""
    ranks = tpcompile.launch(workers.run, mesh, MESHES[mesh])
    return [list(found) for found in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    ("mesh", "job"), [pytest.param(m, job, id=str(case)) for m, cases in MESHES.items() for job, case in enumerate(cases)]
)
def test_three_clipped_steps_equal_one_device(mesh: str, job: int) -> None:
    ranks = results(mesh)[job]
    for found in ranks:
        assert max(found.loss_error, found.evaluation_error) <= 1e-10 and found.norm_error <= 1e-9, found
        assert max(found.gradients.values()) <= 1e-9 and max(found.parameters.values()) <= 1e-9, found
        assert found.losses == ranks[0].losses and found.norms == ranks[0].norms, "the same values on every rank"
        assert min(found.norms) > 0.05, "all of them were clipped"
    names = {name for name, _ in MESHES[mesh][job].made().named_parameters()}
    assert {name for found in ranks for name in found.parameters} == names


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,pp=2"])
def test_a_later_capture_shares_what_replicas_share_out(mesh: str) -> None:
    """Lengths that the model treats differently are captured anew; torch's engine knows the first capture's modules alone."""
    modes = [(mode, "none") for mode in MODES[1:]] + [("ddp", "full"), ("zero3", "full")]
    cases = tuple(Case("turning", mesh, mode, recompute=how) for mode, how in modes)
    for ranks in zip(*tpcompile.launch(workers.run_captures, mesh, cases), strict=True):
        for found in ranks:
            assert found.norms == [2], "two captures"
            assert max(found.loss_error, found.evaluation_error) <= 1e-10, found
            assert max(found.gradients.values()) <= 1e-9 and max(found.parameters.values()) <= 1e-9, found


def test_updates_of_whole_parameters() -> None:
    """Adafactor, and Muon beside AdamW: Muon's matrices are in bfloat16, where products of other values differ by roundings."""
    for found in tpcompile.launch(workers.by_parameter, "dp=2,pp=2", Case("gpt2", "dp=2,pp=2")):
        for name, error in found:
            assert error <= {"Adafactor": 1e-9, "Muon": workers.LR / 100}[name], (name, error)
