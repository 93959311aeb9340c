"""Divisions of sizes that leave no remainder: `b // 4` is b/4 where the capture took for granted that four divides the rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod


def whole_quotients(guards: Iterable[sympy.Basic]) -> tuple[sympy.Expr, ...]:
    """The quotients that are whole numbers wherever these relations hold: p / q of every `p % q == 0`.

    >>> b = sympy.Symbol("b", integer=True, positive=True)
    >>> whole_quotients([sympy.Eq(Mod(6 * b, 12), 0)])
    (b/2,)
    """
    found: list[sympy.Expr] = []
    for guard in guards:
        if isinstance(guard, sympy.Eq) and guard.rhs == 0 and isinstance(guard.lhs, (Mod, PythonMod)):
            quotient = _quotient(*(exact(part, found) for part in guard.lhs.args))
            if quotient is not None and sympy.denom(quotient) != 1:
                found.append(quotient)
    return tuple(found)


def exact(expression: sympy.Basic, known: Collection[sympy.Expr]) -> sympy.Expr:
    """An expression with every floor of a quotient that is a whole number written as the quotient."""
    if not expression.has(FloorDiv):
        return expression  # type: ignore[return-value]
    parts = [exact(part, known) for part in expression.args]
    if isinstance(expression, FloorDiv):
        quotient = _quotient(*parts)
        if quotient is not None and any(sympy.denom(sympy.cancel(quotient / unit)) == 1 for unit in (sympy.Integer(1), *known)):
            return quotient
    made: sympy.Expr = expression.func(*parts)
    return made


def _quotient(above: sympy.Expr, below: sympy.Expr) -> sympy.Expr | None:
    """`above / below` in lowest terms; None where it is no quotient of sums of products."""
    if above.has(sympy.Function) or below.has(sympy.Function) or below == 0:
        return None
    lowest: sympy.Expr = sympy.cancel(above / below)
    return lowest
