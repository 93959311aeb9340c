"""The algebra of factors: what happens to a layout when a dimension is reshaped, split, or put together.

Reshaping is a bijection on factors, so that one function serves both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import sympy

from tpcompile.layout import (
    Cut,
    Dim,
    Factor,
    Layout,
    Open,
    Segment,
    Size,
    canonical,
    cut_factors,
    held_by_all,
    product,
    same_dim,
    size_of,
    tidy,
    whole_dim,
)


class LayoutError(Exception):
    """An operation cannot keep a cut where it is; the message says why, in a few words."""


def reshape(layout: Layout, shape: Sequence[Size]) -> Layout:
    """The layout of a value after a view of it with another shape.

    >>> str(reshape(Layout.parse("[b, s, 4@tp·16]", parts=2), [symbol("b"), symbol("s"), 4, 16]))
    '[b, s, 4@tp, 16]'
    """
    dims: list[Dim] = [whole_dim(size) for size in shape]
    for ins, outs in match_groups([size_of(dim) for dim in layout.dims], list(shape)):
        for index, dim in zip(outs, _regroup([layout.dims[i] for i in ins], [shape[j] for j in outs]), strict=True):
            dims[index] = dim
    return Layout(tuple(dims), layout.partial)


def match_groups(ins: Sequence[Size], outs: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of dimensions with equal products, in order.

    Where symbolic products cannot be compared, what stands between equal sizes at both ends is one run.
    """
    try:
        return _matched(ins, outs)
    except LayoutError:
        return _between_ends(ins, outs)


