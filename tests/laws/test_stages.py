"""stages: parts that are no parts of the program, that lose a parameter, or that do not fit each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from law_models import changed, edited, node, on_stage, refused, step
from torch import fx

from tpcompile.collectives import ops
from tpcompile.ir import Boundary
from tpcompile.layout import Layout, TensorType
from tpcompile.timeline import Step

TWO = "pp=2,tp=2"


def two() -> Step:
    return step(TWO, layers=2)


def crossing(given: Step) -> Boundary:
    """The one value that crosses."""
    (boundary,) = given.stages[0].sends
    return boundary


@pytest.mark.parametrize("mesh", ["pp=1", "pp=2", "pp=3", "pp=4,tp=2"])
def test_what_the_passes_make_is_right(mesh: str) -> None:
    step(mesh, layers=4, microbatches=4)


def test_no_enter_on_one_stage() -> None:
    """The whole program has it; one stage does not."""

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        return made[node.all_input_nodes[0]] if node.name == "add_2_enter" else None

    refused(on_stage(two(), 1, change), "linear_6 works on pieces and reads add_2 whole: its gradient is a partial sum, and is not reduced")


def test_a_call_with_other_operands() -> None:
    """The residual stream of the second layer leaves the attention out."""

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name != "add_3":
            return None
        before = next(new for old, new in made.items() if old.name == "add_1")
        assert callable(node.target)
        return graph.create_node("call_function", node.target, (before, made[node.all_input_nodes[1]]), name=node.name)

    refused(on_stage(two(), 1, change), "add_3 = aten.add.Tensor: stage 1 computes it otherwise than the program: ")


def test_a_call_that_the_program_does_not_make() -> None:
    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name != "relu_1":
            return None
        once = graph.node_copy(node, made.__getitem__)
        return graph.create_node("call_function", torch.ops.aten.relu.default, (once,), name="twice")

    refused(on_stage(two(), 1, change), "twice = aten.relu.default: stage 1 computes it, and the program does not")


def test_a_parameter_that_no_stage_holds() -> None:
    """The second stage's down projection stands in no table, and its weight goes for an input."""
    given = two()
    second = given.stages[1]
    kept = {place: name for place, name in second.parameters.items() if name != "layers.1.down.weight"}
    lost = on_stage(given, 1, parameters=kept, inputs=(*second.inputs, "p_layers_1_down_weight"))
    refused(lost, "p_layers_1_down_weight: no stage holds the parameter layers.1.down.weight")


def test_a_placeholder_that_is_nothing() -> None:
    given = two()
    kept = {place: name for place, name in given.stages[1].parameters.items() if name != "layers.1.down.weight"}
    refused(on_stage(given, 1, parameters=kept), "p_layers_1_down_weight: stage 1 does not say what this placeholder is")


def test_a_parameter_that_is_taken_for_another() -> None:
    given = two()
    other = {**given.stages[1].parameters, "p_layers_1_down_weight": "layers.0.down.weight"}
    refused(on_stage(given, 1, parameters=other), "p_layers_1_down_weight: stage 1 takes it for layers.0.down.weight")


def test_a_parameter_that_is_covered_twice() -> None:
    """Two placeholders of one stage for one parameter: each would get a part of its gradient."""
    given = two()
    place = "p_layers_1_down_weight"

    def change(graph: fx.Graph, one: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if one.name != place:
            return None
        copy = graph.node_copy(one, made.__getitem__)
        graph.create_node("placeholder", "p_again", name="p_again")
        return copy

    program = replace(given.local.program, parameters={**given.local.program.parameters, "p_again": "layers.1.down.weight"})
    local = replace(changed(given.local, change, {}), program=program)
    second = {**given.stages[1].parameters, "p_again": "layers.1.down.weight"}
    twice = on_stage(replace(given, local=local), 1, change, parameters=second)
    refused(twice, "p_layers_1_down_weight: stage 1 holds layers.1.down.weight twice: its gradient would be in two places")


def test_a_receive_of_another_shape() -> None:
    given = two()
    sent = crossing(given)
    other = replace(sent, type=TensorType(sent.type.dtype, (*sent.type.shape[:2], 5)))
    error = refused(on_stage(given, 1, receives=(other,)), f"{sent.name} = aten.add.Tensor: stage 0 sends {sent.name} f64[b, s, 6]")
    assert error.what.endswith(f"and stage 1 receives {sent.name} f64[b, s, 5]")


def test_a_receive_of_another_type() -> None:
    given = two()
    sent = crossing(given)
    other = replace(sent, type=TensorType(torch.float32, sent.type.shape))
    error = refused(on_stage(given, 1, receives=(other,)), f"{sent.name} = aten.add.Tensor: stage 0 sends")
    assert error.what.endswith(f"and stage 1 receives {sent.name} f32[b, s, 6]")


def test_a_gradient_that_does_not_come_back() -> None:
    given = two()
    sent = crossing(given)
    error = refused(on_stage(given, 1, receives=(replace(sent, requires_grad=False),)), f"{sent.name} = aten.add.Tensor: stage 0 sends")
    assert error.what.endswith(f"and stage 1 receives {sent.name} f64[b, s, 6] without a gradient")


def test_a_receive_that_nobody_sends() -> None:
    given = two()
    sent = crossing(given)
    error = refused(on_stage(given, 0, sends=()), f"{sent.name} = aten.add.Tensor: stage 0 sends nothing, and stage 1 receives")
    assert error.what.endswith(f"{sent.name} f64[b, s, 6]")


def test_another_value_in_the_place_of_what_is_sent() -> None:
    """The table says one value, and the stage returns another of the same type."""
    given = two()
    sent = crossing(given)

    def change(graph: fx.Graph, one: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if one.op != "output":
            return None
        return graph.output((next(new for old, new in made.items() if old.name == "add"),))

    refused(on_stage(given, 0, change), f"{sent.name} = aten.add.Tensor: it crosses as add from stage 0 and as {sent.name} to stage 1")


def test_a_value_that_crosses_in_another_layout() -> None:
    """Both stages agree, and the program says otherwise: the second would take a piece for the whole."""
    given = two()
    sent = crossing(given)
    other = replace(sent, layout=Layout.parse("[b, s, 6@tp]", parts=2))
    both = on_stage(on_stage(given, 0, sends=(other,)), 1, receives=(other,))
    refused(both, f"{sent.name} = aten.add.Tensor: it crosses as [b, s, 6@tp], and is {sent.layout}")


def test_a_loss_that_is_a_partial_sum() -> None:
    """Backward would begin with 1 on every rank, of a loss that all of them share."""
    given = step()

    def change(graph: fx.Graph, one: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if one.op != "output":
            return None
        return graph.output((next(new for old, new in made.items() if old.name == "linear_3_partial"),))

    refused(edited(given, change), "linear_3_partial = aten.linear.default: is returned, and is [b, s, 6] +tp")


def test_an_entered_value_twice() -> None:
    """Its gradient would be summed over the ranks twice."""

    def change(graph: fx.Graph, one: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if one.name != "add_enter":
            return None
        once = graph.create_node("call_function", ops.enter.default, (made[one.all_input_nodes[0]], "tp"), name="once")
        return graph.create_node("call_function", ops.enter.default, (once, "tp"), name=one.name)

    made = edited(step(), change, once="[b, s, 6]")
    refused(made, "add_enter works on whole values and reads once: its gradient would be counted by every rank")
    assert node(made, "add_enter")
