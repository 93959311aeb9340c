"""How tables look."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text


def table(*columns: str, right: Sequence[int] = ()) -> Table:
    """A table without lines, whose first heading is its title; columns in `right` are of numbers."""
    made = Table(box=None, pad_edge=False, header_style="", padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        made.add_column(Text(column, "" if place else "bold"), justify="right" if place in right else "left", overflow="fold")
    return made
