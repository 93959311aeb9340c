"""How many collectives a layer costs, as the graph has them and as formulas say; that the process group is asked for the same is tested
in `tests/distributed`.
"""

from __future__ import annotations

from collections import Counter

import pytest
import sympy
from parity_models import compiled

from tpcompile.collectives.table import RANKS
from tpcompile.driver import Compilation
from tpcompile.layout import symbol

b, s = symbol("b"), symbol("s")


def counts(compilation: Compilation, hidden: int, ranks: int) -> Counter[tuple[str, str, str]]:
    """The tensor ranks' calls in one micro-batch: (direction, call, what).

    `what` is "stream" for a value as large as the residual stream, "rows" for one number per label, "weights" for what does not grow
    with the batch.
    """
    found = Counter[tuple[str, str, str]]()
    for stage in compilation.step.messages:
        for sent in (*stage.forward, *stage.backward):
            size = sympy.sympify(sent.elements).subs({RANKS: ranks})
            what = (
                "stream"
                if size.has(b) and size.subs({b: 1, s: ranks}) in (hidden * ranks, hidden)
                else "rows"
                if size.has(b)
                else "weights"
            )
            found[sent.direction, sent.call, what] += 1
    return found


def of(found: Counter[tuple[str, str, str]], what: str) -> dict[tuple[str, str], int]:
    return {(direction, call): count for (direction, call, kind), count in found.items() if kind == what}


@pytest.mark.parametrize("tp", [2, 4])
def test_a_llama_of_two_layers_whole_between_regions(tp: int) -> None:
    """2 L + 1 all-reduces each way: two in every layer, one for the embedding forward and one for the head backward; three for the loss."""
    found, layers = counts(compiled("llama", f"tp={tp}", sequence_parallel=False, outputs="loss"), 16, tp), 2
    assert of(found, "stream") == {("forward", "all_reduce"): 2 * layers + 1, ("backward", "all_reduce"): 2 * layers + 1}
    assert of(found, "rows") == {("forward", "all_reduce"): 3}


@pytest.mark.parametrize(("how", "gathers_again"), [(True, 0), ("regather", 1)])
def test_a_llama_of_two_layers_cut_along_its_positions(how: bool | str, gathers_again: int) -> None:
    """Four all-gathers and four reduce-scatters in every layer, two for embedding and head; six and four where they gather again."""
    found, layers = counts(compiled("llama", "tp=2", sequence_parallel=how, outputs="loss"), 16, 2), 2
    each = 2 * layers + 1
    assert of(found, "stream") == {
        ("forward", "all_gather"): each,
        ("forward", "reduce_scatter"): each,
        ("backward", "all_gather"): each * (1 + gathers_again),
        ("backward", "reduce_scatter"): each,
    }
    assert of(found, "rows") == {("forward", "all_reduce"): 3}


def test_a_parallel_residual_of_one_norm_or_of_two() -> None:
    """Attention and MLP beside one another: L + 1 each way, also where each has a norm of its own."""
    for name, hidden in (("gptj", 32), ("neox", 32)):
        found, layers = counts(compiled(name, "tp=2", sequence_parallel=False, outputs="loss"), hidden, 2), 2
        assert of(found, "stream") == {("forward", "all_reduce"): layers + 1, ("backward", "all_reduce"): layers + 1}, name
