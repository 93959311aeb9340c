"""Private to attend: what holds of an element by its place: conditions on its indices, in sizes that may be known only at run time.

    causal, over [b, 1, s, s]      i2 - i3 >= 0
    a window of 4 of it            i2 - i3 >= 0 and i3 - i2 + 3 >= 0

A condition is an or of ands of such lines, kept short by what two lines say together; the empty or is false, the empty and true.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import sympy

from tpcompile.layout import Size

MOST = 8
"""Ands in an or, at most: a mask has few."""

LARGEST = 2**31
"""Numbers in a line, at most: times a size, and added up, they are exact in int64."""


class TooMuch(Exception):
    """A condition that would get long, or numbers that would get large."""


@dataclass(frozen=True)
class Line:
    """A whole number that is a sum of multiples of an element's indices, by dimension, and a constant."""

    terms: tuple[tuple[int, int], ...]
    constant: Size

    @staticmethod
    def of(terms: Mapping[int, int], constant: Size) -> Line:
        made = constant if isinstance(constant, int) else sympy.expand(constant)
        plain: Size = int(made) if isinstance(made, sympy.Integer) else made
        if any(abs(number) > LARGEST for number in (*terms.values(), plain) if isinstance(number, int)):
            raise TooMuch
        return Line(tuple(sorted((dim, times) for dim, times in terms.items() if times)), plain)

    def plus(self, other: Line, times: int = 1) -> Line:
        terms = dict(self.terms)
        for dim, count in other.terms:
            terms[dim] = terms.get(dim, 0) + count * times
        return Line.of(terms, self.constant + other.constant * times)

    def times(self, factor: int) -> Line:
        return ZERO.plus(self, factor)

    def placed(self, places: Mapping[int, Line]) -> Line:
        """The same number where each index is given by a line of others."""
        made = Line.of({}, self.constant)
        for dim, count in self.terms:
            made = made.plus(places[dim], count)
        return made

    def fixed(self, shape: Sequence[Size]) -> Line:
        """Without the indices of dimensions of size one, which are 0."""
        return Line.of({dim: times for dim, times in self.terms if shape[dim] != 1}, self.constant)

    def least(self, shape: Sequence[Size]) -> Size:
        """A bound from below, over all places of a tensor."""
        return self.constant + sum(times * (shape[dim] - 1) for dim, times in self.terms if times < 0)

    @property
    def plain(self) -> int | None:
        """The number, where it is the same at all places and known."""
        return self.constant if not self.terms and isinstance(self.constant, int) else None


ZERO = Line((), 0)
And = frozenset[Line]
Condition = frozenset[And]
NEVER: Condition = frozenset()
ALWAYS: Condition = frozenset([frozenset()])


def index(dim: int) -> Line:
    return Line(((dim, 1),), 0)


def least_is(value: Size, bound: int) -> bool:
    """Whether a size is known to be at least `bound`. Symbols are 1 or more."""
    return value >= bound if isinstance(value, int) else bool((value - bound).is_nonnegative)


def at_least_zero(line: Line, shape: Sequence[Size]) -> Condition:
    """The condition that a number is 0 or more, over the places of a tensor."""
    line = line.fixed(shape)
    if isinstance(line.constant, int) and (step := math.gcd(*(times for _, times in line.terms))) > 1:
        line = Line.of({dim: times // step for dim, times in line.terms}, line.constant // step)
    if least_is(line.least(shape), 0):
        return ALWAYS
    if least_is(_below(line).least(shape), 0):
        return NEVER
    return frozenset([frozenset([line])])


def _below(line: Line) -> Line:
    """What is 0 or more where a line is less than 0."""
    return Line.of({}, -1).plus(line, -1)


def both(a: Condition, b: Condition) -> Condition:
    return _short(one | other for one, other in product(a, b))


def either(a: Condition, b: Condition) -> Condition:
    return _short([*a, *b])


def negated(condition: Condition) -> Condition:
    made = ALWAYS
    for lines in condition:
        made = both(made, frozenset(frozenset([_below(line)]) for line in lines))
    return made


def placed(condition: Condition, places: Mapping[int, Line], shape: Sequence[Size]) -> Condition:
    """A condition on the indices of one tensor as one on those of another, of this shape, whose elements it gives."""
    made = NEVER
    for lines in condition:
        joined = ALWAYS
        for line in lines:
            joined = both(joined, at_least_zero(line.placed(places), shape))
        made = either(made, joined)
    return made


def _short(ands: Iterable[And]) -> Condition:
    """An or without what its parts say twice."""
    found = {short for lines in ands if (short := _without_weaker(lines)) is not None}
    while True:
        found = {lines for lines in found if not any(other < lines for other in found)}
        pair = next(((a, b, m) for a in found for b in found if a is not b and (m := _merged(a, b)) is not None), None)
        if pair is None:
            break
        found = (found - {*pair[:2]}) | {pair[2]}
    if len(found) > MOST:
        raise TooMuch
    return frozenset(found)


def _without_weaker(lines: And) -> And | None:
    """An and without the lines that others imply; None where two of them cannot both hold."""
    kept = set(lines)
    for a, b in product(lines, lines):
        if a is b:
            continue
        apart, together = a.plus(b, -1), a.plus(b)
        if not apart.terms and a in kept and b in kept and least_is(apart.constant, 0):
            kept.discard(a)  # a = b + something: where b holds, so does a
        if not together.terms and least_is(-1 - together.constant, 0):
            return None
    return frozenset(kept)


def _merged(a: And, b: And) -> And | None:
    """Of two ands that differ in one line, what holds where either does; None where that is no and."""
    (first, second) = (a - b, b - a)
    if len(first) != 1 or len(second) != 1:
        return None
    (one,), (other,) = first, second
    apart, together = one.plus(other, -1), one.plus(other)
    if not together.terms and least_is(together.constant, -1):
        return a & b  # below -1 of one the other holds
    if not apart.terms and least_is(apart.constant, 0):
        return a
    if not apart.terms and least_is(-apart.constant, 0):
        return b
    return None
