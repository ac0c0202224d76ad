"""Helpers of the kernels' tests."""

import pytest

from fairseq_lot.kernels import choice


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel):
        self.kernel, self.launches, self.arg_names = kernel, 0, kernel.arg_names
        self.__name__ = kernel.__name__

    def __getitem__(self, grid):
        self.launches += 1
        return self.kernel[grid]


@pytest.fixture
def untested(monkeypatch):
    """No kernel has passed or failed its self-test yet."""
    monkeypatch.setattr(choice, "_tested", {})
