"""Convert raw sentences to a model's pieces and back, by fairseq's own text encoders.

A tokenizer (fairseq's ``--tokenizer``) splits a sentence into tokens, a BPE (``--bpe``) splits tokens into pieces. Both
are taken from the options, else from the checkpoint if it has them, else they are guessed from the data folder:

- Pieces of sentencepiece begin with ``\u2581``; pieces of subword-nmt and fastBPE end with ``@@``; others are words.
- The file of the BPE is sought under its usual names.
- The tokenizer is Moses. With sentencepiece there is none if commas and full stops follow words without a space.
- Text without capitals was lower-cased. Text with quotation marks was not escaped (``&quot;``). Text with ``@-@`` was
  split at dashes.
"""

import contextlib
import io
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from fairseq.data.data_utils import post_process
from fairseq.data.encoders import BPE_REGISTRY, TOKENIZER_REGISTRY, build_bpe, build_tokenizer
from fairseq.tasks.translation import TranslationTask

from fairseq_lot.corpus.encode import MODEL_NAME, SPACE
from fairseq_lot.corpus.moses import rules_of
from fairseq_lot.errors import InputError, first_line, flag
from fairseq_lot.pretrained.loading import Loaded

_BUILDERS = {"bpe": build_bpe, "tokenizer": build_tokenizer}
_MODELS, _CODES = (MODEL_NAME, "sentencepiece.model", "spm.model"), ("code", "codes", "bpecodes", "bpe.codes")
# for each BPE: fairseq's option for its file, and the file's usual names in a data folder
_FILES = {
    "bert": ("bpe_vocab_file", ()),
    "byte_bpe": ("sentencepiece_model_path", _MODELS),
    "fastbpe": ("bpe_codes", _CODES),
    "sentencepiece": ("sentencepiece_model", _MODELS),
    "subword_nmt": ("bpe_codes", _CODES),
}
_PARTS_OF_TEXT = ("characters", "fastbpe", "sentencepiece", "subword_nmt", None)  # BPEs whose pieces are parts of text
_RARE = 1e-3  # a feature with at most this share of the text does not count in a guess
_PROBES = 500  # largest number of symbols by which a BPE is compared with a dictionary


def add_text_arguments(parser: ArgumentParser | _ArgumentGroup) -> None:
    """Add the options for the tokenizer and the BPE."""
    add = parser.add_argument
    add(
        "--bpe",
        choices=sorted(BPE_REGISTRY),
        help="fairseq's BPE; default: the checkpoint's, else guessed from the pieces in the dictionary",
    )
    add(
        "--bpe-codes",
        metavar="FILE",
        help="file with the BPE's codes or model; default: the checkpoint's, else one of these in the data folder: "
        f"{', '.join(_MODELS + _CODES)}",
    )
    add(
        "--tokenizer",
        choices=sorted(TOKENIZER_REGISTRY),
        help="fairseq's tokenizer; default: the checkpoint's; else moses, or none if sentencepiece's pieces show "
        "commas without a space before them; space leaves sentences as they are",
    )
    add(
        "--tokenised",
        action="store_true",
        help="sentences are tokens, lower-cased if the model's text was; translations are tokens",
    )
    add(
        "--pieces",
        action="store_true",
        help="sentences are pieces, as in the input of fairseq-preprocess; translations are tokens; no tokenizer and "
        "no BPE is used",
    )


def text_options(args: Namespace) -> dict:
    """The options of :meth:`Text.of` from a command line."""
    return {name: getattr(args, name, None) for name in ("bpe", "bpe_codes", "tokenizer", "tokenised", "pieces")}


def piece_kind(dictionary: Dictionary) -> str | None:
    """How a dictionary's pieces join to words: ``sentencepiece``, ``subword_nmt``, or None if they are words.

    The names are fairseq's, as for :meth:`Dictionary.string`.
    """
    shares = {
        "sentencepiece": _share(dictionary, lambda symbol: symbol.startswith(SPACE)),
        "subword_nmt": _share(dictionary, lambda symbol: symbol.endswith("@@") and symbol != "@@"),
    }
    kind = max(shares, key=shares.__getitem__)
    return kind if shares[kind] > _RARE else None


def joins(name: str, kind: str | None) -> bool:
    """Whether fairseq's ``--remove-bpe NAME`` joins pieces of this kind to words, see :func:`piece_kind`."""
    name = "subword_nmt" if name in ("@@ ", "@@") else name
    return name == kind or (kind is None and name in ("subword_nmt", "none"))


