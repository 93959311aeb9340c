"""A cut vocabulary beside one device: the loss, every gradient, a step; and what each rank holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vocabulary_models import HANDWRITTEN, LOSSES, MODELS, VOCABULARY, Words, batch, transformer, words

import tpcompile
from tpcompile.layout import Layout, cut_factors, size_of

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


ROW, NUMBER = "b*s", "1"

REDUCTIONS = {  # what a loss reduces: numbers of rows forward and backward, single numbers
    "z-loss": (5, 0, 0),
    "nll": (2, 1, 1),
    "gathered logs": (2, 1, 1),
    "one-hot": (2, 1, 1),
    "smoothed by hand": (2, 1, 1),
    "smoothed by sum": (2, 1, 1),
    "log of softmax": (2, 1, 1),
    "entropy of softmax": (4, 2, 1),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_what_a_loss_by_hand_moves(name: str) -> None:
    """Maxima and sums of exponentials, a gradient of these; what is added up for the labels waits until it is one number."""
    model, rows = words(name)
    compiled = tpcompile.compile(model, "tp=3", rows, outputs="loss", sequence_parallel=False)
    found = Counter[tuple[str, str]]()
    for stage in compiled.compilation.step.messages:
        found.update((sent.direction, str(sent.elements)) for sent in (*stage.forward, *stage.backward) if "12" not in str(sent.elements))
    forward, backward, numbers = REDUCTIONS[name]
    expected = {("forward", ROW): forward, ("backward", ROW): backward, ("forward", NUMBER): numbers}
    assert found == {key: count for key, count in expected.items() if count}
    assert "tpcompile.gather.default" not in calls(compiled)
    assert long(compiled) == []


def long(compiled: Any) -> list[str]:
    """What is computed and is as long as the vocabulary on every rank."""
    local = compiled.compilation.local
    layouts = {node.name: local.layouts.get(node.name) for node in local.graph.nodes if node.op == "call_function"}
    return [
        name
        for name, a in layouts.items()
        if isinstance(a, Layout) and any(size_of(d) == VOCABULARY and not cut_factors(d) for d in a.dims)
    ]


def hits(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    """A loss with a metric in it: the words that are guessed."""
    right = (scores.argmax(-1) == labels).to(scores.dtype)
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum") + right.sum()


def written(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    """Smoothed labels, written into a tensor like the scores."""
    with torch.no_grad():
        wanted = torch.full_like(scores, 0.1 / (VOCABULARY - 1)).scatter_(-1, labels.clamp(min=0).unsqueeze(-1), 0.9)
    return -(wanted * scores.log_softmax(-1)).sum(-1).mean()


def both(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    """Two passes through one head, pulled together."""
    other = model.head(model.norm(model.embed(labels.masked_fill(labels < 0, 0))))
    far = F.kl_div(scores.log_softmax(-1), other.log_softmax(-1), reduction="sum", log_target=True)
    return far + F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("mesh", ["tp=3", "pp=2,tp=2"])
@pytest.mark.parametrize("loss", [hits, written, both])
def test_what_else_is_made_of_scores(loss: Any, mesh: str) -> None:
    torch.manual_seed(1)
    model, rows = Words(loss, tied=False).double(), batch(1)
    assert long(tpcompile.compile(model, "tp=3", rows, outputs="loss")) == []
    report = tpcompile.check(model, mesh, rows, microbatches=2)
    assert report.ok, f"\n{report}"


def in_order(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    return -scores.sort(-1).values.log_softmax(-1)[..., -1].mean()


def best_few(model: Words, scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten()) + scores.topk(3, -1).values.mean()


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (in_order, "aten.sort.default needs this dimension whole: sort at vocabulary_models.py:"),
        (best_few, "its value linear_2 is also used whole, by topk at vocabulary_models.py:"),
    ],
)
def test_a_head_that_stays_whole_says_why(loss: Any, reason: str) -> None:
    torch.manual_seed(1)
    model, rows = Words(loss, tied=False).double(), batch(1)
    (head,) = [left for left in tpcompile.compile(model, "tp=2", rows).compilation.plan.whole if left.name == "head"]
    assert head.reason.startswith(reason)
    assert tpcompile.check(model, "tp=2", rows).ok


def test_a_softmax_inside_a_model_stays_on_a_rank() -> None:
    """Only scores are cut along the dimension of a softmax: a gate of as many features is no head."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.out = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.gate(x).softmax(-1)).square().sum()

    compiled = tpcompile.compile(Gated().double(), "tp=2", {"x": torch.randn(2, 3, 8, dtype=torch.float64)})
    assert "tpcompile.reduce_max.default" not in calls(compiled)
    assert "aten.softmax.int needs this dimension whole" in {left.name: left.reason for left in compiled.compilation.plan.whole}["out"]
