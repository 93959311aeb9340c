"""How tables look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


def table(*columns: str, right: Sequence[int] = ()) -> Table:
    """A table without lines, whose first heading is its title; columns in `right` are of numbers."""
    made = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        made.add_column(Text(column, "" if place else "bold"), justify="right" if place in right else "left", overflow="fold")
    return made


def few(rows: Sequence[RenderableType], most: int, what: str = "more") -> Iterator[RenderableType]:
    """The first rows, and how many are left out."""
    yield from rows if len(rows) <= most else rows[: most - 1]
    if len(rows) > most:
        yield Text(f"… {len(rows) - most + 1} {what}: explain(full=True)", "dim")
