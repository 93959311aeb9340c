"""Random operations beside dropout: with dropout="exact" every mesh draws what one device draws; else each part of the rows its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tpcompile
from tpcompile.driver import Compilation, Options, lower
from tpcompile.errors import Refused
from tpcompile.mesh import Mesh
from tpcompile.rules import op_name
from tpcompile.simulate.replay import Replay, flatten, rows
from tpcompile.testing import exact_dropout

Work = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """An MLP whose cut values of [rows, 4, 12] meet random numbers; summed over rows."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.work, self.up, self.down = work, nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.work(self.up(x).relu())) ** 2).sum()


def drop_path(x: Tensor, p: float = 0.3) -> Tensor:
    """As in Huang et al., Deep Networks with Stochastic Depth (2016), and as transformers spells it."""
    kept = 1 - p + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
    kept.floor_()
    return x.div(1 - p) * kept


def drop_path_of_timm(x: Tensor, p: float = 0.3) -> Tensor:
    kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - p)
    return x * kept.div_(1 - p)


CASES: dict[str, Work] = {
    "drop path": drop_path,
    "drop path of timm": drop_path_of_timm,
    "rand_like": lambda x: x * torch.rand_like(x),
    "jitter": lambda x: x * torch.empty_like(x).uniform_(0.9, 1.1),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x)),
    "shared by rows": lambda x: x * torch.rand(x.shape[1], 12, dtype=x.dtype),
    "a scalar": lambda x: x * torch.rand([], dtype=x.dtype),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "dropout2d": lambda x: F.dropout2d(x.unflatten(2, (3, 4)), 0.4).flatten(2),
    "alpha dropout": nn.AlphaDropout(0.3),
    "alpha dropout in place": lambda x: F.alpha_dropout(x * 1, 0.2, True, inplace=True),
    "noise": lambda x: x + 0.1 * torch.randn_like(x) + torch.randn(x.shape[1], 1, dtype=x.dtype) + torch.empty_like(x).normal_(1.0, 0.2),
    "gumbel noise": lambda x: F.gumbel_softmax(x, dim=-1),
    "everything dropped": lambda x: x + F.alpha_dropout(x, 1.0, True) + F.dropout1d(x, 1.0),
}


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(6, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=3,tp=3"])
@pytest.mark.parametrize("name", CASES)
def test_every_mesh_draws_what_one_device_draws(name: str, mesh: str) -> None:
    tpcompile.testing.assert_parity(Model(CASES[name]).double(), mesh, batch(), dropout="exact", steps=2)


@pytest.mark.parametrize("name", ["drop path", "jitter", "alpha dropout", "dropout2d"])
def test_a_compiled_program_draws_what_the_untouched_model_draws(name: str) -> None:
    """The printed modules, as they run on one device."""
    torch.manual_seed(5)
    model = Model(CASES[name]).double()
    torch.manual_seed(5)
    compiled = tpcompile.compile(model, "dp=1", batch(), microbatches=3, dropout="exact")
    given = batch()
    for step in range(2):
        loss = compiled.train_step(**given)
        with exact_dropout(5, step=step):
            assert float(loss) == pytest.approx(float(model(**given).detach()), rel=1e-12)


def lowered(work: Work, mesh: str, dropout: str = "local") -> tuple[nn.Module, Compilation]:
    model, placed = Model(work).double(), Mesh.of(mesh)
    options = Options(dropout=dropout)
    return model, lower(model, placed, {"x": batch()["x"][: 6 // options.parts(placed)]}, options)


def test_local_numbers_are_equal_on_tensor_ranks_and_differ_between_parts() -> None:
    model, found = lowered(drop_path, "dp=3,tp=2")
    replay, tensors = Replay(model, found, dropout=True), flatten(found.program, batch())
    (name,) = (node.name for node in found.local.graph.nodes if op_name(node) == "tpcompile.uniform.default")
    drawn = []
    for part in range(3):
        (values,) = replay.forward(rows(found.program, tensors, 0, 3), replay.counts(tensors), part)
        assert torch.equal(*values[name])
        drawn.append(values[name][0].flatten().tolist())
    assert len({number for numbers in drawn for number in numbers}) == 6


def test_local_numbers_are_compared_with_nothing() -> None:
    with pytest.raises(Refused) as error:
        tpcompile.check(Model(drop_path).double(), "dp=2", batch())
    lines = str(error.value).splitlines()
    assert lines[0] == "the model draws random numbers beside dropout, and no single device draws the same"
    assert lines[1] == "  at   check" and "test_random.py" in lines[2]
    assert lines[3] == '  fix  use dropout="exact", which draws the same everywhere'


@pytest.mark.parametrize("name", ["randint", "rrelu", "multinomial"])
def test_what_has_no_key_is_refused(name: str) -> None:
    works: dict[str, Work] = {
        "randint": lambda x: x * torch.randint(0, 2, x.shape),
        "rrelu": lambda x: F.rrelu(x, training=True),
        "multinomial": lambda x: x * (x[..., 0].exp().multinomial(1) + 1)[..., None],
    }
    for how in ("local", "exact", "fast"):
        with pytest.raises(Refused, match="draws random numbers that ranks would not share"):
            lowered(works[name], "tp=2", how)


def test_a_generator_of_the_model_has_no_key() -> None:
    generator = torch.Generator()
    with exact_dropout(0), pytest.raises(Refused, match="random numbers of an own generator have no key"):
        torch.zeros(3).bernoulli_(0.5, generator=generator)


def test_torch_draws_again_afterwards() -> None:
    """Each of the operators that exact_dropout overrides is torch's own outside of it."""
    draws: list[Callable[[], Tensor]] = [
        lambda: torch.rand(50),
        lambda: torch.rand_like(torch.ones(50)),
        lambda: torch.zeros(50).uniform_(),
        lambda: torch.zeros(50).bernoulli_(0.5),
        lambda: torch.bernoulli(torch.full((50,), 0.5)),
        lambda: F.dropout1d(torch.ones(1, 50, 2)),
        lambda: torch.zeros(50).exponential_(),
        lambda: torch.randn(50),
        lambda: torch.randn_like(torch.ones(50)),
        lambda: torch.zeros(50).normal_(),
        lambda: F.alpha_dropout(torch.ones(50), 0.5, True),
    ]
    for draw in draws:
        torch.manual_seed(0)
        first = draw()
        with exact_dropout(0):
            inside = draw()
        with exact_dropout(0):
            assert torch.equal(draw(), inside)
        torch.manual_seed(0)
        assert torch.equal(draw(), first) and not torch.equal(first, inside)
