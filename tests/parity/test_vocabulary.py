"""A cut vocabulary beside one device: the loss, every gradient, a step; and what each rank holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from vocabulary_models import HANDWRITTEN, LOSSES, MODELS, VOCABULARY, transformer, words

import tpcompile
from tpcompile.layout import Layout

MESHES = ("tp=2", "tp=3", "tp=4", "dp=2,tp=2", "pp=2,tp=2", "dp=2,pp=2,tp=2")
HELD = {2: [49, 48], 3: [33, 32, 32], 4: [25, 24, 24, 24]}


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "dp=2,tp=4"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, mesh: str) -> None:
    model, rows = words(name)
    report = tpcompile.check(model, mesh, rows, microbatches=2)
    assert report.ok and report.tolerance.gradient == 1e-9, f"\n{report}"


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_transformers(name: str, mesh: str) -> None:
    """T5's encoder returns its output, which would cross the stages; the loss alone is asked for."""
    model, rows, loss = transformer(name)
    report = tpcompile.check(model, mesh, rows, loss=loss, outputs="loss" if name == "t5" else "all")
    assert report.ok, f"\n{report}"


@pytest.mark.parametrize("parts", HELD)
@pytest.mark.parametrize("name", MODELS)
def test_each_rank_holds_its_rows(name: str, parts: int) -> None:
    """97 words on 2, 3 and 4 ranks, without padding: tables, heads and their biases, under every name that they have."""
    model, rows, loss = transformer(name)
    compiled = tpcompile.compile(model, f"tp={parts}", rows, loss=loss)
    tables = {key for key, p in model.named_parameters(remove_duplicate=False) if p.shape[:1] == (VOCABULARY,)}
    assert tables
    for rank, count in enumerate(HELD[parts]):
        held = dict(compiled.program(rank).module.named_parameters(remove_duplicate=False))
        assert {held[key].shape[0] for key in tables} == {count}


@pytest.mark.parametrize("name", ["gpt2", "t5", "llama untied"])
def test_stages_that_share_a_table_share_its_bounds(name: str) -> None:
    model, rows, loss = transformer(name)
    compiled = tpcompile.compile(model, "pp=2,tp=2", rows, loss=loss)
    ranks = [compiled.program(rank).module for rank in range(4)]
    tables = [[p for key, p in module.named_parameters() if p.shape[-1:] != (VOCABULARY,) and p.dim() == 2] for module in ranks]
    heights = [sorted({p.shape[0] for p in held if p.shape[0] in (48, 49, VOCABULARY)}) for held in tables]
    assert heights == [[49], [48], [49], [48]]


def calls(compiled: Any) -> list[str]:
    return [str(node.target) for node in compiled.program().graph.nodes if str(node.target).startswith("tpcompile.")]


OWN = ("tpcompile.look_up.default", "tpcompile.reduce_max.default", "tpcompile.exp_sum.default", "tpcompile.own_entries.default")


@pytest.mark.parametrize("name", ["llama tied", "bert"])
def test_an_option_keeps_it_whole(name: str) -> None:
    model, rows, loss = transformer(name)
    compiled = tpcompile.compile(model, "tp=2", rows, loss=loss, vocab_parallel=False)
    assert not set(OWN) & set(calls(compiled))
    assert all(p.shape[0] != 49 for p in compiled.program().module.parameters())
    assert {left.reason for left in compiled.compilation.plan.whole if "embed" in left.name} == {"vocab_parallel=False"}
    assert tpcompile.check(model, "tp=2", rows, loss=loss, vocab_parallel=False).ok


def test_scores_are_gathered_only_for_those_who_want_them() -> None:
    model, rows, loss = transformer("gpt2")
    everything = tpcompile.compile(model, "tp=2", rows, loss=loss)
    alone = tpcompile.compile(model, "tp=2", rows, loss=loss, outputs="loss")
    assert calls(everything).count("tpcompile.gather.default") == 1 and "tpcompile.gather.default" not in calls(alone)
    assert calls(everything).count("tpcompile.reduce.default") == calls(alone).count("tpcompile.reduce.default")
    assert len(alone.program().graph.output_node().all_input_nodes) == 1
    for mesh in ("tp=3", "pp=2,tp=2"):
        assert tpcompile.check(model, mesh, rows, loss=loss, outputs="loss").ok


def test_the_loss_alone_is_what_a_call_returns() -> None:
    model, rows = words("mean")
    returned = tpcompile.compile(model, "tp=1", rows, outputs="loss")(**rows)
    assert torch.equal(returned, model(**rows))


def test_a_model_without_a_loss_has_none_to_return() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)  # type: ignore[no-any-return]

    with pytest.raises(tpcompile.TpcompileError) as error:
        tpcompile.compile(Scores(), "tp=2", {"x": torch.rand(2, 3)}, outputs="loss")
    assert [line for line in str(error.value).splitlines() if not line.startswith("  from")] == [
        "there is no loss to return: the model's output is neither a scalar nor has a .loss",
        '  at   compile(outputs="loss")',
        '  fix  pass loss= or the labels with the batch, or outputs="all"',
    ]
    with pytest.raises(tpcompile.TpcompileError, match=r"^outputs='some'"):
        tpcompile.compile(Scores(), "tp=2", {"x": torch.rand(2, 3)}, outputs="some")  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("input_ids", VOCABULARY), ("input_ids", -1), ("labels", VOCABULARY), ("labels", -1)])
def test_a_word_that_no_rank_holds_is_an_error(field: str, value: int) -> None:
    """As it is on one device."""
    model, rows = words("mean")
    rows[field] = rows[field].clone()
    rows[field][0, 2] = value
    with pytest.raises(IndexError):
        model(**rows)
    with pytest.raises(RuntimeError, match="an index is out of range: the size is 97"):
        tpcompile.check(_only_compiled(model), "tp=2", rows)


class _only_compiled(nn.Module):
    """The untouched model's own error must not be what is seen: outside of a capture it sees allowed words."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting():
            input_ids, labels = input_ids.clamp(0, VOCABULARY - 1), labels.masked_fill((labels < 0) | (labels >= VOCABULARY), -100)
        return self.model(input_ids, labels)  # type: ignore[no-any-return]


def test_layouts_in_the_program() -> None:
    """From the head to the loss nothing is as long as the vocabulary."""
    model, rows = words("untied, with a bias")
    local = tpcompile.compile(model, "tp=2", rows).compilation.local
    whole = [
        node.name
        for node in local.graph.nodes
        if isinstance(layout := local.layouts.get(node.name), Layout)
        and node.name not in local.program.buffers
        and any(str(dim) == str(VOCABULARY) for dim in str(layout)[1:].split("]")[0].split(", "))
    ]
    assert whole == []


# --- losses written by hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "dp=2,tp=4"])
@pytest.mark.parametrize("name", HANDWRITTEN)
def test_losses_by_hand(name: str, mesh: str) -> None:
    """The head is cut in all of them, and what is added up for a row is what one device adds up."""
    model, rows = words(name)
    report = tpcompile.check(model, mesh, rows, microbatches=2)
    assert report.ok and report.tolerance.gradient == 1e-9, f"\n{report}"
