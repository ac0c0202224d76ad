"""Multilingual models, of fairseq's task ``translation_multi_simple_epoch``.

Symbols in the input tell such a model the source and the target language.

The dictionaries are those of the data folder plus a symbol for each language. The source may begin with such a symbol
(``--encoder-langtok``), and so may the target (``--decoder-langtok``).
"""

from argparse import Namespace

from fairseq.tasks import FairseqTask
from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask

from fairseq_lot.errors import InputError


def is_multilingual(saved: dict) -> bool:
    """Whether a checkpoint's task options are of this task."""
    return saved.get("task", saved.get("_name")) == "translation_multi_simple_epoch"


def set_up(options: dict) -> FairseqTask:
    """The task with these options, set up for one pair of languages as by ``fairseq-generate``.

    Raises:
        InputError: the model does not know a language, or was trained with ``--lang-tok-replacing-bos-eos``.
    """
    if options.get("lang_tok_replacing_bos_eos"):
        raise InputError("--lang-tok-replacing-bos-eos works only with fairseq's own commands; use fairseq-generate")
    task = TranslationMultiSimpleEpochTask.setup_task(Namespace(**options))
    task.cfg = task.args  # the attribute of the task ``translation``
    return task


def source_symbols(task: FairseqTask) -> list[int]:
    """Dictionary indices that each source starts with: one language symbol, or none."""
    if not isinstance(task, TranslationMultiSimpleEpochTask):
        return []
    spec, _ = task.args.langtoks["main"]
    symbol = spec and task.data_manager.get_encoder_langtok(task.args.source_lang, task.args.target_lang, spec)
    return [symbol] if symbol else []


def language_symbols(task: FairseqTask) -> set[int]:
    """Dictionary indices of the language symbols that sources and targets start with; they are not text."""
    if not isinstance(task, TranslationMultiSimpleEpochTask):
        return set()
    _, spec = task.args.langtoks["main"]
    symbol = spec and task.data_manager.get_decoder_langtok(task.args.target_lang, spec)
    return {*source_symbols(task), symbol} - {None}
