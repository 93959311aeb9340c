"""GPT-2 with dropout: whole values are equal on all tensor ranks, cut ones drop on their own, replicas differ, one seed repeats all."""

from __future__ import annotations

import pytest
import torch
from parity_models import compiled, made

from tpcompile.layout import Layout
from tpcompile.rules import op_name
from tpcompile.simulate.lockstep import Values
from tpcompile.simulate.replay import Replay, flatten, rows

MESH = "dp=2,tp=2"


def forward(*, seed: int = 0, step: int = 0, replica: int = 0) -> tuple[Replay, dict[str, Values]]:
    model, batch, _ = made("gpt2")
    compilation = compiled("gpt2", MESH, sequence_parallel=False)
    replay = Replay(model, compilation, dropout=True, seed=seed, steps=step)
    tensors = flatten(compilation.program, batch)
    (values,) = replay.forward(rows(compilation.program, tensors, 0, 2), replay.counts(tensors), replica)
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


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}, {"replica": 1}], ids=["seed", "step", "replica"])
def test_another_seed_step_or_replica_drops_something_else(other: dict[str, int]) -> None:
    replay, first = forward()
    _, second = forward(**other)
    for name in drops(replay, cut=False) + drops(replay, cut=True):
        assert not torch.equal(first[name][0] != 0, second[name][0] != 0), name


def test_one_seed_repeats_it_all() -> None:
    _, first = forward(seed=5, step=2, replica=1)
    _, second = forward(seed=5, step=2, replica=1)
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
