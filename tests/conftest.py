"""What every test runs under: one thread and the same random numbers."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Every test draws the same numbers, alone or among others."""
    torch.manual_seed(0)
