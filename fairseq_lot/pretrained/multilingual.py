"""Models of fairseq's task ``translation_multi_simple_epoch``: symbols tell them the languages to read and write.

The dictionaries are those of the data folder plus a symbol for each language. The source may begin with such a symbol
(``--encoder-langtok``), and so may the target (``--decoder-langtok``).
"""

from argparse import Namespace

from fairseq.tasks import FairseqTask
from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask

from fairseq_lot.errors import InputError


def is_multilingual(saved: dict) -> bool:
    """Whether the saved options are of this task."""
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
    """Indices of the symbols at the start of each source; empty or the symbol of a language."""
    if not isinstance(task, TranslationMultiSimpleEpochTask):
        return []
    spec, _ = task.args.langtoks["main"]
    symbol = spec and task.data_manager.get_encoder_langtok(task.args.source_lang, task.args.target_lang, spec)
    return [symbol] if symbol else []


def language_symbols(task: FairseqTask) -> set[int]:
    """Indices of the language symbols at the start of sources and targets; they are not text."""
    if not isinstance(task, TranslationMultiSimpleEpochTask):
        return set()
    _, spec = task.args.langtoks["main"]
    symbol = spec and task.data_manager.get_decoder_langtok(task.args.target_lang, spec)
    return {*source_symbols(task), symbol} - {None}
