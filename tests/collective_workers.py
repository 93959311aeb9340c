"""What every rank of the collectives' tests checks, against the same arithmetic on whole values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile import collectives
from tpcompile.errors import TpcompileError

OVERLAPPING = [0, 2, 5, 6, 1, 3, 3, 5, 5, 7, 7, 7]
UNEVEN = [0, 4, 4, 7, 7, 7]
EVEN_BUT_TURNED = [4, 7, 0, 2, 2, 4]
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def communication(call: Callable[[], Any]) -> Counter[str]:
    """What the process group is asked to do while `call` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return Counter(event.name for event in profile.events() if event.name.startswith("gloo:"))


def indices(bounds: list[int], rank: int, size: int) -> list[int]:
    return [index for start, stop in collectives.held_by(bounds, rank, size) for index in range(start, stop)]


def whole_value(dtype: torch.dtype) -> Tensor:
    """The same on every rank, and not contiguous."""
    return torch.arange(14).reshape(7, 2).to(dtype).t()


def forward_and_backward(rank: int, size: int, group: str) -> None:
    for dtype in DTYPES:
        sums(rank, size, group, dtype)
        for bounds in (OVERLAPPING, UNEVEN, EVEN_BUT_TURNED):
            gathers(rank, size, group, dtype, bounds)
            slices(rank, size, group, dtype, bounds)
            shares(rank, size, group, dtype, bounds)


def sums(rank: int, size: int, group: str, dtype: torch.dtype) -> None:
    x = whole_value(dtype).requires_grad_()
    entered = collectives.enter(x, group)
    assert torch.equal(entered, x) and entered.data_ptr() == x.data_ptr()
    total = collectives.reduce(entered * (rank + 1), group)
    assert torch.equal(total, x * 6)
    (total * whole_value(dtype)).sum().backward()
    assert torch.equal(x.grad, 6 * whole_value(dtype))  # type: ignore[arg-type]


def gathers(rank: int, size: int, group: str, dtype: torch.dtype, bounds: list[int]) -> None:
    own = indices(bounds, rank, size)
    piece = (whole_value(dtype)[:, own] + 100 * rank).requires_grad_()  # what is held twice differs: the lowest counts
    lowest = [min(c for c in range(size) if index in indices(bounds, c, size)) for index in range(7)]
    found = collectives.gather(piece, group, -1, bounds)
    assert found.is_contiguous() and torch.equal(found, whole_value(dtype) + 100 * torch.tensor(lowest, dtype=dtype))
    (found * whole_value(dtype)).sum().backward()
    counts = torch.tensor([lowest[index] == rank for index in own])
    assert torch.equal(piece.grad, whole_value(dtype)[:, own] * counts)  # type: ignore[arg-type]


def slices(rank: int, size: int, group: str, dtype: torch.dtype, bounds: list[int]) -> None:
    own = indices(bounds, rank, size)
    x = whole_value(dtype).requires_grad_()
    piece = collectives.local_slice(collectives.enter(x, group), group, 1, bounds)
    assert torch.equal(piece, whole_value(dtype)[:, own])
    (piece * (rank + 1)).sum().backward()
    expected = sum(
        (c + 1) * torch.zeros(7).index_fill_(0, torch.tensor(indices(bounds, c, size), dtype=torch.int64), 1) for c in range(size)
    )
    assert torch.equal(x.grad, expected.to(dtype).expand(2, 7))  # type: ignore[arg-type,union-attr]


def shares(rank: int, size: int, group: str, dtype: torch.dtype, bounds: list[int]) -> None:
    own = indices(bounds, rank, size)
    piece = whole_value(dtype)[:, own].requires_grad_()
    (collectives.shared(piece, group, 1, bounds) * (rank + 1)).sum().backward()
    expected = [sum(c + 1 for c in range(size) if index in indices(bounds, c, size)) for index in own]
    assert torch.equal(piece.grad, torch.tensor(expected, dtype=dtype).expand(2, len(own)))  # type: ignore[arg-type]


