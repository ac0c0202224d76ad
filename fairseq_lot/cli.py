"""The ``fairseq-lot`` command: one subcommand per tool, each imported only when it is called."""

import importlib
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import NoReturn

from fairseq_lot import __version__
from fairseq_lot.errors import MISSING, InputError, is_out_of_memory

# name: (module with add_arguments(parser) and run(args), one line for --help)
COMMANDS = {
    "calibrate": ("fairseq_lot.plug_and_play.calibrate", "fit a swapped attention to softmax, without labels"),
    "check": ("fairseq_lot.pretrained.check", "check a checkpoint and a data folder before a long run"),
    "compare": ("fairseq_lot.evaluation.compare", "test the differences between several systems, pair by pair"),
    "diagnose": ("fairseq_lot.inspection.diagnose", "measure the attention of a checkpoint, head by head"),
    "documents": ("fairseq_lot.corpus.documents", "join encoded sentences to documents for training and testing"),
    "encode": ("fairseq_lot.corpus.encode", "learn a joint BPE on a tokenised text and apply it"),
    "iwslt14": ("fairseq_lot.corpus.iwslt14", "extract the raw IWSLT'14 De-En archive into plain text"),
    "libreoffice": ("fairseq_lot.corpus.libreoffice", "split LibreOffice's help by pages into plain text"),
    "report": ("fairseq_lot.inspection.report", "show results, curves and attention maps on one HTML page"),
    "score": ("fairseq_lot.evaluation.score", "score the output of fairseq-generate with sacreBLEU, as one JSON line"),
    "sweep": ("fairseq_lot.plug_and_play.sweep", "compare many ways to swap the attention of one model or several"),
    "swap": ("fairseq_lot.plug_and_play.swap", "swap the attention of a trained checkpoint (plug-and-play)"),
    "table": ("fairseq_lot.evaluation.table", "print scored systems as a Markdown table"),
    "tokenise": ("fairseq_lot.corpus.tokenise", "Moses-tokenise and lower-case raw text"),
    "translate": ("fairseq_lot.pretrained.translate", "translate typed or piped sentences, with one model or two"),
}


class OneLineParser(ArgumentParser):
    """A command-line parser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser(command: str | None = None) -> ArgumentParser:
    """The parser of all subcommands. Only ``command`` gets its options, so that no other module is imported.

    Args:
        command: name of a subcommand; None: no subcommand gets its options.
    """
    parser = OneLineParser(prog="fairseq-lot", description=__doc__)
    parser.add_argument("--version", action="version", version=f"fairseq-lot {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == command:
            module = importlib.import_module(module_name)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit code (0 done, 2 wrong usage or bad input)."""
    argv = sys.argv[1:] if argv is None else argv
    command = next((word for word in argv if not word.startswith("-")), None)
    return run(lambda: build_parser(command), argv)


def run(build: Callable[[], ArgumentParser], argv: Sequence[str], name: str = "fairseq-lot") -> int:
    """Parse a command line and run the command; errors become one line on stderr.

    Args:
        build: makes the parser, which sets ``run``, a function of the parsed arguments.
        argv: the command line, without the program.
        name: the program's name, for messages.

    Returns:
        The exit code: 0 done, 2 wrong usage or bad input, 130 interrupted, 141 stdout was closed by its reader.
    """
    try:
        args = build().parse_args(argv)
        args.run(args)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        _forget_output()
        return 141
    except InputError as error:
        wrong = str(error)
    except ModuleNotFoundError as error:
        if error.name not in MISSING:
            raise
        wrong = MISSING[error.name]
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        wrong = f"out of memory, give smaller numbers: {error}"
    except UnicodeEncodeError as error:  # file names may be any bytes; Python has them as surrogates
        around, to = error.object[max(0, error.start - 20) : error.end + 20], error.encoding
        remedy = "valid UTF-8; rename it" if to == "utf-8" else f"{to}; set PYTHONIOENCODING=utf-8"
        wrong = f"{around!r} is not {remedy}"
    except OSError as error:  # of standard output: errors of files are InputErrors
        _forget_output()
        wrong = str(error)
    # quoted messages of other libraries may have several lines
    print(f"{name}: error: {' '.join(wrong.splitlines())}", file=sys.stderr)
    return 2


def _forget_output() -> None:
    """Redirect stdout to the null device, so that the flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
