"""Linear layers joined with a collective: what they compute beside plain autograd, what is under way in backward, how they trace."""

from __future__ import annotations

from typing import Any

import linear_workers
import pytest
import ranks
import torch
import torch.nn.functional as F

from tpcompile import collectives
from tpcompile.errors import Refused, TpcompileError

ONE = collectives.unbound("tp", 0, 1)
OPERATORS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (collectives.enter_linear, ()),
    (collectives.kept_linear, (1, 5)),
    (collectives.seq_linear, (1, 5)),
)


@pytest.mark.processes
def test_on_three_ranks() -> None:
    ranks.run(linear_workers.everything, 3)


@pytest.mark.parametrize(("operator", "where"), OPERATORS)
@pytest.mark.parametrize("shape", [(2, 5, 3), (0, 5, 3)])
def test_one_rank_is_linear(operator: Any, where: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    """Also of no rows at all."""
    x, weight, bias = torch.randn(shape).double(), torch.randn(4, 3).double(), torch.randn(4).double()
    both = [[each.clone().requires_grad_() for each in (x, weight, bias)] for _ in range(2)]
    (made,) = operator(both[0][0], ONE, *where, [both[0][1]], [both[0][2]])
    plain = F.linear(*both[1])
    torch.testing.assert_close(made, plain)
    made.square().sum().backward(), plain.square().sum().backward()
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_value_of_one_dimension() -> None:
    x, weight = torch.randn(3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    (made,) = collectives.enter_linear(x, ONE, [weight], [])
    made.sum().backward()
    assert made.shape == (4,) and torch.equal(weight.grad, x.detach().expand(4, 3))  # type: ignore[arg-type]
    torch.testing.assert_close(x.grad, weight.detach().sum(0))


@pytest.mark.parametrize(("operator", "where"), OPERATORS)
def test_a_weight_that_is_computed(operator: Any, where: tuple[Any, ...]) -> None:
    """Of a parameter, by a cast and a slice: its gradient is the parameter's."""
    x, parameter = torch.randn(2, 5, 3), torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    (made,) = operator(x, ONE, *where, [parameter.to(torch.float32)[2:]], [])
    made.sum().backward()
    assert parameter.grad is not None and parameter.grad.dtype == torch.float64
    torch.testing.assert_close(parameter.grad[2:], x.sum((0, 1)).double().expand(4, 3), rtol=1e-6, atol=1e-6)
    assert parameter.grad[:2].count_nonzero() == 0


@pytest.mark.parametrize(("operator", "where"), OPERATORS)
def test_what_is_kept(operator: Any, where: tuple[Any, ...]) -> None:
    """For weights that are trained the value, for a value that has a gradient the weights, and nothing else."""
    for of_x, of_weight in ((True, True), (True, False), (False, True)):
        x, weight = torch.randn(2, 5, 3, requires_grad=of_x), torch.randn(4, 3, requires_grad=of_weight)
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, kept=kept: (kept.append(tensor), tensor)[1], lambda tensor: tensor):
            operator(x, ONE, *where, [weight], [])
        assert [tuple(tensor.shape) for tensor in kept] == [(2, 5, 3)] * of_weight + [(4, 3)] * of_x


@pytest.mark.parametrize(("operator", "where"), OPERATORS)
def test_second_derivatives_are_refused(operator: Any, where: tuple[Any, ...]) -> None:
    x, weight = torch.rand(2, 5, 3, requires_grad=True), torch.rand(4, 3, requires_grad=True)
    with pytest.raises(Refused) as error:
        torch.autograd.grad((operator(x, ONE, *where, [weight], [])[0] ** 2).sum(), x, create_graph=True)
    assert error.value.what == "collectives have no second derivatives"


@pytest.mark.parametrize(("operator", "where"), OPERATORS)
def test_it_is_sound(operator: Any, where: tuple[Any, ...]) -> None:
    """torch's own check of an operator: its schema, its fake kernel, its gradient, and how it traces."""
    x = torch.rand(2, 5, 3, requires_grad=True)
    weights, biases = ([torch.rand(shape, requires_grad=True) for _ in range(2)] for shape in ((4, 3), (4,)))
    torch.library.opcheck(operator, (x, ONE, *where, weights, biases))
    torch.library.opcheck(operator, (x.detach(), ONE, *where, weights[:1], []))


@pytest.mark.parametrize(("operator", "where"), OPERATORS)
def test_tracing_needs_no_group(operator: Any, where: tuple[Any, ...]) -> None:
    """Export sees one operator, and the shapes of a rank among three; tensors without data do too."""

    class Local(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return operator(x, "tp:1/3", *where, [weight, weight], [])[1]  # type: ignore[no-any-return]

    x, weight = torch.rand(2, 2 if where else 5, 3), torch.rand(4, 3)
    exported = torch.export.export(Local(), (x, weight))
    calls = [node for node in exported.graph.nodes if node.op == "call_function"]
    assert calls[0].target is operator and tuple(calls[-1].meta["val"].shape) == (2, 5, 4)
    assert Local()(x.to("meta"), weight.to("meta")).shape == (2, 5, 4)
    with pytest.raises(TpcompileError, match="no process group"):
        Local()(x, weight)


@pytest.mark.parametrize(("operator", "where"), OPERATORS)
def test_inference_mode(operator: Any, where: tuple[Any, ...]) -> None:
    with torch.inference_mode():
        x, weight = torch.rand(2, 5, 3), torch.rand(4, 3)
        assert torch.equal(operator(x, ONE, *where, [weight], [])[0], F.linear(x, weight))
