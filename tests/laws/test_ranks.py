"""ranks: a rank's own program is its stage's with its own numbers; all ranks hold theirs against the same stage."""

from __future__ import annotations

from typing import Any

import pytest
from law_models import LINE, step
from pass_models import Parallel, Tiny, tiny
from torch import fx, nn

import tpcompile
from tpcompile.collectives import held_by, take
from tpcompile.errors import VerifyError
from tpcompile.laws.ranks import check_rank
from tpcompile.layout import Layout, bounds, cut_factors
from tpcompile.passes import emit as emit_module
from tpcompile.passes.emit import _localize
from tpcompile.timeline import Step


def held(given: Step, coordinate: int, model: nn.Module | None = None) -> dict[str, Any]:
    """A rank's pieces of the model's parameters."""
    found: dict[str, Any] = {}
    for place, name in given.stages[0].parameters.items():
        found[name] = (model or Tiny()).get_parameter(name)
        layout = given.local.layouts[place]
        assert isinstance(layout, Layout)
        for dim, places in enumerate(layout.dims):
            if cut_factors(places):
                found[name] = take(found[name], dim, held_by(bounds(places, given.local.parts), coordinate, given.local.parts))
    return found


def refused(given: Step, graph: fx.Graph, coordinate: int, parameters: dict[str, Any], what: str) -> None:
    with pytest.raises(VerifyError) as error:
        check_rank(given.local, given.stages[0], graph, coordinate, parameters)
    assert error.value.what.startswith(what), error.value.what
    assert error.value.source.startswith(LINE), str(error.value)


@pytest.mark.parametrize("coordinate", [0, 1])
def test_every_rank_of_a_step_is_right(coordinate: int) -> None:
    given = step()
    check_rank(given.local, given.stages[0], _localize(given.stages[0].graph, coordinate), coordinate, held(given, coordinate))


def test_two_collectives_swapped_on_one_rank() -> None:
    """Attention and MLP side by side: nothing but the order of calls says which reduction meets which."""
    given = step(block=Parallel, reduced_once=False)
    source = _localize(given.stages[0].graph, 1)
    made: dict[fx.Node, fx.Node] = {}
    swapped, late = fx.Graph(), list[fx.Node]()
    for node in source.nodes:
        if node.name == "linear_1_sum" or any(operand in late for operand in node.all_input_nodes):
            late.append(node)
            continue
        made[node] = swapped.node_copy(node, made.__getitem__)
        while node.name == "linear_3_sum" and late:
            made[late[0]] = swapped.node_copy(late[0], made.__getitem__)
            del late[0]
    swapped.lint()
    what = "linear_3_sum = tpcompile.reduce.default: rank 1 runs it where the other ranks of stage 0 run linear_1_sum"
    refused(given, swapped, 1, held(given, 1, Tiny(block=Parallel)), what)


def test_two_other_calls_swapped_on_one_rank() -> None:
    given = step()
    source = _localize(given.stages[0].graph, 1)
    nodes = {node.name: node for node in source.nodes}
    nodes["getitem_1"].append(nodes["getitem"])
    refused(given, source, 1, held(given, 1), "getitem_1 = getitem: it stands where the other ranks of stage 0 have getitem")


def test_another_number_on_one_rank() -> None:
    """Rank 1 with the sizes of rank 0."""
    given = step()
    graph = _localize(given.stages[0].graph, 0)
    refused(
        given, graph, 1, held(given, 1), "split_with_sizes_default = aten.split_with_sizes.default: on rank 1 it is another call than in"
    )


def test_a_piece_of_another_rank() -> None:
    given = step()
    graph = _localize(given.stages[0].graph, 1)
    refused(given, graph, 1, held(given, 0), "p_layers_0_qkv_weight: rank 1 holds [12, 6] of layers.0.qkv.weight, and its layout")


def test_a_parameter_that_a_rank_does_not_hold() -> None:
    given = step()
    graph = _localize(given.stages[0].graph, 1)
    mine = {name: value for name, value in held(given, 1).items() if name != "layers.0.norm.bias"}
    refused(given, graph, 1, mine, "p_layers_0_norm_bias: rank 1 holds nothing of layers.0.norm.bias")


def test_a_rank_that_leaves_something_out() -> None:
    """The last value that nobody reads on this rank."""
    given = step()
    graph = _localize(given.stages[0].graph, 1)
    output = graph.output_node()
    (loss,) = output.all_input_nodes
    output.args = ((loss.args[0],),)
    graph.erase_node(loss)
    refused(given, graph, 1, held(given, 1), "output: it stands where the other ranks of stage 0 have mul_tensor")


def test_a_program_of_the_compiler_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `compiled.program(rank)` gives has been held against its stage."""
    compiled = tpcompile.compile(Tiny().double(), "tp=2", tiny()[1])
    compiled.program(1)
    other = emit_module._localize
    monkeypatch.setattr(emit_module, "_localize", lambda graph, coordinate: other(graph, 0))
    with pytest.raises(VerifyError, match="on rank 1 it is another call than in stage 0"):
        compiled.compilation.rank_program(compiled.model, 1)
