"""Layouts: how a value's dimensions are cut over mesh axes.

A dimension is a concatenation of segments, a segment a row-major product of factors, and a factor may be cut over a mesh axis:
one range of the factor's indices per coordinate. Ranges may be uneven, and may overlap (key/value heads that several ranks need).

    f32[b, s, 4@tp·16 | 2@tp·16 | 2@tp·16]      q, k, v stacked, whole heads on every rank
    f32[b, 14@tp{0:4, 4:8, 8:11, 11:14}, s, 64]  14 heads on 4 ranks
    f32[b, s@tp, 64]                             a sequence of any length in pieces that are as equal as can be
    f32[b, 64] +tp, f32[b, 1] ^tp                a sum, and a maximum, of which every rank has a part

Every structure here has one text form, and `parse` reads it back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import sympy
import torch

from tpcompile.errors import TpcompileError

Size = int | sympy.Expr
"""A tensor's size along a dimension: a whole number, or an expression in symbols such as b and s."""

Range = tuple[int, int]


@dataclass(frozen=True)
class TensorType:
    """Element type and global shape of a value."""

    dtype: torch.dtype
    shape: tuple[Size, ...]

    @cached_property
    def _number(self) -> int:
        return hash((self.dtype, self.shape))

    def __hash__(self) -> int:
        return self._number

    def __getstate__(self) -> dict[str, object]:
        return {"dtype": self.dtype, "shape": self.shape}  # another process counts other hashes


