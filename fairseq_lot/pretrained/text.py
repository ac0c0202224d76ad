"""From a sentence as people write it to a model's pieces and back, through fairseq's own encoders.

A sentence is split into tokens (fairseq's ``--tokenizer``), and those into pieces (``--bpe``). What did that with the
text of a model is known from the options, else from the checkpoint if its training was told, else from the data folder:

- Sentencepiece's pieces begin with ``\u2581``, those of subword-nmt and fastBPE end with ``@@``, others are words.
  The file that made them is looked for under its usual names. The tokenizer is then Moses, but for sentencepiece where
  commas and full stops go on the words before them.
- Text without capitals was lower-cased, text with quotation marks was not escaped (``&quot;``), text with ``@-@`` was
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
# of each BPE: the option of fairseq that names its file, and the names that the file usually has in a data folder
_FILES = {
    "bert": ("bpe_vocab_file", ()),
    "byte_bpe": ("sentencepiece_model_path", _MODELS),
    "fastbpe": ("bpe_codes", _CODES),
    "sentencepiece": ("sentencepiece_model", _MODELS),
    "subword_nmt": ("bpe_codes", _CODES),
}
_PARTS_OF_TEXT = ("characters", "fastbpe", "sentencepiece", "subword_nmt", None)  # BPEs whose pieces spell it
_RARE = 1e-3  # share of the text up to which a look does not count
_PROBES = 500  # symbols by which a BPE and a dictionary are compared, at most


def add_text_arguments(parser: ArgumentParser | _ArgumentGroup) -> None:
    """Add the options that say how sentences become pieces."""
    add = parser.add_argument
    add(
        "--bpe",
        choices=sorted(BPE_REGISTRY),
        help="fairseq's encoder of pieces; default: the checkpoint's, else by the look of the pieces in the dictionary",
    )
    add(
        "--bpe-codes",
        metavar="FILE",
        help="its codes or model; default: the checkpoint's, else one of the usual names in the data folder: "
        f"{', '.join(_MODELS + _CODES)}",
    )
    add(
        "--tokenizer",
        choices=sorted(TOKENIZER_REGISTRY),
        help="fairseq's encoder of tokens; default: the checkpoint's; else moses, but none where sentencepiece's "
        "pieces show commas on words; space leaves sentences as they are",
    )
    add(
        "--tokenised",
        action="store_true",
        help="sentences are tokens already, lower-cased if the model's text was, and translations stay tokens",
    )
    add(
        "--pieces",
        action="store_true",
        help="sentences are in pieces already, as fairseq-preprocess took them; no tokenizer and no BPE is used, and "
        "translations are tokens",
    )


def text_options(args: Namespace) -> dict:
    """What :meth:`Text.of` takes, from a command line."""
    return {name: getattr(args, name, None) for name in ("bpe", "bpe_codes", "tokenizer", "tokenised", "pieces")}


def piece_kind(dictionary: Dictionary) -> str | None:
    """How a dictionary's pieces join to words: ``sentencepiece``, ``subword_nmt``, or None where they are words.

    The names are fairseq's, as :meth:`Dictionary.string` takes them.
    """
    shares = {
        "sentencepiece": _share(dictionary, lambda symbol: symbol.startswith(SPACE)),
        "subword_nmt": _share(dictionary, lambda symbol: symbol.endswith("@@") and symbol != "@@"),
    }
    kind = max(shares, key=shares.__getitem__)
    return kind if shares[kind] > _RARE else None


def joins(name: str, kind: str | None) -> bool:
    """Whether fairseq's ``--remove-bpe NAME`` makes words of pieces of this kind, see :func:`piece_kind`."""
    name = "subword_nmt" if name in ("@@ ", "@@") else name
    return name == kind or (kind is None and name in ("subword_nmt", "none"))


