"""Moses tokenisation of sentences, and its inverse."""

from collections.abc import Sequence

from langcodes import Language
from langcodes.tag_parser import LanguageTagError
from tqdm import tqdm


def rules_of(code: str) -> str:
    """The language code that selects Moses' rules: ``en`` for en, EN, eng, en_XX and eng_Latn, ``et`` for ekk.

    Moses knows two-letter codes in lower case. For all others it has no language-specific rules.

    Args:
        code: the language in the names of files; returned unchanged if it is not a language code.
    """
    try:
        return Language.get(code).prefer_macrolanguage().language or code
    except LanguageTagError:
        return code


def tokenise_lines(lines: Sequence[str], language: str) -> list[str]:
    """Lower-cased Moses tokens of each line, separated by single spaces, with escapes (``&apos;``)."""
    from sacremoses import MosesTokenizer  # takes half a second; not all commands need it

    tokenise = MosesTokenizer(rules_of(language)).tokenize
    shown = tqdm(lines, f"tokenising {language}", unit=" lines", disable=None, leave=False)
    return [" ".join(tokenise(line, escape=True)).lower() for line in shown]


def detokenise(lines: list[str], *, language: str) -> list[str]:
    """Undo the Moses tokenisation of each line, including escapes (``&apos;``); lower case stays."""
    from sacremoses import MosesDetokenizer

    detokenizer = MosesDetokenizer(lang=rules_of(language))
    return [detokenizer.detokenize(line.split()) for line in lines]
