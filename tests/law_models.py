"""Steps of tiny models for the tests of laws, and the same with something broken by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from exported import copied
from pass_models import Tiny, captured, local, tiny
from torch import fx, nn

from tpcompile.driver import Options, costs, sizes_of, step_of
from tpcompile.errors import VerifyError
from tpcompile.ir import Local, Stage
from tpcompile.layout import Layout
from tpcompile.mesh import Mesh
from tpcompile.passes.optimize import optimize
from tpcompile.passes.split import split
from tpcompile.timeline import Step
from tpcompile.verify import verify

Change = Callable[[fx.Graph, fx.Node, dict[fx.Node, fx.Node]], fx.Node | None]

LINE = "pass_models.py:"
"""Where the user's lines of these models are."""


def step(
    mesh: str = "tp=2",
    layers: int = 1,
    schedule: str = "1f1b",
    microbatches: int = 2,
    *,
    per_rank: int = 1,
    row: bool = False,
    reduced_once: bool = True,
    overlap: bool = False,
    **sizes: Any,
) -> Step:
    """A step of the tiny model, right as it is.

    Its vocabulary is whole. With `row` its head has a weight of its own, cut by rows: its input is sliced. Without `reduced_once` it is
    not optimized; with `overlap` linears are joined with what they enter by.
    """
    placed = Mesh.of(mesh)
    given, batch = tiny(layers=layers, **sizes)
    if row:
        model = Tiny(layers=layers)
        model.head = nn.Linear(6, 7, bias=False)
        given = captured(model, batch)
    rewritten = local(given, placed.tp, embed="whole", head="row" if row else "whole")
    made = optimize(rewritten, overlap=overlap) if reduced_once else rewritten
    stages = split(made, placed.pp, costs(given, batch), per_rank)
    options = Options(microbatches=microbatches, schedule=schedule, stages_per_rank=per_rank)
    found = step_of(made, stages, placed, options, sizes_of(given, batch))
    return verify(found)


def edited(given: Step, change: Change, **layouts: str) -> Step:
    """A step whose graphs are changed, in the program and on every stage, as a faulty pass would; and some values' layouts."""
    whole = changed(given.local, change, layouts)
    stages = tuple(replace(stage, graph=copied(stage.graph, change)) for stage in given.stages)
    assert layouts or str(whole.graph) != str(given.local.graph), "the case changes nothing"
    return replace(given, local=whole, stages=stages)


def on_stage(given: Step, index: int, change: Change | None = None, **fields: Any) -> Step:
    """A step one of whose stages is changed."""
    stage = given.stages[index]
    other = replace(stage, graph=copied(stage.graph, change) if change else stage.graph, **fields)
    assert other != stage and (not change or str(other.graph) != str(stage.graph)), "the case changes nothing"
    return with_stage(given, index, other)


def with_stage(given: Step, index: int, stage: Stage) -> Step:
    return replace(given, stages=(*given.stages[:index], stage, *given.stages[index + 1 :]))


def changed(given: Local, change: Change, layouts: Mapping[str, str]) -> Local:
    parsed = {name: Layout.parse(text, parts=given.parts) for name, text in layouts.items()}
    return replace(given, graph=copied(given.graph, change), layouts={**given.layouts, **parsed})


def nothing(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
    return None


def other_arguments(name: str, *arguments: Any) -> Change:
    """One call with other arguments after its first."""

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name != name:
            return None
        assert callable(node.target)
        return graph.create_node("call_function", node.target, (made[node.all_input_nodes[0]], *arguments), name=name)

    return change


def refused(given: Step, what: str, line: str = LINE) -> VerifyError:
    """The error of a broken step: these words first, and a line of the user's code."""
    with pytest.raises(VerifyError) as error:
        verify(given)
    assert error.value.what.startswith(what), error.value.what
    assert error.value.source.startswith(line), str(error.value)
    return error.value


def node(given: Step, name: str) -> fx.Node:
    return next(node for node in given.local.graph.nodes if node.name == name)
