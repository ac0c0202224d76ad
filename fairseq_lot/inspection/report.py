"""``fairseq-lot report``: one HTML file with results, training curves and attention maps; it needs no network."""

import base64
import json
import sys
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from fairseq_lot.attention.options import SITES
from fairseq_lot.errors import InputError, flag
from fairseq_lot.evaluation.results import read_rows
from fairseq_lot.evaluation.table import result_tables
from fairseq_lot.experiment.spec import Row
from fairseq_lot.inspection.charts import bleu_bars, loss_curves
from fairseq_lot.inspection.maps import sentence_maps
from fairseq_lot.inspection.training_log import read_curves
from fairseq_lot.modules.sites import named_sites
from fairseq_lot.output.figures import as_bytes
from fairseq_lot.output.files import atomic_write, read_lines, refuse_same
from fairseq_lot.pretrained.device import add_device_argument
from fairseq_lot.pretrained.languages import add_language_arguments, typed_pair
from fairseq_lot.pretrained.loading import Loaded
from fairseq_lot.pretrained.multilingual import language_symbols
from fairseq_lot.pretrained.text import add_text_arguments, text_options
from fairseq_lot.pretrained.translate import Translator

FIRST = 5  # sentences that --split shows


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--results", nargs="+", default=[], metavar="FILE.jsonl", help="scores, written by fairseq-lot score")
    add("--path", metavar="CKPT.pt", help="show the attention of this checkpoint")
    add("--compare", nargs="+", default=[], metavar="CKPT.pt", help="more checkpoints to show")
    add("--sentences", metavar="FILE", help="source sentences, one per line; --path needs this or --split")
    split = f"show the first {FIRST} sentences of this split of the data: train, valid or test"
    add("--split", metavar="NAME", help=split)
    add("--sites", metavar="SITES", help=f"sites to show, of {','.join(SITES)} (default: encoder)")
    logs = "logs of fairseq-train (default: train.log beside each checkpoint)"
    add("--logs", nargs="+", default=[], metavar="LOG", help=logs)
    add("--data", metavar="DATA", help="data folder (default: the one of the training)")
    add_device_argument(parser)
    add_language_arguments(parser)
    add_text_arguments(parser.add_argument_group("from sentences to pieces"))
    add("--out", required=True, metavar="REPORT.html", help="the HTML file to write")


def run(args: Namespace) -> None:
    """Run ``fairseq-lot report``: write the page and print its path and size."""
    for path in (args.path, args.sentences, *args.compare, *args.results, *args.logs):
        refuse_same({"--out": args.out, "an input": path})
    with atomic_write(args.out, "wb") as file:  # opened first: an unwritable path fails at once
        rows = read_rows(args.results)
        maps = _maps(args)
        paths = [Path(path).parent / "train.log" for path in (args.path, *args.compare) if path is not None]
        trainings = {}
        for log in args.logs or map(str, paths):
            with nullcontext() if args.logs else suppress(InputError):  # a default log may have no loss yet
                trainings[log] = read_curves(log)
        figures: dict[str, Figure] = {}
        if rows:
            figures["BLEU of each system"] = bleu_bars(rows)
        if trainings:
            named = {name: trainings[log] for name, log in _short_names([*trainings]).items()}
            figures["Training and validation loss"] = loss_curves(named)
        if not figures and not maps:
            raise InputError("nothing to report; give --results with a row, --logs, or --path with --sentences")
        data = page(rows, figures, maps).encode("utf-8")
        file.write(data)
    print(f"{args.out}: {len(data) / 1e6:.2f} MB", file=sys.stderr)


def page(rows: Sequence[Row], figures: dict[str, Figure], maps: dict | None) -> str:
    """The self-contained HTML page, from the template in the folder ``page``.

    Args:
        rows: scored systems, for the tables.
        figures: the figures by their titles.
        maps: the result of :func:`~fairseq_lot.inspection.maps.sentence_maps`; None: no attention maps.
    """
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("fairseq_lot.inspection", "page"),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return templates.get_template("report.html.jinja").render(
        tables=[table.html() for table in result_tables(rows)],
        charts={title: _base64(as_bytes(figure, "svg")) for title, figure in figures.items()},
        maps=maps,
        data=_base64(zlib.compress(json.dumps(maps, allow_nan=False).encode("utf-8"), 9)),
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _maps(args: Namespace) -> dict | None:
    """The attention maps for ``--path`` and ``--compare``; None without ``--path``."""
    text, languages = text_options(args), typed_pair(args)
    if args.path is None:
        needing = ("sentences", "split", "compare", "sites", "data", "device", "source_lang", *text)
        given = [flag(name) for name in needing if getattr(args, name)]
        if given:
            raise InputError(f"{', '.join(given)} cannot be used without --path; give --path CKPT.pt")
        return None
    if (args.sentences is None) == (args.split is None):
        raise InputError("--path needs the sentences to show; give either --sentences FILE or --split NAME")
    sites = named_sites(args.sites or "encoder")
    paths = [args.path, *args.compare]
    names = _short_names(paths)
    if len(names) < len(paths):
        raise InputError(f"a checkpoint is given twice: {', '.join(paths)}; give each once")
    sentences = None if args.sentences is None else read_lines(args.sentences)
    if sentences == []:
        raise InputError(f"{args.sentences} is empty; put one sentence on each line")
    how: dict[str, Any] = {"split": args.split, "device": args.device, "languages": languages, **text}
    models = {name: Translator(path, args.data, **how) for name, path in names.items()}
    first = next(iter(models.values()))
    pieces = _first_of_split(first.loaded) if sentences is None else first.text.encode(sentences)
    return sentence_maps(models, pieces, sites)


def _first_of_split(loaded: Loaded) -> list[list[str]]:
    """The pieces of the split's first sentences, without the end of sentence."""
    dictionary, sources = loaded.task.source_dictionary, loaded.sentences.src
    ignored = language_symbols(loaded.task)
    shown = range(min(FIRST, len(loaded.sentences)))
    return [dictionary.string(sources[i], extra_symbols_to_ignore=ignored).split() for i in shown]


def _short_names(paths: Sequence[str]) -> dict[str, str]:
    """Each path by a short name: the path without the folders that all share, but with the file's own folder."""
    parts = [Path(path).parts for path in paths]
    shared = 0
    while all(len(part) > shared + 2 for part in parts) and len({part[shared] for part in parts}) == 1:
        shared += 1
    return {"/".join(part[shared:]): path for part, path in zip(parts, paths, strict=True)}
