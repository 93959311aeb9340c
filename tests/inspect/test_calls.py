"""The calls of a step as `explain` prints them: by formula, and counted in the graph."""

from __future__ import annotations

import counting
import pytest
from parity_models import compiled, made

from tpcompile.inspect.calls import calls, formula, known, value
from tpcompile.inspect.explain import explain
from tpcompile.simulate import compare

FORMULAS = {  # per micro-batch: all-reduces forward and backward of L layers; a cut vocabulary's table, head and loss
    ("llama", False): ("2·L·m", "2·L·m"),
    ("llama", True): ("m·(2·L + 4)", "m·(2·L + 1)"),
    ("neox", False): ("L·m", "L·m"),  # attention and MLP side by side, each behind a norm whose weight and bias are summed once a step
    ("neox", True): ("m·(L + 4)", "m·(L + 1)"),
    ("gpt", False): ("2·L·m", "2·L·m"),
    ("gpt", True): ("m·(2·L + 4)", "m·(2·L + 1)"),
}


@pytest.mark.parametrize(("name", "vocabulary"), FORMULAS)
def test_all_reduces_of_a_layer(name: str, vocabulary: bool) -> None:
    compilation = compiled(name, "tp=2", vocab_parallel=vocabulary, sequence_parallel=False)
    (stage,) = compilation.stages
    rows = {(row.direction, row.call): row for row in calls(compilation, stage) if row.axis == "tp"}
    sizes = known(compilation, stage)
    forward, backward = rows["forward", "all_reduce"], rows["backward", "all_reduce"]
    assert (formula(forward.count), formula(backward.count)) == FORMULAS[name, vocabulary]
    graph = compilation.rank_program(made(name)[0], 1).graph
    assert value(forward.count, sizes) == counting.forward(graph)["all_reduce"]
    assert value(backward.count, sizes) == counting.backward(graph)["all_reduce"]


def test_whole_parameters_are_summed_once_a_step() -> None:
    """Weights and biases of the two norms of 2 layers, 32 numbers of 8 bytes each, whatever the batch and its micro-batches."""
    compilation = compiled("neox", "tp=2", sequence_parallel=False)
    (row,) = [row for row in calls(compilation, compilation.stages[0]) if (row.axis, row.direction) == ("tp", "step")]
    assert (row.call, row.count, row.bytes) == ("all_reduce", 1, 2 * 4 * 32 * 8)
    assert formula(row.sent) == "4096 - 4096/tp"


def test_bytes_are_those_of_the_residual_stream() -> None:
    """A reduction is of b rows of s positions of the hidden size, 16 numbers of 8 bytes, for each of 2 layers' two regions."""
    compilation = compiled("llama", "tp=2", vocab_parallel=False, sequence_parallel=False)
    (stage,) = compilation.stages
    (forward,) = [row for row in calls(compilation, stage) if (row.axis, row.direction) == ("tp", "forward")]
    assert formula(forward.bytes) == "256·L·b·m·s" and 256 == 2 * 16 * 8
    assert formula(forward.sent) == "256·L·b·m·s·(2 - 2/tp)"
    assert value(forward.bytes, known(compilation, stage)) == 256 * 2 * 8 * 6


def test_a_cut_loss_sends_a_number_for_each_token() -> None:
    """Three times, of the type that the loss is computed in; beside the table's look-up, and the gathered scores that the model returns."""
    compilation = compiled("gpt", "tp=2", sequence_parallel=False)
    (stage,) = compilation.stages
    rows = {row.call: row for row in calls(compilation, stage) if (row.axis, row.direction) == ("tp", "forward")}
    sizes = known(compilation, stage)
    hidden, token = 20 * 8, 3 * 8
    assert value(rows["all_reduce"].bytes, sizes) == (hidden * (2 * 2 + 1) + token) * 8 * 6
    assert value(rows["all_gather"].bytes, sizes) == 40 // 2 * 8 * 8 * 6
    alone = compiled("gpt", "tp=2", outputs="loss", sequence_parallel=False)
    assert {row.call for row in calls(alone, alone.stages[0]) if (row.axis, row.direction) == ("tp", "forward")} == {"all_reduce"}


def test_what_is_printed_is_what_the_checker_moves() -> None:
    """Every number of the table, over all axes, beside the bytes that a lockstep run hands on."""
    compilation = compiled("gpt2", "dp=2,pp=2,tp=2")
    model, batch, _ = made("gpt2")
    moved = {(t.stage, t.axis, t.direction, t.call): (t.count, t.bytes) for t in compare(model, compilation, batch).traffic}
    for stage in compilation.stages:
        sizes = known(compilation, stage)
        for row in calls(compilation, stage):
            if row.axis != "all":
                key = stage.index, row.axis, row.direction, row.call
                assert moved.pop(key) == (value(row.count, sizes), value(row.bytes, sizes)), key
    assert not moved


def test_stages_that_do_the_same_share_a_line() -> None:
    made = compiled("gpt", "pp=2,tp=2", vocab_parallel=False, sequence_parallel=False)
    lines = [line.split() for line in explain(made, full=True).splitlines()]
    assert ["tp", "forward", "0–1", "all-reduce", "2·m", "4", "320·b·m·s", "15,360", "320·b·m·s·(2", "-", "2/tp)", "15,360"] in lines
    assert ["pp", "forward", "0", "send", "m", "2", "160·b·m·s", "7,680", "160·b·m·s", "7,680"] in lines


def test_one_rank_says_nothing() -> None:
    assert "calls in a step" not in explain(compiled("gpt", "tp=1"), full=True)
    assert "handed over" not in explain(compiled("gpt", "tp=1"))
