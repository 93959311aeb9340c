"""split: stages balanced by cost, with the residual stream alone between them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import pytest
import torch
from pass_models import Tiny, captured, local, stages, tiny
from torch import Tensor, nn

from tpcompile.errors import InputError
from tpcompile.ir import Stage
from tpcompile.passes._places import balance
from tpcompile.passes.optimize import optimize
from tpcompile.passes.split import split
from tpcompile.simulate import check
from tpcompile.text import text


def test_golden(golden: Callable[..., None]) -> None:
    program, batch = tiny(layers=2)
    before = optimize(local(program, 2))
    shown = text(before)
    made = stages(program, batch, 2, 2)
    assert text(before) == shown
    golden("\n\n".join([f"before\n{shown}", *(f"stage {stage.index}\n{text(stage)}" for stage in made)]), "split")


def brute_force(loads: Sequence[int], count: int) -> int:
    """The least greatest sum over all ways to cut a row of loads."""
    cuts = combinations(range(1, len(loads)), count - 1)
    return min(max(sum(loads[a:z]) for a, z in pairwise([0, *places, len(loads)])) for places in cuts)


@pytest.mark.parametrize("seed", range(40))
def test_balance_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    loads = [rng.choice([0, 1, 2, 3, 5, 8, 13]) for _ in range(rng.randint(2, 9))]
    count = rng.randint(1, len(loads))
    ranges = balance(loads, count)
    assert [index for start, stop in ranges for index in range(start, stop)] == list(range(len(loads)))
    assert len(ranges) == count and all(start < stop for start, stop in ranges)
    assert max(sum(loads[start:stop]) for start, stop in ranges) == brute_force(loads, count)


@pytest.mark.parametrize(("layers", "count"), [(2, 2), (4, 2), (4, 4), (5, 3)])
@pytest.mark.parametrize("parts", [1, 2])
def test_only_the_residual_stream_crosses(layers: int, count: int, parts: int) -> None:
    program, batch = tiny(layers=layers)
    made = stages(program, batch, parts, count)
    for before, after in pairwise(made):
        (sent,) = before.sends
        assert before.sends == after.receives
        assert [str(size) for size in sent.type.shape] == ["b", "s", "6"] and sent.requires_grad
    assert made[0].receives == () and made[-1].sends == ()


def test_layers_are_in_order_and_every_parameter_has_a_home() -> None:
    program, batch = tiny(layers=4)
    made = stages(program, batch, 2, 3)
    held = [sorted({name.split(".")[1] for name in stage.parameters.values() if name.startswith("layers.")}) for stage in made]
    assert [layer for stage in held for layer in stage] == ["0", "1", "2", "3"]
    assert {name for stage in made for name in stage.parameters.values()} == set(program.parameters.values())


def test_a_tied_weight_is_on_both_stages() -> None:
    program, batch = tiny(layers=2)
    first, last = stages(program, batch, 2, 2)
    assert "embed.weight" in first.parameters.values() and "embed.weight" in last.parameters.values()
    assert "layers.0.up.weight" not in last.parameters.values()


def test_inputs_go_where_they_are_used() -> None:
    program, batch = tiny(layers=2)
    first, last = stages(program, batch, 2, 2)
    assert first.inputs == ("ids",) and last.inputs == ("labels", "loss_count_0", "replicas")


class Positions(Tiny):
    """A table of positions, made from the inputs alone, is used before the layers and after them."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).cos()[None, :, None]
        x = self.embed(ids) + positions
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy((self.head(x) * positions).flatten(0, 1), labels.flatten())


def test_what_depends_on_inputs_alone_is_computed_again() -> None:
    batch = {"ids": torch.tensor([[0, 1, 4], [2, 2, 3]]), "labels": torch.tensor([[1, 4, 2], [2, 3, -100]])}
    made = stages(captured(Positions(layers=2), batch), batch, 2, 2)
    assert all(len(stage.sends) <= 1 for stage in made)
    assert all("aten.cos" in text(stage) for stage in made) and "ids" in made[1].inputs


def test_placeholders_stand_in_the_order_of_the_contract() -> None:
    program, batch = tiny(layers=2)
    for stage in stages(program, batch, 2, 2):
        names = [node.name for node in stage.graph.find_nodes(op="placeholder")]
        assert names == [*(b.name for b in stage.receives), *stage.parameters, *stage.buffers, *stage.constants, *stage.inputs]


def costs_of(stage: Stage) -> int:
    return sum("aten.linear" in line for line in text(stage).splitlines())


def test_a_costly_head_takes_layers_from_its_stage() -> None:
    program, _ = tiny(layers=4)
    made = local(program, 1)
    heavy = {node.name: 1_000_000 if node.name == "linear_16" else 1000 for node in made.graph.nodes}
    first, last = split(made, 2, heavy)
    assert costs_of(first) == 12 and costs_of(last) == 5


