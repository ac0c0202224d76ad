"""Rows of Markdown tables."""

from collections.abc import Iterable

MISSING = "–"


def markdown_row(cells: Iterable) -> str:
    """Return one row of a table."""
    return f"| {' | '.join(map(cell, cells))} |"


def cell(text) -> str:
    """Return the text of one cell: in one line, a bar does not end it."""
    return " ".join(str(text).split()).replace("|", "\\|")
