"""The rule table as it is printed and documented: read from its own source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from textwrap import fill

from tpcompile import linear, rules

WIDTH = 140


def operations() -> str:
    """Every operation that a cut passes through, as Markdown.

    | operation            | rule                     | meaning                                       |
    | `aten.bmm.default`   | `b m k, b k n -> b m n`  |                                               |
    | `aten.cumsum.default`| `along(op)`              | Works along dimensions, which stay whole; … |
    """
    views = len(rules.PARTED)
    parts = [
        "# Operations",
        f"{len(rules.RULES)} rules, {len(rules.POINTWISE)} element-wise operations beside those that torch tags so, {views} views.",
        "Written by `tpcompile inspect --rules`. An operation that is not here stays whole, and the plan says so.",
        inspect.cleandoc(_letters()),
        "\n".join(_table("RULES")),
        "## Ends\n\nOperations that a cut can end in: a letter without its `!` may be cut there.",
        "\n".join(_table("ENDS")),
        "## Along a cut\n\nOperations that work along a cut dimension of a head's scores, and leave it cut.",
        "\n".join(_table("ALONG")),
        _names(
            "Element-wise",
            "dimension by dimension, aligned from the right; also every operation that torch tags `pointwise`",
            rules.POINTWISE,
        ),
        _names("Views", "the factors of a dimension are kept, merged or divided", rules.RESHAPES),
        _names("Splits", "a dimension is divided at the sizes that the call gives", rules.SPLITS),
        _names("Joins", "dimensions follow each other: all of them cut, each in its own way, or none", rules.JOINS),
        _names("Linear", "in the first operand, which may be a partial sum: the reduction comes after", linear.IN_FIRST | linear.QUOTIENTS),
        _names("Products", "linear in one operand, the other whole", linear.PRODUCTS),
        _names("Sums", "linear in several operands together, each a partial sum or zero", linear.TOGETHER.keys() | linear.ALL_TOGETHER),
    ]
    return "\n\n".join(parts) + "\n"


def _letters() -> str:
    """How rules are read: from the module's own words."""
    text = inspect.getdoc(rules) or ""
    return "## Rules\n\n" + text.partition("\n\n")[2]


def _table(table: str) -> Iterator[str]:
    rows = [("operation", "rule", "meaning"), *((f"`{name}`", f"`{rule}`", meaning) for name, rule, meaning in entries(table))]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for place, row in enumerate(rows):
        yield "| " + " | ".join(cell.replace("|", "\\|").ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + " |"
        if not place:
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"


def entries(table: str) -> Iterator[tuple[str, str, str]]:
    """Each row of a table: the operation, its rule as it stands there, and what the function says that computes it."""
    module = ast.parse(inspect.getsource(rules)).body
    found = next(node.value for node in module if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == table)
    assert isinstance(found, ast.Dict)
    for key, value in zip(found.keys, found.values, strict=True):
        assert isinstance(key, ast.Constant)
        match value:
            case ast.Constant(value=str(text)):
                yield str(key.value), text, ""
            case ast.Lambda(body=body):
                yield str(key.value), ast.unparse(body), _meaning(body)
            case _:
                yield str(key.value), ast.unparse(value), _meaning(value)


def _meaning(body: ast.expr) -> str:
    """The first sentence of the function that a rule calls."""
    match body:
        case ast.Call(func=ast.Name(id=name)) | ast.Name(id=name):
            return (inspect.getdoc(getattr(rules, name, None)) or "").partition("\n")[0]
    return ""


def _names(title: str, meaning: str, names: Iterable[str]) -> str:
    listed = fill(" ".join(f"`{name}`" for name in sorted(names)), WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"## {title}\n\n{meaning[0].upper()}{meaning[1:]}.\n\n{listed}"
