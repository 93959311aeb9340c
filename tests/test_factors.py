"""The algebra of factors, held to what views, splits and concatenations do to the pieces of real tensors."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from cuts import cut, random_factors
from torch import Tensor

from tpcompile.factors import LayoutError, concatenate, divide, divides, join, match_groups, quotient, reshape
from tpcompile.layout import Dim, Factor, Layout, format_dim, local_size, product, same, size_of, symbol, whole

b, s = symbol("b"), symbol("s")


def parse(text: str, parts: int = 2) -> Layout:
    return Layout.parse(text, parts=parts)


def dim(text: str, parts: int = 2) -> Dim:
    return parse(f"[{text}]", parts).dims[0]


def grouped(rng: random.Random, factors: list[Factor]) -> Layout:
    """Consecutive factors as dimensions: the same elements, in any shape that keeps factors entire; some dimensions of size one."""
    cuts = sorted(rng.randint(0, len(factors)) for _ in range(rng.randint(0, 3)))
    groups = [tuple(factors[a:z]) for a, z in pairwise([0, *cuts, len(factors)])]
    return Layout(tuple(((group or (Factor(1),)),) for group in groups))


def shape_of(layout: Layout) -> list[int]:
    return [int(size_of(d)) for d in layout.dims]


def local_shape(layout: Layout, coordinate: int) -> list[int]:
    return [int(local_size(d, coordinate)) for d in layout.dims]


def check_view(before: Layout, after: Layout, parts: int) -> None:
    """A rank's piece, viewed in its local shape, is its piece of the viewed tensor."""
    value = torch.arange(torch.Size(shape_of(before)).numel()).reshape(shape_of(before))
    for coordinate in range(parts):
        piece: Tensor = cut(value, before, coordinate)
        expected = cut(value.reshape(shape_of(after)), after, coordinate)
        assert piece.numel() == expected.numel()
        assert torch.equal(piece.reshape(local_shape(after, coordinate)), expected), (str(before), str(after), coordinate)


@pytest.mark.parametrize("seed", range(150))
def test_a_view_of_pieces_is_a_piece_of_the_view(seed: int) -> None:
    rng = random.Random(seed)
    parts = rng.choice([2, 3, 4])
    factors = random_factors(rng, parts)
    before, shape = grouped(rng, factors), grouped(rng, factors)
    after = reshape(before, shape_of(shape))
    check_view(before, after, parts)
    assert same(reshape(after, shape_of(before)), before)  # the other direction


@pytest.mark.parametrize(
    ("before", "shape", "after"),
    [
        ("[b, s, 4@tp·16]", [b, s, 4, 16], "[b, s, 4@tp, 16]"),
        ("[b, s, 64@tp]", [b, s, 4, 16], "[b, s, 4@tp, 16]"),
        ("[b, s, 4@tp, 16]", [b, s, 64], "[b, s, 4@tp·16]"),
        ("[b, s, 4@tp, 16]", [b * s, 64], "[b*s, 4@tp·16]"),
        ("[b, s, 4@tp·48]", [b, s, 4, 3, 16], "[b, s, 4@tp, 3, 16]"),
        ("[b, s, 3·4@tp·16]", [b, s, 3, 4, 16], "[b, s, 3, 4@tp, 16]"),
        ("[b, s, 64@tp | 64@tp | 64@tp]", [b, s, 3, 64], "[b, s, 3, 64@tp]"),
        ("[b, s, 3, 4@tp·16]", [b, s, 192], "[b, s, 3·4@tp·16]"),
        ("[b, 4@tp, s, 16]", [4 * b, s, 16], "[b·4@tp, s, 16]"),
        ("[b·4@tp, s, 16]", [b, 4, s, 16], "[b, 4@tp, s, 16]"),
        ("[b, 8@tp]", [b, 1, 8, 1], "[b, 1, 8@tp, 1]"),
        ("[b, 1, 8@tp, 1]", [b, 8], "[b, 8@tp]"),
        ("[8@tp{0:5, 5:8}]", [1, 8], "[1, 8@tp{0:5, 5:8}]"),
        ("[b, 8] +tp", [b, 2, 4], "[b, 2, 4] +tp"),
        ("[b, s, 32]", [b * s, 4, 8], "[b*s, 4, 8]"),
        ("[b, s, 64@?0]", [b, s, 4, 16], "[b, s, 4@?0, 16]"),
        ("[b, s, 4@?0, 16]", [b, s, 64], "[b, s, 4@?0·16]"),
    ],
)
def test_views_of_attention(before: str, shape: list[object], after: str) -> None:
    made = reshape(parse(before), shape)  # type: ignore[arg-type]
    assert same(made, parse(after)), str(made)
    assert same(reshape(made, [size_of(d) for d in parse(before).dims]), parse(before))


