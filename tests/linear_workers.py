"""What every rank of the tests of joined linear layers checks: beside plain autograd on whole values, and in a profiler's trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.profiler import ProfilerActivity, profile

import tpcompile
from tpcompile import collectives
from tpcompile.collectives.table import LINEARS
from tpcompile.operation import op_name

LENGTH, WIDTH = 7, 4
ROWS = ((4, 3, 0), (2, 2, 2), (1, 0, 4))
"""Of each of three layers, how many rows of its weight three ranks hold."""

TOLD = {"all_gather_into_tensor": "gather", "all_reduce_": "sum", "all_reduce": "sum", "reduce_scatter_tensor": "scatter"}
TOLD |= {"wait_tensor": "wait", "mm": "product", "addmm_": "product"}
"""What stands for a call in a trace of backward."""


@dataclass(frozen=True)
class Case:
    """One operator over some layers: which have no gradient, which of their results are not used."""

    operator: str
    layers: int = 3
    biased: bool = True
    frozen: tuple[str, ...] = ()  # of "x", "weight 0", "bias 2", …
    unused: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64

    def forward(self, x: Tensor, axis: str, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
        where = (axis,) if self.operator == "enter_linear" else (axis, 1, LENGTH)
        made: list[Tensor] = getattr(collectives, self.operator)(x, *where, weights, biases)
        return made

    def expected(self) -> Counter[str]:
        """The calls of one backward."""
        called = Counter[str]()
        trained = any(f"weight {layer}" not in self.frozen for layer in range(self.layers))
        for message in collectives.COLLECTIVES[self.operator].backward:
            called[message.call] += trained if message.gradient == "weights" else "x" not in self.frozen
        return +called


OPERATORS = ("enter_linear", "kept_linear", "seq_linear")
CASES = [case for name in OPERATORS for case in (Case(name), Case(name, biased=False), Case(name, layers=1, unused=()))]
CASES += [Case(name, unused=unused) for name in OPERATORS for unused in ((0,), (1, 2))]
WEIGHTS = tuple(f"weight {layer}" for layer in range(3))
CASES += [Case(name, frozen=frozen) for name in OPERATORS for frozen in (("x",), ("weight 0", "bias 2"), WEIGHTS, ("x", *WEIGHTS))]
CASES += [Case(name, dtype=torch.bfloat16) for name in OPERATORS]


def beside_plain_autograd(rank: int, size: int, group: str) -> None:
    for case in CASES:
        compared(case, rank, size, f"{collectives.unbound('tp', rank, size)}={group}")


def values(case: Case) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Whole ones, the same on every rank: the input, weights, biases, and what the results are multiplied with."""
    drawn = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=drawn, dtype=torch.float64).to(case.dtype)

    counts = [sum(rows) for rows in ROWS[: case.layers]]
    x, weights = draw(2, LENGTH, WIDTH), [draw(count, WIDTH) for count in counts]
    return x, weights, [draw(count) for count in counts if case.biased], [draw(2, LENGTH, count) for count in counts]


def asking(case: Case, x: Tensor, weights: Iterable[Tensor], biases: Iterable[Tensor]) -> dict[str, Tensor]:
    named = {"x": x, **{f"weight {i}": one for i, one in enumerate(weights)}, **{f"bias {i}": one for i, one in enumerate(biases)}}
    return {name: one.detach().clone().requires_grad_(name not in case.frozen) for name, one in named.items()}


def listed(named: dict[str, Tensor], kind: str) -> list[Tensor]:
    return [one for name, one in named.items() if name.startswith(kind)]


def compared(case: Case, rank: int, size: int, axis: str) -> None:
    """A rank's results and gradients are its pieces of those of the whole, and its process group was asked for what the table says."""
    x, weights, biases, by = values(case)
    whole = asking(case, x, weights, biases)
    added = listed(whole, "bias") or [None] * case.layers
    results = [F.linear(whole["x"], w, b) for w, b in zip(listed(whole, "weight"), added, strict=True)]  # type: ignore[arg-type]
    total(case, results, by).backward()

    held = [slice(sum(rows[:rank]), sum(rows[: rank + 1])) for rows in ROWS]
    start, count = collectives.piece(LENGTH, rank, size) if case.operator != "enter_linear" else (0, LENGTH)
    cut = {"x": slice(start, start + count), **{f"{kind} {i}": held[i] for kind in ("weight", "bias") for i in range(3)}}

    def piece(name: str, value: Tensor) -> Tensor:
        return value[:, cut[name]] if name == "x" else value[cut[name]]

    own = asking(
        case, *(piece("x", x), [w[s] for w, s in zip(weights, held, strict=False)], [b[s] for b, s in zip(biases, held, strict=False)])
    )
    made = case.forward(own["x"], axis, listed(own, "weight"), listed(own, "bias"))
    close = {"rtol": 1e-12, "atol": 1e-12} if case.dtype == torch.float64 else {"rtol": 2e-2, "atol": 6e-2}
    for one, result, place in zip(made, results, held, strict=False):
        torch.testing.assert_close(one, result[..., place], **close)
    loss = total(case, made, [factor[..., place] for factor, place in zip(by, held, strict=False)])
    if not loss.requires_grad:
        return
    called = [name for name, _ in trace(loss.backward) if name in ("gather", "sum", "scatter")]
    words = {"all_gather": "gather", "all_reduce": "sum", "reduce_scatter": "scatter"}
    assert Counter(called) == Counter({words[name]: times for name, times in case.expected().items()}), (case, called)
    for name, one in own.items():
        wanted = whole[name].grad
        assert (one.grad is None) == (wanted is None), (case, name)
        if wanted is not None:
            torch.testing.assert_close(one.grad, piece(name, wanted), **close, msg=lambda text, name=name: f"{case}, {name}: {text}")


