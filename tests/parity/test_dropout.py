"""GPT-2 with dropout: whole values are equal on all tensor ranks, cut ones drop on their own, replicas differ, one seed repeats all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parity_models import compiled, made

from tpcompile.errors import Refused
from tpcompile.layout import Layout
from tpcompile.rules import argument, op_name
from tpcompile.simulate import compare
from tpcompile.simulate.lockstep import Values
from tpcompile.simulate.replay import Replay, flatten, rows

MESH = "dp=2,tp=2"


def forward(*, seed: int = 0, step: int = 0, part: int = 0) -> tuple[Replay, dict[str, Values]]:
    """Every value on the first of the batch's quarters, with the key of one of them: the numbers before dropout are the same."""
    model, batch, _ = made("gpt2")
    compilation = compiled("gpt2", MESH, sequence_parallel=False)
    compilation = replace(compilation, options=replace(compilation.options, microbatches=2))
    replay = Replay(model, compilation, dropout=True, seed=seed, steps=step)
    tensors = flatten(compilation.program, batch)
    (values,) = replay.forward(rows(compilation.program, tensors, 0, 4), replay.counts(tensors), part)
    return replay, values


def drops(replay: Replay, *, cut: bool) -> list[str]:
    """The dropouts of whole values, or of cut ones."""
    local = replay.compilation.local
    nodes = [node for node in local.graph.nodes if op_name(node) == "tpcompile.dropout.default"]
    layouts = {node.name: local.layouts[node.name] for node in nodes}
    return [name for name, layout in layouts.items() if isinstance(layout, Layout) and layout.is_cut == cut]


def test_whole_values_are_equal_on_all_tensor_ranks() -> None:
    replay, values = forward()
    local = replay.compilation.local
    whole = [name for name, layout in local.layouts.items() if isinstance(layout, Layout) and layout.is_whole and name in values]
    assert len(whole) > 50 and len(drops(replay, cut=False)) == 5  # the embedding's, and two in every layer
    for name in whole:
        assert all(torch.equal(value, values[name][0]) for value in values[name]), name


def test_cut_values_drop_on_their_own() -> None:
    replay, values = forward()
    assert len(drops(replay, cut=True)) == 2  # the attention weights of every layer
    for name in drops(replay, cut=True):
        masks = [value != 0 for value in values[name]]
        assert not torch.equal(masks[0], masks[1]), name
        assert all(0 < int((~mask).sum()) < mask.numel() for mask in masks)


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}, {"part": 1}, {"part": 2}], ids=["seed", "step", "replica", "micro-batch"])
def test_another_seed_step_or_part_of_the_rows_drops_something_else(other: dict[str, int]) -> None:
    replay, first = forward()
    _, second = forward(**other)
    for name in drops(replay, cut=False) + drops(replay, cut=True):
        assert not torch.equal(first[name][0] != 0, second[name][0] != 0), name


def test_masks_are_independent_and_drop_a_tenth() -> None:
    """All masks of one size: of sites, ranks, seeds, steps and parts. Two of them drop the same element in one of a hundred places."""
    masks: list[tuple[str, torch.Tensor]] = []
    for settings in ({}, {"seed": 1}, {"step": 1}, {"part": 1}, {"part": 3}):
        replay, values = forward(**settings)
        for name in drops(replay, cut=False):
            masks.append((f"{name} {settings}", (values[name][0] == 0).double().flatten()))
    assert len(masks) == 25
    gone = torch.stack([mask for _, mask in masks])
    assert abs(gone.mean() - 0.1) < 0.01
    together = gone @ gone.T / gone.shape[1]
    apart = together[~torch.eye(len(masks), dtype=torch.bool)]
    assert abs(apart.mean() - 0.01) < 0.003 and apart.max() < 0.06


def test_one_seed_repeats_it_all() -> None:
    _, first = forward(seed=5, step=2, part=1)
    _, second = forward(seed=5, step=2, part=1)
    assert all(torch.equal(a, b) for a, b in zip(first["output"][0], second["output"][0], strict=True))


def test_it_trains() -> None:
    """Steps with dropout on: the loss falls, and the ranks' copies of whole parameters stay equal."""
    model, batch, _ = made("gpt2")
    replay = Replay(model, compiled("gpt2", MESH), dropout=True)
    optimizers = list(replay.optimizers(torch.optim.AdamW, {"lr": 1e-2}))
    losses = []
    for _ in range(4):
        losses.append(float(replay.step(batch)[0]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < losses[0]
    for name, pieces in replay.pieces[0].items():
        if name not in replay.compilation.pieces():
            assert torch.equal(pieces[0], pieces[1]), name


class TestFast:
    """Attention keeps its own dropout; all others are keyed."""

    def test_only_attention_draws_from_torch(self) -> None:
        local = compiled("gpt2", "tp=2", dropout="fast").local
        ops = [op_name(node) for node in local.graph.nodes]
        attention = [node for node in local.graph.nodes if op_name(node) == "aten.scaled_dot_product_attention.default"]
        assert [argument(node, "dropout_p") for node in attention] == [0.1, 0.1]
        assert ops.count("tpcompile.dropout.default") == 5 and "tpcompile.dropout_at.default" not in ops

    def test_one_seed_of_torch_repeats_it(self) -> None:
        model, batch, _ = made("gpt2")
        losses = []
        for seed in (1, 1, 2):
            replay = Replay(model, compiled("gpt2", "tp=2", dropout="fast"), dropout=True)
            torch.manual_seed(seed)
            losses.append(float(replay.step(batch)[0]))
        assert losses[0] == losses[1] != losses[2]

    def test_whole_attention_is_refused_on_several_ranks(self) -> None:
        with pytest.raises(Refused) as error:
            compiled("gpt2", "tp=5", dropout="fast")  # four heads
        lines = str(error.value).splitlines()
        assert lines[0] == "attention that is whole on all tensor ranks would draw other numbers on each, for the dropout inside it"
        assert lines[1] == '  at   compile(dropout="fast")' and lines[2].startswith("  from ") and lines[3] == '  fix  use dropout="local"'
        compiled("gpt2", "dp=2", dropout="fast")

    def test_check_turns_it_off(self) -> None:
        model, batch, _ = made("gpt2")
        report = compare(model, compiled("gpt2", "tp=2", dropout="fast"), batch)
        assert report.ok and report.notes == ("dropout was off in this comparison",)
