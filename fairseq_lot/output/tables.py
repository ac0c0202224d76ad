"""Tables as Markdown and as HTML."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import DataRow, TableFormat, tabulate

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
        cells = [[_cell(text) for text in row] for row in (self.head, *self.rows)]
        sides = ["right" if side == ">" else "left" for side in self._sides()]
        as_padded = {"tablefmt": "pipe", "colalign": sides}
        as_plain = {"tablefmt": _plain(sides), "stralign": None}
        table = tabulate(cells[1:], cells[0], disable_numparse=True, **(as_padded if padded else as_plain))
        notes = "\n".join(f"- {_one_line(note)}" for note in self.notes)
        return "\n\n".join(part for part in (_one_line(self.heading), table, notes) if part)

    def html(self) -> str:
        """The same as HTML; a table that is too wide scrolls, also by the keyboard."""
        rows = [self._html_row("th", self.head), *(self._html_row("td", row) for row in self.rows)]
        heading = f"<p>{_inline(self.heading)}</p>\n" if self.heading else ""
        notes = "".join(f"<li>{_inline(note)}</li>" for note in self.notes)
        table = f'<div class="wide" tabindex="0"><table>{"".join(rows)}</table></div>'
        return heading + table + (f"\n<ul>{notes}</ul>" if notes else "")

    def _html_row(self, tag, row):
        styles = ("" if side == "<" else ' style="text-align: right"' for side in self._sides())
        cells = (f"<{tag}{style}>{_inline(cell)}</{tag}>" for cell, style in zip(row, styles, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    def _sides(self):
        return self.align or "<" * len(self.head)


def _plain(sides: list[str]) -> TableFormat:
    """Markdown without padding, so that a change of one cell changes one line."""
    row = DataRow("| ", " | ", " |")
    rule = f"| {' | '.join('---:' if side == 'right' else '---' for side in sides)} |"
    return TableFormat(None, lambda widths, aligns: rule, None, None, row, row, 0, None)


def _one_line(text):
    return " ".join(str(text).split())


def _cell(text):
    """In one line, a bar does not end it."""
    return _one_line(text).replace("|", "\\|")


def _inline(text):
    """Escaped text with its bold and code parts."""
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(_one_line(text)))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)
