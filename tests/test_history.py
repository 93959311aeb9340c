"""What each pass did: as a table, before and after, as a diff, and of one layer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from parity_models import compiled

from tpcompile import colours
from tpcompile.cli import main
from tpcompile.errors import InputError
from tpcompile.history import Step
from tpcompile.parse import parse
from tpcompile.text import text

GPT = "tpcompile.demo.model:gpt"
ROOT = Path(__file__).resolve().parent.parent


def step(name: str, mesh: str = "pp=2,tp=2", **options: bool) -> Step:
    return compiled("gpt", mesh, **options).history[name]


def test_the_table() -> None:
    """One line for every pass, in order: nodes before and after, seconds, and what it did."""
    history = compiled("gpt", "pp=2,tp=2").history
    heading, *lines = str(history).splitlines()
    assert heading.split() == ["pass", "nodes", "seconds", "what", "it", "did"]
    rows = {line.split()[0]: line for line in lines if not line.startswith(" ")}
    assert list(rows) == list(history) and repr(history) == str(history)
    for name, row in rows.items():
        found = history[name]
        before, after = (f"{count:,}" if count is not None else "–" for count in found.nodes)
        assert re.match(rf"{name} +{before} +→ +{after} +{found.seconds:.2f}  ", row), row
    assert rows["plan"].endswith("5 regions cut, 1 left whole") and rows["detect"].endswith("7 of 12 places may end a region")
    assert rows["split"].rstrip().endswith(f"2 stages of {', '.join(str(len(s.graph.nodes)) for s in compiled('gpt', 'pp=2,tp=2').stages)}")
    assert "tpcompile.enter" in rows["rewrite"] and "-2 aten.split.Tensor" in rows["normalize"]
    assert "nothing changed" in rows["place_dropout"]


def test_a_pass_that_there_is_not() -> None:
    with pytest.raises(KeyError, match="no pass is named 'rewrit': the passes are normalize, attend, divide_loss, "):
        _ = compiled("gpt", "tp=2").history["rewrit"]


def test_before_and_after() -> None:
    """The text of what went in and came out, and the lines that differ."""
    found = step("rewrite", sequence_parallel=False)
    made = compiled("gpt", "pp=2,tp=2", sequence_parallel=False)
    assert found.before == text(made.history["delay"].made) and found.text == found.after == text(found.made)
    lines = found.diff().splitlines()
    assert lines[:2] == ["--- before", "+++ after"]
    new, old = ({line[1:] for line in lines if line[0] == sign} for sign in "+-")
    assert all(line in found.after.splitlines() for line in new - {"++ after"}) and not new & old
    assert any(re.match(r"! %linear_1_sum = tpcompile\.reduce\(%linear_1_partial, \"tp\"\) : f64\[b, s, 20\]$", line) for line in new)
    assert found.nodes == tuple(len(parse(shown).graph.nodes) for shown in (found.before, found.after))


def test_colours() -> None:
    """What is new is green and its collectives bold, what is gone is red; the words stay."""
    plain, coloured = step("rewrite").diff(), step("rewrite").diff(color=True)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    (collective,) = (line for line in coloured.splitlines() if "%linear_1_sum = tpcompile" in line and "_partial" in line)
    assert "\x1b[1;35m! %linear_1_sum" in collective and collective.startswith("\x1b[32m+")
    assert any(line.startswith("\x1b[31m-") for line in coloured.splitlines())
    shown = colours.graph(step("rewrite").text)
    spans = {shown.plain[span.start : span.end]: str(span.style) for span in shown.spans}
    assert spans["@tp"] == "cyan" and spans[" +tp"] == "bold yellow" and spans["! %linear_1_sum = tpcompile.seq_scatter"] == "bold magenta"


@pytest.mark.parametrize("name", ["normalize", "propagate", "rewrite", "optimize", "split"])
def test_one_layer(name: str) -> None:
    """The values of a layer, its parameters, and what passes put beside them: of all layers together, nothing twice."""
    whole = step(name)
    layers = [whole.layer(number) for number in (0, 1)]
    lines = [[line for line in layer.text.splitlines() if line.startswith(("  %", "! %"))] for layer in layers]
    every = [line for line in whole.text.splitlines() if line.startswith(("  %", "! %"))]
    assert all(set(own) <= set(every) for own in lines) and not {*lines[0]} & {*lines[1]}
    assert any("%p_blocks_1_mlp_up_weight" in line for line in lines[1]) and not any("blocks_0" in line for line in lines[1])
    if name in ("rewrite", "optimize", "split"):
        gather = "tpcompile.seq_gather" if name == "rewrite" else "tpcompile.kept_linear"
        assert sum(gather in line for line in lines[1]) == sum("tpcompile.seq_scatter" in line for line in lines[1]) == 2
    assert whole.layer("blocks.1").text == layers[1].text


def test_one_layer_of_what_makes_no_graph() -> None:
    """Of what may end a region, and of the plan."""
    assert [line.split(":")[0] for line in step("plan").layer(1).text.splitlines()] == ["blocks.1.attention", "blocks.1.mlp"]
    seeds = step("detect").layer(1).text.splitlines()
    assert len(seeds) == 4 and all(" ends " in line for line in seeds)
    assert step("plan").layer(1).diff().splitlines()[3].startswith("+blocks.1.attention: attention over tp")


def test_a_layer_that_there_is_not() -> None:
    with pytest.raises(InputError) as error:
        step("rewrite").layer(7)
    lines = [line for line in str(error.value).splitlines() if "from" not in line]
    assert lines == ["no layer is named '7'", "  at   history['rewrite'].layer('7')", "  fix  the layers are blocks.0, blocks.1"]


def test_the_users_lines() -> None:
    shown = step("rewrite").layer(1)
    text_with = shown.text_of(shown.made, sources=True)
    assert [line for line in text_with.splitlines() if not line.startswith("  # ")] == shown.text.splitlines()
    lines = text_with.splitlines()
    place = next(index for index, line in enumerate(lines) if "= aten.gelu" in line)
    assert "F.gelu(self.up(x))" in next(line for line in reversed(lines[:place]) if line.startswith("  # model.py:"))


def test_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a pass, the table; with one, its text, a layer of it, what it changed, and the model's lines."""
    call = ["inspect", GPT, "--mesh", "tp=2"]
    assert main(call) == 0
    assert capsys.readouterr().out.startswith("pass ")
    assert main([*call, "--pass", "rewrite", "--layer", "3", "--diff", "--source"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("--- before\n+++ after\n") and "  # model.py:" in shown
    assert "\n+! %linear_15_sum = tpcompile.seq_scatter(%linear_15_partial" in shown and "%linear_1_sum" not in shown
    assert main([*call, "--pass", "rewrite", "--layer", "9"]) == 2
    assert "fix  the layers are blocks.0, …, blocks.3" in capsys.readouterr().err


def test_the_readme_shows_what_inspect_prints(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("## Before and after") : readme.index("## Training")]
    before, after = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    call = ["inspect", GPT, "--mesh", "tp=2", "--sequence-parallel", "off", "--pass"]
    names = re.compile(r"%p_blocks_0_mlp_(\w+)")
    for name, quoted in (("normalize", before), ("rewrite", after)):
        assert main([*call, name]) == 0
        assert quoted in names.sub(r"%\1", capsys.readouterr().out)
