"""The device that a command runs on."""

from argparse import ArgumentParser

import torch

from fairseq_lot.errors import InputError


def add_device_argument(parser: ArgumentParser) -> None:
    """Add ``--device``."""
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:1; default: a GPU when there is one")


def choose_device(name: str | torch.device | None = None) -> torch.device:
    """The device of this name, if it is one here; None: a GPU when there is one.

    Raises:
        InputError: there is no such device here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise InputError(f"--device must be cpu, cuda or cuda:NUMBER, not {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"--device is {name}, but this machine has {torch.cuda.device_count()} GPUs that torch can use; use cpu"
        )
    return device
