"""detect: what would be cut with each linear, and where a walk ends."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from pass_models import Rows, before_and_after, cone, program_of, tiny
from torch import Tensor, nn

from tpcompile.layout import Layout
from tpcompile.passes.detect import detect


def test_golden(golden: Callable[..., None]) -> None:
    program, _ = tiny()
    cones = detect(program)
    layouts = [
        "\n".join([f"%{found.seed}: {found.kind}", *(f"  %{name} {_text(layout)}" for name, layout in found.layouts.items())])
        for found in cones
    ]
    golden("\n\n".join([before_and_after(detect, program), *layouts]), "detect")


def _text(layout: Layout | tuple[Layout, ...]) -> str:
    return str(layout) if isinstance(layout, Layout) else f"({', '.join(map(str, layout))})"


class Gated(Rows):
    def body(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Fused(Rows):
    def body(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Chain(Rows):
    def body(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Normed(Rows):
    def body(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]


class Sorted(Rows):
    def body(self, x: Tensor) -> Tensor:
        return self.second(torch.cumsum(self.first(x), -1))  # type: ignore[no-any-return]


class Unknown(Rows):
    def body(self, x: Tensor) -> Tensor:
        return self.second(torch.logcumsumexp(self.first(x), -1))  # type: ignore[no-any-return]


def test_a_gated_mlp_has_two_columns() -> None:
    program = program_of(Gated(gate=nn.Linear(8, 10), up=nn.Linear(8, 10), down=nn.Linear(10, 8)), 8)
    found = cone(detect(program), "linear_2")
    assert (found.kind, set(found.columns), found.reason) == ("mlp", {"linear", "linear_1"}, "")


def test_a_fused_gate_is_two_parts_of_one_column() -> None:
    program = program_of(Fused(both=nn.Linear(8, 20), down=nn.Linear(10, 8)), 8)
    found = cone(detect(program), "linear_1")
    assert (found.kind, found.columns) == ("mlp", ("linear",))
    assert str(found.layouts["p_both_weight"]) == f"[10@?{_key(found)} | 10@?{_key(found)}, 8]"


def _key(found: object) -> int:
    from tpcompile.ir import Cone
    from tpcompile.layout import Open, cut_factors

    assert isinstance(found, Cone)
    (factor,) = (factor for dim in found.wants[0].dims for factor in cut_factors(dim))
    assert isinstance(factor.cut, Open)
    return factor.cut.key


def test_linears_with_nothing_between_are_a_chain() -> None:
    assert cone(detect(program_of(Chain(first=nn.Linear(8, 6), second=nn.Linear(6, 8)), 8)), "linear_1").kind == "linear"


def test_a_norm_ends_the_walk() -> None:
    program = program_of(Normed(first=nn.Linear(8, 6), norm=nn.LayerNorm(6), second=nn.Linear(6, 8)), 8)
    found = cone(detect(program), "linear_1")
    assert (found.columns, found.stop, found.reason) == ((), "layer_norm", "aten.layer_norm.default needs this dimension whole")


def test_what_mixes_the_dimension_ends_the_walk() -> None:
    found = cone(detect(program_of(Sorted(first=nn.Linear(8, 6), second=nn.Linear(6, 8)), 8)), "linear_1")
    assert (found.stop, found.reason) == ("cumsum", "aten.cumsum.default needs this dimension whole")


def test_an_operation_without_a_rule_ends_the_walk() -> None:
    found = cone(detect(program_of(Unknown(first=nn.Linear(8, 10), second=nn.Linear(10, 8)), 8)), "linear_1")
    assert (found.stop, found.reason) == ("logcumsumexp", "no rule for aten.logcumsumexp.default")


def test_a_linear_on_the_inputs_has_none_before_it() -> None:
    found = cone(detect(program_of(Chain(first=nn.Linear(8, 6), second=nn.Linear(6, 8)), 8)), "linear")
    assert (found.columns, found.stop, found.reason) == ((), "", "")
