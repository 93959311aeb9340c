"""The plan on one screen: what it must hold, and that it fits."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import llama_shaped
import pytest
from parity_models import compiled
from torch import nn

import tpcompile
from tpcompile.driver import Compilation, Options, lower_captured
from tpcompile.inspect.explain import explain, show
from tpcompile.inspect.load import Load
from tpcompile.inspect.memory import spelled
from tpcompile.inspect.short import _formula
from tpcompile.ir import Program
from tpcompile.layout import symbol
from tpcompile.mesh import Mesh
from tpcompile.passes.capture import capture

LINES, COLUMNS = 60, 120
QUESTIONS = ("does it fit one device?", "are there enough devices?", "does the structure cut?", "does communication pay?")


@cache
def captured(layers: int) -> tuple[nn.Module, Program]:
    """One capture for all meshes, of two rows."""
    model = llama_shaped.made(layers)
    return model, capture(model, llama_shaped.batch(2))


def llama(layers: int, mesh: str, microbatches: int, **options: Any) -> Compilation:
    """For a batch of 16 rows."""
    model, program = captured(layers)
    placed = Mesh.of(mesh)
    part = llama_shaped.batch(16 // (placed.dp * microbatches))
    return lower_captured(program, model, placed, part, Options(microbatches=microbatches, **options))


def on_one_screen(text: str) -> list[str]:
    lines = text.splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS, (len(lines), max(lines, key=len))
    return lines


@pytest.mark.slow
def test_126_layers_fit_on_a_screen() -> None:
    """60 lines of 120 columns, with everything that a plan has to say."""
    made = llama(126, "dp=2,pp=4,tp=8", 4)
    text = explain(made)
    lines = on_one_screen(text)
    starts = [next(place for place, line in enumerate(lines) if line.startswith(question)) for question in QUESTIONS]
    assert starts == sorted(starts) and starts[-1] < 12, "the four questions stand at the top"
    words = " ".join(text.split())
    for said in (
        "no, of 80 GiB: one device needs 7.327 TiB = parameters 1.48 + gradients 1.48 + moments 2.95 + activations 1.42",
        "; a rank 568.8 GiB = 47 + 47 + 94 + in a step 94 + activations 287",
        "this mesh takes 64 devices and does NOT fit 80 GiB on each; the smallest that fit, estimated for the same batch: dp=2,pp=",
        ">99.99% of 405.9 B parameters, by 128256 words, 128 and 8 heads, 53248 columns of MLPs; no linear and no table is whole",
        "layers.0–125.self_attn attention q_proj.weight [128@tp·128, 16384]",
        "tp backward reduce-scatter 0–3 256 131072·L·b·m·tp·⌈s/tp⌉ 128 GiB",
        "1 layers.31–62 25.3% 218 TFLOP 47.5 GiB 47.5 GiB 95.01 GiB 95.01 GiB",
    ):
        assert said in words, said
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    (quoted,) = re.findall(r"```\n(does it fit one device\?.*?)```", readme, re.DOTALL)
    assert quoted in text


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2,pp=4,tp=8", {"data_parallel": "zero2", "recompute": "full"}),
        ("pp=6,tp=8", {"schedule": "gpipe", "outputs": "loss"}),
        ("dp=2,pp=3,tp=2", {"schedule": "zbv", "stages_per_rank": 2, "data_parallel": "zero3"}),
    ],
)
def test_other_ways_to_train_it_fit_too(mesh: str, options: dict[str, Any]) -> None:
    on_one_screen(explain(llama(8, mesh, 8 if options.get("schedule") else 4, **options)))


def test_tables_are_shortened_where_a_screen_is_too_small() -> None:
    """A model with much to say on four axes leaves some of it to the full form, and says so."""
    made = compiled("bert", "dp=2,pp=2,tp=2", data_parallel="zero3", recompute="full")
    text = "\n".join(on_one_screen(explain(made)))
    assert "2 more: explain(full=True)" in text and len(explain(made, full=True).splitlines()) > LINES


def test_zero3_that_runs_as_zero2_says_so() -> None:
    """Schedules that halve backward find no gradients where layers are gathered again: the plan tells of it, with the reason."""
    halved = compiled("gpt", "dp=2,pp=2", schedule="zbv", stages_per_rank=2, data_parallel="zero3")
    said = "zero3 runs as zero2: schedule zbv runs backward in halves, which find no gradients where layers are gathered again for it"
    for full in (False, True):
        assert said in " ".join(explain(halved, full=full).split())
    for options in ({"data_parallel": "zero3"}, {"data_parallel": "zero2", "schedule": "zbv", "stages_per_rank": 2}):
        assert "zero3 runs as zero2" not in explain(compiled("gpt", "dp=2,pp=2", **options))


def test_the_device_decides() -> None:
    made = compiled("gpt", "pp=2,tp=2")
    assert "yes, of 80 GiB: one device needs" in explain(made) and "and fits 80 GiB on each" in explain(made)
    small = explain(made, device_memory=1e-5)
    assert "no, of 10.49 KiB: one device needs" in small and "does NOT fit 10.49 KiB on each; no mesh is estimated to" in small


def test_the_full_form_has_every_tensor_rank() -> None:
    text = explain(compiled("gpt", "tp=4"), full=True)
    assert "on tp 3" in text and "calls in a step" in text and max(map(len, text.splitlines())) <= 160
    assert all(question in text for question in QUESTIONS)


def test_colours_where_there_are_any() -> None:
    from io import StringIO

    from rich.console import Console

    made, seen = compiled("gpt", "tp=2"), StringIO()
    show(made, Console(file=seen, width=COLUMNS, force_terminal=True, color_system="standard"))
    assert "\x1b[" in seen.getvalue() and "\x1b[" not in explain(made)


@pytest.mark.parametrize(
    ("mesh", "mode"), [("pp=2,tp=2", "ddp"), ("dp=2,pp=2,tp=2", "zero2"), ("dp=2,tp=4", "zero1"), ("pp=4,tp=4", "ddp"), ("tp=8", "ddp")]
)
def test_the_estimate_for_other_meshes(mesh: str, mode: str) -> None:
    """Within a sixth of what compiling for that mesh gives, from what was compiled for another."""
    from_here = Load(llama(8, "dp=2,pp=4,tp=8", 4))
    other = Mesh.of(mesh)
    there = Load(llama(8, mesh, max(4, other.pp), data_parallel=mode))
    assert from_here.guess(other, mode) == pytest.approx(there.most.most, rel=1 / 6)


def attention_of(text: str) -> list[str]:
    """The lines of the table of attention that stays, rows that are folded over several lines joined."""
    lines = text.splitlines()
    (start,) = [place for place, line in enumerate(lines) if line.startswith("attention ")]
    return [" ".join(line.split()) for line in lines[start + 1 : lines.index("", start)]]


def test_it_says_why_attention_stays() -> None:
    """Each reason once, with how many it is of, the layers, and the first line of the model."""
    import parity_models
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 40}
    model, batch = BertForMaskedLM(BertConfig(attention_probs_dropout_prob=0.0, **sizes)), parity_models.masked_batch()
    for mesh in ("tp=2", "pp=2"):
        made, said = tpcompile.compile(model, mesh, batch), "3 with a mask that stays: it depends on attention_mask"
        (short,) = [line for line in made.explain().splitlines() if line.startswith("attention")]
        assert re.fullmatch(rf"attention: {said}, at modeling_bert\.py:\d+", short)
        (long,) = attention_of(made.explain(full=True))
        assert long.startswith(f"bert.encoder.layer.0–2.attention.self {said} modeling_bert.py:") and "attn_output, attn_weights =" in long
    dropped = attention_of(explain(compiled("gpt2", "tp=2"), full=True))
    assert dropped[0].startswith("transformer.h.0–1.attn 2 written out: no key repeats a fused kernel's dropout modeling_gpt2.py:")
    assert dropped[1:] == ["(dropout='fast' keeps it)"], "one reason, on two lines"
    assert "\nattention" not in explain(compiled("gpt", "tp=2")), "all of it is one operation"


def test_clipping_is_in_the_traffic() -> None:
    """One number of float64 from every rank; what moves in a real step is compared with it in tests/distributed/test_traffic.py."""
    assert "all clipping all-reduce 8 B" in " ".join(explain(compiled("gpt", "pp=2,tp=2")).split())
    (row,) = [line for line in explain(compiled("gpt", "pp=2,tp=2"), full=True).splitlines() if "clipping" in line]
    assert row.split()[:8] == ["all", "clipping", "0–1", "all-reduce", "1", "1", "8", "8"]
    assert "clipping" not in explain(compiled("gpt", "tp=1"), full=True)


def test_formulas_are_short() -> None:
    import sympy

    b, s, m, tp = (symbol(name) for name in ("b", "s", "m", "tp"))
    assert _formula(m * (8 * b + 4) / 4) == "m·(2·b + 1)"
    assert _formula(b * sympy.floor(s / 8 + sympy.Rational(7, 8))) == "b·⌈s/8⌉"
    assert _formula(b * sympy.floor(s / 8)) == "b·floor(s/8)"
    assert _formula(2 * sympy.ceiling(s / tp)) == "2·⌈s/tp⌉"


def test_a_backend_that_is_not_used_is_said_to_be() -> None:
    found = explain(llama(2, "tp=2", 1, backend="aot_eager", recompute="selective"))
    assert "runs eagerly, and not through aot_eager: the core of attention" in found
    assert "runs through torch.compile's aot_eager, a graph for each stage" in explain(llama(2, "tp=2", 1, backend="aot_eager"))


def test_a_weight_of_two_stages_of_a_rank_is_there_once() -> None:
    """The tied table and head of a V's first and last stage; replicas reduce their gradients apart, and hold two of them."""
    alone, several = (Load(compiled("gpt2", mesh, schedule="zbv", stages_per_rank=2)).places[0] for mesh in ("pp=2", "dp=2,pp=2"))
    table = 40 * 32 * 8
    assert alone.stages == several.stages == (0, 3)
    assert alone.state.parameters == alone.state.gradients == several.state.parameters - table == several.state.gradients - table
    assert alone.state.optimizer == several.state.optimizer == 2 * alone.state.parameters


def test_the_full_forms_memory_is_that_of_ranks() -> None:
    """A line for every place along the pipeline, of what a rank there holds; what several ranks hold copies of is named."""
    said = "transformer.wte.weight is in 2 of these lines: the ranks of places 0, 1 each hold, and step, a copy of it"
    for options, labels in (({}, ["stage 0", "stage 1"]), ({"schedule": "zbv", "stages_per_rank": 2}, ["stages 0, 3", "stages 1, 2"])):
        made = compiled("gpt2", "pp=2", **options)
        lines, load = explain(made, full=True).splitlines(), Load(made)
        assert (said in lines) == (len(labels[0]) == len("stage 0")), "of a V, one rank has both"
        for label, place in zip(labels, load.places, strict=True):
            (row,) = [line.removeprefix(label) for line in lines if line.startswith(f"{label}  ")]
            sizes = [place.state.parameters, place.state.gradients, place.state.optimizer, 0, 0, place.state.most]
            assert re.split(r" {2,}", row.strip()) == [spelled(size) for size in sizes]
