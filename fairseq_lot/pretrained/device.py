"""The device that a command runs on."""

from argparse import ArgumentParser

import torch

from fairseq_lot.errors import InputError, first_line


def add_device_argument(parser: ArgumentParser) -> None:
    """Add ``--device``."""
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:1; default: a GPU if there is one")


def describe_device(cpu: bool = False) -> str:
    """The name of the GPU; without one, or with ``cpu``, the CPU with its number of threads."""
    if torch.cuda.is_available() and not cpu:
        return torch.cuda.get_device_name()
    return f"CPU, threads: {torch.get_num_threads()}"


def choose_device(name: str | torch.device | None = None) -> torch.device:
    """The device of this name; None: a GPU if there is one, else the CPU.

    Raises:
        InputError: this machine has no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros((), device=name).item()
    except Exception as error:  # each type of device has its own errors
        way_out = "give cpu, cuda or cuda:NUMBER"
        raise InputError(f"--device {name!r} cannot be used here: {first_line(error)}; {way_out}") from error
    return torch.device(name)
