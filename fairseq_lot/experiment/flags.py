"""Search in flags of fairseq's commands before fairseq parses them."""

from argparse import ArgumentParser
from collections.abc import Sequence


def take(name: str, flags: Sequence[str], default: str = "") -> tuple[str, list[str]]:
    """Take a flag out of a command line.

    Args:
        name: the flag, without dashes before it.
        flags: the words of the command line.
        default: the value if the flag is absent.

    Returns:
        The flag's last value, empty for a flag without one, and the other words.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", dest="value", nargs="?", default=default)
    found, others = parser.parse_known_args(list(flags))
    return found.value or "", others
