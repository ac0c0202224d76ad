"""Figures as files; the same data give the same bytes."""

import io
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from fairseq_lot.output.files import atomic_write

_SVG = {"svg.fonttype": "none", "svg.hashsalt": "fairseq-lot"}  # text instead of paths; fixed names of elements


def as_bytes(figure: Figure, form: str) -> bytes:
    """The bytes of the figure's file, in the format ``form``: ``svg`` or ``png``."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(_SVG):
        figure.savefig(buffer, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()


def write_figure(figure: Figure, path: Path) -> None:
    """Write the figure as SVG or PNG, by the ending of the file name."""
    with atomic_write(path, "wb") as file:
        file.write(as_bytes(figure, path.suffix[1:]))