@dataclass(frozen=True)
class Text:
    """How the text of a model was encoded, and how its translations are decoded.

    Attributes:
        tokenizer: fairseq's; None: sentences come as tokens already, and translations stay such tokens.
        bpe: fairseq's; None: tokens are the pieces.
        lower: sentences are lower-cased.
        joined: how pieces of a translation join to words where there is no ``bpe``, see :func:`piece_kind`.
        known: dictionary that has to know most pieces of a sentence, which come from outside; None: no look is taken.
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
        """The encoding of a model's text; what is None is found as this module says.

        Args:
            bpe, tokenizer: names of fairseq's encoders.
            bpe_codes: codes or model of the BPE.
            tokenised: sentences are tokens already.
            pieces: sentences are in pieces already.

        Raises:
            InputError: an encoder is unknown, lacks its file or package, makes pieces that the model does not know, or
                is named although there are pieces already.
        """
        task = loaded.task
        if pieces:
            others = {"bpe": bpe, "bpe_codes": bpe_codes, "tokenizer": tokenizer, "tokenised": tokenised}
            given = ", ".join(flag(name) for name, value in others.items() if value)
            if given:
                raise InputError(f"{given}: with --pieces the sentences are in pieces already; leave out one of both")
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
        """Sentences that are in pieces already; translations become tokens."""
        return cls(None, None, False, piece_kind(task.target_dictionary), known)

    def encode(self, sentences: Sequence[str], first_line: int = 1) -> list[list[str]]:
        """The pieces of each sentence, without an end of sentence; none for a blank one.

        Raises:
            InputError: most of what should be a sentence's pieces are none; ``first_line`` numbers the first sentence.
        """
        encoded = [self._encode(sentence).split() for sentence in sentences]
        if self.known is not None:
            for line, pieces in enumerate(encoded, start=first_line):
                unknown = [piece for piece in pieces if self.known.index(piece) == self.known.unk()]
                if 2 * len(unknown) > len(pieces):
                    raise InputError(
                        f"line {line}: {len(unknown)} of {len(pieces)} pieces are not in the dictionary, such as "
                        f"{unknown[0]!r:.60}; --pieces is for sentences as fairseq-preprocess took them"
                    )
        return encoded

    def _encode(self, line: str) -> str:
        if self.tokenizer is not None:
            line = self.tokenizer.encode(line)
        if self.lower:
            line = line.lower()
        return line if self.bpe is None else self.bpe.encode(line)

    def decode(self, pieces: str) -> str:
        """The sentence that these pieces, separated by spaces, spell."""
        tokens = post_process(pieces, self.joined) if self.bpe is None else self.bpe.decode(pieces)
        return tokens if self.tokenizer is None else self.tokenizer.decode(tokens)


def _symbols(dictionary: Dictionary) -> list[str]:
    """Without those that every dictionary has."""
    return dictionary.symbols[dictionary.nspecial :]


def _share(dictionary: Dictionary, condition: Callable[[str], bool]) -> float:
    """How much of the text these symbols were, by the dictionary's counts."""
    symbols = zip(_symbols(dictionary), dictionary.count[dictionary.nspecial :], strict=True)
    counts = {symbol: max(count, 1) for symbol, count in symbols}
    return sum(count for symbol, count in counts.items() if condition(symbol)) / max(sum(counts.values()), 1)


def _guess_tokenizer(bpe: str | None, is_saved: bool, dictionary: Dictionary) -> str | None:
    """The tokenizer of a training that names none: Moses, unless something shows that there was none.

    Args:
        bpe: the name of the BPE.
        is_saved: the checkpoint names the BPE; its training was told of that and of no tokenizer, so it had none.
    """
    reads_raw_text = bpe == "sentencepiece" and _is_raw(dictionary)
    return None if is_saved or reads_raw_text else "moses"


def _is_lower_cased(dictionary: Dictionary) -> bool:
    """Whether the text was lower-cased: capitals are rare."""
    return _share(dictionary, lambda symbol: symbol != symbol.lower()) <= _RARE


