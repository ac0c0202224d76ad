"""The same seed gives the same bits."""

import pytest

from tests.end_to_end.conftest import differing, train


@pytest.mark.fast_if(lambda family: family == "lot")
@pytest.mark.parametrize("family", ("lot", "esp", "near_far", "set", "sinkhorn", "softmax", "diff"))
def test_same_seed_same_bits(family, data, tmp_path):
    """This holds in one process, with dropout; another seed gives another model."""
    paths = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        flags = ("--arch", f"{family}_transformer_small", "--dropout", 0.3, "--attention-dropout", 0.1, "--seed", seed)
        flags += ("--encoder-layers", 1, "--decoder-layers", 1)
        paths.append(train(data / "bin", tmp_path / name, *flags, updates=4))
    assert not differing(paths[0], paths[1])
    assert differing(paths[0], paths[2])
