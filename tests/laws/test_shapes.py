"""shapes: local shapes that are not those of the layouts, by torch's own word."""

from __future__ import annotations

import pytest
import torch
from law_models import edited, nothing, other_arguments, refused, step
from parity_models import compiled
from pass_models import Rows, local, program_of
from torch import Tensor, fx, nn

from tpcompile.errors import VerifyError
from tpcompile.ir import PerRank
from tpcompile.laws.shapes import Sizes, check_shapes, unlike


@pytest.mark.parametrize(("mesh", "kinds"), [("tp=1", [0]), ("tp=2", [0, 1]), ("tp=3", [0, 2])])
def test_ranks_of_equal_pieces_are_looked_at_once(mesh: str, kinds: list[int]) -> None:
    """Three heads and five inner columns on three ranks: 1, 1, 1 and 2, 2, 1."""
    made = step(mesh)
    assert unlike(made.local, Sizes(made.sizes)) == kinds


@pytest.mark.parametrize(("tp", "kinds"), [(2, [0]), (4, [0, 2]), (8, [0, 6]), (16, [0, 6, 8])])
def test_what_is_cut_along_its_positions_is_looked_at_once_for_each_length(tp: int, kinds: list[int]) -> None:
    """Six positions of a Llama: on sixteen ranks one each, then none; from the ninth on, fewer words."""
    made = compiled("llama", f"tp={tp}").step
    assert unlike(made.local, Sizes(made.sizes)) == kinds


def test_a_view_with_another_ranks_sizes() -> None:
    made = edited(step(), other_arguments("unflatten", -1, [PerRank((2, 2)), -1]))
    what = "has shape [2, 3, 2, 1] on rank 1, and its layout [b, s, 3@tp{0:2, 2:3}, 2] says [2, 3, 1, 2]"
    refused(made, f"unflatten = aten.unflatten.int: {what}")


def test_a_split_into_other_sizes() -> None:
    made = edited(step(), other_arguments("split_with_sizes_default", [4, 4, 4], -1))
    refused(made, "split_with_sizes_default = aten.split_with_sizes.default: cannot work on the pieces of rank 1: ")


def test_a_weight_of_another_shape() -> None:
    """The layout of one parameter is not that of its bias, nor of what reads it."""
    made = edited(step(), nothing, p_layers_0_up_weight="[5@tp{0:2, 2:5}, 6]")
    refused(made, "linear_2 = aten.linear.default: ")


def test_a_value_of_another_shape() -> None:
    made = edited(step(), nothing, relu="[b, s, 5@tp{0:4, 4:5}]")
    what = "has shape [2, 3, 3] on rank 0, and its layout [b, s, 5@tp{0:4, 4:5}] says [2, 3, 4]"
    with pytest.raises(VerifyError) as error:
        check_shapes(made.local, made.sizes)
    assert error.value.what == f"relu = aten.relu.default: {what}"


def test_another_element_type() -> None:
    def change(graph: fx.Graph, node: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node | None:
        if node.name != "relu":
            return None
        value = made[node.all_input_nodes[0]]
        return graph.create_node("call_function", torch.ops.aten.to.dtype, (value, torch.float32), name=node.name)

    refused(edited(step(), change), "relu = aten.to.dtype: is torch.float32 on rank 0, and torch.float64 in the program")


class Chosen(Rows):
    """Positions are chosen by their values, before a region: torch cannot say without values how many."""

    def body(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())[x[..., 0] > 0]  # type: ignore[no-any-return]


def test_what_torch_cannot_say_without_values_is_left_alone() -> None:
    program = program_of(Chosen(up=nn.Linear(6, 5), down=nn.Linear(5, 6)), 6)
    made = local(program, 2)
    assert any("aten.index" in str(node.target) for node in made.graph.nodes)
    check_shapes(made, dict.fromkeys(program.symbols, 3))