def _is_raw(dictionary: Dictionary) -> bool:
    """Whether sentencepiece has seen sentences as people write them: no space stands before commas and full stops.

    False where the dictionary does not say: its counts are all the same, or such marks are rare.
    """
    inside, apart = (_share(dictionary, symbols.__contains__) for symbols in (",.", (SPACE, f"{SPACE},", f"{SPACE}.")))
    return len(set(dictionary.count[dictionary.nspecial :])) > 1 and inside > max(apart, _RARE)


def _moses_options(spelt: list[str]) -> dict[str, bool]:
    """How Moses was called, as far as the symbols show it."""
    return {
        "moses_no_dash_splits": not any("@-@" in symbol for symbol in spelt),
        "moses_no_escape": any(mark in symbol for symbol in spelt for mark in "'\""),
    }


def _build_bpe(name: str, codes: str | Path | None, of_training: dict, task: TranslationTask, *, guessed: bool) -> Any:
    """The BPE of this name with its file, compared with the dictionary; ``guessed``: by the look of the pieces."""
    option, usual = _FILES.get(name, ("", ()))
    file = None if codes is None else Path(codes)
    if file is not None and not option:
        raise InputError(f"--bpe-codes belongs to one of {', '.join(sorted(_FILES))}; name it with --bpe")
    if file is not None and not file.is_file():
        raise InputError(f"there is no --bpe-codes {file}")
    if file is None and option:
        saved = [Path(of_training[option])] if isinstance(of_training.get(option), str) else []
        beside = [Path(task.cfg.data) / name for name in (*(path.name for path in saved), *usual)]
        file = next((path for path in [*saved, *beside] if path.is_file()), None)
        if file is None and usual:
            raise InputError(
                f"{task.cfg.data} has no {usual[0]} (nor {', '.join(usual[1:])}), with which {name} makes pieces of "
                "sentences; copy there what encoded its text, or name it with --bpe-codes"
            )
    options = of_training | {"sentencepiece_enable_sampling": False}  # that is for training
    if file is not None:
        options[option] = str(file)
        # codes of fastBPE have a count in each line, which subword-nmt's have not
        if guessed and name == "subword_nmt" and len(file.read_bytes().partition(b"\n")[0].split()) == 3:
            name = "fastbpe"
    bpe = _build("bpe", name, options, file)
    _compare(bpe, file or f"--bpe {name}", task)
    return bpe


def _build(kind: str, name: str, options: dict, file: str | Path | None = None) -> Any:
    """One of fairseq's encoders."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return _BUILDERS[kind](Namespace(**{**options, kind: name}))
    except (Exception, SystemExit) as error:  # whatever reading garbage raises; subword-nmt exits
        reason = said.getvalue().strip().splitlines()[0] if said.getvalue().strip() else first_line(error)
        what = f"--{kind} {name}" if file is None else f"{file}, --{kind} {name}"
        raise InputError(f"{what} cannot be used: {reason}") from error


def _compare(bpe: Any, file: str | Path, task: TranslationTask) -> None:
    """Refuse a BPE if the dictionary lacks most of what it makes of the words that the longest symbols spell."""
    dictionary = task.source_dictionary
    try:
        spelt = [bpe.decode(symbol) for symbol in _symbols(dictionary) if not symbol.startswith("madeupword")]
        longest = sorted(spelt, key=len, reverse=True)[: min(_PROBES, 1 + len(spelt) // 4)]
        pieces = [piece for text in longest for piece in bpe.encode(text).split()]
    except Exception as error:  # an encoder of numbers meets words
        raise InputError(f"{file} does not fit {task.cfg.data}: {first_line(error)}") from error
    unknown = sum(dictionary.index(piece) == dictionary.unk() for piece in pieces)
    if 2 * unknown > len(pieces):
        raise InputError(
            f"{file} does not fit {task.cfg.data}: {unknown} of {len(pieces)} pieces that it makes are not in "
            f"dict.{task.cfg.source_lang}.txt; give the one that encoded its text"
        )