@pytest.mark.parametrize(
    ("before", "shape", "reason"),
    [
        ("[64@tp{0:20, 20:64}]", [4, 16], "a view divides 64@tp{0:20, 20:64} inside a piece"),
        ("[6@tp{0:1, 1:6}·4]", [4, 6], "a view divides 24@tp{0:4, 4:24} inside a piece"),
        ("[6@tp, 5]", [5, 6], "a view divides 6@tp at 5"),
        ("[4, 1@tp{0:1, 1:1}]", [4], "a view drops 1@tp{0:1, 1:1}"),
        ("[4@tp·8 | 2@tp·8]", [4, 12], "a view regroups a dimension made of unlike parts"),
        ("[b, 8]", [b, 9], "sizes [b, 8] and [b, 9] do not match"),
    ],
)
def test_views_that_break_pieces_are_refused(before: str, shape: list[object], reason: str) -> None:
    with pytest.raises(LayoutError) as error:
        reshape(parse(before), shape)  # type: ignore[arg-type]
    assert str(error.value) == reason


@pytest.mark.parametrize("seed", range(60))
def test_groups_have_equal_products(seed: int) -> None:
    rng = random.Random(seed)
    factors = [Factor(rng.choice([1, 2, 3, 4, b, s])) for _ in range(rng.randint(1, 5))]
    ins, outs = (tuple(size_of(d) for d in grouped(rng, factors).dims) for _ in range(2))
    groups = match_groups(ins, outs)
    assert [i for left, _ in groups for i in left] == list(range(len(ins)))
    assert [j for _, right in groups for j in right] == list(range(len(outs)))
    assert all(product(ins[i] for i in left) == product(outs[j] for j in right) for left, right in groups)


@pytest.mark.parametrize("seed", range(100))
def test_splitting_pieces_gives_pieces_of_the_parts(seed: int) -> None:
    """Dimensions put one behind the other and taken apart again: on tensors, on ranks, and as layouts."""
    rng = random.Random(seed)
    parts = rng.choice([2, 3])
    dims = [(tuple(random_factors(rng, parts, cuts=rng.randint(0, 1))),) for _ in range(rng.randint(2, 4))]
    sizes = [int(size_of(d)) for d in dims]
    joined = concatenate(dims)
    divided = divide(joined, sizes)
    assert all(same(Layout((a,)), Layout((z,))) for a, z in zip(divided, dims, strict=True))
    value = torch.arange(sum(sizes))
    for coordinate in range(parts):
        local = cut(value, Layout((joined,)), coordinate).split([int(local_size(d, coordinate)) for d in divided])
        for piece, part, d in zip(local, value.split(sizes), dims, strict=True):
            assert torch.equal(piece, cut(part, Layout((d,)), coordinate))


@pytest.mark.parametrize(
    ("whole_dim", "sizes", "parts"),
    [
        ("64@tp | 64@tp | 64@tp", [64, 64, 64], ["64@tp", "64@tp", "64@tp"]),
        ("3·4@tp·16", [64, 64, 64], ["4@tp·16", "4@tp·16", "4@tp·16"]),
        ("4@tp·16 | 2@tp·16 | 2@tp·16", [64, 32, 32], ["4@tp·16", "2@tp·16", "2@tp·16"]),
        ("4@tp·16 | 2@tp·16 | 2@tp·16", [64, 64], ["4@tp·16", "2@tp·16 | 2@tp·16"]),
        ("4@tp·16 | 10", [64, 4, 6], ["4@tp·16", "4", "6"]),
        ("96", [64, 32], ["64", "32"]),
        ("64@tp", [64], ["64@tp"]),
    ],
)
def test_parts_of_stacked_weights(whole_dim: str, sizes: list[int], parts: list[str]) -> None:
    made = divide(dim(whole_dim), sizes)
    assert all(same(Layout((a,)), Layout((dim(z),))) for a, z in zip(made, parts, strict=True)), [format_dim(d) for d in made]


def test_a_cut_segment_stays_in_one_part() -> None:
    with pytest.raises(LayoutError, match="a cut dimension is split inside a piece"):
        divide(dim("64@tp"), [32, 32])


def test_two_uses_must_agree() -> None:
    assert join(dim("4@tp·16"), dim("64@tp")) == dim("4@tp·16")
    with pytest.raises(LayoutError, match="two uses of a value need it cut in different ways"):
        join(dim("4@tp·16"), dim("64"))


def test_sizes_with_symbols_divide() -> None:
    assert divides(b, b * s) and divides(4, 8 * s) and divides(3, 12) and not divides(s, b) and not divides(0, 4)
    assert quotient(b * s, b) == s and quotient(12, 4) == 3 and quotient(8 * s, s) == 8 and isinstance(quotient(8 * s, s), int)


def test_a_whole_value_stays_whole() -> None:
    assert reshape(whole(b, s, 64), [b, s, 4, 16]) == whole(b, s, 4, 16)
