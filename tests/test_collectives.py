"""The collectives: what they compute, forward and backward, on real ranks, on one rank, and while being traced."""

from __future__ import annotations

import collective_workers
import pytest
import ranks
import torch
from torch._dynamo.backends.common import aot_autograd

from tpcompile import collectives
from tpcompile.errors import Refused, TpcompileError

ONE = collectives.unbound("tp", 0, 1)


@pytest.mark.processes
def test_on_three_ranks() -> None:
    ranks.run(collective_workers.everything, 3)


def test_table_names_every_operator() -> None:
    for name in collectives.COLLECTIVES:
        assert getattr(collectives, name) is getattr(torch.ops.tpcompile, name).default
        assert f"\n    {name:<12}  " in (collectives.__doc__ or "")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_rank_is_the_identity(dtype: torch.dtype) -> None:
    x = torch.arange(6, dtype=dtype).reshape(2, 3).t().requires_grad_()
    for call in (
        lambda: collectives.enter(x, ONE),
        lambda: collectives.reduce(x, ONE),
        lambda: collectives.gather(x, ONE, 0, [0, 3]),
        lambda: collectives.local_slice(x, ONE, 0, [0, 3]),
        lambda: collectives.shared(x, ONE, 0, [0, 3]),
    ):
        x.grad = None
        y = call()
        assert torch.equal(y, x)
        (y * y).sum().backward()
        assert torch.equal(x.grad, 2 * x)  # type: ignore[arg-type]


def test_positions_of_one_row_are_no_view() -> None:
    """A piece of one row lies in one stretch of memory."""
    x = torch.rand(1, 6, 2, dtype=torch.float64, requires_grad=True)
    y = collectives.seq_slice(x, ONE, 1, 6)
    assert torch.equal(y, x) and y.data_ptr() != x.data_ptr()


def test_second_derivatives_are_refused() -> None:
    x = torch.rand(3, requires_grad=True)
    for call in (
        lambda: collectives.enter(x * x, ONE),
        lambda: collectives.reduce(x * x, ONE),
        lambda: collectives.gather(x * x, ONE, 0, [0, 3]),
        lambda: collectives.local_slice(x * x, ONE, 0, [0, 3]),
        lambda: collectives.shared(x * x, ONE, 0, [0, 3]),
    ):
        with pytest.raises(Refused) as error:
            torch.autograd.grad((call() ** 2).sum(), x, create_graph=True)
        assert error.value.what == "collectives have no second derivatives"


def test_operators_are_sound() -> None:
    """torch's own check of an operator: its schema, its fake kernel, its gradient, and how they trace."""
    x = torch.rand(3, 4, requires_grad=True)
    for operator, arguments in (
        (collectives.enter, (x, ONE)),
        (collectives.reduce, (x, ONE)),
        (collectives.gather, (x, ONE, 1, [0, 4])),
        (collectives.local_slice, (x, ONE, 1, [1, 2, 3, 4])),
        (collectives.shared, (x, ONE, 1, [0, 4])),
        (collectives.dropout, (x, 0.5, torch.tensor([1, 2, 3]), 4, 0)),
    ):
        torch.library.opcheck(operator, arguments)


def test_tracing_needs_no_group() -> None:
    class Local(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = collectives.local_slice(collectives.enter(x, "tp:1/3"), "tp:1/3", 1, [0, 3, 3, 5, 5, 6])
            return collectives.gather(collectives.reduce(x, "tp:1/3"), "tp:1/3", 1, [0, 3, 3, 5, 5, 6])

    exported = torch.export.export(Local(), (torch.rand(2, 6),))
    shapes = [tuple(node.meta["val"].shape) for node in exported.graph.nodes if node.op == "call_function"]
    assert shapes == [(2, 6), (2, 2), (2, 2), (2, 6)]


def test_running_without_a_group_is_an_error() -> None:
    with pytest.raises(TpcompileError) as error:
        collectives.enter(torch.rand(2), "tp:1/3")
    assert str(error.value) == (
        "the program has no process group to communicate over\n"
        "  at   a collective over tp, of 3 ranks\n"
        '  fix  call tpcompile.collectives.bind(module, {"tp": group.group_name})'
    )
    with pytest.raises(TpcompileError):
        collectives.enter(torch.rand(2, requires_grad=True), "tp:1/3")


def test_bind_reaches_what_names_the_axis() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Module())
    module[1].tp = "tp:0/2"  # type: ignore[assignment]
    for name in ("7", "8"):
        collectives.bind(module, {"tp": name})
        assert module[1].tp == f"tp:0/2={name}" and not hasattr(module, "tp") and not hasattr(module[0], "tp")
    assert collectives.place("tp:0/2=8") == (0, 2)


