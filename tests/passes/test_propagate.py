"""propagate: a layout for every value, and whose gradients are partial sums."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from pass_models import Rows, before_and_after, planned, program_of, sharded, tiny
from torch import Tensor, nn

from tpcompile.layout import Layout, TensorType
from tpcompile.passes.propagate import propagate


def test_golden(golden: Callable[..., None]) -> None:
    program, _ = tiny()
    golden(before_and_after(lambda given: propagate(given, planned(given, 2), "tp", 2), program), "propagate")


def test_every_value_has_a_layout() -> None:
    program, _ = tiny()
    made = sharded(program, 3)
    assert made.layouts.keys() == {name for name, kind in program.types.items() if isinstance(kind, (TensorType, tuple))}


def test_one_rank_has_everything_whole() -> None:
    program, _ = tiny()
    made = sharded(program, 1)
    assert not made.rows and not made.entering
    assert all(layout.is_whole for layout in made.layouts.values() if isinstance(layout, Layout))


class Scaled(Rows):
    """A whole parameter, a whole input and a detached value used inside of a region."""

    def __init__(self) -> None:
        super().__init__(up=nn.Linear(8, 10), down=nn.Linear(10, 8))
        self.scale = nn.Parameter(torch.ones(()))

    def body(self, x: Tensor) -> Tensor:
        y = self.up(x) * self.scale * x.mean() + self.up.bias.detach().sum()
        return self.down(F.relu(y))  # type: ignore[no-any-return]


def test_what_enters_a_region_has_a_partial_gradient() -> None:
    """Parameters and what is computed from them; not the batch's own tensors, nor what is detached."""
    made = sharded(program_of(Scaled(), 8), 2)
    assert made.entering == {"p_scale"}


class After(Rows):
    def body(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.down(F.relu(self.up(self.first(x))))))  # type: ignore[no-any-return]


def test_values_after_a_reduction_are_whole() -> None:
    modules = {"first": nn.Linear(8, 7), "up": nn.Linear(7, 30), "down": nn.Linear(30, 8), "norm": nn.LayerNorm(8), "head": nn.Linear(8, 3)}
    made = sharded(program_of(After(**modules), 8), 2)
    assert str(made.layouts["linear_1"]) == "[b, s, 30@tp]" and str(made.layouts["linear_2"]) == "[b, s, 8]"
    assert made.entering == {"linear"} and made.rows.keys() == {"linear_2"}