class Everything(nn.Module):
    """Every operator once."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).reshape(4, 3))
        self.tp = group

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        weight = collectives.shared(self.weight, self.tp, 0, [0, 4, 0, 4, 0, 4])
        x = collectives.dropout(collectives.enter(x, self.tp) @ weight, 0.5, key, 3, 0)
        x = collectives.enter(collectives.gather(x, self.tp, 1, [0, 3, 3, 6, 6, 9]), self.tp)
        x = collectives.local_slice(x, self.tp, 1, [0, 4, 4, 6, 6, 9])
        return collectives.reduce(x.sum(-1), self.tp)


def gradients(call: Callable[..., Tensor], weight: Tensor) -> list[Tensor]:
    x = torch.linspace(0, 1, 20).reshape(5, 4).requires_grad_()
    weight.grad = None
    result = call(x, torch.tensor([7, 0, 1]))
    result.sin().sum().backward()
    return [result.detach(), x.grad, weight.grad]  # type: ignore[list-item]


def ways(name: str) -> tuple[tuple[collectives.Message, ...], ...]:
    return collectives.COLLECTIVES[name].forward, collectives.COLLECTIVES[name].backward


def traced(rank: int, size: int, group: str) -> None:
    """torch.compile and torch.export keep the numbers, gradients included; the table of what communicates is true."""
    module = Everything(group)
    eager = gradients(module, module.weight)
    compiled = gradients(torch.compile(module, fullgraph=True, backend="aot_eager"), module.weight)
    program = torch.export.export(module, (torch.rand(5, 4), torch.tensor([7, 0, 1])), strict=False).module()
    exported = gradients(program, program.weight)  # type: ignore[arg-type]
    for a, b, c in zip(eager, compiled, exported, strict=True):
        assert torch.allclose(a, b) and torch.allclose(a, c)
    seen = communication(lambda: gradients(module, module.weight))
    names = ["shared", "dropout", "enter", "gather", "enter", "local_slice", "reduce"]
    claimed = Counter(message.call for name in names for way in ways(name) for message in way)
    assert seen == {"gloo:all_reduce": claimed["all_reduce"], "gloo:all_gather": claimed["all_gather"]}, seen


def along_positions(rank: int, size: int, group: str) -> None:
    """Values in pieces along one dimension, of rows that are one or several: whole, in pieces, and summed; gradients too."""
    generator = torch.Generator().manual_seed(5)
    for shape, dim in (((2, 6, 3), 1), ((2, 7, 3), 1), ((1, 6, 3), 1), ((6, 2, 3), 0), ((2, 3, 9), 2), ((3, 2, 6, 2), 2), ((2, 2, 3), 1)):
        length = shape[dim]
        values, grads = (torch.rand((size, *shape), generator=generator, dtype=torch.float64) for _ in range(2))
        own = collectives.piece(length, rank, size)
        pieces = [grads[c].narrow(dim, *collectives.piece(length, c, size)) for c in range(size)]
        whole, cut = values[0], values[0].narrow(dim, *own)
        cases = {
            "seq_gather": (cut, whole, grads[rank], grads.sum(0).narrow(dim, *own)),
            "seq_whole": (cut, whole, grads[rank], grads[rank].narrow(dim, *own)),
            "seq_scatter": (values[rank], values.sum(0).narrow(dim, *own), pieces[rank], torch.cat(pieces, dim)),
            "seq_slice": (whole, cut, pieces[rank], torch.cat(pieces, dim)),
        }
        for name, (given, made, grad, expected) in cases.items():
            x = given.clone().requires_grad_()
            found = getattr(collectives, name)(x, group, dim, length)
            found.backward(grad)
            assert torch.allclose(found, made) and found.is_contiguous() and x.grad is not None, (name, shape)
            assert torch.allclose(x.grad, expected), (name, shape)


def under_way(rank: int, size: int, group: str) -> None:
    """In backward of linears that gather again, products are computed between a collective and the wait for it, as a trace shows."""
    start, count = collectives.piece(7, rank, size)
    x = torch.rand(2, 7, 4)[:, start : start + count].clone().requires_grad_()
    (made,) = torch.ops.tpcompile.seq_linear(x, group, 1, 7, [torch.rand(3, 4, requires_grad=True)], [])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        made.sum().backward()
    told = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter", "wait_tensor": "wait", "mm": "product"}
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    seen = [told[event.name.rpartition("::")[2]] for event in events if event.name.rpartition("::")[2] in told]
    assert seen == ["gather", "product", "scatter", "wait", "product", "wait"], seen


def everything(rank: int, size: int, group: str) -> None:
    forward_and_backward(rank, size, group)
    along_positions(rank, size, group)
    under_way(rank, size, group)
    traced(rank, size, f"{collectives.unbound('tp', rank, size)}={group}")
    misplaced = nn.Module()
    misplaced.tp = collectives.unbound("tp", (rank + 1) % size, size)  # type: ignore[assignment]
    try:
        collectives.bind(misplaced, {"tp": group})
    except TpcompileError as error:
        assert str(error).startswith(f"process group {group} has this process as rank {rank} of {size}\n  at   a program for tp coordinate")
    else:
        raise AssertionError("a program of another coordinate was bound")
