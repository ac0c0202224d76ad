"""Models of fairseq's task ``translation_multi_simple_epoch``: symbols tell them which languages they read and write.

The dictionaries of such a task are those of the data folder with a symbol for every language. The source may begin with
one (``--encoder-langtok``), and so may the target (``--decoder-langtok``).
"""

from argparse import Namespace

from fairseq.tasks import FairseqTask
from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask

from fairseq_lot.errors import InputError


def is_multilingual(saved: dict) -> bool:
    """Whether this is the task, by its saved options."""
    return saved.get("task", saved.get("_name")) == "translation_multi_simple_epoch"


def set_up(options: dict) -> FairseqTask:
    """The task with these options, as ``fairseq-generate`` sets it up for one pair of languages.

    Raises:
        InputError: languages that the model does not know, or symbols in the place of the end of sentence.
    """
    if options.get("lang_tok_replacing_bos_eos"):
        raise InputError("--lang-tok-replacing-bos-eos is known to fairseq's own commands alone; use fairseq-generate")
    task = TranslationMultiSimpleEpochTask.setup_task(Namespace(**options))
    task.cfg = task.args  # where the task ``translation`` has its options
    return task


def source_symbols(task: FairseqTask) -> list[int]:
    """What every source begins with."""
    if not isinstance(task, TranslationMultiSimpleEpochTask):
        return []
    spec, _ = task.args.langtoks["main"]
    symbol = spec and task.data_manager.get_encoder_langtok(task.args.source_lang, task.args.target_lang, spec)
    return [symbol] if symbol else []


def language_symbols(task: FairseqTask) -> set[int]:
    """The symbols before sources and targets, which spell no word."""
    if not isinstance(task, TranslationMultiSimpleEpochTask):
        return set()
    _, spec = task.args.langtoks["main"]
    symbol = spec and task.data_manager.get_decoder_langtok(task.args.target_lang, spec)
    return {*source_symbols(task), symbol} - {None}
