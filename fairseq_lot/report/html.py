"""The HTML of the report; style and script lie in the folder ``assets``."""

import base64
import html
import json
import zlib
from collections.abc import Sequence
from importlib.resources import files
from string import Template

from matplotlib.figure import Figure

from fairseq_lot.evaluation.results import Row
from fairseq_lot.evaluation.table import result_tables
from fairseq_lot.output.figures import as_bytes

_TITLES = {"bleu": "BLEU of each system", "loss": "Training and validation loss"}


def page(rows: Sequence[Row], figures: dict[str, Figure], maps: dict | None) -> str:
    """One self-contained page.

    Args:
        rows: scored systems; none: no table.
        figures: by name; those named ``maps-...`` stand below the explorer.
        maps: what ``sentence_maps`` returned; None: no explorer.
    """
    parts = files(__package__) / "assets"
    static = {name: _image(name, figure) for name, figure in figures.items()}
    tables = "\n".join(table.html() for table in result_tables(rows))
    scores = [f"<section><h2>Results</h2>{tables}</section>"] if rows else []
    charts = [f"<section><h2>{title}</h2>{static[name]}</section>" for name, title in _TITLES.items() if name in static]
    explorer, still = "", ""
    if maps:
        explorer = (parts / "explorer.html").read_text(encoding="utf-8")
        first = html.escape(" ".join(maps["sentences"][0]["source"]))
        images = "".join(image for name, image in static.items() if name not in _TITLES)
        still = f"<section><h2>Maps of the first sentence</h2><p>{first}</p>{images}</section>"
    return Template((parts / "report.html").read_text(encoding="utf-8")).substitute(
        style=(parts / "report.css").read_text(encoding="utf-8"),
        body="\n".join([*scores, *charts, explorer, still]),
        data=base64.b64encode(zlib.compress(json.dumps(maps).encode("utf-8"), 9)).decode("ascii"),
        script=(parts / "explorer.js").read_text(encoding="utf-8") if maps else "",
    )


def _image(name, figure):
    """The figure as an image; maps as pixels, because a vector image of all their tokens is large."""
    kind, form = ("svg+xml", "svg") if name in _TITLES else ("png", "png")
    data = base64.b64encode(as_bytes(figure, form, dpi=90)).decode("ascii")
    title = _TITLES.get(name, name.replace("-", " "))
    return f'<figure class="still wide" tabindex="0"><img alt="{title}" src="data:image/{kind};base64,{data}"></figure>'
