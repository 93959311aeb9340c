"""The command line: exit status, what it prints, and what it says when the call does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tpcompile.cli import main
from tpcompile.rules import JOINS, POINTWISE, RESHAPES, RULES, SPLITS

ROOT = Path(__file__).resolve().parent.parent
GPT = "tpcompile.demo.model:gpt"
SMALL_LLAMA = "hf:llama,num_hidden_layers=2,hidden_size=64,intermediate_size=96,num_attention_heads=4,num_key_value_heads=2,vocab_size=91"


def test_plan(capsys: pytest.CaptureFixture[str], golden: Callable[..., None]) -> None:
    assert main(["plan", GPT, "--mesh", "pp=2,tp=2"]) == 0
    golden(capsys.readouterr().out, "plan_of_the_demo")


def test_plan_of_a_transformers_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", SMALL_LLAMA, "--mesh", "tp=2"]) == 0
    out = capsys.readouterr().out
    assert "model.layers.0–1.self_attn" in out and "model.layers.0–1.mlp" in out and "q_proj.weight [4@tp·16, 64]" in out


def test_inspect_prints_the_graph_after_a_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", GPT, "--mesh", "tp=2", "--pass", "rewrite"]) == 0
    assert "tpcompile.reduce" in capsys.readouterr().out


def test_inspect_prints_the_source_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", GPT, "--mesh", "tp=2", "--pass", "emit", "--rank", "1"]) == 0
    assert "class Stage(nn.Module):" in capsys.readouterr().out


def test_inspect_lists_the_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", GPT, "--mesh", "tp=2", "--pass", "rewrit"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tpcompile: no pass is named 'rewrit'\n  at   --pass rewrit\n  fix  the passes are capture, normalize, ")


def test_inspect_prints_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    """The documentation of operations is this command's output, and every rule is in it as it stands in the table."""
    assert main(["inspect", "--rules"]) == 0
    printed = capsys.readouterr().out
    assert all(f"`{name}`" in printed for names in (RULES, POINTWISE, RESHAPES, SPLITS, JOINS) for name in names)
    assert all(f"`{rule}`" in printed for rule in RULES.values() if isinstance(rule, str))
    assert printed == (ROOT / "docs" / "operations.md").read_text(), "tpcompile inspect --rules > docs/operations.md"


def test_inspect_needs_a_model_and_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", GPT]) == 2
    assert capsys.readouterr().err == (
        "tpcompile: --mesh not given\n  at   tpcompile inspect\n  fix  give both MODEL and --mesh, or --rules alone\n"
    )


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", GPT, "--mesh", "tp=2", "--dtype", "float64"]) == 0
    assert "loss" in capsys.readouterr().out


def test_check_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", GPT, "--mesh", "pp=2", "--dtype", "float64", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True and report["loss_error"] < 1e-10


def test_a_mesh_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", GPT, "--mesh", "tp=2,ep=2"]) == 2
    assert "unknown mesh axis 'ep'" in capsys.readouterr().err


def test_a_count_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--steps", "none"])
    assert "argument --steps: 'none' is not a whole number of 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "plan", "inspect", "check"])
def test_help_says_how_models_are_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "hf:TYPE[,key=value…]" in capsys.readouterr().out


def test_check_with_dropout_by_global_index(capsys: pytest.CaptureFixture[str]) -> None:
    small = "hf:gpt2,n_layer=1,n_embd=24,n_head=3,vocab_size=31"
    for how, note in (("exact", False), ("local", True)):
        assert main(["check", small, "--mesh", "dp=2,tp=2", "--dtype", "float64", "--dropout", how, "--json"]) == 0
        assert ("dropout was off in this comparison" in json.loads(capsys.readouterr().out)["notes"]) == note


def test_plan_of_zero_in_16_bits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "tpcompile.demo.model:gpt", "--mesh", "dp=2", "--data-parallel", "zero3", "--precision", "bf16"]
    assert main([*arguments, "--recompute", "full"]) == 0
    printed = capsys.readouterr().out
    assert "held by a rank under zero3 over 2 replicas" in printed and "reduce-scatter" in printed
