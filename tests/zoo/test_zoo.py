"""A part of the zoo that spans its kinds, each captured once: parity on every mesh, and what is cut of the blocks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tpcompile.passes.capture import capture
from tpcompile.simulate.reference import weighted_sum
from zoo.blocks import Blocks
from zoo.measure import MESHES, ROWS, Row, measure, part, sample
from zoo.tiny import types

ROOT = Path(__file__).resolve().parent.parent.parent

ATTENTION_AND_MLP = (
    "causal/deepseek_v3",  # low-rank projections with norms, experts with shared ones
    "causal/falcon",  # one key/value head
    "causal/gemma3_text",  # sandwich norms, sliding and full attention
    "causal/gpt2",  # weights stored the other way around
    "causal/gpt_neox",  # parallel residual, fused qkv
    "causal/gpt_oss",  # attention sinks, experts with biases
    "causal/gptj",  # interleaved rotary
    "causal/glm_moe_dsa",  # attention to places that scores choose, which are sums over heads
    "causal/llama",
    "causal/mixtral",  # experts
    "causal/mpt",  # alibi, a softmax that is written out
    "causal/olmo3",  # norms over all heads, after the projections
    "causal/opt",
    "causal/phi3",  # fused qkv, fused gate and up
    "causal/phimoe",  # random numbers in its router
    "causal/qwen3",  # norms of each head
    "img/segformer",  # places are reduced by a convolution, one head
    "img/vit",
    "mlm/bert",
    "mlm/convbert",  # attention beside a convolution with computed weights
    "mlm/squeezebert",  # projections in groups, by convolutions
    "s2s/bart",  # encoder and decoder, cross-attention
    "s2s/t5",  # relative bias shared over layers
)
OTHERS = ("causal/mamba",)  # state space
SLIM = ("causal/gemma3_text", "causal/gpt2", "causal/gpt_neox", "causal/llama", "causal/mixtral", "causal/phi3", "causal/qwen3")
SPREAD = ("causal/gpt2", "causal/deepseek_v3", "causal/mamba", "causal/phimoe", "img/vit", "s2s/t5")
"""Kinds that are run on every mesh, the others on tp=2 alone."""

DOWN = "its output meets a norm over the same dimension"


@pytest.mark.parametrize("kind", ATTENTION_AND_MLP + OTHERS)
def test_parity_and_what_is_cut(kind: str) -> None:
    row = measure(kind, MESHES if kind in SPREAD else ("tp=2",))
    assert row.meshes == dict.fromkeys(row.meshes, "equal")
    assert row.attention_and_mlp == (kind in ATTENTION_AND_MLP), row.layers
    if row.attention_and_mlp:
        assert row.share is not None and row.share >= 0.98, row.whole
    if kind in SLIM:
        assert row.held is not None and row.held <= 1.02


OPTIONS = ("sequence_parallel=False", "vocab_parallel=False", "sequence_parallel=False vocab_parallel=False", "sequence_parallel=regather")


@pytest.mark.parametrize("kind", ["causal/gpt2", "causal/gpt_neox", "causal/llama", "causal/mixtral", "mlm/bert", "s2s/t5"])
def test_parity_with_options_on_and_off(kind: str) -> None:
    """With both on, which is the default, also at tp=4."""
    row = measure(kind, ("tp=4", *(f"tp=2 {options}" for options in OPTIONS), *(f"tp=4 {options}" for options in OPTIONS[:3])))
    assert row.meshes == dict.fromkeys(row.meshes, "equal")


def test_statistics_of_a_batch_in_one_piece() -> None:
    row = measure("img/pp_lcnet", ("tp=2", "pp=2"))
    assert row.ok, row.failures
    assert {mesh: row.verdict(mesh) for mesh in row.meshes} == {"tp=2": "equal", "pp=2": "equal in one micro-batch"}


@pytest.mark.parametrize(
    ("note", "result", "verdict", "ok"),
    [
        ("", "equal", "equal", True),
        ("", "refused: a router's balance; equal undivided", "refused", False),
        ("batch statistics", "refused: its mean is of all rows; equal undivided", "equal in one micro-batch", True),
        ("batch statistics", "refused: CaptureError: it learns", "refused", False),
        ("batch statistics", "different: by 1.0e-01, first value mean", "different", False),
        ("batch statistics", "error: KeyError: 'none'", "error", False),
    ],
)
def test_what_a_result_comes_to(note: str, result: str, verdict: str, ok: bool) -> None:
    row = Row("img/none", note, meshes={"tp=2": result})
    assert (row.verdict("tp=2"), row.ok) == (verdict, ok)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("causal/deepseek_v3", {"self_attn.q_a_proj.weight": DOWN, "self_attn.kv_a_proj_with_mqa.weight": DOWN}),
        ("causal/mixtral", {"mlp.gate.weight": "a router"}),
        ("causal/olmo3", {"self_attn.q_proj.weight": DOWN, "self_attn.k_proj.weight": DOWN}),
        ("causal/qwen3", {}),  # norms of each head
        ("causal/gemma3_text", {}),  # norms follow output projections too: these are cut all the same
    ],
)
def test_what_is_whole_by_law(kind: str, expected: dict[str, str]) -> None:
    model, batch = sample(kind)
    blocks = Blocks(capture(model, part(batch, ROWS), loss=weighted_sum))
    named = {blocks.program.parameters[placeholder]: reason for placeholder, reason in blocks.by_law.items()}
    assert named == {f"model.layers.{layer}.{name}": reason for layer in (0, 1) for name, reason in expected.items()}


def test_the_list_names_each_type_once() -> None:
    names = [(row["task"], row["model_type"]) for row in types()]
    assert len(names) == len(set(names)) == 239


def test_a_type_that_fails_is_a_row_with_its_error(tmp_path: Path) -> None:
    """The benchmark, as it is called: a type that there is none of does not stop the next."""
    rows, table = tmp_path / "rows.json", tmp_path / "zoo.md"
    command = [sys.executable, ROOT / "benchmarks" / "zoo.py", "--types", "causal/none,img/vit", "--meshes", "tp=2"]
    done = subprocess.run([*command, "--json", rows, "--markdown", table], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    failed, passed = json.loads(rows.read_text())
    assert failed["meshes"] == {"tp=2": "error: KeyError: 'none'"} and not failed["captured"]
    assert passed["meshes"] == {"tp=2": "equal"} and passed["share"] == 1.0
    assert "| causal/none | error | not captured |  |  |" in table.read_text()
    assert "| img/vit | equal | 2 × attention + MLP | 100.0% |" in table.read_text()
