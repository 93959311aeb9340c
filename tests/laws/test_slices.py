"""slices: collectives that ranks would not run alike, or that take other pieces than the layouts say."""

from __future__ import annotations

import pytest
from law_models import edited, nothing, other_arguments, refused, step
from pass_models import TwoNorms
from torch import fx

from tpcompile.collectives import ops
from tpcompile.ir import PerRank


@pytest.mark.parametrize("mesh", ["tp=1", "tp=2", "tp=3"])
def test_what_the_passes_make_is_right(mesh: str) -> None:
    step(mesh, row=True)


def test_a_wrong_slice() -> None:
    """Both ranks have pieces of the right size; the second begins one too early."""
    made = edited(step(row=True), other_arguments("add_1_slice", "tp", 2, [0, 3, 2, 5]))
    what = "takes the pieces [0, 3, 2, 5], and its layout [b, s, 6@tp] says [0, 3, 3, 6]"
    refused(made, f"add_1_slice = tpcompile.local_slice.default: {what}")


def test_a_slice_of_another_dimension() -> None:
    made = edited(step(row=True), other_arguments("add_1_slice", "tp", 1, [0, 3, 3, 6]))
    refused(made, "add_1_slice = tpcompile.local_slice.default: dimension 1 of its pieces is not cut: [b, s, 6@tp]")


def test_another_group() -> None:
    made = edited(step(), other_arguments("linear_3_sum", "dp"))
    refused(made, "linear_3_sum = tpcompile.reduce.default: goes over the axis dp, and the program is cut over tp")


def test_another_group_on_one_rank() -> None:
    made = edited(step(), other_arguments("linear_3_sum", PerRank(("tp", "pp"))))
    refused(made, "linear_3_sum = tpcompile.reduce.default: its axis differs by rank: tp|pp, so the ranks would not meet")


def test_other_pieces_on_one_rank() -> None:
    made = edited(step(row=True), other_arguments("add_1_slice", "tp", 2, [0, 3, PerRank((3, 2)), 6]))
    refused(made, "add_1_slice = tpcompile.local_slice.default: its bounds differs by rank: [0, 3, 3|2, 6], so the ranks would not meet")


def test_a_parameter_that_no_rank_holds_in_full() -> None:
    """Nobody holds the fourth row of the weight."""
    made = edited(step(), nothing, p_layers_0_up_weight="[5@tp{0:3, 4:5}, 6]")
    refused(made, "p_layers_0_up_weight: no rank holds index 3 of 5: 5@tp{0:3, 4:5}")


def test_a_parameter_whose_end_no_rank_holds() -> None:
    made = edited(step(), nothing, p_layers_0_up_weight="[5@tp{0:2, 2:4}, 6]")
    refused(made, "p_layers_0_up_weight: no rank holds index 4 of 5: 5@tp{0:2, 2:4}")


def test_a_cut_for_another_number_of_ranks() -> None:
    made = edited(step(), nothing, p_layers_0_up_weight="[5@tp{0:2, 2:4, 4:5}, 6]")
    refused(made, "p_layers_0_up_weight: is cut for 3 ranks, and 2 run: 5@tp{0:2, 2:4, 4:5}")


def test_a_gradient_that_is_summed_over_ranks_that_share_nothing() -> None:
    """Only a parameter is held by several ranks; of anything else the sum would count a gradient again."""

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name != "relu":
            return None
        again = graph.create_node("call_function", ops.shared.default, (made[node.all_input_nodes[0]], "tp", 2, [0, 3, 3, 5]), name="again")
        return graph.create_node("call_function", node.target, (again,), name=node.name)  # type: ignore[arg-type]

    refused(edited(step(), change), "again = tpcompile.shared.default: linear_2 is no parameter, and its gradient is not shared")


def test_a_value_whose_gradient_nobody_sums_later() -> None:
    """What is summed after the step is a parameter's gradient; that of a value went on long before."""

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name != "add_enter":
            return None
        return graph.create_node("call_function", ops.enter_later.default, (made[node.all_input_nodes[0]], "tp"), name=node.name)  # type: ignore[arg-type]

    refused(edited(step(), change), "add_enter = tpcompile.enter_later.default: add is no parameter, and its gradient is not summed after")


def test_a_gradient_that_is_summed_after_the_step_once_more() -> None:
    """One of two uses is reduced at once: the sum after the step would count that again."""
    weight = "p_layers_0_norm_weight"

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name != f"{weight}_enter":
            return None
        parameter = made[node.all_input_nodes[0]]
        later = graph.create_node("call_function", ops.enter_later.default, (parameter, "tp"), name=node.name)  # type: ignore[arg-type]
        graph.create_node("call_function", ops.enter.default, (parameter, "tp"), name="again")  # type: ignore[arg-type]
        return later

    made = edited(step(block=TwoNorms), change)
    what = f"again = tpcompile.enter.default: reads the parameter {weight}, whose gradient is summed once more after the step"
    refused(made, what, line="")


def test_a_gradient_that_is_summed_nowhere() -> None:
    name = "p_layers_0_norm_weight"

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        return made[node.all_input_nodes[0]] if node.name == f"{name}_enter" else None

    what = f"layer_norm works on pieces and reads {name} whole: its gradient is a partial sum, and is not reduced"
    refused(edited(step(block=TwoNorms), change), what)
