"""Models whose forward changes buffers, beside the untouched ones: buffers after two steps too, and where a batch may not be divided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exported import copied
from state_models import made
from torch import fx

from tpcompile.driver import Options, lower
from tpcompile.errors import Refused
from tpcompile.ir import results
from tpcompile.mesh import Mesh
from tpcompile.simulate import Report, check, compare

STATISTICS = {
    f"{norm}.{name}"
    for norm in ("stem_norm", *(f"blocks.{i}.{n}_norm" for i in (0, 1) for n in ("inner", "outer")))
    for name in ("running_mean", "running_var", "num_batches_tracked")
}
COUNTS = {"steps", *(f"blocks.{i}.{name}" for i in (0, 1) for name in ("count", "decay"))}
AVERAGES = {f"blocks.{i}.{name}" for i in (0, 1) for name in ("mean", "seen", "largest")}
UPDATED = {"statistics": STATISTICS, "counting": COUNTS, "averages": AVERAGES, "positions": {"features", "places", "inner"}}


def agrees(report: Report, name: str) -> Report:
    assert report.ok, f"\n{report}"
    assert report.buffer_errors.keys() == UPDATED[name]
    return report


@pytest.mark.parametrize("mesh", ["tp=1", "tp=2", "tp=3", "pp=2", "pp=2,tp=2"])
@pytest.mark.parametrize("name", UPDATED)
def test_two_steps_in_one_piece(name: str, mesh: str) -> None:
    model, batch = made(name)
    before = {key: value.clone() for key, value in model.named_buffers()}
    agrees(check(model, mesh, batch, microbatches=1, schedule="gpipe", steps=2, optimizer_settings={"lr": 0.1}), name)
    assert all(torch.equal(value, before[key]) for key, value in model.named_buffers())


@pytest.mark.parametrize(("mesh", "microbatches"), [("dp=2", 1), ("tp=2", 2), ("pp=2", 2), ("dp=2,pp=2,tp=2", 2)])
def test_counters_count_steps_and_no_parts_of_them(mesh: str, microbatches: int) -> None:
    model, batch = made("counting")
    agrees(check(model, mesh, batch, microbatches=microbatches, steps=2, optimizer_settings={"lr": 0.1}), "counting")


@pytest.mark.parametrize(
    ("name", "reason", "line"),
    [
        ("statistics", "stem_norm.running_mean takes its new value from all rows of a batch", "x = self.stem_norm(self.stem(images))"),
        ("averages", "blocks.0.mean takes its new value from all rows of a batch", "self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)"),
    ],
)
@pytest.mark.parametrize(("mesh", "microbatches", "fix"), [("dp=2", 1, ""), ("pp=2", 2, ' with schedule="gpipe"')])
def test_what_all_rows_decide_is_refused_in_parts(name: str, reason: str, line: str, mesh: str, microbatches: int, fix: str) -> None:
    model, batch = made(name)
    with pytest.raises(Refused) as error:
        check(model, mesh, batch, microbatches=microbatches)
    first, at, source, last = str(error.value).splitlines()
    assert first.startswith(f"{reason} at state_models.py:")
    assert at == f"  at   check(dp={Mesh.of(mesh).dp}, microbatches={microbatches})" and source.startswith("  from test_updates.py:")
    assert last == f"  fix  use dp=1 and microbatches=1{fix}, or put what learns from a batch's statistics into eval mode"


def test_channels_of_a_batch_norm_are_cut() -> None:
    model, batch = made("statistics")
    compilation = lower(model, Mesh.of("tp=3"), batch, Options())
    weights = {name: text for region in compilation.plan.regions for name, text in region.weights.items()}
    cut = {name for name in weights if name.startswith("blocks.0.")}
    assert cut == {f"blocks.0.{name}" for name in ("widen.weight", "inner_norm.weight", "inner_norm.bias", "narrow.weight")}
    agrees(compare(model, compilation, batch, settings={"lr": 0.1}, steps=2), "statistics")


def test_means_of_positions_that_are_cut() -> None:
    """A mean of each position is taken where the position is; a mean over positions of all of them."""
    model, batch = made("positions")
    compilation = lower(model, Mesh.of("tp=2"), batch, Options())
    new = results(compilation.local.graph, compilation.program.updates)[1]
    layouts = {name: compilation.local.layouts[value.all_input_nodes[0].all_input_nodes[0].name] for name, value in new.items()}
    assert str(layouts["places"]) == "[5@tp{0:3, 3:5}, 6]" and str(layouts["features"]) == "[6]"
    agrees(compare(model, compilation, batch, settings={"lr": 0.1}, steps=2), "positions")


def test_in_float32() -> None:
    model, batch = made("statistics")
    batch["images"] = batch["images"].float()
    agrees(check(model.float(), "tp=2", batch, steps=2, optimizer_settings={"lr": 0.1}), "statistics")


def test_a_lost_update_is_found() -> None:
    """The checker compares all buffers that the untouched model changes, whether the program knows of them or not."""
    model, batch = made("counting")
    compilation = lower(model, Mesh.of("tp=2"), batch, Options())
    stages = tuple(replace(stage, updates=(), graph=_without(stage.graph, len(stage.updates))) for stage in compilation.stages)
    report = compare(model, replace(compilation, stages=stages), batch)
    assert not report.ok and report.buffer_errors["steps"] == 0.5 and report.buffer_errors["blocks.0.count"] > 0


def test_a_wrong_update_is_found() -> None:
    """One rank's statistics are those of another rank's channels."""
    model, batch = made("statistics")
    compilation = lower(model, Mesh.of("tp=2"), batch, Options())
    (stage,) = compilation.stages

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if not node.name.endswith("_gather"):
            return None
        value, axis, dim, held = node.args
        assert held == [0, 5, 5, 10]
        return graph.create_node("call_function", node.target, (made[value], axis, dim, [5, 10, 0, 5]), name=node.name)  # type: ignore[index]

    report = compare(model, replace(compilation, stages=(replace(stage, graph=copied(stage.graph, change)),)), batch)
    assert not report.ok and max(report.grad_errors.values()) <= report.tolerance.gradient
    wrong = {name for name, error in report.buffer_errors.items() if error > 1e-3}
    assert wrong == {f"blocks.{i}.inner_norm.{name}" for i in (0, 1) for name in ("running_mean", "running_var")}
    assert report.first_divergence is not None and report.first_divergence.name.endswith("_gather")


def _without(graph: fx.Graph, count: int) -> fx.Graph:
    made = copied(graph, lambda *_: None)
    output = made.output_node()
    output.args = (output.args[0][:-count],)  # type: ignore[index]
    return made
