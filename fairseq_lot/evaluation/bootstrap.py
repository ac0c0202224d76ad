"""Bootstrap of the sentences of a test set: its options, the interval, the paired test."""

import argparse
from typing import Any

import numpy as np

from fairseq_lot.errors import check_least

SAMPLES = 1000
SEED = 12345
# A difference with a smaller p-value is marked in the tables.
LEVEL = 0.05


def add_arguments(parser) -> None:
    """Add the options to a parser or a group of one."""
    parser.add_argument("--bootstrap-samples", type=int, default=SAMPLES, metavar="N", help="default: %(default)s")
    parser.add_argument("--bootstrap-seed", type=int, default=SEED, metavar="INT", help="default: %(default)s")


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments ``samples`` and ``seed``.

    Raises:
        InputError: one of the options is not as it must be.
    """
    check_least(args, bootstrap_samples=1, bootstrap_seed=0)
    return {"samples": args.bootstrap_samples, "seed": args.bootstrap_seed}


def interval(scores: np.ndarray) -> tuple[float, float]:
    """Return the bounds of the 95 % interval: one fortieth of the resamples lies outside at either end."""
    ordered = np.sort(scores)
    outside = len(ordered) // 40
    return ordered[outside], ordered[len(ordered) - outside - 1]


def paired_p_value(differences: np.ndarray, difference: float) -> float:
    """Return the two-sided p-value of a paired bootstrap test.

    It is the share of resamples whose centred difference is at least as large as the real one. sacreBLEU's
    paired test folds the differences before it centres them, which makes it one-sided for all but the
    smallest differences (its p is about half of this one), and gives two equal systems the smallest p; here
    they get 1.

    Args:
        differences: score differences on the resamples.
        difference: score difference on the test set.
    """
    reached = np.abs(differences - differences.mean()) >= abs(difference)
    return (np.count_nonzero(reached) + 1) / (len(differences) + 1)
