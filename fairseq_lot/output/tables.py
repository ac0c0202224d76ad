"""Tables as Markdown and as HTML."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

MISSING = "–"


@dataclass(frozen=True)
class Table:
    """Cells under the titles of their columns. Any text may have ``**bold**`` and `` `code` `` parts.

    Attributes:
        head: the titles.
        rows: the cells, one for each title; numbers are shown as ``str`` shows them.
        heading: the line above the table; none when empty.
        notes: what is listed below the table.
        align: ``<`` (left) or ``>`` (right) for each column; all left when empty.
    """

    head: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    heading: str = ""
    notes: Sequence[str] = ()
    align: str = ""

    def markdown(self, *, padded: bool = False) -> str:
        """The heading, the table and the notes, with blank lines between them and no line end after them.

        Args:
            padded: make every column as wide as its widest cell, to be read in a terminal.
        """
        cells = [[_one_line(text).replace("|", "\\|") for text in row] for row in (self.head, *self.rows)]
        if padded:
            table = tabulate(cells[1:], cells[0], "pipe", colalign=self._sides(), disable_numparse=True)
        else:  # so that a change of one cell changes one line
            rule = ["---:" if side == "right" else "---" for side in self._sides()]
            table = "\n".join(f"| {' | '.join(row)} |" for row in (cells[0], rule, *cells[1:]))
        notes = "\n".join(f"- {_one_line(note)}" for note in self.notes)
        return "\n\n".join(part for part in (_one_line(self.heading), table, notes) if part)

    def html(self) -> str:
        """The same as HTML; a table that is too wide scrolls, also by the keyboard."""
        cells = [[_inline(text) for text in row] for row in (self.head, *self.rows)]
        table = tabulate(cells[1:], cells[0], "unsafehtml", colalign=self._sides(), disable_numparse=True)
        heading = f"<p>{_inline(self.heading)}</p>\n" if self.heading else ""
        notes = "".join(f"<li>{_inline(note)}</li>" for note in self.notes)
        return f'{heading}<div class="wide" tabindex="0">{table}</div>' + (f"\n<ul>{notes}</ul>" if notes else "")

    def _sides(self) -> list[str]:
        return ["right" if side == ">" else "left" for side in self.align or "<" * len(self.head)]


def _one_line(text: object) -> str:
    """Any text; a cell of Markdown ends at the line's end."""
    return " ".join(str(text).split())


def _inline(text: object) -> str:
    """Escaped text with its bold and code parts."""
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(_one_line(text)))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)
