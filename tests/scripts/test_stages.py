"""The stage scripts with stubs of fairseq-train and fairseq-lot: their calls, what they reuse, and their errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

STUBS = {
    "fairseq-train": 'echo "$@" >>"$CALLS"',
    "fairseq-lot": 'echo "$@" >"$CALLS.lot"',
}


@pytest.fixture
def stage(tmp_path):
    """A function that runs a stage script; it returns the calls of the fairseq-train stub, and standard error."""
    (tmp_path / "bin").mkdir()
    for name, shell in STUBS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{shell}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    calls = tmp_path / "calls"

    def run(script, *words):
        calls.write_text("")
        environment = {
            "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(tmp_path), "CALLS": str(calls),
        }  # fmt: skip
        command = ["bash", str(ROOT / "scripts" / script), *map(str, words)]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=30)
        assert done.returncode == (2 if done.stderr else 0) and len(done.stderr.splitlines()) <= 1, done.stderr
        return calls.read_text().splitlines(), done.stderr

    return run


def test_plug_and_play_sh_runs_a_sweep(stage, tmp_path):
    assert stage("plug_and_play.sh", "base.pt", "data", "--try", "lot --lot-num-pivots 8", "--beam", 4) == ([], "")
    called = (tmp_path / "calls.lot").read_text()
    assert called == "sweep data --path base.pt --try lot --lot-num-pivots 8 --beam 4\n"
    _, error = stage("plug_and_play.sh", "base.pt")
    assert error == "plug_and_play.sh: error: give BASE.pt and DATA, then flags of fairseq-lot sweep\n"


def test_a_folder_belongs_to_its_data_and_flags_once_something_is_trained(stage, tmp_path):
    data, other, out, swapped = (tmp_path / name for name in ("data", "other", "out", "lot.pt"))
    assert stage("pretrain.sh", data, out) == (
        [], f"pretrain.sh: error: there is no folder {data}; make it with scripts/prepare_*.sh\n",
    )  # fmt: skip
    assert not out.exists()
    data.mkdir()
    other.mkdir()

    def trained(*words):
        """The number of trainings; after a refusal the word that follows "was trained"."""
        (out / "finished").unlink(missing_ok=True)
        calls, error = stage(*words)
        return len(calls) or error.partition("was trained ")[2].partition(" ")[0]

    assert trained("pretrain.sh", data, out, "--max-epochs", "1") == 1
    swapped.touch()
    assert trained("finetune.sh", swapped, data, out) == 1, "other words are allowed as long as nothing was trained"
    (out / "checkpoint_last.pt").touch()
    assert trained("finetune.sh", swapped, f"{data}/", out) == 1
    assert trained("finetune.sh", swapped, data, out, "--lr", "1") == "with"
    assert trained("finetune.sh", swapped, other, out) == "on"
    for name in ("dict.de.txt", "train.de-en.de.idx"):
        (data / name).write_text("der 1")
        assert "was made again since" in stage("finetune.sh", swapped, data, out)[1]
        (data / name).unlink()
    (out / "data").unlink()
    assert trained("finetune.sh", swapped, other, out) == 1, "folders of early versions lack a record of their data"
    os.utime(swapped, (1, 1))  # an older one, as cp -p leaves it
    assert trained("finetune.sh", swapped, other, out) == "from"


def test_data_are_checked_with_the_flags_of_the_training_before_anything_is_written(stage, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "bin" / "fairseq-lot").write_text('#!/bin/sh\necho "$@" >>"$CALLS"\necho too long >&2\nexit 2\n')
    swapped, out = tmp_path / "lot.pt", tmp_path / "out"
    swapped.touch()
    for words in (("pretrain.sh",), ("finetune.sh", swapped)):
        (call,), error = stage(*words, tmp_path / "data", out, "--max-source-positions", "99")
        assert call.startswith(f"check {tmp_path}/data --training ") and call.endswith(" --max-source-positions 99")
        assert error == "too long\n" and not out.exists()


@pytest.mark.parametrize(
    ("target", "shared"), [("der 1\n", "--share-all-embeddings"), ("the 1\n", "--share-decoder-input-output-embed")]
)
def test_embeddings_are_shared_if_their_dictionaries_are_the_same(target, shared, stage, tmp_path):
    (tmp_path / "data").mkdir()
    for language, text in (("de", "der 1\n"), ("en", target)):
        (tmp_path / "data" / f"dict.{language}.txt").write_text(text)
    (call,), _ = stage("pretrain.sh", tmp_path / "data", tmp_path / "out")
    assert [word for word in call.split() if word.startswith("--share")] == [shared]


@pytest.mark.parametrize(
    ("flags", "without"),
    [
        ((), None),
        (("--criterion", "cross_entropy"), "--label-smoothing"),
        (("--optimizer=sgd",), "--adam-betas"),
        (("--lr-scheduler", "fixed", "--lr-scheduler=triangular"), "--warmup-updates"),
    ],
)
def test_a_typed_flag_drops_the_defaults_that_do_not_go_with_it(flags, without, stage, tmp_path):
    (tmp_path / "data").mkdir()
    (call,), _ = stage("pretrain.sh", tmp_path / "data", tmp_path / "out", *flags)
    own = {"--label-smoothing", "--adam-betas", "--warmup-updates"}
    assert own - {word.partition("=")[0] for word in call.split()} == ({without} if without else set())


def test_a_finished_training_is_not_continued(stage, tmp_path):
    """fairseq would: it forgets at the next call that --patience has stopped it."""
    data, out = tmp_path / "data", tmp_path / "out [1]"
    data.mkdir()
    words = ("pretrain.sh", data, out, "--patience", "1")
    assert len(stage(*words)[0]) == 1
    (out / "checkpoint_best.pt").touch()
    assert stage(*words) == ([], "")
    assert "was trained with" in stage(*words[:3])[1]
    (tmp_path / "link").symlink_to(out)
    assert stage(*words[:2], tmp_path / "link", *words[3:]) == ([], "")
    (out / "finished").unlink()
    assert len(stage(*words)[0]) == 1, "a killed training may have no checkpoint_last.pt yet"
    (out / "flags").unlink()
    (out / "finished").unlink()
    assert "has checkpoints that were not trained here" in stage(*words)[1]
    (out / "checkpoint_last.pt").touch()
    for _ in range(2):
        assert len(stage(*words, "--stop-time-hours", "1")[0]) == 1, "a training that --stop-time-hours ended goes on"


def test_only_more_epochs_continue_a_finished_training(stage, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    words = ("pretrain.sh", data, out)
    assert len(stage(*words, "--max-epoch=2")[0]) == 1
    (out / "checkpoint_best.pt").touch()
    assert "was trained with" in stage(*words, "--max-epoch=3")[1], "fairseq would begin again"
    (out / "checkpoint_last.pt").touch()
    assert len(stage(*words, "--max-epoch", "10")[0]) == 1
    assert stage(*words, "--max-epoch", "10") == ([], "")
    assert "was trained with" in stage(*words, "--max-epoch", "9")[1]
    assert "was trained with" in stage(*words, "--max-epoch", "11", "--lr", "1")[1]
    assert len(stage(*words)[0]) == 1, "the script's own number of epochs is larger"
    other = ("pretrain.sh", data, tmp_path / "other", "--patience", "1")
    assert len(stage(*other)[0]) == 1
    (tmp_path / "other" / "checkpoint_last.pt").touch()
    assert "was trained with" in stage(*other, "--max-epoch", "99")[1], "--patience may have stopped it earlier"


@pytest.mark.parametrize("flags", [("--reset-dataloader",), ("--max-epoch", "2", "--no-save-optimizer-state")])
def test_a_training_that_would_begin_again_in_part_is_refused(flags, stage, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    words = ("pretrain.sh", data, out, *flags)
    assert len(stage(*words)[0]) == 1
    (out / "checkpoint_last.pt").touch()
    assert stage(*words) == ([], ""), "it is finished"
    (out / "finished").unlink()
    calls, error = stage(*words)
    assert calls == [] and "would begin again in part" in error


def test_nothing_is_trained_if_the_flags_cannot_be_recorded(stage, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "out" / "flags").mkdir(parents=True)  # a file of this name cannot be written
    calls, error = stage("pretrain.sh", tmp_path / "data", tmp_path / "out")
    assert calls == [] and f"cannot write in {tmp_path}/out; free space or give another folder" in error
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data", "data.sum", "flags"]


def test_a_failed_training_is_not_finished(stage, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    (tmp_path / "bin" / "fairseq-train").write_text("#!/bin/sh\necho killed >&2; exit 2\n")
    out.mkdir()
    (out / "finished").touch()  # of a training whose checkpoints were removed
    assert stage("pretrain.sh", data, out)[1] == "killed\n"
    assert not (out / "finished").exists()
