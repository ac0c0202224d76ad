"""``fairseq-lot report``: results, training curves and attention maps as one page that needs no network."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

from fairseq_lot.attention.options import SITES
from fairseq_lot.errors import InputError
from fairseq_lot.evaluation.results import Row
from fairseq_lot.evaluation.systems import read_systems
from fairseq_lot.output.figures import write_figure
from fairseq_lot.output.files import atomic_write, read_lines
from fairseq_lot.pretrained.device import add_device_argument, choose_device
from fairseq_lot.pretrained.languages import add_language_arguments, typed_pair
from fairseq_lot.pretrained.loading import Loaded
from fairseq_lot.pretrained.text import add_text_arguments, text_options
from fairseq_lot.pretrained.translate import Searcher, Translator
from fairseq_lot.report.charts import bleu_bars, loss_curves, map_grid
from fairseq_lot.report.html import page
from fairseq_lot.report.maps import sentence_maps
from fairseq_lot.report.training_log import Curves, read_curves

FIRST = 5  # sentences of a split


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--results", nargs="+", default=[], metavar="FILE.jsonl", help="scores, written by fairseq-lot score")
    add("--path", metavar="CKPT.pt", help="checkpoint whose attention is to be seen")
    add("--compare", nargs="+", default=[], metavar="CKPT.pt", help="checkpoints to see beside it")
    add("--sentences", metavar="FILE", help="source sentences, one per line; this or --split is needed with --path")
    add("--split", metavar="NAME", help=f"look at the first {FIRST} sentences of this split of the data: train, valid "
        "or test")  # fmt: skip
    add("--sites", default="encoder", metavar="SITES", help=f"of {','.join(SITES)} (default: %(default)s)")
    add("--logs", nargs="+", default=[], metavar="LOG", help="logs of fairseq-train or its --tensorboard-logdir; "
        "default: train.log beside the checkpoints")  # fmt: skip
    add("--data", metavar="DATA", help="data folder; default: that of the training")
    add_device_argument(parser)
    add_language_arguments(parser)
    add_text_arguments(parser.add_argument_group("from sentences to pieces"))
    add("--out", required=True, metavar="REPORT.html", help="the page")
    add("--figures", metavar="DIR", help="also write its static figures here, as svg and png")


def run(args: Namespace) -> int:
    """Write the page, and the figures; say where it is and how large."""
    with atomic_write(args.out, "wb") as file:  # opened first: an unwritable path fails at once
        rows = read_systems(args.results)
        maps = _maps(args)
        logs = args.logs or _logs_beside([args.path, *args.compare] if args.path else [])
        curves = dict(zip(_short_names(logs), map(read_curves, logs), strict=True))
        if not (rows or maps or curves):
            raise InputError("nothing to report; give --results, --logs, or --path with --sentences")
        figures = dict(_figures(rows, curves, maps))
        data = page(rows, figures, maps).encode("utf-8")
        file.write(data)
        if args.figures is not None:
            for name, figure in figures.items():
                for form in ("svg", "png"):
                    write_figure(figure, Path(args.figures, f"{name}.{form}"))
    print(f"{args.out}: {len(data) / 1e6:.2f} MB", file=sys.stderr)
    return 0


def _maps(args) -> dict | None:
    """The maps that were asked for."""
    if args.path is None:
        if args.sentences or args.split or args.compare:
            raise InputError("--sentences, --split and --compare go with --path; name a checkpoint there")
        return None
    if (args.sentences is None) == (args.split is None):
        raise InputError("--path needs either --sentences FILE or --split NAME, the sentences to look at")
    sites = args.sites.split(",")
    for site in sites:
        if site not in SITES:
            raise InputError(f"--sites knows {', '.join(SITES)}, not {site!r}")
    paths = [args.path, *args.compare]
    names = _short_names(paths)
    if len(set(names)) < len(names):
        raise InputError(f"a checkpoint is named twice: {', '.join(paths)}")
    shared = {"device": choose_device(args.device), "languages": typed_pair(args)}
    if args.split is not None:
        models = {
            name: Searcher(path, args.data, split=args.split, **shared) for name, path in zip(names, paths, strict=True)
        }
        return sentence_maps(models, _first_of_split(models[names[0]].loaded), sites)
    sentences = read_lines(args.sentences)
    if not sentences:
        raise InputError(f"{args.sentences} is empty; put one sentence on each line")
    models = {
        name: Translator(path, args.data, **shared, **text_options(args))
        for name, path in zip(names, paths, strict=True)
    }
    return sentence_maps(models, models[names[0]].text.encode(sentences), sites)


def _first_of_split(loaded: Loaded) -> list[list[str]]:
    """The pieces of its first sentences, without an end of sentence."""
    dictionary, sources = loaded.task.source_dictionary, loaded.dataset.src
    return [dictionary.string(sources[i]).split() for i in range(min(FIRST, len(loaded.dataset)))]


def _short_names(paths) -> list[str]:
    """Paths without the folders that they share; a file keeps the folder that it lies in."""
    parts = [Path(path).parts for path in paths]
    shared = 0
    while all(len(part) > shared + 2 for part in parts) and len({part[shared] for part in parts}) == 1:
        shared += 1
    return ["/".join(part[shared:]) for part in parts]


def _logs_beside(paths) -> list[str]:
    """The logs of the trainings that made the checkpoints, where they lie in the same folder."""
    logs = dict.fromkeys(Path(path).parent / "train.log" for path in paths)
    return [str(log) for log in logs if log.is_file()]


def _figures(rows: list[Row], curves: dict[str, Curves], maps: dict | None) -> Iterator[tuple]:
    """Every static figure with its name; of the maps those of the first sentence."""
    if rows:
        yield "bleu", bleu_bars(rows)
    if curves:
        yield "loss", loss_curves(curves)
    if maps:
        of_all = (map_ for of_model in maps["sentences"][0]["maps"] for map_ in of_model)
        for site, layer in dict.fromkeys((map_["site"], map_["layer"]) for map_ in of_all):
            yield f"maps-{site}-layer-{layer}", map_grid(maps, 0, site, layer)
