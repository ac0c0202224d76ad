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
    "documents": ("fairseq_lot.corpus.documents", "join encoded sentences to documents, to train on and to test"),
    "encode": ("fairseq_lot.corpus.encode", "learn a joint BPE on a tokenised text and apply it"),
    "iwslt14": ("fairseq_lot.corpus.iwslt14", "extract the raw IWSLT'14 De-En archive into plain text"),
    "libreoffice": ("fairseq_lot.corpus.libreoffice", "split LibreOffice's help by pages into plain text"),
    "report": ("fairseq_lot.inspection.report", "results, curves and attention maps as one page to look at"),
    "score": ("fairseq_lot.evaluation.score", "score the output of fairseq-generate with sacreBLEU, as one JSON line"),
    "sweep": ("fairseq_lot.plug_and_play.sweep", "swap the attention of a model or several in many ways, and compare"),
    "swap": ("fairseq_lot.plug_and_play.swap", "swap the attention of a pretrained checkpoint (plug-and-play)"),
    "table": ("fairseq_lot.evaluation.table", "print scored systems as a Markdown table"),
    "tokenise": ("fairseq_lot.corpus.tokenise", "Moses-tokenise and lower-case raw text"),
    "translate": ("fairseq_lot.pretrained.translate", "translate typed or piped sentences, with one model or two"),
}


class OneLineParser(ArgumentParser):
    """A parser whose errors are one line, without the usage of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser(command: str | None = None) -> ArgumentParser:
    """Return the parser; only ``command`` gets its options, so that no other module is imported."""
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
    """Call what the parser's ``run`` names; return the exit code, after one line on stderr where something is wrong."""
    try:
        args = build().parse_args(argv)
        args.run(args)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever reads the output, such as head, has had enough
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
    except UnicodeEncodeError as error:  # names of files may be any bytes, which Python holds as surrogates
        around, to = error.object[max(0, error.start - 20) : error.end + 20], error.encoding
        remedy = "valid UTF-8; rename it" if to == "utf-8" else f"{to}; set PYTHONIOENCODING=utf-8"
        wrong = f"{around!r} is not {remedy}"
    except OSError as error:  # files have messages of their own: this is standard output
        _forget_output()
        wrong = str(error)
    # messages of other libraries, which some errors quote, may have several lines
    print(f"{name}: error: {' '.join(wrong.splitlines())}", file=sys.stderr)
    return 2


def _forget_output() -> None:
    """Let the flush at exit, which would fail again, go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
