"""Lone linears: which are cut by themselves and how, and which stay whole."""

from __future__ import annotations

import pytest
from lone_models import After, Beside, Choosing, LowRank, Normed, Scanning, Shared, Small, Spelled
from pass_models import Block, local, planned, tiny

from tpcompile.ir import Local, Plan
from tpcompile.passes.detect import detect
from tpcompile.passes.optimize import optimize
from tpcompile.passes.plan import plan
from tpcompile.rules import op_name

SIZES = {"layers": 2, "hidden": 10, "heads": 5, "inner": 7}


def lone(found: Plan) -> dict[str, tuple[str, dict[str, str]]]:
    """The regions of lone products in the first of two layers: how each is cut, and its weights. The second is like it."""
    made = {one.name: (one.kind, {**one.weights}) for one in found.regions if one.kind in ("column", "row")}
    first = {name: what for name, what in made.items() if name.startswith("layers.0")}
    assert len(made) == 2 * len(first)
    return first


def collectives(made: Local) -> list[str]:
    return [op_name(node).split(".")[1] for node in made.graph.nodes if op_name(node).startswith("tpcompile.")]


def test_a_column_between_whole_values() -> None:
    program, _ = tiny(block=After, **SIZES)
    layout = "10@tp{0:4, 4:7, 7:10}"
    weights = {"layers.0.mix.weight": f"[{layout}, 10]", "layers.0.mix.bias": f"[{layout}]"}
    assert lone(planned(program, 3)) == {"layers.0.mix": ("column", weights)}
    assert collectives(local(program, 3, vocab_parallel=False)) == ["enter", "reduce", "enter", "reduce", "enter", "gather"] * 2


def test_a_row_whose_sum_joins_another() -> None:
    """What it makes is reduced with the MLP's: there are no more reductions than without it."""
    program, _ = tiny(block=Beside, **SIZES)
    assert lone(planned(program, 2)) == {"layers.0.mix": ("row", {"layers.0.mix.weight": "[10, 10@tp]"})}
    made = collectives(optimize(local(program, 2, vocab_parallel=False)))
    assert made.count("reduce") == 4 and "gather" not in made


def test_convolutions_and_weights_that_are_computed() -> None:
    program, _ = tiny(block=Spelled, **SIZES)
    assert lone(planned(program, 2)) == {
        "layers.0.conv": ("column", {"layers.0.conv.weight": "[10@tp, 10, 1]", "layers.0.conv.bias": "[10@tp]"}),
        "layers.0.matmul": ("column", {"layers.0.matrix": "[10, 10@tp]"}),
    }


@pytest.mark.parametrize("block", [Block, Choosing, LowRank, Normed, Scanning, Shared])
def test_what_stays_whole(block: type[Block]) -> None:
    program, _ = tiny(block=block, **SIZES)
    assert lone(planned(program, 2)) == {}


def test_heads_that_cannot_be_shared_leave_all_of_attention_whole() -> None:
    program, _ = tiny(layers=2, block=After, hidden=10, heads=2, inner=7)
    found = planned(program, 3, vocab_parallel=False)
    kinds = {"layers.0": "mlp", "layers.0.mix": "column"}
    assert {one.name: one.kind for one in found.regions} == kinds | {name.replace("0", "1"): kind for name, kind in kinds.items()}


def test_a_part_of_its_layer_that_is_too_small() -> None:
    """One number of 10 is 10 weights of some 700, of 30 it is 30 of some 4,300; too few channels to be shared are made of parts of all."""
    program, _ = tiny(block=Small, **SIZES)
    assert lone(planned(program, 2)) == {"layers.0.scale": ("row", {"layers.0.scale.weight": "[1, 10@tp]"})}
    program, _ = tiny(layers=2, block=Small, hidden=30, heads=5, inner=7)
    assert lone(planned(program, 2)) == {}


@pytest.mark.parametrize(("wish", "kinds"), [("whole", {}), ("row", {"layers.0.mix": "row"}), ("cut", {"layers.0.mix": "column"})])
def test_overrides(wish: str, kinds: dict[str, str]) -> None:
    program, _ = tiny(block=After, **SIZES)
    found = plan(program, detect(program), "tp", 2, {"layers.*.mix": wish})
    assert {name: kind for name, (kind, _) in lone(found).items()} == kinds
    if wish == "whole":
        assert {left.reason for left in found.whole if left.name == "layers.0.mix"} == {'overrides say "whole"'}


def test_a_region_that_overrides_leave_whole_is_not_cut_in_pieces() -> None:
    program, _ = tiny(block=After, **SIZES)
    found = plan(program, detect(program), "tp", 2, {"layers.*.mlp": "whole"})
    assert set(lone(found)) == {"layers.0.mix"}


def test_a_later_capture_does_as_the_first() -> None:
    """Without the earlier layouts of a lone weight, it is not cut; with them it is cut as it was."""
    program, _ = tiny(block=After, **SIZES)
    first = planned(program, 2)
    cut = {name: layout for one in first.regions for name, layout in one.layouts.items()}
    layouts = {path: cut[name] for name, path in program.parameters.items() if name in cut}
    again = plan(program, detect(program), "tp", 2, {}, held=layouts)  # type: ignore[arg-type]
    assert lone(again) == lone(first)
    without = {name: layout for name, layout in layouts.items() if ".mix." not in name}
    assert lone(plan(program, detect(program), "tp", 2, {}, held=without)) == {}  # type: ignore[arg-type]
