"""The two languages of a model: from the command line, else the checkpoint, else the names of the data's files."""

import re
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from pathlib import Path

from fairseq_lot.errors import InputError
from fairseq_lot.pretrained.checkpoint import Checkpoint
from fairseq_lot.pretrained.multilingual import is_multilingual

Pair = tuple[str, str]


def add_language_arguments(parser: ArgumentParser | _ArgumentGroup) -> None:
    """Add ``--source-lang`` and ``--target-lang``."""
    for side in ("source", "target"):
        text = f"{side} language; default: the checkpoint's, else from the file names of DATA (train.de-en.de.idx)"
        parser.add_argument(f"--{side}-lang", metavar="LANG", help=text)


def typed_pair(args: Namespace) -> Pair | None:
    """The languages on the command line, or None; InputError if only one is given."""
    pair = args.source_lang, args.target_lang
    if pair == (None, None):
        return None
    if None in pair:
        raise InputError("--source-lang and --target-lang go together; give both or neither")
    return pair


def with_languages(state: Checkpoint, pair: Pair | None) -> Checkpoint:
    """The checkpoint with these languages in its task; unchanged without a pair.

    Raises:
        InputError: the pair is the opposite of the trained direction.
    """
    if pair is None:
        return state
    saved = state.task_options()
    trained = saved.get("source_lang"), saved.get("target_lang")
    if trained == pair[::-1] != pair and not is_multilingual(saved):
        target, source = pair
        way_out = f"give --source-lang {source} --target-lang {target}"
        raise InputError(f"{state.path} translates {source} to {target}, not {target} to {source}; {way_out}")
    state = state.with_own_arguments()
    task = state.settings("task")
    (task if isinstance(task, dict) else vars(task)).update(source_lang=pair[0], target_lang=pair[1])
    return state


def languages(saved: dict, data: str | Path, path: str | Path | None) -> Pair:
    """Source and target language: from the checkpoint's task, else from the file names of the data folder.

    Args:
        saved: options of the checkpoint's task.
        data: the data folder.
        path: of the checkpoint, for messages.

    Raises:
        InputError: neither has them, or the folder has several pairs.
    """
    source, target = saved.get("source_lang"), saved.get("target_lang")
    if isinstance(source, str) and isinstance(target, str):
        return source, target
    if not Path(data).is_dir():
        raise InputError(f"there is no folder {data}; give a folder made by fairseq-preprocess")
    pairs = pairs_in(data)
    if len(pairs) == 1:
        return pairs[0]
    if pairs:
        found = f"{data} has {' and '.join(map('-'.join, pairs))}"
    else:
        found = f"no languages in {path or 'a checkpoint'} or the names of files in {data} (as train.de-en.de.idx)"
    raise InputError(f"{found}; give the languages by --source-lang and --target-lang")


def pairs_in(data: str | Path) -> list[Pair]:
    """The language pairs of a data folder, from the names ``SPLIT.SOURCE-TARGET.LANGUAGE.idx``."""
    names = (re.fullmatch(r"[^.]+\.([^.]+)-([^.]+)\.(?:\1|\2)\.idx", file.name) for file in Path(data).iterdir())
    return sorted({(name[1], name[2]) for name in names if name})
