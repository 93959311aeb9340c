"""Layouts: their text, which of them are equal, and which elements they give to whom."""

from __future__ import annotations

import pickle
import random
from dataclasses import fields

import pytest
import torch
from cuts import cut, even, random_dim, random_ranges

from tpcompile.collectives import held_by, take
from tpcompile.errors import TpcompileError
from tpcompile.layout import (
    Cut,
    Factor,
    Layout,
    Open,
    TensorType,
    bounds,
    canonical,
    concrete,
    local_size,
    pieces,
    same,
    size_of,
    symbol,
    whole,
)

b, s = symbol("b"), symbol("s")
UNEVEN = Cut("tp", ((0, 4), (4, 8), (8, 11), (11, 14)))


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (whole(), "[]"),
        (whole(b, s, 64), "[b, s, 64]"),
        (whole(2 * s + 1, b * s), "[2*s + 1, b*s]"),
        (Layout(((((Factor(8, even(8, 4)), Factor(64))),),)), "[8@tp·64]"),
        (Layout(((((Factor(14, UNEVEN), Factor(64))),),)), "[14@tp{0:4, 4:8, 8:11, 11:14}·64]"),
        (Layout((((Factor(2, Cut("tp", ((0, 1), (0, 1), (1, 2), (1, 2)))),),),)), "[2@tp{0:1, 0:1, 1:2, 1:2}]"),
        (Layout((((Factor(4, even(4, 4)), Factor(16)), (Factor(2), Factor(8))), ((Factor(s),),))), "[4@tp·16 | 2·8, s]"),
        (Layout((((Factor(3), Factor(4, even(4, 4))),),), ("tp",)), "[3·4@tp] +tp"),
        (Layout(whole(b, 8).dims, ("tp", "pp")), "[b, 8] +tp +pp"),
        (Layout((((Factor(64, Open(3)),),), ((Factor(2, Open(3, shared=True)),),))), "[64@?3, 2@?3~]"),
    ],
)
def test_text_of_a_layout_is_read_back(layout: Layout, text: str) -> None:
    assert str(layout) == text
    assert Layout.parse(text, parts=4) == layout


@pytest.mark.parametrize("seed", range(60))
def test_text_of_any_layout_is_read_back(seed: int) -> None:
    rng = random.Random(seed)
    parts = rng.choice([2, 3, 4])
    dims = tuple(random_dim(rng, parts) for _ in range(rng.randint(1, 3)))
    layout = Layout(dims, tuple(rng.sample(["tp", "dp"], rng.randint(0, 2))))
    assert Layout.parse(str(layout), parts=parts) == layout


@pytest.mark.parametrize("text", ["", "8", "[8", "[8@]", "[8@tp{0:1]", "[8@tp{0-1}]", "[8, ]", "[8]+tp", "[8] tp"])
def test_what_is_no_layout_is_not_read(text: str) -> None:
    with pytest.raises(TpcompileError, match=r"not a (layout|factor)"):
        Layout.parse(text, parts=2)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("[4@tp·16]", "[64@tp]", True),  # on two ranks both are 32 and 32
        ("[1·64@tp·1]", "[64@tp]", True),
        ("[4·16]", "[64]", True),
        ("[32 | 32]", "[64]", True),
        ("[4@tp·4·4]", "[4@tp·16]", True),
        ("[4@tp·16 | 4@tp·16]", "[8@tp·16]", False),
        ("[2·4@tp·16]", "[8@tp·16]", False),
        ("[3·4@tp·16]", "[4@tp·16 | 4@tp·16 | 4@tp·16]", True),
        ("[2·4@tp·16 | 4@tp·16]", "[4@tp·16 | 2·64@tp]", True),
        ("[3·4@tp·16]", "[4@tp·16 | 2@tp·16 | 4@tp·16]", False),
        ("[64@tp]", "[64]", False),
        ("[64@tp]", "[64@dp]", False),
        ("[64] +tp", "[64]", False),
        ("[64] +tp +dp", "[64] +dp +tp", True),
        ("[64, 64@tp]", "[64@tp, 64]", False),
        ("[2@tp{0:1, 0:1}]", "[2@tp]", False),
    ],
)
def test_layouts_are_equal_when_their_pieces_are(left: str, right: str, equal: bool) -> None:
    assert same(Layout.parse(left, parts=2), Layout.parse(right, parts=2)) is equal


def test_heads_are_not_columns() -> None:
    """64 columns in three are 22, 21 and 21; four heads of 16 are two heads, one and one."""
    columns = Layout(((((Factor(64, Cut("tp", ((0, 22), (22, 43), (43, 64)))),),)),))
    heads = Layout.parse("[4@tp{0:2, 2:3, 3:4}·16]")
    assert [local_size(columns.dims[0], c) for c in range(3)] == [22, 21, 21]
    assert [local_size(heads.dims[0], c) for c in range(3)] == [32, 16, 16]
    assert not same(columns, heads)
    assert same(heads, Layout.parse("[64@tp{0:32, 32:48, 48:64}]"))


