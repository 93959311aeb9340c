"""Every rank's gradients of every stage, against the untouched model on one device, with real processes and float64."""

from __future__ import annotations

import handmade
import pytest
import runtime_workers as workers
import torch
from runtime_workers import Case

from tpcompile import schedules
from tpcompile.runtime.launch import launch

CASES = (
    Case("pp=2", microbatches=4),
    Case("pp=2", "gpipe", microbatches=1),
    Case("dp=2"),
    Case("dp=2", split=False),
    Case("dp=2,pp=2"),
    Case("dp=2,pp=2", microbatches=4),
    Case("dp=2,pp=2", "gpipe", microbatches=4),
    Case("dp=2,pp=2", split=False),
)


def reference(*batches: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    model, total = handmade.Tied(), 0.0
    for batch in batches:
        loss = model(**batch)["loss"]
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(results: list[tuple[float, workers.Grads]], loss: float, grads: dict[str, torch.Tensor]) -> None:
    scale = max(grad.abs().max().item() for grad in grads.values())
    seen: set[str] = set()
    for its_loss, its_grads in results:
        assert abs(its_loss - loss) < 1e-12
        assert its_grads
        for name, grad in its_grads.items():
            assert (grad - grads[name]).abs().max().item() < 1e-12 * scale, name
        seen |= set(its_grads)
    assert seen == set(grads)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_every_stage(case: Case) -> None:
    check(launch(workers.one_step, case.mesh, case), *reference(handmade.batch()))


@pytest.mark.processes
@pytest.mark.parametrize("case", [Case("dp=2"), Case("pp=2"), Case("dp=2,pp=2"), Case("dp=2,pp=2", "gpipe")], ids=str)
def test_steps_add_up(case: Case) -> None:
    check(launch(workers.several_steps, case.mesh, case), *reference(*(handmade.batch(length=length) for length in (5, 7, 5))))


@pytest.mark.processes
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,pp=2"])
def test_parameters_that_are_not_trained(mesh: str) -> None:
    loss, grads = reference(handmade.batch())
    del grads["mix.bias"]
    check(launch(workers.frozen, mesh, Case(mesh)), loss, grads)


@pytest.mark.processes
def test_a_loss_of_the_users_own() -> None:
    expected = torch.tensor([1.5, 4.5])
    for used, other in launch(workers.own_loss, "dp=2"):
        assert torch.equal(used, 2 * expected + 1) and torch.equal(other, 4 * expected)


@pytest.mark.processes
def test_the_drawing_of_the_schedules() -> None:
    """The one in the docstring of tpcompile.schedules, and the tables there."""
    drawn = [line.split()[2:] for line in (schedules.__doc__ or "").split("\n") if line.strip().startswith("stage")]
    ran = [launch(workers.order, "pp=2", Case("pp=2", name, microbatches=4)) for name in ("1f1b", "gpipe")]
    assert [" ".join(line) for line in drawn] == [f"{ran[0][stage]} {ran[1][stage]}" for stage in range(2)]
    for stage, line in enumerate(drawn):
        tables = [run for name in ("1f1b", "gpipe") for run in schedules.actions(name, stage, 2, 1, 4) if isinstance(run, schedules.Run)]
        assert [str(run) for run in tables] == line


@pytest.mark.processes
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "captured anew"])
@pytest.mark.parametrize("mesh", ["dp=2", "pp=2", "dp=2,pp=2"])
def test_training_with_evaluation_and_other_lengths(mesh: str, static: bool) -> None:
    model = handmade.Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for length in (5, 7, 5):
        loss = model(**handmade.batch(length=length))["loss"]
        loss.backward()
        losses += [loss.item()] * 2
        optimizer.step()
        optimizer.zero_grad()
    for its_losses, parameters in launch(workers.training, mesh, Case(mesh, static=static)):
        assert its_losses == pytest.approx(losses, abs=1e-10)
        for name, p in parameters.items():
            assert torch.allclose(p, model.get_parameter(name), rtol=0, atol=1e-9), name


@pytest.mark.processes
def test_own_device_mesh_keeps_its_order() -> None:
    results = launch(workers.device_mesh, "dp=2,pp=2")
    assert [loss for loss, _ in results] == pytest.approx([reference(handmade.batch())[0]] * 4, abs=1e-12)
    assert [place for _, place in results][1:3] == [{"dp": 1, "pp": 0, "tp": 0}, {"dp": 0, "pp": 1, "tp": 0}]


@pytest.mark.processes
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,pp=2"])
def test_call_gives_the_model_output(mesh: str) -> None:
    loss, grads = reference(handmade.batch())
    logits = handmade.Tied()(**handmade.batch())["logits"]
    results = launch(workers.calls, mesh, Case(mesh))
    for rank, (its_loss, its_logits, its_grads) in enumerate(results):
        replica = rank * 2 // len(results)
        assert its_loss == pytest.approx(loss, abs=1e-12)
        assert torch.allclose(its_logits, logits.chunk(2)[replica], rtol=0, atol=1e-12)
        for name, grad in its_grads.items():
            assert torch.allclose(grad, grads[name], rtol=0, atol=1e-12), name
    assert mesh != "dp=2" or set(results[0][2]) == set(grads)
