"""Values whose sizes only a run of the model gives: their bytes are not promised, and all else is compared."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tpcompile.simulate import check


class Chosen(nn.Module):
    """An MLP of the rows that a mask chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return x.index_put((chosen,), self.down(self.up(x[chosen]).relu()))


def test_the_rows_that_a_mask_chooses() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(6, 5, 8, dtype=torch.float64), "chosen": torch.arange(30).reshape(6, 5) % 3 != 1}
    report = check(Chosen().double(), "tp=2", batch)
    assert report.ok and not report.traffic_errors, f"\n{report}"
    assert any(total.call == "all_reduce" and total.bytes == 20 * 8 * 8 for total in report.traffic), "twenty rows are reduced"