@dataclass(frozen=True)
class Text:
    """The text encoding of a model.

    Attributes:
        tokenizer: fairseq's tokenizer; None: sentences are tokens already, and translations stay tokens.
        bpe: fairseq's BPE; None: tokens are pieces.
        lower: sentences are lower-cased.
        joined: how pieces of a translation join to words if ``bpe`` is None, see :func:`piece_kind`.
        known: a dictionary that must have at least half of each sentence's pieces; None: no check.
    """

    tokenizer: Any
    bpe: Any
    lower: bool
    joined: str | None
    known: Dictionary | None = None

    @classmethod
    def of(
        cls,
        loaded: Loaded,
        *,
        bpe: str | None = None,
        bpe_codes: str | Path | None = None,
        tokenizer: str | None = None,
        tokenised: bool = False,
        pieces: bool = False,
    ) -> "Text":
        """The encoding of a model's text; arguments that are None are found as this module says.

        Args:
            loaded: the model with its data.
            bpe, tokenizer: names of fairseq's encoders.
            bpe_codes: file with the codes or the model of the BPE.
            tokenised: sentences are tokens already.
            pieces: sentences are pieces already.

        Raises:
            InputError: an encoder is unknown, lacks its file or package, makes pieces that the model does not know, or
                is given together with ``pieces``.
        """
        task = loaded.task
        if pieces:
            others = {"bpe": bpe, "bpe_codes": bpe_codes, "tokenizer": tokenizer, "tokenised": tokenised}
            given = ", ".join(flag(name) for name, value in others.items() if value)
            if given:
                raise InputError(f"{given} cannot be used with --pieces; leave out one of both")
            return cls.of_pieces(task, known=task.source_dictionary)
        saved = {kind: loaded.encoders.get(kind, {}) for kind in _BUILDERS}
        names = {"bpe": bpe or saved["bpe"].get("_name") or piece_kind(task.source_dictionary), "tokenizer": None}
        if not tokenised:
            guess = _guess_tokenizer(names["bpe"], bool(saved["bpe"]) and bpe is None, task.source_dictionary)
            names["tokenizer"] = tokenizer or saved["tokenizer"].get("_name") or guess
        of_training = {kind: saved[kind] if saved[kind].get("_name") == name else {} for kind, name in names.items()}
        spelt = _symbols(task.source_dictionary) if names["bpe"] in _PARTS_OF_TEXT else []
        words, parts = None, None
        if names["bpe"] is not None or bpe_codes is not None:
            guessed = bpe is None and not of_training["bpe"]
            parts = _build_bpe(names["bpe"] or "", bpe_codes, of_training["bpe"], task, guessed=guessed)
        if names["tokenizer"] is not None:
            pair = {f"{side}_lang": rules_of(getattr(task.cfg, f"{side}_lang")) for side in ("source", "target")}
            words = _build("tokenizer", names["tokenizer"], (of_training["tokenizer"] or _moses_options(spelt)) | pair)
        lower = not tokenised and bool(spelt) and _is_lower_cased(task.source_dictionary)
        return cls(words, parts, lower, piece_kind(task.target_dictionary))

    @classmethod
    def of_pieces(cls, task: TranslationTask, known: Dictionary | None = None) -> "Text":
        """The encoding for sentences that are pieces already. Pieces of translations are joined to tokens.

        Args:
            task: gives the target dictionary.
            known: see :class:`Text`.
        """
        return cls(None, None, False, piece_kind(task.target_dictionary), known)

    def encode(self, sentences: Sequence[str], first_line: int = 1) -> list[list[str]]:
        """The pieces of each sentence, without the end of sentence; empty for a blank one.

        Args:
            sentences: the sentences.
            first_line: number of the first sentence, for messages.

        Raises:
            InputError: with ``known``, most pieces of a sentence are not in that dictionary.
        """
        encoded = [self._encode(sentence).split() for sentence in sentences]
        if self.known is not None:
            for line, pieces in enumerate(encoded, start=first_line):
                unknown = [piece for piece in pieces if self.known.index(piece) == self.known.unk()]
                if 2 * len(unknown) > len(pieces):
                    raise InputError(
                        f"line {line}: {len(unknown)} of {len(pieces)} pieces are not in the dictionary, such as "
                        f"{unknown[0]!r:.60}; --pieces needs sentences as in the input of fairseq-preprocess"
                    )
        return encoded

    def _encode(self, line: str) -> str:
        if self.tokenizer is not None:
            line = self.tokenizer.encode(line)
        if self.lower:
            line = line.lower()
        return line if self.bpe is None else self.bpe.encode(line)

    def decode(self, pieces: str) -> str:
        """The sentence for these pieces, which are separated by spaces."""
        tokens = post_process(pieces, self.joined) if self.bpe is None else self.bpe.decode(pieces)
        return tokens if self.tokenizer is None else self.tokenizer.decode(tokens)


def _symbols(dictionary: Dictionary) -> list[str]:
    """The symbols of a dictionary, without fairseq's special ones."""
    return dictionary.symbols[dictionary.nspecial :]


def _share(dictionary: Dictionary, condition: Callable[[str], bool]) -> float:
    """Share of the text in symbols that meet the condition, by the dictionary's counts."""
    symbols = zip(_symbols(dictionary), dictionary.count[dictionary.nspecial :], strict=True)
    counts = {symbol: max(count, 1) for symbol, count in symbols}
    return sum(count for symbol, count in counts.items() if condition(symbol)) / max(sum(counts.values()), 1)


