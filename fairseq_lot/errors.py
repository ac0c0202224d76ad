"""What ends a command with one clear line."""

from argparse import Namespace

# packages that are no requirements of this one: how to get them
MISSING = {
    "fairseq": "fairseq is not installed; run 'pip install --no-deps fairseq==0.12.2'",
    "subword_nmt": "subword-nmt is not installed; run 'pip install subword-nmt'",
}
COUNTABLE = 2**53  # what torch and numpy can count


def flag(name: str) -> str:
    """``"lot_num_pivots" -> "--lot-num-pivots"``."""
    return "--" + name.replace("_", "-")


class InputError(ValueError):
    """Input that a person can fix: the message names the value and the way out.

    ``fairseq-lot`` prints it as one line on stderr and exits with code 2.

    Args:
        message: where ``field`` is given, it goes on from that name: "must be at least 1, got 0".
        field: the option that is wrong, by its name in Python.
    """

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message if field is None else f"{field} {message}")
        self.message, self.field = message, field

    def on_command_line(self) -> "InputError":
        """The same with the option's flag in place of its name."""
        if self.field is None:
            return self
        return InputError(f"{flag(self.field)} {self.message}")


def check_least(args: Namespace, **least: int) -> None:
    """Refuse options below their least values, or above what can be counted; one that is None was not given."""
    for name, value in least.items():
        given = getattr(args, name)
        if given is not None and not given >= value:  # also NaN
            raise InputError(f"{flag(name)} must be at least {value}, got {given}")
        if isinstance(given, int) and given > COUNTABLE:
            raise InputError(f"{flag(name)} must be at most {COUNTABLE}, got {given}")


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line, with the next one after a colon; its kind if nothing."""
    line, *others = (str(error).strip() or type(error).__name__).splitlines()
    return f"{line} {others[0].strip()}" if line.endswith(":") and others else line


def is_out_of_memory(error: Exception) -> bool:
    """Python's MemoryError, or torch's, which is a RuntimeError of the CPU or of a GPU."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error)
