"""optimize: partial sums that are added are reduced once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pass_models import Parallel, before_and_after, local, sharded, tiny

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
