"""Moses tokens: made from sentences, and undone."""

from collections.abc import Sequence

from langcodes import Language
from langcodes.tag_parser import LanguageTagError
from tqdm import tqdm


def rules_of(code: str) -> str:
    """The language by whose rules Moses goes: ``en`` for en, EN, eng, en_XX and eng_Latn, ``et`` for ekk.

    Moses knows two-letter codes in small letters. It treats all others as no language in particular.

    Args:
        code: by which the files of a language are named; it need not be a language code.
    """
    try:
        return Language.get(code).prefer_macrolanguage().language or code
    except LanguageTagError:
        return code


def tokenise_lines(lines: Sequence[str], language: str) -> list[str]:
    """Return each line as lower-cased Moses tokens with escapes (``&apos;``), separated by single spaces."""
    from sacremoses import MosesTokenizer  # half a second, which commands that only read rules need not wait

    tokenise = MosesTokenizer(rules_of(language)).tokenize
    shown = tqdm(lines, f"tokenising {language}", unit=" lines", disable=None, leave=False)
    return [" ".join(tokenise(line, escape=True)).lower() for line in shown]


def detokenise(lines: list[str], *, language: str) -> list[str]:
    """Undo Moses tokenisation and its escapes (``&apos;`` and the like) with sacremoses."""
    from sacremoses import MosesDetokenizer

    detokenizer = MosesDetokenizer(lang=rules_of(language))
    return [detokenizer.detokenize(line.split()) for line in lines]
