"""Flags of fairseq's commands that the scripts look at before fairseq does."""

from argparse import ArgumentParser
from collections.abc import Sequence


def take(name: str, flags: Sequence[str], default: str = "") -> tuple[str, list[str]]:
    """The value of a flag and the other words.

    As for fairseq, the last value counts. It is empty for a flag without a value.

    Args:
        default: the value of a flag that is not there.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", dest="value", nargs="?", default=default)
    found, others = parser.parse_known_args(list(flags))
    return found.value or "", others
