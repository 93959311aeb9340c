"""The root of a stage: buffers that forward replaces, over micro-batches and captures."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tpcompile.runtime.stage import StageRoot

ONE = torch.ones(())


class Counter(nn.Module):
    """As an emitted module does: another tensor in a buffer's place, under both of its names."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("again", self.steps)
        self.register_buffer("c_lifted_tensor_0", torch.tensor(by))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        steps = self.steps + self.c_lifted_tensor_0
        made = x * steps * self.scale
        self.steps = steps
        self.again = self.steps
        return (made,)


def test_every_micro_batch_of_a_step_finds_the_buffers_as_they_were() -> None:
    root = StageRoot(Counter(1.0), {"again": "steps"})
    for step in (1.0, 2.0):
        root.begin(("steps",))
        made = [root(x=ONE)[0].item() for _ in range(3)]
        assert made == [step] * 3 and root.program.steps.item() == step
        assert root.program.again is root.program.steps


def test_without_updates_nothing_is_put_back() -> None:
    root = StageRoot(Counter(1.0), {})
    root.begin(())
    assert [root(x=ONE)[0].item() for _ in range(2)] == [1.0, 2.0]


def test_captures_share_what_they_update_and_keep_their_constants() -> None:
    root = StageRoot(Counter(1.0), {"again": "steps"})
    root.begin(("steps",))
    root(x=ONE)
    second = Counter(10.0)
    root.capture = root.adopt(second)
    assert second.steps.item() == second.again.item() == 1.0, "it starts from what the first capture has left"
    root.begin(("steps",))
    assert root(x=ONE)[0].item() == 11.0
    root.capture = 0
    assert root.program.steps.item() == root.program.again.item() == 11.0
    root.begin(("steps",))
    assert root(x=ONE)[0].item() == 12.0 and second.steps.item() == 12.0
    assert second.c_lifted_tensor_0.item() == 10.0