@dataclass(frozen=True)
class Cut:
    """The ranges of a factor's indices that each coordinate of an axis holds."""

    axis: str
    ranges: tuple[Range, ...]

    def is_even(self, size: Size) -> bool:
        """Whether the ranges are equal pieces of `size` in order: what is printed without ranges."""
        parts = len(self.ranges)
        return self.ranges == tuple((i * size // parts, (i + 1) * size // parts) for i in range(parts)) and size % parts == 0

    @property
    def overlaps(self) -> bool:
        """Whether some index is held by more than one coordinate."""
        held = sorted(r for r in self.ranges if r[0] < r[1])
        return any(before[1] > after[0] for before, after in zip(held, held[1:], strict=False))


@dataclass(frozen=True)
class Open:
    """A cut whose ranges are not chosen yet: what the backward walk carries.

    It stands for a partition of the whole factor in proportions that are fixed later, once for all values with the same key.
    `shared` marks a factor of which several coordinates may need the same index (key/value heads).
    """

    key: int
    shared: bool = False


@dataclass(frozen=True)
class Even:
    """Consecutive pieces, one per coordinate, whose lengths differ by one at most, the longer first.

    The cut of a length that may be known only when the program runs: a sequence's.
    """

    axis: str
    parts: int

    def length(self, size: Size, coordinate: int) -> Size:
        """The length of a coordinate's piece."""
        return (size + self.parts - 1 - coordinate) // self.parts

    def held(self, size: int, coordinate: int) -> Range:
        """A coordinate's piece of a known length."""
        start = coordinate * (size // self.parts) + min(coordinate, size % self.parts)
        return start, start + int(self.length(size, coordinate))


@dataclass(frozen=True)
class Factor:
    size: Size
    cut: Cut | Open | Even | None = None

    def __str__(self) -> str:
        match self.cut:
            case None:
                return str(self.size)
            case Even(axis, parts) if isinstance(self.size, int):
                return str(Factor(self.size, Cut(axis, tuple(self.cut.held(self.size, c) for c in range(parts)))))
            case Even(axis, _):
                return f"{self.size}@{axis}"
            case Open(key, shared):
                return f"{self.size}@?{key}" + ("~" if shared else "")
            case Cut(axis, ranges):
                spelled = "" if self.cut.is_even(self.size) else "{" + ", ".join(f"{a}:{b}" for a, b in ranges) + "}"
                return f"{self.size}@{axis}{spelled}"


Segment = tuple[Factor, ...]
Dim = tuple[Segment, ...]


@dataclass(frozen=True)
class Layout:
    """One `Dim` per tensor dimension, and the axes over which the value is a partial sum, or a partial maximum."""

    dims: tuple[Dim, ...]
    partial: tuple[str, ...] = ()
    highest: tuple[str, ...] = ()

    @cached_property
    def _number(self) -> int:
        return hash((self.dims, self.partial, self.highest))

    def __hash__(self) -> int:
        return self._number

    def __getstate__(self) -> dict[str, object]:
        return {"dims": self.dims, "partial": self.partial, "highest": self.highest}  # another process counts other hashes

    @cached_property
    def is_cut(self) -> bool:
        return any(is_cut(dim) for dim in self.dims)

    @property
    def is_whole(self) -> bool:
        return not self.is_cut and not self.partial and not self.highest

    def __str__(self) -> str:
        dims = ", ".join(format_dim(dim) for dim in self.dims)
        return f"[{dims}]" + "".join(f" +{axis}" for axis in self.partial) + "".join(f" ^{axis}" for axis in self.highest)

    @classmethod
    def parse(cls, text: str, *, parts: int = 0) -> Layout:
        """The layout that `str` printed. `parts`, the number of coordinates, is needed where an even cut is left unspelled."""
        match = re.fullmatch(r"\[(.*)\]((?: \+\w+)*)((?: \^\w+)*)", text)
        if not match:
            raise TpcompileError(f"not a layout: {text!r}")
        inside, partial, highest = match[1], tuple(match[2].replace("+", "").split()), tuple(match[3].replace("^", "").split())
        dims = re.split(r",\s*(?![^{]*})(?![^(]*\))", inside) if inside else []
        return cls(tuple(_parse_dim(dim, parts) for dim in dims), partial, highest)


def format_dim(dim: Dim) -> str:
    return " | ".join("·".join(str(factor) for factor in segment) for segment in dim)


def _parse_dim(text: str, parts: int) -> Dim:
    return tuple(tuple(_parse_factor(factor.strip(), parts) for factor in segment.split("·")) for segment in text.split("|"))


def _parse_factor(text: str, parts: int) -> Factor:
    match = re.fullmatch(r"([\w*+\-(), /]+?)(?:@(\w+|\?\d+~?)(?:\{(\d+:\d+(?:, \d+:\d+)*)\})?)?", text)
    if not match:
        raise TpcompileError(f"not a factor: {text!r}")
    size = parse_size(match[1])
    if match[2] is None:
        return Factor(size)
    if match[2].startswith("?"):
        return Factor(size, Open(int(match[2].strip("?~")), shared=match[2].endswith("~")))
    if match[3] is None and not isinstance(size, int):
        return Factor(size, Even(match[2], parts))
    if match[3] is None:
        ranges = tuple((i * size // parts, (i + 1) * size // parts) for i in range(parts))
    else:
        ranges = tuple((int(a), int(b)) for a, b in (piece.split(":") for piece in match[3].split(",")))
    return Factor(size, Cut(match[2], ranges))


def parse_size(text: str) -> Size:
    """A number, or an expression in which every name is a symbol but those of functions."""
    if text.isdigit():
        return int(text)
    names = re.findall(r"[A-Za-z_]\w*(?![\w(])", text)
    return sympy.parse_expr(text, local_dict={name: symbol(name) for name in names})  # type: ignore[no-any-return]


def symbol(name: str) -> sympy.Symbol:
    """A size that is known only when the program runs, such as b (rows) or s (positions)."""
    return sympy.Symbol(name, integer=True, positive=True)


def whole(*sizes: Size) -> Layout:
    """The layout of a value that every coordinate has entire."""
    return Layout(tuple(whole_dim(size) for size in sizes))


def whole_dim(size: Size) -> Dim:
    return ((Factor(size),),)


def product(sizes: Iterable[Size]) -> Size:
    return math.prod(sizes)


def size_of(dim: Dim) -> Size:
    """The global size of a dimension."""
    return sum(product(factor.size for factor in segment) for segment in dim)


def is_cut(dim: Dim) -> bool:
    """Whether any part of a dimension is cut."""
    for segment in dim:
        for factor in segment:
            if factor.cut is not None:
                return True
    return False


def cut_factors(dim: Dim) -> list[Factor]:
    return [factor for segment in dim for factor in segment if factor.cut is not None]


def tidy(dim: Dim) -> Dim:
    """A dimension without needless parts: size-1 factors dropped, a factor and the whole one after it as one, whole neighbours as one.

    Ranges count elements of the merged factor.
    """
    segments: list[Segment] = []
    for segment in dim:
        merged = _merge_factors(segment)
        if segments and all(f.cut is None for f in segments[-1] + merged):
            segments[-1] = (Factor(segments[-1][0].size + merged[0].size),)
        else:
            segments.append(merged)
    return tuple(segments)


def canonical(dim: Dim) -> Dim:
    """The one spelling of a dimension: what two layouts are compared by.

    `tidy`, and equal segments in a row are one with a leading factor: q, k and v stacked are 3·4@tp·16. So 4 heads of 16 and 64 single
    columns are equal only if their pieces are.
    """
    runs: list[tuple[Size, Segment]] = []
    for segment in tidy(dim):
        leading = segment[0].cut is None and len(segment) > 1
        count, core = (segment[0].size, segment[1:]) if leading else (1, segment)
        if runs and runs[-1][1] == core and any(f.cut for f in core):
            runs[-1] = (runs[-1][0] + count, core)
        else:
            runs.append((count, core))
    return tuple(core if count == 1 else (Factor(count), *core) for count, core in runs)


def _merge_factors(segment: Segment) -> Segment:
    factors: list[Factor] = []
    for factor in segment:
        if factor.cut is None and factor.size == 1:
            continue
        if factors and factor.cut is None and not isinstance(factors[-1].cut, Even):
            last = factors[-1]
            factors[-1] = Factor(last.size * factor.size, _scaled(last.cut, factor.size))
        else:
            factors.append(factor)
    return tuple(factors) or (Factor(1),)


def _scaled(cut: Cut | Open | Even | None, by: Size) -> Cut | Open | Even | None:
    if isinstance(cut, Cut):
        return Cut(cut.axis, tuple((start * by, stop * by) for start, stop in cut.ranges))
    return cut


def same_dim(a: Dim, b: Dim) -> bool:
    return a == b or canonical(a) == canonical(b)


def held_by_all(dim: Dim) -> bool:
    """Whether a dimension of size one is on every coordinate: whole, or one key/value head that all of them need."""
    if size_of(dim) != 1:
        return False
    return all(
        isinstance(f.cut, Open) or (isinstance(f.cut, Cut) and all(held == (0, 1) for held in f.cut.ranges)) for f in cut_factors(dim)
    )


def fits(made: Layout, declared: Layout) -> bool:
    """Whether a value made in one layout may be declared in another: the same, or of size one and on every coordinate in both."""
    pairs = list(zip(made.dims, declared.dims, strict=False))
    return (
        len(made.dims) == len(declared.dims)
        and _waits_alike(made, declared)
        and all(same_dim(a, b) or (held_by_all(a) and held_by_all(b)) for a, b in pairs)
    )


def _waits_alike(a: Layout, b: Layout) -> bool:
    """Whether two values wait for the same sums and maxima."""
    return set(a.partial) == set(b.partial) and set(a.highest) == set(b.highest)


def same(a: Layout, b: Layout) -> bool:
    """Whether two layouts put the same elements on the same coordinates."""
    return a == b or (
        len(a.dims) == len(b.dims) and _waits_alike(a, b) and all(same_dim(x, y) for x, y in zip(a.dims, b.dims, strict=True))
    )


def pieces(dim: Dim, coordinate: int) -> list[Range]:
    """The index ranges of the global dimension that a coordinate holds, in order: at least one, possibly empty."""
    held: list[Range] = []
    offset: int = 0
    for segment in dim:
        ranges: list[Range] = [(0, 1)]
        for factor in segment:
            ranges = list(_refine(ranges, factor, coordinate))
        held += [(offset + start, offset + stop) for start, stop in ranges]
        offset += int(product(factor.size for factor in segment))
    return held


def _refine(ranges: Sequence[Range], factor: Factor, coordinate: int) -> Iterable[Range]:
    """The ranges over one more factor, the fastest so far."""
    if isinstance(factor.cut, Open):
        raise TpcompileError(f"the cut of {factor} has no ranges yet")
    if factor.cut is None:
        return [(start * int(factor.size), stop * int(factor.size)) for start, stop in ranges]
    cut = factor.cut
    low, high = cut.held(int(factor.size), coordinate) if isinstance(cut, Even) else cut.ranges[coordinate]
    return [(index * int(factor.size) + low, index * int(factor.size) + high) for start, stop in ranges for index in range(start, stop)]


def local_size(dim: Dim, coordinate: int) -> Size:
    """The size of the piece that a coordinate holds."""
    if not cut_factors(dim):
        return size_of(dim)
    if all(isinstance(size_of(((f,),)), int) for segment in dim for f in segment):
        return sum(stop - start for start, stop in pieces(dim, coordinate))
    total: Size = 0
    for segment in dim:
        total += product(_held(factor, coordinate) for factor in segment)
    return total


def _held(factor: Factor, coordinate: int) -> Size:
    if isinstance(factor.cut, Cut):
        start, stop = factor.cut.ranges[coordinate]
        return stop - start
    return factor.cut.length(factor.size, coordinate) if isinstance(factor.cut, Even) else factor.size


def concrete(layout: Layout, sizes: Mapping[sympy.Symbol, int]) -> Layout:
    """A layout for given values of the symbols."""

    def known(size: Size) -> Size:
        return size if isinstance(size, int) else int(size.subs(dict(sizes)))  # type: ignore[arg-type]

    dims = tuple(tuple(tuple(Factor(known(f.size), f.cut) for f in segment) for segment in dim) for dim in layout.dims)
    return Layout(dims, layout.partial, layout.highest)


def bounds(dim: Dim, parts: int) -> list[int]:
    """All coordinates' `pieces` as one flat list of shape [parts, n, 2], padded with empty ranges to equal n."""
    held = [pieces(dim, coordinate) for coordinate in range(parts)]
    most = max(len(ranges) for ranges in held)
    return [index for ranges in held for pair in ranges + [(0, 0)] * (most - len(ranges)) for index in pair]
