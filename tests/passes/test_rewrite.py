"""rewrite: operations on pieces, and the collectives between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pass_models import Rows, Tiny, before_and_after, captured, local, program_of, sharded, tiny
from torch import Tensor, nn

from tpcompile.ir import Local, PerRank, Program
from tpcompile.passes.rewrite import rewrite
from tpcompile.rules import op_name


def collectives(made: Local) -> list[str]:
    return [op_name(node).split(".")[1] for node in made.graph.nodes if op_name(node).startswith("tpcompile.")]


def calls(made: Local, name: str) -> list[object]:
    return [node for node in made.graph.nodes if op_name(node) == name]


def test_golden(golden: Callable[..., None]) -> None:
    program, _ = tiny()
    golden(before_and_after(rewrite, sharded(program, 2)), "rewrite")


def test_one_enter_and_one_reduce_per_region() -> None:
    program, _ = tiny(layers=3)
    assert collectives(local(program, 2, vocab_parallel=False)) == ["enter", "reduce"] * 6


def test_one_rank_has_no_collectives() -> None:
    program, _ = tiny()
    made = local(program, 1)
    assert collectives(made) == []
    assert [op_name(node) for node in made.graph.nodes] == [op_name(node) for node in program.graph.nodes]


class Attention(Rows):
    """Heads that share key/value heads; written with torch's attention, or out in full."""

    def __init__(self, heads: int, groups: int, *, full: bool) -> None:
        super().__init__(q=nn.Linear(8, heads * 2), k=nn.Linear(8, groups * 2), v=nn.Linear(8, groups * 2), o=nn.Linear(heads * 2, 8))
        self.full, self.step = full, heads // groups

    def body(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, 2)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        if self.full:
            k, v = (y.repeat_interleave(self.step, 1) for y in (k, v))
            mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def attention(heads: int, groups: int, *, full: bool) -> Program:
    return program_of(Attention(heads, groups, full=full), 8)


@pytest.mark.parametrize("full", [True, False])
def test_heads_that_share_evenly_on_every_rank(full: bool) -> None:
    """Whole groups on every rank: a repeat stays a repeat, and attention shares heads itself."""
    assert collectives(local(attention(8, 4, full=full), 2)) == ["reduce"]


@pytest.mark.parametrize("full", [True, False])
def test_key_value_heads_on_several_ranks_sum_their_gradients(full: bool) -> None:
    made = local(attention(8, 2, full=full), 4)
    assert sorted(collectives(made)) == ["reduce", *["shared"] * 4]  # weight and bias of key and value
    if full:
        assert [node.args[1] for node in calls(made, "aten.repeat_interleave.self_int")] == [2, 2]  # type: ignore[attr-defined]


@pytest.mark.parametrize("full", [True, False])
def test_heads_that_share_unevenly_are_picked(full: bool) -> None:
    """24 heads on three key/value heads on four ranks: six on each, two ranks' across two key/value heads, four and two."""
    made = local(attention(24, 3, full=full), 4)
    picks = [node.args[2] for node in calls(made, "tpcompile.pick.default")]  # type: ignore[attr-defined]
    wanted = ([0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0])
    assert picks == [PerRank(wanted)] * 2


def test_an_uneven_view_has_a_size_for_every_rank() -> None:
    program, _ = tiny()
    sizes = {str(node.args[1]) for node in calls(local(program, 2), "aten.split_with_sizes.default")}  # type: ignore[attr-defined]
    assert sizes == {"[4|2, 4|2, 4|2]"}


def test_a_bias_is_added_after_the_reduction() -> None:
    program, _ = tiny()
    made = local(program, 2)
    nodes = {node.name: node for node in made.graph.nodes}
    assert op_name(nodes["linear_3"]) == "aten.add.Tensor"
    assert [operand.name for operand in nodes["linear_3"].all_input_nodes] == ["linear_3_sum", "p_layers_0_down_bias"]
    assert len(nodes["linear_3_partial"].all_input_nodes) == 2


def test_a_cut_output_is_gathered() -> None:
    program, _ = tiny()
    made = local(program, 2, vocab_parallel=False, head="column")
    gathers = calls(made, "tpcompile.gather.default")
    assert gathers and collectives(made).count("gather") >= 1


def test_a_row_by_itself_slices_its_input() -> None:
    model = Tiny()
    model.head = nn.Linear(6, 7)
    program = captured(model, {"ids": torch.tensor([[0, 1, 4], [2, 2, 3]]), "labels": torch.tensor([[1, 4, 2], [2, 3, -100]])})
    made = local(program, 2, head="row")
    (piece,) = calls(made, "tpcompile.local_slice.default")
    assert piece.args[1:] == ("tp", 2, [0, 3, 3, 6]) and op_name(piece.args[0]) == "tpcompile.enter.default"  # type: ignore[attr-defined]


def test_names_and_origins_lead_back() -> None:
    """Every local value that stands for a global one says which, and what piece of it."""
    program, _ = tiny()
    made = local(program, 2)
    assert set(made.origins.values()) <= set(program.nodes())
    assert set(made.origins) <= made.layouts.keys() | {node.name for node in made.graph.nodes}
