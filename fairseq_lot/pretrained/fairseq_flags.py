"""Parse command lines of fairseq's own commands."""

import contextlib
import io
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from fairseq import options

from fairseq_lot.errors import InputError, first_line
from fairseq_lot.models import pluggable_transformer  # noqa: F401 - registers the architectures
from fairseq_lot.pretrained.logs import quiet


def read_flags(parser: ArgumentParser, words: Sequence[str], command: str) -> Namespace:
    """Parse a command line as fairseq's command does.

    Args:
        parser: fairseq's parser of this command.
        words: the command line, without the command.
        command: the command's name, for the message.

    Raises:
        InputError: the command would refuse the line.
    """
    with contextlib.redirect_stderr(io.StringIO()) as printed, quiet("fairseq"), quiet("fairseq_lot"):
        try:
            return options.parse_args_and_arch(parser, list(words))
        except InputError:
            raise
        except SystemExit:
            reason = printed.getvalue().strip().partition("error: ")[2]
        except Exception as error:  # from an architecture or a checkpoint
            reason = first_line(error)
    raise InputError(f"{command} refuses its flags: {' '.join(reason.split())}")
