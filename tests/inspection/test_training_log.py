"""Curves from the logs of fairseq-train."""

import pytest

from fairseq_lot.errors import InputError
from fairseq_lot.inspection.training_log import Curves, read_curves

SIMPLE = """\
num. shared model params: 1,503,744 (num. trained: 1,503,744)
epoch 001:    100 / 529 loss=10.983, nll_loss=10.791, ppl=1771.47, wps=6821.2, num_updates=100, lr=0.000375
2026-01-01 10:00:00 | INFO | train_inner | epoch 001:    200 / 529 loss=9.4, nll_loss=8.961, num_updates=200, lr=1e-05
epoch 001 | valid on 'valid' subset | loss 7.429 | nll_loss 6.634 | ppl 99.33 | num_updates 529
epoch 001 | valid on 'valid' subset | loss 7.429 | nll_loss 6.634 | ppl 99.33 | num_updates 529
epoch 001 | loss 8.98 | nll_loss 8.451 | ppl 349.9 | num_updates 529 | lr 0.00198375
"""


JSON = """\
2026-01-01 | INFO | train | {"epoch": 1, "update": 0.2, "loss": "10.983", "nll_loss": "10.791", "num_updates": "100"}
2026-01-01 | INFO | train | {"epoch": 1, "valid_loss": "7.429", "valid_nll_loss": "6.634", "valid_num_updates": "529"}
2026-01-01 | INFO | train | {"epoch": 1, "train_loss": "8.98", "train_nll_loss": "8.451", "train_num_updates": "529"}
2026-01-01 | INFO | train | {"epoch": 2, "loss": "nan", "nll_loss": "nan", "num_updates": "600"}
{broken}
"""
SECOND_SET = "epoch 001 | valid on 'test' subset | loss 9.9 | nll_loss 9.9 | ppl 955.4 | num_updates 529\n"
CROSS_ENTROPY = """\
x | INFO | train_inner | {"epoch": 1, "loss": "9.5", "num_updates": "10"}
epoch 001 | valid on 'valid' subset | loss 8.5 | ppl 99.33 | num_updates 20
"""


@pytest.mark.parametrize(
    ("log", "train", "valid"),
    [
        (SIMPLE, {100: 10.791, 200: 8.961}, {529: 6.634}),
        (SIMPLE + SECOND_SET, {100: 10.791, 200: 8.961}, {529: 6.634}),
        (JSON, {100: 10.791}, {529: 6.634}),
        (CROSS_ENTROPY, {10: 9.5}, {20: 8.5}),
    ],
    ids=["simple", "first-of-two-sets", "json", "loss-alone"],
)
def test_losses_are_read_from_every_format_of_log(log, train, valid, tmp_path):
    (tmp_path / "train.log").write_text(log)
    assert read_curves(tmp_path / "train.log") == Curves(train, valid)


def test_a_file_that_is_not_a_log_is_refused(tmp_path):
    (tmp_path / "other.txt").write_text("epoch of the dinosaurs\n")
    for name in ("other.txt", "gone.log"):
        with pytest.raises(InputError, match=name):
            read_curves(tmp_path / name)