@pytest.mark.parametrize(("layers", "count"), [(1, 2), (2, 3), (2, 5)])
def test_more_stages_than_layers_are_cut_where_few_values_cross(layers: int, count: int) -> None:
    """Inside a layer the residual stream crosses beside what is added to it."""
    batch = {"ids": torch.arange(90).remainder(7).view(30, 3), "labels": torch.arange(90).remainder(5).view(30, 3)}
    made = stages(captured(Tiny(layers=layers), batch), batch, 1, count)
    assert len(made) == count and all(before.sends == after.receives for before, after in pairwise(made))
    assert all(1 <= len(stage.sends) <= 2 for stage in made[:-1])
    report = check(Tiny(layers=layers).double(), f"pp={count},tp=2", batch)
    assert report.ok, str(report)


class Unlisted(nn.Module):
    """Three blocks with names of their own, the last one twice; and what an early one chooses for a late one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.first, self.second, self.last = (nn.Sequential(nn.Linear(6, 11), nn.ReLU(), nn.Linear(11, 6)) for _ in range(3))
        self.head = nn.Linear(6, 7)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.first(x)
        places, low = x.topk(2, -1).indices, x < 0
        x = x + self.second(x)
        x = x + self.last(x)
        x = x + self.last(x)
        x = x.masked_fill(low, 0.0).scatter(-1, places, 1.0)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_layers_that_no_list_holds_are_cut_by_cost() -> None:
    """Whole numbers and truths cross too, without gradients; a weight that is used on both sides is on both stages."""
    batch = {"ids": torch.arange(12).remainder(7).view(4, 3), "labels": torch.arange(12).remainder(5).view(4, 3)}
    first, last = stages(captured(Unlisted(), batch), batch, 1, 2)
    crossing = {(boundary.type.dtype, boundary.requires_grad) for boundary in first.sends}
    assert crossing == {(torch.float64, True), (torch.int64, False), (torch.bool, False)}
    both = set(first.parameters.values()) & set(last.parameters.values())
    assert both in (set(), {f"last.{place}.{name}" for place in (0, 2) for name in ("weight", "bias")})
    products = [text(stage).count("aten.linear") for stage in (first, last)]
    assert sum(products) == 9 and abs(products[0] - products[1]) <= 1
    for mesh in ("pp=2", "pp=4", "pp=2,tp=2"):
        report = check(Unlisted().double(), mesh, batch)
        assert report.ok, str(report)


def test_a_weight_used_on_both_sides_is_on_both_stages() -> None:
    class Thrice(Unlisted):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(ids)
            for _ in range(4):
                x = x + self.last(x)
            return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    model = Thrice()
    del model.first, model.second
    batch = {"ids": torch.arange(12).remainder(7).view(4, 3), "labels": torch.arange(12).remainder(5).view(4, 3)}
    first, last = stages(captured(model, batch), batch, 1, 2)
    both = set(first.parameters.values()) & set(last.parameters.values())
    assert both == {f"last.{place}.{name}" for place in (0, 2) for name in ("weight", "bias")}
    assert [str(size) for size in first.sends[0].type.shape] == ["b", "s", "6"] and len(first.sends) == 1
    report = check(model.double(), "pp=2,tp=2", batch)
    assert report.ok, str(report)


class Complex(nn.Module):
    """Complex numbers between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.view_as_complex(self.first(x).unflatten(-1, (3, 2)))
        y = y * y * y
        return self.second(torch.view_as_real(y).flatten(-2)).sum()


def test_complex_values_do_not_cross() -> None:
    batch = {"x": torch.randn(4, 3, 6, dtype=torch.float64)}
    first, _ = stages(captured(Complex(), batch), batch, 1, 2)
    assert all(not boundary.type.dtype.is_complex for boundary in first.sends)


def test_one_operation_is_one_stage() -> None:
    batch = {"input": torch.zeros(4, 4, dtype=torch.float64)}
    with pytest.raises(InputError) as error:
        stages(captured(nn.Linear(4, 4), batch), batch, 1, 2)
    lines = [line for line in str(error.value).splitlines() if not line.startswith("  from")]
    assert lines == ["2 pipeline stages for a model that can be cut into 1 part", "  at   compile(mesh pp=2)", "  fix  use pp=1"]


class Weighted(nn.Module):
    """torch's attention with its weights: it merges the heads with the batch, so that sizes are computed on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x)[0]  # type: ignore[no-any-return]


def test_sizes_computed_on_the_way_belong_to_no_layer() -> None:
    model = Tiny(layers=2)
    model.layers = nn.ModuleList([Weighted(), Weighted()])
    batch = {"ids": torch.tensor([[0, 1, 4], [2, 2, 3]]), "labels": torch.tensor([[1, 4, 2], [2, 3, -100]])}
    first, last = stages(captured(model, batch), batch, 2, 2)
    assert len(first.sends) == 1 and "held_size" in text(first) and "held_size" in text(last)