def _between_ends(ins: Sequence[Size], outs: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    shortest = min(len(ins), len(outs))
    front = next((i for i in range(shortest) if ins[i] != outs[i]), shortest)
    back = next((i for i in range(shortest - front) if ins[-1 - i] != outs[-1 - i]), shortest - front)
    left, right = list(range(front, len(ins) - back)), list(range(front, len(outs) - back))
    if all(isinstance(size, int) for size in (*(ins[i] for i in left), *(outs[j] for j in right))):
        raise LayoutError(f"sizes {list(ins)} and {list(outs)} do not match")
    ends = [([len(ins) - back + i], [len(outs) - back + i]) for i in range(back)]
    return [*(([i], [i]) for i in range(front)), (left, right), *ends]


def _matched(ins: Sequence[Size], outs: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(ins) or j < len(outs):
        left, right = ([i] if i < len(ins) else []), ([j] if j < len(outs) else [])
        a, b = product(ins[k] for k in left), product(outs[k] for k in right)
        i, j = i + len(left), j + len(right)
        while a != b:
            grow_left, grow_right = _grow(a, b)
            if (grow_left and i == len(ins)) or (grow_right and j == len(outs)):
                raise LayoutError(f"sizes {list(ins)} and {list(outs)} do not match")
            if grow_left:
                left.append(i)
                a, i = a * ins[i], i + 1
            if grow_right:
                right.append(j)
                b, j = b * outs[j], j + 1
        groups.append((left, right))
    return groups


def _grow(a: Size, b: Size) -> tuple[bool, bool]:
    """Which of two unequal products needs another factor to become equal."""
    if divides(a, b):
        return True, False
    if divides(b, a):
        return False, True
    if isinstance(a, int) and isinstance(b, int):
        return a < b, b < a
    return True, True


def divides(a: Size, b: Size) -> bool:
    """Whether `a` divides `b` for every value of the symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a != 0 and b % a == 0
    return a != 0 and sympy.denom(_ratio(b, a)) == 1


def quotient(a: Size, b: Size) -> Size:
    """`a / b`, where `b` divides `a`."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    ratio = _ratio(a, b)
    return int(ratio) if ratio.is_Integer else ratio


@lru_cache(maxsize=4096)
def _ratio(a: Size, b: Size) -> sympy.Expr:
    """`a / b` in lowest terms. The same few sizes are compared over and over."""
    ratio: sympy.Expr = sympy.cancel(sympy.sympify(a) / b)
    return ratio


def _regroup(ins: list[Dim], shape: list[Size]) -> list[Dim]:
    """One group of `match_groups`: the same elements, as dimensions of these sizes."""
    if not any(cut_factors(dim) for dim in ins):
        return [whole_dim(size) for size in shape]
    if len(ins) == len(shape) == 1:
        return ins
    for dim in ins:
        if size_of(dim) == 1 and not held_by_all(dim):
            raise LayoutError(f"a view drops {cut_factors(dim)[0]}")
    big_in = [dim for dim in ins if size_of(dim) != 1]
    big_out = [index for index, size in enumerate(shape) if size != 1]
    if len(big_in) == 1 and len(big_out) == 1:
        return [big_in[0] if index == big_out[0] else whole_dim(1) for index in range(len(shape))]
    sizes = [shape[index] for index in big_out]
    if big_in and len(canonical(big_in[0])) > 1:
        parts = iter(_regroup_parts(big_in, sizes))
        return [next(parts) if index in big_out else whole_dim(1) for index in range(len(shape))]
    factors = [factor for dim in big_in for factor in _one_segment(dim)]
    dims: list[Dim] = []
    for size in shape:
        taken, factors = _take(factors, size)
        dims.append((taken,))
    if any(factor.cut for factor in factors):
        raise LayoutError("a view regroups sizes that cannot be compared")
    return dims


def _regroup_parts(ins: list[Dim], sizes: list[Size]) -> list[Dim]:
    """A dimension made of unlike parts, merged with what follows it or split off from it, part by part: q, k and v heads of one size."""
    first, rest = (
        [part for segment in canonical(ins[0]) for part in _unfold(segment)],
        [factor for dim in ins[1:] for factor in _one_segment(dim)],
    )
    if len(sizes) == 1:
        return [tidy(tuple((*segment, *rest) for segment in first))]
    inner = product(sizes[1:])
    if rest or any(not divides(inner, product(factor.size for factor in segment)) for segment in first):
        raise LayoutError("a view regroups a dimension made of unlike parts")
    heads: list[Segment] = []
    for segment in first:
        head, tail = _front(segment, quotient(product(factor.size for factor in segment), inner))
        if any(factor.cut for factor in tail):
            raise LayoutError("a view regroups a dimension made of unlike parts")
        heads.append(head)
    return [tuple(heads), *(whole_dim(size) for size in sizes[1:])]


def _front(segment: Segment, size: Size) -> tuple[Segment, list[Factor]]:
    """`_take`, where a cut of a single head stays with the head."""
    if size == 1 and segment[0].cut is not None:
        head, tail = _split_factor(segment[0], 1)
        return (head,), [tail, *segment[1:]]
    return _take(list(segment), size)


def _one_segment(dim: Dim) -> Segment:
    """A dimension as one segment: equal segments in a row are a leading whole factor."""
    segments = canonical(dim)
    if len(segments) > 1:
        raise LayoutError("a view regroups a dimension made of unlike parts")
    return segments[0]


def _take(factors: list[Factor], size: Size) -> tuple[Segment, list[Factor]]:
    """Factors from the front whose product is `size`, splitting the last one where needed; and the rest."""
    taken: list[Factor] = []
    rest = list(factors)
    while size != 1:
        if not rest:
            raise LayoutError("a view regroups more than there is")
        factor = rest.pop(0)
        if divides(factor.size, size):
            taken.append(factor)
            size = quotient(size, factor.size)
        elif divides(size, factor.size):
            head, tail = _split_factor(factor, size)
            taken.append(head)
            rest.insert(0, tail)
            size = 1
        else:
            raise LayoutError(f"a view divides {factor} at {size}")
    return tuple(taken) or (Factor(1),), rest


def _split_factor(factor: Factor, size: Size) -> tuple[Factor, Factor]:
    """A factor as a product whose first part has this size. A cut stays with the first part, whole steps of the second."""
    step = quotient(factor.size, size)
    match factor.cut:
        case None:
            return Factor(size), Factor(step)
        case Open():
            return Factor(size, factor.cut), Factor(step)
        case Cut(axis, ranges):
            if isinstance(step, int) and all(start % step == 0 and stop % step == 0 for start, stop in ranges):
                return Factor(size, Cut(axis, tuple((start // step, stop // step) for start, stop in ranges))), Factor(step)
    raise LayoutError(f"a view divides {factor} inside a piece")


def in_steps(dim: Dim) -> tuple[Size, Factor]:
    """A cut dimension as equal steps, in each of which a coordinate holds one range: how many there are, and the factor that one is.

    >>> steps, factor = in_steps(Layout.parse("[3·4@tp·16]", parts=2).dims[0])
    >>> f"{steps} of {factor}"
    '3 of 64@tp'
    """
    segments = canonical(dim)
    *before, factor = segments[0]
    if len(segments) > 1:
        raise LayoutError("a dimension made of unlike parts")
    if factor.cut is None or any(other.cut for other in before):
        raise LayoutError("a dimension cut in two ways")
    return product(other.size for other in before), factor


def concatenate(dims: Sequence[Dim]) -> Dim:
    """Dimensions put one behind the other."""
    return tidy(tuple(segment for dim in dims for segment in dim))


def divide(dim: Dim, sizes: Sequence[Size]) -> list[Dim]:
    """A dimension taken apart into consecutive parts of these sizes; a cut segment stays in one part."""
    if len(sizes) == 1:
        return [dim]
    if not cut_factors(dim):
        return [whole_dim(size) for size in sizes]
    segments = [part for segment in canonical(dim) for part in _unfold(segment)]
    parts: list[Dim] = []
    for size in sizes:
        part: list[Segment] = []
        while size_of(tuple(part)) != size:
            if not segments:
                raise LayoutError(f"parts of sizes {list(sizes)} do not fit")
            segment = segments.pop(0)
            missing = size - size_of(tuple(part))
            have = product(factor.size for factor in segment)
            if isinstance(missing, int) and isinstance(have, int) and have > missing:
                if any(factor.cut for factor in segment):
                    raise LayoutError("a cut dimension is split inside a piece")
                segments.insert(0, (Factor(have - missing),))
                segment = (Factor(missing),)
            part.append(segment)
        parts.append(tuple(part) or whole_dim(0))
    return parts


def _unfold(segment: Segment) -> list[Segment]:
    """A segment with a leading whole factor as that many equal segments."""
    if segment[0].cut is None and len(segment) > 1 and isinstance(segment[0].size, int):
        return [segment[1:]] * segment[0].size
    return [segment]


def join(first: Dim, second: Dim) -> Dim:
    """The one layout that two users of a dimension agree on: key/value heads that one of them wants apart are shared by nobody."""
    if same_dim(first, second):
        return first
    if held_by_all(first) and held_by_all(second):
        return first if cut_factors(first) else second
    apart = _unshared(first)
    if same_dim(apart, _unshared(second)):
        return apart
    raise LayoutError("two uses of a value need it cut in different ways")


def _unshared(dim: Dim) -> Dim:
    """A dimension each index of which one coordinate has."""
    return tuple(tuple(Factor(f.size, Open(f.cut.key)) if isinstance(f.cut, Open) else f for f in segment) for segment in dim)
