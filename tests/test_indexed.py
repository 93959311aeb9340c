"""Dropout by global index: its stream of numbers, and that every piece of a value has its piece of the mask."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from tpcompile import collectives
from tpcompile.collectives import indexed


def key(step: int = 0, part: int = 0, parts: int = 1, seed: int = 7) -> Tensor:
    return torch.tensor([collectives.mix(seed, step), part, parts])


def mask(*shape: int, p: float = 0.5, of: Tensor | None = None, site: int = 0, rows: int = -1, cuts: tuple[int, ...] = ()) -> Tensor:
    return collectives.dropout_at(torch.ones(shape), p, key() if of is None else of, site, rows, cuts) != 0  # type: ignore[no-any-return]


def test_numbers_are_those_of_splitmix64() -> None:
    """The first five of the generator's reference implementation, from seed 1234567."""
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    states = 1234567 + torch.arange(1, 6) * indexed.GAMMA
    assert [number % 2**64 for number in collectives.finalize(states).tolist()] == first


def test_mask_is_of_the_element_s_number() -> None:
    """Written once more with Python's numbers: the i-th number of the stream of key and site, against p."""
    p, site, made = 0.3, 5, mask(3, 4, 5, p=0.3, site=5)
    start = int(key()[0]) + collectives.mix(site)
    for index, kept in enumerate(made.flatten().tolist()):
        z = (start + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        z ^= z >> 31
        signed = z - 2**64 if z >= 2**63 else z
        assert kept == (signed + 2**63 >= p * 2**64)


SHAPES = [(24,), (6, 10), (4, 6, 5), (4, 3, 2, 6), (2, 3, 4, 2, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_piece_has_its_piece_of_the_mask(shape: tuple[int, ...]) -> None:
    whole = mask(*shape)
    assert torch.equal(mask(*shape[:1], *shape[1:]).flatten(), mask(whole.numel())), "numbers count row by row"
    for dim, size in enumerate(shape):
        for start, stop in ((0, 1), (1, size), (size // 2, size), (0, size)):
            piece = mask(*shape[:dim], stop - start, *shape[dim + 1 :], cuts=(dim, start, size))
            assert torch.equal(piece, whole.narrow(dim, start, stop - start)), (dim, start, stop)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_of_the_rows_have_their_rows_of_the_mask(shape: tuple[int, ...]) -> None:
    whole = mask(*shape)
    for rows, size in enumerate(shape):
        for part in range(size):
            local = mask(*shape[:rows], 1, *shape[rows + 1 :], of=key(part=part, parts=size), rows=rows)
            assert torch.equal(local, whole.narrow(rows, part, 1)), (rows, part)


def test_rows_and_two_cuts_at_once() -> None:
    whole = mask(4, 6, 5, 8)
    for part, head, column in itertools.product(range(2), range(3), range(2)):
        made = mask(2, 2, 5, 4, of=key(part=part, parts=2), rows=0, cuts=(1, 2 * head, 6, 3, 4 * column, 8))
        assert torch.equal(made, whole[2 * part : 2 * part + 2, 2 * head : 2 * head + 2, :, 4 * column : 4 * column + 4])


def test_a_value_that_all_rows_share_has_one_mask() -> None:
    assert torch.equal(mask(5, 6, of=key(part=0, parts=4)), mask(5, 6, of=key(part=3, parts=4)))


def test_values_in_chunks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "CHUNK", {"cpu": 10**9})
    whole = mask(7, 50, 30)
    for chunk in (1, 64, 999):
        monkeypatch.setattr(indexed, "CHUNK", {"cpu": chunk})
        assert torch.equal(mask(7, 50, 30), whole)


def test_streams_have_nothing_to_do_with_each_other() -> None:
    """Other seeds, steps and sites, and the same numbers a place or a row further: they agree in half of the places."""
    keys = [key(), key(step=1), key(step=2), key(seed=8), key(seed=8, step=1)]
    masks = [mask(60, 100, of=of, site=site) for of in keys for site in (0, 1, 2, 1000)]
    masks += [mask(60, 101)[:, 1:], mask(61, 100)[1:], mask(100, 60).t()]
    for a, b in itertools.combinations(masks, 2):
        assert abs((a == b).double().mean() - 0.5) < 0.04


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_rate(p: float) -> None:
    """Of 200,000 elements; five standard deviations of the mean are under 0.006. Along every dimension too."""
    x = torch.rand(200, 10, 100) + 1
    dropped = collectives.dropout_at(x, p, key(), 3)
    gone = (dropped == 0).double()
    assert abs(gone.mean() - p) < 0.006
    assert torch.allclose(dropped[dropped != 0], (x / (1 - p) if p < 1 else x)[dropped != 0])
    for dims, spread in (((0, 1), 0.06), ((0, 2), 0.02), ((1, 2), 0.09)):
        assert (gone.mean(dims) - p).abs().max() < spread


def test_pairs_of_neighbours_are_independent() -> None:
    kept = mask(1000, 256).double() - 0.5
    for a, b in ((kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1]), (kept[:, 64:], kept[:, :-64]), (kept[2:, 1:], kept[:-2, :-1])):
        assert abs((a * b).mean() * 4) < 0.01  # a correlation: five standard deviations


def test_backward_uses_the_same_mask() -> None:
    x = torch.rand(7, 5, dtype=torch.float64).t().requires_grad_()
    y = collectives.dropout_at(x, 0.5, key(), 0)
    y.backward(torch.full_like(y, 3))
    assert torch.equal(x.grad, 3 * (y / x).detach())  # type: ignore[arg-type]


def test_a_scalar_and_nothing() -> None:
    assert collectives.dropout_at(torch.tensor(2.0), 0.0, key(), 0) == 2 and mask(0, 3).shape == (0, 3)
    assert {bool(mask(site=site)) for site in range(20)} == {False, True}


def test_does_not_touch_the_global_generator() -> None:
    state = torch.get_rng_state()
    mask(40)
    assert torch.equal(state, torch.get_rng_state())


def test_operator_is_sound() -> None:
    x = torch.rand(3, 4, requires_grad=True)
    torch.library.opcheck(collectives.dropout_at, (x, 0.5, key(part=1, parts=2), 4, 0, [1, 2, 9]))


def test_traces_to_plain_operations_with_the_same_numbers() -> None:
    """A compiler sees additions and shifts of whole numbers, which it can fuse; sizes may be symbols."""
    seen: set[str] = set()

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        seen.update(str(node.target).partition(".")[0] for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def work(x: Tensor, of: Tensor) -> Tensor:
        return collectives.dropout_at(x, 0.5, of, 1, 0, [1, 2, 12])  # type: ignore[no-any-return]

    compiled = torch.compile(work, backend=aot_autograd(fw_compiler=backend), fullgraph=True, dynamic=True)
    for rows, part in ((3, 0), (5, 2)):
        x, of = torch.rand(rows, 4, 5), key(part=part, parts=3)
        assert torch.equal(compiled(x, of), work(x, of))
    assert not any("tpcompile" in name for name in seen)


# --- numbers between 0 and 1 -----------------------------------------------------------------------------------------


def uniform(*shape: int, of: Tensor | None = None, site: int = 0, rows: int = -1, dtype: torch.dtype = torch.float64) -> Tensor:
    return collectives.uniform(shape, key() if of is None else of, site, rows, dtype=dtype)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers(dtype: torch.dtype) -> None:
    numbers = uniform(200, 1000, dtype=dtype)
    assert numbers.dtype == dtype and numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers.double(), 10, 0, 1) / numbers.numel()
    assert (counts - 0.1).abs().max() < 0.005


def test_dropout_is_where_a_number_is_less_than_p() -> None:
    """Up to the sign, by which the two count from other ends."""
    numbers = uniform(60, 100)
    assert torch.equal(mask(60, 100, p=0.5), numbers < 0.5)


def test_parts_of_the_rows_have_their_rows_of_the_numbers() -> None:
    whole = uniform(6, 3, 4)
    for part in range(3):
        assert torch.equal(uniform(2, 3, 4, of=key(part=part, parts=3), rows=0), whole[2 * part : 2 * part + 2])
    assert torch.equal(uniform(3, 4, of=key(part=2, parts=3)), uniform(3, 4))


def test_parts_with_numbers_of_their_own() -> None:
    drawn = [uniform(50, of=key(step, part, 4), rows=collectives.OWN) for step in range(2) for part in range(4)]
    assert len(torch.stack(drawn).unique()) == 400
    assert uniform().shape == () and uniform(0, 3).shape == (0, 3)


def test_the_operator_of_numbers_is_sound() -> None:
    torch.library.opcheck(collectives.uniform, ([3, 4], key(part=1, parts=2), 4, 0), {"dtype": torch.float32})