def test_pieces_of_stacked_heads() -> None:
    layout = Layout.parse("[4@tp·16 | 2@tp·16 | 2@tp·16]", parts=2)
    (dim,) = layout.dims
    assert pieces(dim, 0) == [(0, 32), (64, 80), (96, 112)]
    assert pieces(dim, 1) == [(32, 64), (80, 96), (112, 128)]
    assert [local_size(dim, c) for c in range(2)] == [64, 64]
    assert bounds(dim, 2) == [0, 32, 64, 80, 96, 112, 32, 64, 80, 96, 112, 128]


def test_pieces_inside_a_whole_factor_repeat() -> None:
    (dim,) = Layout.parse("[2·4@tp{0:1, 1:4}·3]").dims
    assert pieces(dim, 0) == [(0, 3), (12, 15)]
    assert pieces(dim, 1) == [(3, 12), (15, 24)]


def test_bounds_are_filled_up_with_empty_ranges() -> None:
    (dim,) = Layout.parse("[3@tp{0:1, 1:3}·2@dp{0:1, 1:2}]").dims  # two axes: only the number of ranges matters here
    assert bounds(dim, 2) == [0, 1, 0, 0, 3, 4, 5, 6]


@pytest.mark.parametrize("seed", range(60))
def test_pieces_are_what_the_text_says(seed: int) -> None:
    """Cut a vector by its factors as a tensor of that many dimensions, and by the layout's ranges."""
    rng = random.Random(seed)
    parts = rng.choice([2, 3, 4])
    dim = random_dim(rng, parts)
    vector = torch.arange(int(size_of(dim)))
    flat = bounds(dim, parts)
    for coordinate in range(parts):
        segments, at = [], 0
        for segment in dim:
            shape = [int(f.size) for f in segment]
            piece = vector[at : at + torch.Size(shape).numel()].reshape(shape)
            at += piece.numel()
            for place, factor in enumerate(segment):
                if isinstance(factor.cut, Cut):
                    start, stop = factor.cut.ranges[coordinate]
                    piece = piece.narrow(place, start, stop - start)
            segments.append(piece.flatten())
        expected = torch.cat(segments)
        assert torch.equal(torch.cat([vector[a:z] for a, z in pieces(dim, coordinate)]), expected)
        assert torch.equal(take(vector, 0, held_by(flat, coordinate, parts)), expected)
        assert local_size(dim, coordinate) == len(expected)
        merged = canonical(dim)
        assert torch.equal(torch.cat([vector[a:z] for a, z in pieces(merged, coordinate)]), expected)


def test_a_canonical_dimension_is_its_own_canonical() -> None:
    for seed in range(60):
        dim = random_dim(random.Random(seed), 3)
        assert canonical(canonical(dim)) == canonical(dim) and size_of(canonical(dim)) == size_of(dim)


def test_overlap_and_evenness() -> None:
    assert Cut("tp", ((0, 1), (0, 1), (1, 2), (1, 2))).overlaps and Cut("tp", ((0, 3), (2, 4))).overlaps
    assert not UNEVEN.overlaps and not Cut("tp", ((2, 4), (0, 2), (3, 3))).overlaps
    assert even(8, 4).is_even(8) and not UNEVEN.is_even(14) and not even(8, 4).is_even(9)


def test_sizes_that_are_symbols() -> None:
    layout = Layout.parse("[b*s, 4@tp·s]", parts=2)
    assert size_of(layout.dims[0]) == b * s and size_of(layout.dims[1]) == 4 * s
    assert local_size(layout.dims[1], 0) == 2 * s
    assert concrete(layout, {b: 2, s: 5}) == Layout.parse("[10, 4@tp·5]", parts=2)
    assert same(concrete(layout, {b: 2, s: 5}), Layout.parse("[10, 20@tp]", parts=2))


def test_random_ranges_cover_their_factor() -> None:
    """The helper of these tests: nothing is left out, and sometimes ranges overlap or are empty."""
    made = [random_ranges(random.Random(seed), 5, 3) for seed in range(200)]
    assert all(set().union(*(range(*r) for r in cut.ranges)) == set(range(5)) for cut in made)
    assert any(cut.overlaps for cut in made) and any(a == z for cut in made for a, z in cut.ranges)


def test_cut_takes_every_cut_dimension() -> None:
    grid = torch.arange(12).reshape(3, 4)
    layout = Layout.parse("[3@tp{0:1, 1:3}, 4@tp]", parts=2)
    assert cut(grid, layout, 1).tolist() == [[6, 7], [10, 11]]


def test_what_goes_to_another_process_takes_no_hash_along() -> None:
    """Names hash otherwise there: an equal layout must be found by the hash of that process."""
    for value in (Layout.parse("[b, 4@tp·16] +tp", parts=2), TensorType(torch.float32, (4,))):
        hash(value)
        other = pickle.loads(pickle.dumps(value))
        assert other == value and vars(other).keys() == {field.name for field in fields(value)} and hash(other) == hash(value)