def _guess_tokenizer(bpe: str | None, is_saved: bool, dictionary: Dictionary) -> str | None:
    """The tokenizer if options and checkpoint name none: Moses, or None if the text was not tokenised.

    Args:
        bpe: the name of the BPE.
        is_saved: the checkpoint names the BPE. If it then names no tokenizer, there was none.
        dictionary: dictionary of the source.
    """
    reads_raw_text = bpe == "sentencepiece" and _is_raw(dictionary)
    return None if is_saved or reads_raw_text else "moses"


def _is_lower_cased(dictionary: Dictionary) -> bool:
    """Whether the text was lower-cased: symbols with capitals are rare."""
    return _share(dictionary, lambda symbol: symbol != symbol.lower()) <= _RARE


def _is_raw(dictionary: Dictionary) -> bool:
    """Whether sentencepiece was trained on untokenised text: commas and full stops have no space before them.

    False if unknown: all counts of the dictionary are equal, or these marks are rare.
    """
    inside, apart = (_share(dictionary, symbols.__contains__) for symbols in (",.", (SPACE, f"{SPACE},", f"{SPACE}.")))
    return len(set(dictionary.count[dictionary.nspecial :])) > 1 and inside > max(apart, _RARE)


def _moses_options(spelt: list[str]) -> dict[str, bool]:
    """The options of Moses, guessed from a dictionary's symbols."""
    return {
        "moses_no_dash_splits": not any("@-@" in symbol for symbol in spelt),
        "moses_no_escape": any(mark in symbol for symbol in spelt for mark in "'\""),
    }


def _build_bpe(name: str, codes: str | Path | None, of_training: dict, task: TranslationTask, *, guessed: bool) -> Any:
    """Build a BPE and compare it with the dictionary.

    Args:
        name: name of fairseq's encoder.
        codes: its file; None: the training's file, else one in the data folder.
        of_training: the encoder's options in the checkpoint.
        task: with the data folder and the dictionary.
        guessed: the name was guessed from the pieces, so subword_nmt may also be fastbpe.
    """
    option, usual = _FILES.get(name, ("", ()))
    file = None if codes is None else Path(codes)
    if file is not None and not option:
        raise InputError(f"--bpe-codes needs --bpe; give one of {', '.join(sorted(_FILES))}")
    if file is not None and not file.is_file():
        raise InputError(f"--bpe-codes {file} does not exist; give an existing file")
    if file is None and option:
        saved = [Path(of_training[option])] if isinstance(of_training.get(option), str) else []
        beside = [Path(task.cfg.data) / name for name in (*(path.name for path in saved), *usual)]
        file = next((path for path in [*saved, *beside] if path.is_file()), None)
        if file is None and usual:
            raise InputError(
                f"{task.cfg.data} has no {usual[0]} (nor {', '.join(usual[1:])}), which {name} needs to encode "
                "sentences; copy there the file that encoded its text, or give it by --bpe-codes"
            )
    options = of_training | {"sentencepiece_enable_sampling": False}  # sampling is for training
    if file is not None:
        options[option] = str(file)
        # lines of fastBPE's codes have a count as third word, subword-nmt's do not
        if guessed and name == "subword_nmt" and len(file.read_bytes().partition(b"\n")[0].split()) == 3:
            name = "fastbpe"
    bpe = _build("bpe", name, options, file)
    _compare(bpe, file or f"--bpe {name}", task)
    return bpe


def _build(kind: str, name: str, options: dict, file: str | Path | None = None) -> Any:
    """Build one of fairseq's encoders.

    Args:
        kind: ``bpe`` or ``tokenizer``.
        name: of the encoder.
        options: of the encoder.
        file: its file, for the message.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return _BUILDERS[kind](Namespace(**{**options, kind: name}))
    except (Exception, SystemExit) as error:  # a bad file leads to errors of any type; subword-nmt exits
        reason = said.getvalue().strip().splitlines()[0] if said.getvalue().strip() else first_line(error)
        what = f"--{kind} {name}" if file is None else f"{file}, --{kind} {name}"
        raise InputError(f"{what} cannot be used: {reason}") from error


def _compare(bpe: Any, file: str | Path, task: TranslationTask) -> None:
    """Raise InputError if a BPE does not fit the dictionary.

    The text of the longest symbols is encoded again; the dictionary must have at least half of the resulting pieces.
    """
    dictionary = task.source_dictionary
    try:
        spelt = [bpe.decode(symbol) for symbol in _symbols(dictionary) if not symbol.startswith("madeupword")]
        longest = sorted(spelt, key=len, reverse=True)[: min(_PROBES, 1 + len(spelt) // 4)]
        pieces = [piece for text in longest for piece in bpe.encode(text).split()]
    except Exception as error:  # e.g. an encoder of numbers gets words
        raise InputError(f"{file} does not fit {task.cfg.data}: {first_line(error)}") from error
    unknown = sum(dictionary.index(piece) == dictionary.unk() for piece in pieces)
    if 2 * unknown > len(pieces):
        raise InputError(
            f"{file} does not fit {task.cfg.data}: {unknown} of {len(pieces)} of its pieces are not in "
            f"dict.{task.cfg.source_lang}.txt; give the file that encoded its text"
        )
