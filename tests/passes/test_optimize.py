"""optimize: partial sums that are added are reduced once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pass_models import Parallel, Tiny, TwoNorms, before_and_after, captured, local, sharded, tiny
from torch import Tensor, nn

import tpcompile
from tpcompile.ir import Local
from tpcompile.layout import cut_factors
from tpcompile.passes.optimize import optimize
from tpcompile.passes.rewrite import rewrite
from tpcompile.rules import op_name
from tpcompile.simulate.lockstep import Values, run
from tpcompile.verify import verify


def reduces(graph: object) -> int:
    return sum(op_name(node) == "tpcompile.reduce.default" for node in graph.nodes)  # type: ignore[attr-defined]


def test_golden(golden: Callable[..., None]) -> None:
    program, _ = tiny(block=Parallel)
    golden(before_and_after(optimize, local(program, 2)), "optimize")


def test_attention_and_mlp_side_by_side_need_one_all_reduce() -> None:
    program, _ = tiny(block=Parallel, layers=2)
    before = local(program, 2, vocab_parallel=False)
    after = verify(optimize(before))
    assert (reduces(before.graph), reduces(after.graph)) == (4, 2)


def test_regions_one_after_the_other_keep_theirs() -> None:
    program, _ = tiny(layers=2)
    before = local(program, 2, vocab_parallel=False)
    assert reduces(verify(optimize(before)).graph) == reduces(before.graph) == 4


def test_one_rank_has_nothing_to_do() -> None:
    program, _ = tiny(block=Parallel)
    before = local(program, 1)
    assert [node.name for node in optimize(before).graph.nodes] == [node.name for node in before.graph.nodes]


def test_the_numbers_stay() -> None:
    from cuts import cut

    program, batch = tiny(block=Parallel, layers=2)
    made = sharded(program, 3)
    before = rewrite(made)
    given = {
        name: torch.randn([int(n) for n in kind.shape], dtype=torch.float64)
        for name, kind in program.types.items()
        if name in program.parameters
    }  # type: ignore[union-attr]
    feed: dict[str, Values] = {name: [batch[name]] * 3 for name in ("ids", "labels")}
    feed |= {"loss_count_0": [torch.tensor(5.0)] * 3, "replicas": [torch.tensor(1.0)] * 3}
    for name, value in given.items():
        layout = made.layouts[name]
        feed[name] = [cut(value, layout, c) if any(map(cut_factors, layout.dims)) else value for c in range(3)]  # type: ignore[union-attr, arg-type]
    losses = [run(one.graph, feed, 3)["output"][0][0] for one in (before, verify(optimize(before)))]
    assert torch.allclose(*losses, rtol=1e-13)


class Flattened(nn.Module):
    """Two MLPs of one norm: the first reads a view of it, the second the norm itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.second_up, self.second_down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        first = self.down(self.up(y.reshape(-1, 8)).relu()).reshape(x.shape)
        return x + first + self.second_down(self.second_up(y).relu())


def test_what_enters_late_serves_an_earlier_reader() -> None:
    batch = {"x": torch.randn(4, 6, 8, dtype=torch.float64)}
    model = Flattened().double()
    compiled = tpcompile.compile(model, "tp=2", batch)
    assert sum(op_name(node) == "tpcompile.enter.default" for node in compiled.history["optimize"].made.graph.nodes) == 1
    assert tpcompile.check(model, "tp=2", batch).ok


def test_an_enter_behind_a_sum_without_a_name_of_its_own() -> None:
    """What a row by itself enters has been reduced before: the sum stands for no value of the whole program."""
    model = Tiny()
    model.head = nn.Linear(6, 7, bias=False)
    program = captured(model, tiny()[1])
    made = verify(optimize(local(program, 2, head="row")))
    assert any(node.name.endswith("_slice") for node in made.graph.nodes)


class Sized(nn.Module):
    """Every head is scaled by a learned table of positions, whose shape another value takes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        table = self.table(torch.arange(x.shape[1]))[None, :, None]
        half = table.chunk(2, -1)[0]
        heads = self.up(x).view(*x.shape[:2], 4, 6) * torch.stack([half, half], -1).reshape_as(table)
        return x + self.down(heads.flatten(2))


def test_a_size_that_is_read_off_a_value_has_no_gradient() -> None:
    batch = {"x": torch.randn(4, 6, 8, dtype=torch.float64)}
    assert tpcompile.check(Sized().double(), "tp=2", batch, loss=lambda outputs, batch: outputs.square().sum()).ok


# --- gradients of whole parameters -----------------------------------------------------------------------------------


def read_by(made: Local, name: str) -> set[str]:
    """What reads a parameter."""
    (parameter,) = (node for node in made.graph.nodes if node.name == name)
    return {op_name(user) for user in parameter.users}


LATER, ENTER = {"tpcompile.enter_later.default"}, {"tpcompile.enter.default"}


def test_norms_that_regions_alone_read_are_summed_later() -> None:
    made = verify(optimize(local(tiny(block=TwoNorms)[0], 2)))
    names = [f"p_layers_0_{norm}_{own}" for norm in ("norm", "second") for own in ("weight", "bias")]
    assert [read_by(made, name) for name in names] == [LATER] * 4


class Scaled(nn.Module):
    """A scale that a region reads and the residual stream too, and one that a region alone reads, added to one first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.both, self.inner = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.both + self.down(self.up(x).relu() * self.both * (1 + self.inner))


def test_a_parameter_that_whole_values_use_too_is_summed_where_it_enters() -> None:
    """By one of its ways its gradient is whole: summed later, that would be counted by every rank."""
    model, batch = Scaled().double(), {"x": torch.randn(4, 6, 8, dtype=torch.float64)}
    compiled = tpcompile.compile(model, "tp=2", batch, sequence_parallel=False)
    made = compiled.history["optimize"].made
    assert read_by(made, "p_both") == {"aten.mul.Tensor", *ENTER} and read_by(made, "p_inner") == LATER
    assert tpcompile.check(model, "tp=2", batch, sequence_parallel=False).ok


class OnePlus(nn.Module):
    """Norms whose weight is one more than their parameter, in float32 whatever the model's type."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).relu())
        normed = x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * (1.0 + self.scale)
        return x + self.down(self.up(normed).relu())


def test_what_parameters_alone_make_does_not_enter() -> None:
    """1 + scale is used at every position; the scale enters, and its gradient is summed once a step."""
    model, batch = OnePlus().double(), {"x": torch.randn(4, 6, 8, dtype=torch.float64)}
    made = tpcompile.compile(model, "tp=2", batch).history["optimize"].made
    assert read_by(made, "p_scale") == LATER
    report = tpcompile.check(model, "tp=2", batch, microbatches=2)
    assert report.ok and [total.count for total in report.traffic if (total.axis, total.direction) == ("tp", "step")] == [1]
