"""Errors that end a command with one clear line."""

from argparse import Namespace

# packages that are not installed with this one: how to install them
MISSING = {
    "fairseq": "fairseq is not installed; run 'pip install --no-deps fairseq==0.12.2'",
    "subword_nmt": "subword-nmt is not installed; run 'pip install subword-nmt'",
}
COUNTABLE = 2**53  # largest whole number for torch and numpy


def flag(name: str) -> str:
    """The command-line flag of an option: ``--lot-num-pivots`` for ``lot_num_pivots``."""
    return "--" + name.replace("_", "-")


class InputError(ValueError):
    """Wrong input that the user can correct: the message has the value and the way out.

    ``fairseq-lot`` prints it as one line on stderr and exits with code 2.

    Args:
        message: the whole message, or with ``field`` the text after its name: "must be at least 1, got 0".
        field: Python name of the wrong option, such as ``lot_num_pivots``; None: the error is not about an option.
    """

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message if field is None else f"{field} {message}")
        self.message, self.field = message, field

    def on_command_line(self) -> "InputError":
        """The same error, with the option's command-line flag instead of its Python name."""
        if self.field is None:
            return self
        return InputError(f"{flag(self.field)} {self.message}")


def check_least(args: Namespace, **least: int) -> None:
    """Raise InputError if an option is too small, or is a whole number above ``COUNTABLE``.

    Args:
        args: the parsed command line; options that are None are not checked.
        **least: the smallest allowed value of each option.
    """
    for name, value in least.items():
        given = getattr(args, name)
        if given is not None and not given >= value:  # also NaN
            raise InputError(f"{flag(name)} must be at least {value}, got {given}")
        if isinstance(given, int) and given > COUNTABLE:
            raise InputError(f"{flag(name)} must be at most {COUNTABLE}, got {given}")


def first_line(error: BaseException) -> str:
    """The first line of another library's error, or its type if the message is empty.

    A first line that ends with a colon is joined with the second line.
    """
    line, *others = (str(error).strip() or type(error).__name__).splitlines()
    return f"{line} {others[0].strip()}" if line.endswith(":") and others else line


def is_out_of_memory(error: Exception) -> bool:
    """Whether this is Python's MemoryError, or torch's RuntimeError for a lack of memory on a CPU or GPU."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error)
