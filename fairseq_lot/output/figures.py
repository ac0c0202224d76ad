"""Figures as bytes: the same data give the same file."""

import io

import matplotlib
from matplotlib.figure import Figure

matplotlib.rcParams["svg.fonttype"] = "none"
matplotlib.rcParams["svg.hashsalt"] = "fairseq-lot"


def as_bytes(figure: Figure, form: str, *, dpi: int = 150) -> bytes:
    """The figure as ``svg`` or ``png``."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=dpi, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()
