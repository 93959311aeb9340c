"""torch.vmap in forward: taken apart into what it does to whole tensors, with its gradients, at any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcompile
from tpcompile.driver import Options, lower_captured
from tpcompile.mesh import Mesh
from tpcompile.passes.capture import capture
from tpcompile.simulate import compare


class Work(nn.Module):
    def __init__(self, work: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.work = work
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.weight = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.work(self.up(x), self.weight))


def squares(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def masked(x: Tensor, weight: Tensor) -> Tensor:
    """A mask over rows, queries and keys, one function of their numbers; it reads a tensor from around it."""
    rows, length, _ = x.shape
    shift = torch.ones((), dtype=torch.int64)

    def seen(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < 3 + shift) & (row >= 0)

    each = torch.vmap(torch.vmap(torch.vmap(seen, (None, None, 0)), (None, 0, None)), (0, None, None))
    mask = each(*(torch.arange(size) for size in (rows, length, length)))
    return F.scaled_dot_product_attention(x, x, x, mask)


def unrecorded(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.vmap(torch.exp)(x)
    return x * scale


def written(x: Tensor, weight: Tensor) -> Tensor:
    def row(y: Tensor) -> Tensor:
        z = y * 2
        z.add_(y.sin())
        return z.detach() * y

    return torch.vmap(row, in_dims=1, out_dims=1)(x)


WORKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "element-wise": lambda x, w: torch.vmap(lambda row: F.gelu(row) * w)(x),
    "product": lambda x, w: torch.vmap(lambda row: row @ row.mT @ row)(x),
    "last dimension": lambda x, w: torch.vmap(torch.sin, in_dims=-1, out_dims=-1)(x),
    "several": lambda x, w: sum(torch.vmap(lambda row, scale: (row * scale, row.softmax(-1)), (2, 0), 2)(x, w)),  # type: ignore[arg-type]
    "mask": masked,
    "no_grad": unrecorded,
    "written": written,
    "nothing": lambda x, w: (torch.vmap(torch.sin)(x), x)[1],
}


@pytest.mark.parametrize("name", WORKS)
def test_numbers_at_any_size(name: str) -> None:
    torch.manual_seed(0)
    model = Work(WORKS[name]).double()
    program = capture(model, {"x": torch.randn(2, 5, 6, dtype=torch.float64)}, loss=squares)
    assert [str(size) for size in program.types["x"].shape] == ["b", "s", "6"]  # type: ignore[union-attr]
    for mesh, rows, length in (("tp=2", 2, 5), ("dp=2", 4, 7)):
        batch = {"x": torch.randn(rows, length, 6, dtype=torch.float64)}
        report = compare(model, lower_captured(program, model, Mesh.of(mesh), batch, Options(squares)), batch)
        assert report.ok, f"{mesh}\n{report}"


def test_a_norm_makes_sizes_fixed() -> None:
    """torch's own rule for a norm below vmap asks for the sizes: they are what they were."""
    model = Work(lambda x, w: torch.vmap(lambda row: F.layer_norm(row, (12,)) * w)(x)).double()
    batch = {"x": torch.randn(2, 5, 6, dtype=torch.float64)}
    assert tpcompile.check(model, "tp=2", batch, loss=squares).ok


def test_lines() -> None:
    program = capture(Work(masked).double(), {"x": torch.randn(2, 5, 6, dtype=torch.float64)})
    (source,) = {str(program.sources[node.name]) for node in program.graph.nodes if "aten.le" in str(node.target)}
    assert source.startswith("test_vmap.py:")
