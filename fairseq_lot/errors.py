"""The exception that ends a command with one clear line."""


class InputError(ValueError):
    """Input that a person can mend: the message names the value and the way out.

    ``fairseq-lot`` prints it as one line on stderr and exits with code 2.
    """
