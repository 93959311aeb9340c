"""The checker can fail: programs broken in the ways that compilers of this kind break are found, and the first wrong value is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from exported import copied
from parity_models import compiled, made
from torch import fx

from tpcompile.collectives import ops
from tpcompile.driver import Compilation
from tpcompile.simulate import Report, compare

Change = Callable[[fx.Graph, fx.Node, dict[fx.Node, fx.Node]], fx.Node | None]


def broken(name: str, compilation: Compilation, change: Change, stage: int = 0) -> Report:
    """The report on a compilation in which one stage's graph is edited; the edit has to be there."""
    stages = list(compilation.stages)
    before = stages[stage].graph
    stages[stage] = replace(stages[stage], graph=copied(before, change))
    assert str(stages[stage].graph) != str(before), "the edit changed nothing"
    model, batch, _ = made(name)
    assert compare(model, compilation, batch).ok
    return compare(model, replace(compilation, stages=tuple(stages)), batch)


def first(report: Report) -> tuple[str, str, int]:
    assert not report.ok and report.capture_error <= report.tolerance.gradient, "what is captured is not to blame"
    assert report.first_divergence is not None
    return report.first_divergence.kind, report.first_divergence.name, report.first_divergence.stage


def test_no_enter() -> None:
    """The forward numbers are right; the gradient of what enters is each rank's part only."""

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        return made[node.all_input_nodes[0]] if node.name == "layer_norm_1_enter" else None

    report = broken("gpt", compiled("gpt", "tp=2", sequence_parallel=False, overlap=False), change)
    assert first(report) == ("gradient", "layer_norm_1", 0)
    assert report.loss_error <= report.tolerance.loss and report.output_error <= report.tolerance.gradient
    assert report.grad_errors["blocks.0.norm_2.weight"] > 1e-3
    assert report.grad_errors["blocks.1.norm_2.weight"] < 1e-12, "what comes after is right"
    assert "model.py" in report.first_divergence.source and "x + self.mlp(self.norm_2(x))" in report.first_divergence.source  # type: ignore[union-attr]


def test_a_doubled_enter() -> None:
    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name != "layer_norm_1_enter":
            return None
        again = graph.call_function(ops.enter.default, (made[node.all_input_nodes[0]], "tp"))
        return graph.create_node("call_function", ops.enter.default, (again, "tp"), name=node.name)

    made = compiled("gpt", "tp=3", sequence_parallel=False, overlap=False)
    assert first(broken("gpt", made, change)) == ("gradient", "layer_norm_1", 0)


def test_an_enter_before_joined_linears() -> None:
    """They sum the gradient of what they read themselves."""

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.target is not ops.enter_linear.default or node.all_input_nodes[0].name != "layer_norm_1":
            return None
        once = graph.call_function(ops.enter.default, (made[node.all_input_nodes[0]], "tp"))
        return graph.create_node("call_function", node.target, (once, *fx.map_arg(node.args[1:], made.__getitem__)), name=node.name)  # type: ignore[arg-type,misc]

    assert first(broken("gpt", compiled("gpt", "tp=3", sequence_parallel=False), change)) == ("gradient", "layer_norm_1", 0)


def test_a_doubled_reduce() -> None:
    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name != "linear_7_sum":
            return None
        once = graph.node_copy(node, made.__getitem__)
        return graph.call_function(ops.reduce.default, (once, "tp"))

    report = broken("gpt", compiled("gpt", "pp=2,tp=2", sequence_parallel=False), change, stage=1)
    assert first(report) == ("value", "linear_7", 1)
    assert report.loss_error > 1e-6
    assert "self.down(F.gelu(self.up(x)))" in report.first_divergence.source  # type: ignore[union-attr]


def test_no_reduce() -> None:
    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        return made[node.all_input_nodes[0]] if node.name == "linear_1_sum" else None

    assert first(broken("gpt", compiled("gpt", "dp=2,tp=2", sequence_parallel=False), change)) == ("value", "linear_1", 0)


def test_a_wrong_slice() -> None:
    """The second rank takes its piece one place too early."""

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.target is not ops.local_slice.default:
            return None
        value, axis, dim, held = node.args
        assert held == [0, 12, 12, 24]
        return graph.create_node("call_function", ops.local_slice.default, (made[value], axis, dim, [0, 12, 11, 23]), name=node.name)  # type: ignore[index]

    report = broken("encoder", compiled("encoder", "tp=2", overrides={"head": "row"}, sequence_parallel=False), change)
    assert first(report) == ("value", "mean_slice", 0)


def test_a_row_bias_added_on_every_rank() -> None:
    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        by_name = {n.name: new for n, new in made.items()}
        match node.name:
            case "linear_3_partial":
                args = (*(made[operand] for operand in node.all_input_nodes), by_name["p_blocks_0_mlp_down_bias"])
                return graph.create_node("call_function", torch.ops.aten.linear.default, args, name=node.name)
            case "linear_3_sum":
                return by_name["linear_3_partial"]
            case "linear_3":
                return graph.create_node("call_function", ops.reduce.default, (by_name["linear_3_partial"], "tp"), name=node.name)
        return None

    assert first(broken("gpt", compiled("gpt", "tp=2", sequence_parallel=False), change)) == ("value", "linear_3", 0)


def test_two_stages_weights_swapped() -> None:
    compilation = compiled("gpt", "pp=2,tp=2", sequence_parallel=False)
    names = ("blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight")
    swap = dict(zip(names, reversed(names), strict=True))
    stages = tuple(
        replace(stage, parameters={key: swap.get(name, name) for key, name in stage.parameters.items()}) for stage in compilation.stages
    )
    model, batch, _ = made("gpt")
    assert first(compare(model, replace(compilation, stages=stages), batch)) == ("parameter", "blocks.0.mlp.up.weight", 0)


def test_shared_heads_whose_gradients_are_not_summed() -> None:
    """Four query heads on two key/value heads on four ranks: two ranks hold the same rows of the key's weight."""

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        return made[node.all_input_nodes[0]] if node.target is ops.shared.default and "k_proj" in node.name else None

    report = broken("llama", compiled("llama", "tp=4", sequence_parallel=False), change)
    kind, name, stage = first(report)
    assert (kind, stage) == ("gradient", 0) and name.endswith("k_proj_weight")
    wrong = {key for key, error in report.grad_errors.items() if error > report.tolerance.gradient}
    assert wrong == {f"model.layers.{layer}.self_attn.k_proj.weight" for layer in range(2)}


def test_whole_values_that_differ_between_ranks() -> None:
    """A number of its own on one rank, where all must have the same."""

    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        from tpcompile.ir import PerRank

        if node.name != "add_1":
            return None
        args = (*(made[operand] for operand in node.all_input_nodes),)
        return graph.create_node("call_function", node.target, args, {"alpha": PerRank((1.0, 1.5))}, name=node.name)  # type: ignore[dict-item, arg-type]

    assert first(broken("gpt", compiled("gpt", "tp=2", sequence_parallel=False), change)) == ("value", "add_1", 0)


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,pp=2,tp=2"])
def test_the_report_of_a_broken_program_says_so(mesh: str) -> None:
    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        return made[node.all_input_nodes[0]] if node.name == "linear_1_sum" else None

    report = broken("gpt", compiled("gpt", mesh, sequence_parallel=False), change)
    text = str(report)
    assert f"DIFFERENT on dp={2 if 'dp' in mesh else 1}" in text and "first that differs" in text and "value linear_1 in stage 0" in text