def total(case: Case, results: list[Tensor], by: list[Tensor]) -> Tensor:
    return sum((one * factor).sum() for i, (one, factor) in enumerate(zip(results, by, strict=True)) if i not in case.unused)  # type: ignore[return-value]


def trace(call: Callable[[], Any]) -> list[tuple[str, int]]:
    """What runs while `call` does, in order, as `TOLD` says it; and which thread's event it is in the trace."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        call()
    events = sorted(recorded.events(), key=lambda event: event.time_range.start)
    return [(TOLD[name], event.thread) for event in events if (name := event.name.rpartition("::")[2]) in TOLD]


ORDERS = {
    "enter_linear": ["product", "product", "sum", "product", "product", "wait"],
    "kept_linear": ["product", "product", "scatter", "product", "product", "wait"],
    "seq_linear": ["gather", "product", "product", "scatter", "wait", "product", "product", "wait"],
}


def under_way(rank: int, size: int, group: str) -> None:
    """In backward the products of the weights' gradients are between the start of a collective and the wait for it, as a trace shows."""
    for name, order in ORDERS.items():
        case = Case(name, layers=2, biased=False)
        x, weights, _, _ = values(case)
        start, count = collectives.piece(LENGTH, rank, size)
        own = asking(case, x if name == "enter_linear" else x[:, start : start + count], weights, [])
        made = case.forward(own["x"], group, listed(own, "weight"), [])
        seen = [what for what, _ in trace((made[0].sum() + made[1].sum()).backward)]
        assert seen == order, (name, seen)


def compiled(rank: int, size: int, group: str) -> None:
    """Through AOTAutograd: the same gradients, and functional collectives in the graph of backward."""
    axis = f"{collectives.unbound('tp', rank, size)}={group}"
    for name in OPERATORS:
        case = Case(name, layers=2)
        x, weights, biases, _ = values(case)
        start, count = collectives.piece(LENGTH, rank, size)
        own = asking(case, x if name == "enter_linear" else x[:, start : start + count], weights, biases)
        seen: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: object, seen: list[str] = seen) -> torch.fx.GraphModule:
            seen += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            return graph

        def loss(case: Case = case, own: dict[str, Tensor] = own) -> Tensor:
            made = case.forward(own["x"] * 2, axis, listed(own, "weight"), listed(own, "bias"))
            return made[0].sin().sum() + made[1].cos().sum()

        found = []
        for run in (loss, torch.compile(loss, fullgraph=True, backend=aot_autograd(fw_compiler=backend))):
            for one in own.values():
                one.grad = None
            run().backward()
            found.append([one.grad for one in own.values()])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
        kinds = {call for call in ("all_reduce", "reduce_scatter_tensor") if f"_c10d_functional.{call}.default" in seen}
        assert kinds == ({"all_reduce"} if name == "enter_linear" else {"reduce_scatter_tensor"}), seen
        assert f"tpcompile.{name}.default" not in seen


def everything(rank: int, size: int, group: str) -> None:
    beside_plain_autograd(rank, size, group)
    under_way(rank, size, group)
    compiled(rank, size, group)


def products_meanwhile(model: str, sequence_parallel: bool, overlap: bool) -> tuple[list[int], list[int], dict[str, Tensor], Tensor]:
    """Of a step of training: for each collective in backward how many products run between its start and the wait for it, by a trace.

    Beside it what the graph has: how many weights each joined operator has, from the last to the first. And the gradients, and the loss.
    """
    from parity_models import made

    untouched, batch, _ = made(model)
    program = tpcompile.compile(untouched, "tp=2", batch, sequence_parallel=sequence_parallel, overlap=overlap)
    program.train_step(**batch)
    for parameter in program.parameters():
        parameter.grad = None
    losses: list[Tensor] = []
    seen = [what for what, _ in trace(lambda: losses.append(program.train_step(**batch)))]
    found: list[int] = []
    for place, what in enumerate(seen):
        if what in ("sum", "scatter"):
            between = seen[place + 1 : seen.index("wait", place)]
            assert set(between) <= {"product"}
            found.append(len(between))
    joined = [node for node in program.compilation.local.graph.nodes if op_name(node) in LINEARS]
    grads = {name: parameter.grad for name, parameter in program.named_parameters() if parameter.grad is not None}
    return found, [len(node.args[-2]) for node in reversed(joined)], grads, losses[0]
