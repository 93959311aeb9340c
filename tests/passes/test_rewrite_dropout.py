"""rewrite: dropout by global index is told its piece, however a dimension is cut; every rank's mask is its piece of the whole one."""

from __future__ import annotations

import pytest
import torch
from cuts import cut
from one_call import RANKS, Call, e, f, i

from tpcompile import collectives
from tpcompile.ir import PerRank
from tpcompile.layout import Cut, Dim, Even, Factor, Layout, whole_dim
from tpcompile.passes.rewrite import rewrite
from tpcompile.rules import op_name
from tpcompile.simulate.lockstep import run
from tpcompile.verify import verify

UNEVEN = Cut("tp", ((0, 1), (1, 4)))
EVEN = Even("tp", RANKS)

CASES: dict[str, tuple[Dim, int, list[object]]] = {
    # the first dimension's cut, which dimension counts rows, and what the call is told: rows and cuts
    "one range": (((Factor(4, UNEVEN),),), -1, [-1, [0, PerRank((0, 1)), 4]]),
    "rows elsewhere": (((Factor(4, UNEVEN),),), 1, [1, [0, PerRank((0, 1)), 4]]),
    "with what follows": (((Factor(4, UNEVEN), Factor(3)),), -1, [-1, [0, PerRank((0, 3)), 12]]),
    "in steps": (((Factor(3), Factor(4, UNEVEN)),), -1, [-1, [1, PerRank((0, 1)), 4]]),
    "stacked": (((Factor(4, UNEVEN),), (Factor(4, UNEVEN),)), -1, [-1, [1, PerRank((0, 1)), 4]]),
    "rows before, in one dimension": (((Factor(3), Factor(4, UNEVEN)),), 0, [0, [1, PerRank((0, 1)), 4]]),
    "rows behind steps": (((Factor(3), Factor(4, UNEVEN)),), 1, [2, [1, PerRank((0, 1)), 4]]),
    "one row, in one dimension": (((Factor(4, UNEVEN),),), 0, [0, [1, PerRank((0, 1)), 4]]),
    "positions": (((Factor(7, EVEN),),), -1, []),
    "positions in steps": (((Factor(3), Factor(7, EVEN)),), -1, []),
    "positions behind rows": (((Factor(3), Factor(7, EVEN)),), 0, []),
}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_s_mask_is_its_piece(name: str) -> None:
    dim, rows, told = CASES[name]
    size = sum(torch.tensor([int(factor.size) for factor in segment]).prod().item() for segment in dim)
    call = Call.of("tpcompile.dropout_at.default", e(f(int(size), 2, 3), 0.5, i(3, high=2, low=1), 4, rows))
    layout = Layout((dim, whole_dim(2), whole_dim(3)))
    local = verify(rewrite(verify(call.sharded([layout], [layout, Layout((whole_dim(3),))], given=True))))
    (dropped,) = (node for node in local.graph.nodes if op_name(node) == "tpcompile.dropout_at.default")
    assert not told or list(dropped.args[4:]) == told
    x, key = call.values["x0"], torch.tensor([5, 0, 1])
    pieces = {"x0": [cut(x, layout, c) for c in range(RANKS)], "x1": [key] * RANKS}
    made = run(local.graph, pieces, RANKS, dropout=True)[call.node.name]
    expected = collectives.dropout_at(x, 0.5, key, 4)
    assert 0.2 < (expected == 0).double().mean() < 0.8
    assert all(torch.equal(value, cut(expected, layout, coordinate)) for coordinate, value in enumerate(made))
