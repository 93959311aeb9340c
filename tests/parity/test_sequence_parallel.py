"""Sequence parallel on and off; what is broken in it is found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from exported import copied
from parity_models import Experts, compiled, made
from torch import fx

from tpcompile.driver import Compilation, Options, lower
from tpcompile.layout import Even, Layout, cut_factors
from tpcompile.mesh import Mesh
from tpcompile.rules import op_name
from tpcompile.simulate import compare

NAMES = ("enter", "enter_linear", "kept_linear", "reduce", "seq_gather", "seq_linear", "seq_scatter", "seq_slice", "seq_whole")


def counted(compilation: Compilation, *, large: bool = True) -> dict[str, int]:
    """The collectives of the optimized graph; of `enter`, those of values that grow with the batch."""
    found = Counter[str]()
    for node in compilation.local.graph.nodes:
        name = op_name(node).removeprefix("tpcompile.").removesuffix(".default")
        if name in NAMES and (name != "enter" or not large or node.args[0].op != "placeholder"):
            found[name] += 1
    return dict(found)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "dp=2,pp=2,tp=2"])
@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "neox", "bert", "encoder"])
def test_without_it(name: str, mesh: str) -> None:
    model, batch, _ = made(name)
    compilation = compiled(name, mesh, sequence_parallel=False)
    assert not counted(compilation).keys() & {"kept_linear", "seq_gather", "seq_scatter", "seq_slice", "seq_whole"}
    report = compare(model, compilation, batch)
    assert report.ok, f"\n{report}"


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "pp=2,tp=2"])
@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "neox"])
def test_gathering_again_in_backward(name: str, mesh: str) -> None:
    """As many operators as values that were gathered; none of those is left."""
    model, batch, _ = made(name)
    kept, compilation = compiled(name, mesh), compiled(name, mesh, sequence_parallel="regather")
    assert counted(compilation)["seq_linear"] == counted(kept)["kept_linear"] > 1
    assert "seq_gather" not in {*counted(compilation), *counted(kept)} and "kept_linear" not in counted(compilation)
    report = compare(model, compilation, batch)
    assert report.ok, f"\n{report}"


def along(compilation: Compilation) -> list[str]:
    """The values of the local graph that are cut along their positions."""
    layouts = compilation.local.layouts.items()
    cut = {name: [f.cut for dim in layout.dims for f in cut_factors(dim)] for name, layout in layouts if isinstance(layout, Layout)}
    return [name for name, cuts in cut.items() if any(isinstance(c, Even) for c in cuts)]


def test_norms_and_residual_sums_keep_their_positions() -> None:
    """Six positions on four ranks: two ranks have two of them, two have one."""
    compilation = compiled("llama", "tp=4")
    origins = {compilation.local.origins.get(name, "") for name in along(compilation)}
    program = compilation.program
    lines = {program.sources[name].path for name in origins if name in program.sources}
    assert {"model.layers.0.post_attention_layernorm", "model.layers.1.input_layernorm", "model.norm"} <= lines
    model, batch, _ = made("llama")
    assert compare(model, compilation, batch).ok


def test_what_crosses_a_boundary_is_a_share_of_the_residual_stream() -> None:
    (boundary,) = compiled("gpt", "pp=2,tp=2").stages[0].sends
    assert [str(size) for size in boundary.shape(0)] == ["b", "floor(s/2 + 1/2)", "20"]
    assert [str(size) for size in boundary.shape(1)] == ["b", "floor(s/2)", "20"]
    (whole,) = compiled("gpt", "pp=2,tp=2", sequence_parallel=False).stages[0].sends
    assert [str(size) for size in whole.shape(1)] == ["b", "s", "20"]


@pytest.mark.parametrize(("of", "to"), [("seq_gather", "seq_whole"), ("seq_whole", "seq_gather")])
def test_the_wrong_gradient_of_a_gather(of: str, to: str) -> None:
    """A partial gradient that is not summed, and a whole one that is."""
    compilation = compiled("gpt", "tp=2", vocab_parallel=False, overlap=False)

    def change(graph: fx.Graph, node: fx.Node, by: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if op_name(node) != f"tpcompile.{of}.default":
            return None
        args = tuple(by.get(arg, arg) if isinstance(arg, fx.Node) else arg for arg in node.args)
        return graph.create_node("call_function", getattr(torch.ops.tpcompile, to).default, args, name=node.name)

    model, batch, _ = made("gpt")
    stages = (replace(compilation.stages[0], graph=copied(compilation.stages[0].graph, change)),)
    report = compare(model, replace(compilation, stages=stages), batch)
    assert not report.ok and report.loss_error <= report.tolerance.loss
    assert report.first_divergence is not None and report.first_divergence.kind == "gradient"


def test_two_norms_of_one_value_enter_once() -> None:
    """A parallel residual with two norms: one all-reduce forward and one backward in every layer."""
    alike: dict[str, Any] = {"sequence_parallel": False, "vocab_parallel": False, "overlap": False}
    assert counted(compiled("neox", "tp=2", **alike)) == {"enter": 2, "reduce": 2}
    assert counted(compiled("gpt", "tp=2", **alike)) == {"enter": 4, "reduce": 4}


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3"])
def test_experts_are_reduced_once_after_their_tokens_are_combined(mesh: str) -> None:
    torch.manual_seed(3)
    model = Experts().double()
    batch = {"x": torch.randn(4, 5, 12, dtype=torch.float64)}
    compilation = lower(model, Mesh.of(mesh), batch, Options(lambda outputs, batch: outputs.square().sum(), sequence_parallel=False))
    assert counted(compilation)["reduce"] == 1
    reduction = next(node for node in compilation.local.graph.nodes if op_name(node) == "tpcompile.reduce.default")
    assert compilation.local.layouts[reduction.name] == Layout.parse("[b, s, 12]")
    report = compare(model, compilation, batch)
    assert report.ok, f"\n{report}"
