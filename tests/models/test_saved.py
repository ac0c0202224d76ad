"""Checkpoints of each format, read without fairseq."""

from argparse import Namespace

import pytest
import torch

from fairseq_lot.errors import InputError
from fairseq_lot.models.saved import read_saved, read_with_weights

ARGS = Namespace(arch="lot_transformer", source_lang="de")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("holder", "task"),
    [
        ({"cfg": {"model": ARGS, "task": {"source_lang": "de"}}}, {"source_lang": "de"}),
        ({"cfg": {"model": vars(ARGS), "task": None}}, {}),
        ({"cfg": None, "args": ARGS}, vars(ARGS)),  # fairseq 0.10 keeps all arguments in one namespace
    ],
)
@pytest.mark.parametrize("optimiser", [None, {"state": {}}])
def test_arguments_task_and_weights_are_read(zipped, holder, task, optimiser, tmp_path):
    path, weights = str(tmp_path / "x.pt"), {"weight": torch.ones(2)}
    content = {**holder, "model": weights, "last_optimizer_state": optimiser}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    saved = read_saved(path)
    assert (saved.path, saved.model, saved.task) == (path, ARGS, task)
    assert saved.has_optimiser is (optimiser is not None)
    args, read = read_with_weights(path)
    assert args == ARGS and torch.equal(read["weight"], weights["weight"])


@pytest.mark.parametrize("content", [b"", b"not a checkpoint\n"])
def test_a_damaged_file_is_refused_in_one_line(content, tmp_path):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(InputError, match="x.pt cannot be read as a checkpoint: ") as caught:
        read_saved(str(tmp_path / "x.pt"))
    assert "\n" not in str(caught.value)
