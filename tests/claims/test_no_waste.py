"""A tensor rank computes what the model does, each operation on its piece, and nothing twice: beside collectives and a cut loss,
a rank's graph has the operations of the captured one, and an addition for every bias that is added after a sum.
"""

from __future__ import annotations

from collections import Counter

import pytest
from parity_models import compiled
from torch import fx

from tpcompile.operation import argument, op_name

VIEWS = {"aten.view.default": "aten.reshape.default"}
"""The same under two names: a piece may not lie as the whole did."""


def operations(graph: fx.Graph) -> Counter[str]:
    names = (op_name(node) for node in graph.nodes if node.op == "call_function")
    return Counter(VIEWS.get(name, name) for name in names if not name.startswith("tpcompile."))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gpt"])
def test_a_rank_has_no_more_operations_than_its_share(name: str) -> None:
    made = compiled(name, "tp=2", sequence_parallel=False, vocab_parallel=False, overlap=False)
    whole, own = operations(made.program.graph), operations(made.local.graph)
    rows = {linear for region in made.plan.regions for linear in region.rows}
    biased = sum(argument(node, "bias") is not None for node in made.program.graph.nodes if node.name in rows)
    assert own - whole == Counter({"aten.add.Tensor": biased} if biased else {})
    assert whole - own == Counter()
    assert bool(biased) == (name != "llama"), "Llama has no biases, the others one for every row-cut linear"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_cut_loss_and_a_cut_stream_cost_a_few_operations_a_step(name: str) -> None:
    """A dozen at most, whatever the layers do."""
    both = {how: operations(compiled(name, "tp=2", sequence_parallel=how, vocab_parallel=how).local.graph) for how in (True, False)}
    assert sum((both[True] - both[False]).values()) <= 12
