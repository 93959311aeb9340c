"""wiring: operations of the right kind, in the right order, of pieces of the right shape, that read something else than the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from law_models import Change, edited, nothing, refused, step
from parity_models import compiled
from pass_models import Parallel, TwoNorms
from torch import fx

from tpcompile.errors import VerifyError
from tpcompile.layout import whole
from tpcompile.verify import verify


def other_operand(name: str, old: str, new: str) -> Change:
    """One call that reads another value in the place of one."""

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name != name:
            return None
        named = {before.name: after for before, after in made.items()}
        assert old in [operand.name for operand in node.all_input_nodes]
        return graph.node_copy(node, lambda operand: named[new if operand.name == old else operand.name])

    return change


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3"])
@pytest.mark.parametrize("reduced_once", [True, False])
@pytest.mark.parametrize("block", [Parallel, TwoNorms])
def test_what_the_passes_make_is_right(mesh: str, reduced_once: bool, block: type[Parallel | TwoNorms]) -> None:
    step(mesh, layers=2, block=block, reduced_once=reduced_once)


WRONG: Mapping[str, tuple[Change, str]] = {
    "keys in the place of queries": (
        other_operand("scaled_dot_product_attention", "transpose", "transpose_1"),
        "scaled_dot_product_attention = aten.scaled_dot_product_attention.default: reads transpose_1, a piece of transpose_1, "
        "and the program reads transpose",
    ),
    "another weight of the same shape": (
        other_operand("layer_norm", "p_layers_0_norm_weight", "p_layers_0_norm_bias"),
        "layer_norm = aten.layer_norm.default: reads p_layers_0_norm_bias, a piece of p_layers_0_norm_bias, and the program reads "
        "p_layers_0_norm_weight",
    ),
    "another bias after the sum": (
        other_operand("linear_3", "p_layers_0_down_bias", "p_layers_0_out_bias"),
        "linear_3 = aten.add.Tensor: adds up p_layers_0_out_bias, and the program p_layers_0_down_bias",
    ),
    "the values of another region": (
        other_operand("linear_2", "add_enter", "layer_norm_enter"),
        "linear_2 = aten.linear.default: reads layer_norm_enter, a piece of layer_norm, and the program reads add",
    ),
    "another loss": (
        other_operand("output", "mul_tensor", "div_tensor"),
        "div_tensor = aten.div.Tensor: is returned, a piece of div_tensor",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_the_same_shape_in_another_place(name: str) -> None:
    change, what = WRONG[name]
    refused(edited(step(), change), what)


def test_an_addend_that_is_added_twice() -> None:
    """Where partial sums are added before they are reduced, what is whole comes after: each once."""
    added = "add_1_with_p_layers_0_down_bias"
    change = other_operand(added, "p_layers_0_down_bias", "p_layers_0_out_bias")
    what = f"{added} = aten.add.Tensor: adds up p_layers_0_out_bias, and the program p_layers_0_down_bias"
    refused(edited(step(block=Parallel), change), what)


def test_operands_that_are_cut_in_different_ways() -> None:
    """Of both the first rank has three columns, but not the same."""
    made = edited(step(), nothing, p_layers_0_down_weight="[6, 5@tp{2:5, 0:2}]")
    refused(made, "linear_3_partial = aten.linear.default: reads [b, s, 5@tp{0:3, 3:5}], [6, 5@tp{2:5, 0:2}]")


def test_a_partial_sum_that_is_declared_whole() -> None:
    given = step(reduced_once=False)
    layouts = {**given.local.layouts, "linear_3_partial": whole(2, 3, 6)}
    with pytest.raises(VerifyError, match=r"linear_3_partial|linear_3_sum"):
        verify(replace(given, local=replace(given.local, layouts=layouts)))


def test_a_joined_linear_with_the_weight_of_its_neighbour() -> None:
    """Keys and values of a Llama, whose linears gather their positions again: weights of one shape."""
    given = compiled("llama", "tp=2", sequence_parallel="regather").step

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.target is not torch.ops.tpcompile.seq_linear.default or len(node.args[4]) != 3:  # type: ignore[arg-type]
            return None
        args = fx.map_arg(node.args, made.__getitem__)
        return graph.create_node("call_function", node.target, (*args[:4], [args[4][0], args[4][2], args[4][1]], args[5]), name=node.name)

    error = refused(edited(given, change), "linear_1 = getitem: reads p_", line="")
    assert "v_proj_weight, a piece of" in error.what and "k_proj_weight" in error.what


def test_joined_linears_of_another_value() -> None:
    change = other_operand("linear_2_all", "add", "layer_norm")
    refused(edited(step(overlap=True), change), "linear_2 = getitem: reads layer_norm, a piece of layer_norm, and the program reads add")


def test_joined_linears_whose_weight_is_cut_otherwise() -> None:
    made = edited(step(overlap=True), nothing, p_layers_0_up_weight="[5@tp{0:2, 2:5}, 6]")
    refused(made, "linear_2 = getitem: ")
