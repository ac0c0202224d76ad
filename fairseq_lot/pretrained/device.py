"""The device that a command runs on."""

from argparse import ArgumentParser

import torch

from fairseq_lot.errors import InputError, first_line


def add_device_argument(parser: ArgumentParser) -> None:
    """Add ``--device``."""
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:1; default: a GPU when there is one")


def describe_device(cpu: bool = False) -> str:
    """The name of the GPU, or the CPU with its threads; ``cpu``: a GPU is not used."""
    if torch.cuda.is_available() and not cpu:
        return torch.cuda.get_device_name()
    return f"CPU, threads: {torch.get_num_threads()}"


def choose_device(name: str | torch.device | None = None) -> torch.device:
    """The device of this name, if it is one here; None: a GPU when there is one.

    Raises:
        InputError: there is no such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros((), device=name).item()
    except Exception as error:  # of a kind for each device
        way_out = "give cpu, cuda or cuda:NUMBER"
        raise InputError(f"--device {name!r} cannot be used here: {first_line(error)}; {way_out}") from error
    return torch.device(name)
