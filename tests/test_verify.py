"""verify: programs that break a law are rejected, with the node named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from exported import copied
from parity_models import captured as captured_parity
from pass_models import Parallel, local, sharded, stages, tiny
from torch import fx
from vocabulary_models import words

import tpcompile
from tpcompile.collectives import ops
from tpcompile.errors import VerifyError
from tpcompile.ir import Local, Program, Sharded
from tpcompile.layout import Layout, whole
from tpcompile.passes.divide_loss import divide_loss
from tpcompile.passes.normalize import normalize
from tpcompile.passes.optimize import optimize
from tpcompile.verify import verify

Change = Callable[[fx.Graph, fx.Node, dict[fx.Node, fx.Node]], fx.Node | None]


def program() -> Program:
    return tiny()[0]


def with_layouts(made: Sharded, **texts: str) -> Sharded:
    """Other layouts for some values."""
    layouts = {name: _parsed(made.layouts[name], text) for name, text in texts.items()}
    return replace(made, layouts={**made.layouts, **layouts})


def _parsed(before: object, text: str) -> Layout:
    assert isinstance(before, Layout) and str(before) != text, "the case changes nothing"
    return Layout.parse(text, parts=2)


def edited(made: Local, change: Change, **changes: Any) -> Local:
    graph = copied(made.graph, change)
    assert str(graph) != str(made.graph)
    return replace(made, graph=graph, **changes)


def rejected(value: Any, *words: str) -> None:
    with pytest.raises(VerifyError) as error:
        verify(value)
    assert all(word in str(error.value) for word in words), str(error.value)


# --- what is right -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_what_the_passes_make_is_right_and_comes_back(parts: int) -> None:
    given, batch = tiny(layers=2, block=Parallel)
    made = sharded(given, parts)
    rewritten = local(given, parts)
    for value in (given, made, rewritten, optimize(rewritten), *stages(given, batch, parts, 2)):
        assert verify(value) is value


# --- programs --------------------------------------------------------------------------------------------------------


def test_a_placeholder_of_nothing() -> None:
    rejected(replace(program(), inputs={}), "placeholder ids is neither state nor input")


def test_a_loss_that_is_not_there() -> None:
    rejected(replace(program(), loss="gone"), "the loss gone is not in the graph")


def test_a_call_of_a_module() -> None:
    given = program()

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name != "relu":
            return None
        return graph.create_node("call_method", "relu", (made[node.all_input_nodes[0]],), name=node.name)

    rejected(replace(given, graph=copied(given.graph, change)), "relu is a call_method")


# --- layouts ---------------------------------------------------------------------------------------------------------


BROKEN: Mapping[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "a size that is not the value's": ({"add": "[b, s, 7]"}, ("add = aten.add.Tensor", "has layout [b, s, 7]")),
    "a norm's dimension": ({"layer_norm": "[b, s, 6@tp]"}, ("layer_norm = aten.layer_norm.default", "needs this dimension whole")),
    "a row-cut linear whose value is cut": ({"linear_3": "[b, s, 6@tp]"}, ("linear_3",)),
    "parts of a stack that are cut in unlike ways": ({"getitem_1": "[b, s, 3@tp{0:1, 1:3}·2]"}, ("getitem_1",)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_layouts_that_do_not_fit(name: str) -> None:
    texts, words = BROKEN[name]
    right = sharded(program(), 2)
    wrong = with_layouts(right, **texts)
    rejected(wrong, *words)
    with pytest.raises(VerifyError) as error:  # beside what is known to be right, only what differs is looked at
        verify(wrong, known=right)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_rows_that_want_something_else() -> None:
    """Operands that are not cut alike make no sum."""
    made = sharded(program(), 2)
    activation, _, *rest = made.rows["linear_3"]
    other = Layout.parse("[6, 5@tp{0:1, 1:5}]")
    rejected(
        replace(made, rows={**made.rows, "linear_3": (activation, other, *rest)}), "linear_3 = aten.linear.default", "in different ways"
    )


def test_a_row_whose_operands_are_whole() -> None:
    """Each rank would make the whole value, and their sum would count it twice."""
    made = sharded(program(), 2)
    wholes = tuple(whole(*made.program.types[name].shape) for name in ("relu", "p_layers_0_down_weight", "p_layers_0_down_bias"))  # type: ignore[union-attr]
    rejected(replace(made, rows={**made.rows, "linear_3": wholes}), "linear_3 = aten.linear.default", "+tp")


def test_the_users_line_is_given() -> None:
    made = with_layouts(sharded(program(), 2), layer_norm="[b, s, 6@tp]")
    with pytest.raises(VerifyError) as error:
        verify(made)
    lines = str(error.value).splitlines()
    assert lines[0] == "layer_norm = aten.layer_norm.default: aten.layer_norm.default needs this dimension whole"
    assert lines[-1].startswith("  from pass_models.py:")


# --- local graphs ----------------------------------------------------------------------------------------------------


def test_a_partial_sum_that_is_not_reduced() -> None:
    made = local(program(), 2)

    def change(graph: fx.Graph, node: fx.Node, by: dict[fx.Node, fx.Node]) -> fx.Node | None:
        return by[node.all_input_nodes[0]] if node.name == "linear_3_sum" else None

    rejected(edited(made, change), "linear_3 reads linear_3_partial, a partial sum that is not reduced")


def test_a_partial_sum_that_something_else_reads() -> None:
    made = local(program(), 2)

    def change(graph: fx.Graph, node: fx.Node, by: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name != "linear_3_sum":
            return None
        return graph.create_node("call_function", torch.ops.aten.relu.default, (by[node.all_input_nodes[0]],), name=node.name)

    rejected(edited(made, change), "linear_3_sum reads linear_3_partial, a partial sum that is not reduced")


def test_a_second_reduction() -> None:
    made = local(program(), 2)

    def change(graph: fx.Graph, node: fx.Node, by: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name != "linear_3_sum":
            return None
        once = graph.node_copy(node, by.__getitem__)
        return graph.create_node("call_function", ops.reduce.default, (once, "tp"), name="twice")

    layouts = {**made.layouts, "twice": made.layouts["linear_3_sum"]}
    rejected(
        edited(made, change, layouts=layouts),
        "twice = tpcompile.reduce.default: linear_3_sum is a whole value, and should be a partial sum",
    )


def test_no_enter() -> None:
    made = local(program(), 2)

    def change(graph: fx.Graph, node: fx.Node, by: dict[fx.Node, fx.Node]) -> fx.Node | None:
        return by[node.all_input_nodes[0]] if node.name == "add_enter" else None

    rejected(edited(made, change), "linear_2 works on pieces and reads add whole: its gradient is a partial sum, and is not reduced")


def test_an_enter_that_whole_uses_share() -> None:
    """The residual stream reads the value before it enters, not after."""
    made = local(program(), 2)

    def change(graph: fx.Graph, node: fx.Node, by: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name != "add_1":
            return None
        entered = next(new for old, new in by.items() if old.name == "add_enter")
        return graph.create_node("call_function", node.target, (entered, by[node.all_input_nodes[1]]), name=node.name)

    rejected(edited(made, change), "add_1 works on pieces and reads linear_3 whole: its gradient is a partial sum, and is not reduced")


def test_an_enter_of_what_is_cut() -> None:
    made = local(program(), 2)

    def change(graph: fx.Graph, node: fx.Node, by: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name != "relu":
            return None
        again = graph.create_node("call_function", ops.enter.default, (by[node.all_input_nodes[0]], "tp"), name="again")
        return graph.create_node("call_function", node.target, (again,), name=node.name)

    rejected(edited(made, change), "again = tpcompile.enter.default: linear_2 is a cut value, and should be a whole value")


def test_a_shared_piece_whose_gradient_is_not_summed() -> None:
    made = local(divide_loss(normalize(captured_parity("llama"))), 4)

    def change(graph: fx.Graph, node: fx.Node, by: dict[fx.Node, fx.Node]) -> fx.Node | None:
        return by[node.all_input_nodes[0]] if node.target is ops.shared.default and "0_self_attn_k" in node.name else None

    words = ("k_proj_weight, of which several ranks hold one piece: its gradient is not summed over them",)
    rejected(edited(made, change), *words)


# --- partial maxima ----------------------------------------------------------------------------------------------------


def cut_loss() -> Local:
    """A loss of cut scores: the largest score of each row is a maximum over the ranks."""
    model, rows = words("mean")
    made: Local = tpcompile.compile(model, "tp=2", rows).history["optimize"].made
    return made


def test_a_partial_maximum_that_is_not_reduced() -> None:
    made = cut_loss()
    (name,) = (node.name for node in made.graph.nodes if node.target is ops.reduce_max.default)

    def change(graph: fx.Graph, node: fx.Node, by: dict[fx.Node, fx.Node]) -> fx.Node | None:
        return by[node.all_input_nodes[0]] if node.name == name else None

    rejected(edited(made, change), f"reads {name}_partial, a partial maximum that is not reduced")


def test_a_partial_maximum_that_is_added_up() -> None:
    made = cut_loss()

    def change(graph: fx.Graph, node: fx.Node, by: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.target is not ops.reduce_max.default:
            return None
        return graph.create_node("call_function", ops.reduce.default, (by[node.all_input_nodes[0]], "tp"), name=node.name)

    rejected(edited(made, change), "_max_partial is a partial maximum, and should be a partial sum")


def test_a_maximum_of_what_is_a_sum() -> None:
    made = cut_loss()

    def change(graph: fx.Graph, node: fx.Node, by: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if not node.name.endswith("_exp"):
            return None
        return graph.create_node("call_function", ops.reduce_max.default, (by[node.all_input_nodes[0]], "tp"), name=node.name)

    rejected(edited(made, change), "_exp_partial is a partial sum, and should be a partial maximum")


def test_a_second_maximum() -> None:
    made = cut_loss()

    def change(graph: fx.Graph, node: fx.Node, by: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.target is not ops.reduce_max.default:
            return None
        once = graph.node_copy(node, by.__getitem__)
        return graph.create_node("call_function", ops.reduce_max.default, (once, "tp"), name="twice")

    (name,) = (node.name for node in made.graph.nodes if node.target is ops.reduce_max.default)
    twice = edited(made, change, layouts={**made.layouts, "twice": made.layouts[name]})
    rejected(twice, "twice = tpcompile.reduce_max.default:", "is a whole value, and should be a partial maximum")
