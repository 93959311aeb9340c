"""Backward in halves: what each half says, and which stages keep theirs whole."""

from __future__ import annotations

from collections import Counter
from typing import Any

import parity_models
import pytest
from law_models import step

from tpcompile.halves import first_half, second_half, why_whole
from tpcompile.messages import asked_of, roots
from tpcompile.timeline import Step

AGAIN = "linear layers gather their inputs again"
FROZEN = "nothing that it receives has a gradient"


def cut(model: str, mesh: str, **options: Any) -> Step:
    return parity_models.compiled(model, mesh, schedule="zbv", stages_per_rank=2, **options).step


@pytest.mark.parametrize(("model", "mesh"), [("gpt2", "pp=2,tp=2"), ("frozen", "pp=2,tp=2")])
def test_halves_say_together_what_the_whole_says(model: str, mesh: str) -> None:
    """The first stage receives nothing: its first half is empty. A backward that stays whole has no second half."""
    given = cut(model, mesh)
    for stage, said in zip(given.stages, given.messages, strict=True):
        assert Counter(said.input) + Counter(said.weight) == Counter(said.backward)
        assert not (said.weight if stage.unhalved else said.input if stage.index == 0 else ())
    assert any(said.input for said in given.messages)


def test_which_stages_keep_it_whole() -> None:
    assert [stage.unhalved for stage in cut("frozen", "pp=2").stages] == ["", FROZEN, FROZEN, ""]
    assert [stage.unhalved for stage in cut("gpt2", "pp=2,tp=2", sequence_parallel="regather").stages] == ["", AGAIN, AGAIN, AGAIN]


def test_a_weight_used_twice_and_one_apart() -> None:
    """The middle stages' halves as they are, then with an operation of the first half taken out of it: what meets what changes."""
    given = step("pp=2", layers=2)
    stage = given.stages[1]
    asked, begin = asked_of(given.local, stage), roots(given.local, stage)
    received = [boundary.name for boundary in stage.receives]
    first = first_half(stage.graph, received, asked)
    assert set(received) < first and why_whole(stage.graph, stage.parameters, first, begin, asked) == ""
    assert why_whole(stage.graph, stage.parameters, frozenset(), begin, asked) == FROZEN
    alone = why_whole(stage.graph, stage.parameters, first & set(received), begin, asked)
    assert alone.endswith("does not meet what is received")
    assert {name for group in second_half(stage.graph, stage.parameters, first, asked) for name in group} & first == set()
