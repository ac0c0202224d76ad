"""Tables in Markdown and HTML."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

MISSING = "–"


@dataclass(frozen=True)
class Table:
    """A table with its heading and notes. Any text may have ``**bold**`` and `` `code` `` parts.

    Attributes:
        head: the column titles.
        rows: the rows, each with a cell for each title; cells are shown by ``str``.
        heading: a line above the table, if not empty.
        notes: a list below the table.
        align: ``<`` (left) or ``>`` (right) for each column; empty: all left.
    """

    head: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    heading: str = ""
    notes: Sequence[str] = ()
    align: str = ""

    def markdown(self, *, padded: bool = False) -> str:
        """The heading, the table and the notes, separated by blank lines, without a line end.

        Args:
            padded: make each column as wide as its widest cell, for a terminal.
        """
        cells = [[_one_line(text).replace("|", "\\|") for text in row] for row in (self.head, *self.rows)]
        if padded:
            table = tabulate(cells[1:], cells[0], "pipe", colalign=self._sides(), disable_numparse=True)
        else:  # a changed cell then changes one line
            rule = ["---:" if side == "right" else "---" for side in self._sides()]
            table = "\n".join(f"| {' | '.join(row)} |" for row in (cells[0], rule, *cells[1:]))
        notes = "\n".join(f"- {_one_line(note)}" for note in self.notes)
        return "\n\n".join(part for part in (_one_line(self.heading), table, notes) if part)

    def html(self) -> str:
        """The heading, the table and the notes as HTML; a wide table scrolls, also by the keyboard."""
        cells = [[_inline(text) for text in row] for row in (self.head, *self.rows)]
        table = tabulate(cells[1:], cells[0], "unsafehtml", colalign=self._sides(), disable_numparse=True)
        heading = f"<p>{_inline(self.heading)}</p>\n" if self.heading else ""
        notes = "".join(f"<li>{_inline(note)}</li>" for note in self.notes)
        return f'{heading}<div class="wide" tabindex="0">{table}</div>' + (f"\n<ul>{notes}</ul>" if notes else "")

    def _sides(self) -> list[str]:
        return ["right" if side == ">" else "left" for side in self.align or "<" * len(self.head)]


def _one_line(text: object) -> str:
    """The text on one line: a line end would end a Markdown cell."""
    return " ".join(str(text).split())


def _inline(text: object) -> str:
    """The text escaped for HTML, with its bold and code parts as tags."""
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(_one_line(text)))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)