def test_pieces() -> None:
    bounds = [0, 2, 5, 6, 1, 3, 3, 5, 5, 7, 7, 7]  # 0 1 5 | 1 2 3 4 | 5 6
    assert collectives.overlap(bounds, 3) == [(1, 2), (5, 6)]
    assert collectives.holders(bounds, 3) == ((0, 1, 0, 0), (1, 2, 0, 1), (2, 3, 1, 1), (3, 5, 1, 2), (5, 6, 0, 2), (6, 7, 2, 1))
    with pytest.raises(TpcompileError, match="no coordinate holds the indices 1:2"):
        collectives.holders([0, 1, 2, 3], 2)


def test_identities_are_views_when_run_and_vanish_when_compiled() -> None:
    x = torch.rand(3)
    for value in (x, x.clone().requires_grad_()):
        assert collectives.enter(value, ONE).data_ptr() == value.data_ptr()
        assert collectives.shared(value, ONE, 0, [0, 3]).data_ptr() == value.data_ptr()
    seen = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(lambda value: collectives.enter(value, ONE) * 2, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    compiled(x), compiled(x.requires_grad_())
    assert set(seen) == {"aten.clone.default", "aten.mul.Tensor"}


class TestDropout:
    key = torch.tensor([5, 1, 2])

    def mask(
        self, *, x: torch.Tensor | None = None, p: float = 0.5, key: torch.Tensor = key, site: int = 0, offset: int = 0
    ) -> torch.Tensor:
        return collectives.dropout(torch.ones(40, 50) if x is None else x, p, key, site, offset)

    def test_depends_on_its_key_alone(self) -> None:
        first = self.mask()
        assert torch.equal(first, self.mask()) and torch.equal(first, self.mask(key=self.key[None]))
        keys = [torch.tensor([6, 1, 2]), torch.tensor([5, 2, 2]), torch.tensor([5, 1, 3]), torch.tensor([1, 5, 2])]
        others = [*(self.mask(key=key) for key in keys), self.mask(site=1), self.mask(offset=1), self.mask(site=1, offset=1)]
        for i, a in enumerate([first, *others]):
            for b in others[i:]:
                assert 0.45 < (a == b).double().mean() < 0.55  # unrelated

    @pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
    def test_rate(self, p: float) -> None:
        dropped = self.mask(p=p)
        assert abs((dropped == 0).double().mean() - p) < 0.03
        assert torch.allclose(dropped[dropped != 0], torch.tensor(1 / (1 - p) if p < 1 else 0.0))

    def test_backward_uses_the_same_mask(self) -> None:
        x = torch.rand(7, 5, dtype=torch.float64).t().requires_grad_()
        y = self.mask(x=x)
        y.backward(torch.full_like(y, 3))
        assert torch.equal(x.grad, 3 * (y / x).detach())  # type: ignore[arg-type]

    def test_does_not_touch_the_global_generator(self) -> None:
        state = torch.get_rng_state()
        self.mask()
        assert torch.equal(state, torch.get_rng_state())

    def test_seed_is_splitmix64(self) -> None:
        assert collectives.mix(0) == 0xE220A8397B1DCDAF >> 1  # the generator's first number from seed 0
        assert len({collectives.mix(1, 2), collectives.mix(2, 1), collectives.mix(3), collectives.mix(-3)}) == 4


def test_gradients_of_whole_parameters_wait_where_the_caller_sums_them() -> None:
    """A module that is called by itself sums them; within `postponed`, whoever calls it. What it was is restored, whatever happens."""
    module = torch.nn.Module()
    module.tp, module.tp_later = "tp:1/2", "tp:1/2"  # type: ignore[assignment]
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(TpcompileError, match="no process group"):
        collectives.enter_later(weight, module.tp_later)
    with pytest.raises(ValueError), collectives.postponed(module, "tp"):
        assert (module.tp, module.tp_later) == ("tp:1/2", "tp:0/1")
        collectives.enter_later(weight, module.tp_later).sum().backward()
        raise ValueError
    assert module.tp_later == "tp:1/2" and weight.grad is not None and weight.grad.tolist() == [1, 1, 1]
    collectives.bind(module, {"tp": "5"})
    assert (module.tp, module.tp_later) == ("tp:1/2=5", "tp:1/2=5")
