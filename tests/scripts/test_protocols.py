"""What the two protocols give to fairseq-train, and how results name them."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EVAL_BLEU = (
    '--eval-bleu --eval-bleu-args {"beam": 5, "max_len_a": 1.2, "max_len_b": 10} --eval-bleu-detok moses '
    '--eval-bleu-detok-args {"target_lang": "en"} --eval-bleu-remove-bpe sentencepiece '
    "--best-checkpoint-metric bleu --maximize-best-checkpoint-metric"
)


@pytest.fixture
def flags(tmp_path):
    """A function that runs a stage with a stand-in for fairseq-train; returns the settings that it noted."""
    data, tools = tmp_path / "data", tmp_path / "bin"
    for folder in (data, tools):
        folder.mkdir()
    for name in ("train.de-en.de.idx", "dict.de.txt", "dict.en.txt", "sentencepiece.bpe.model"):
        (data / name).touch()
    (tmp_path / "swapped.pt").touch()
    for name in ("fairseq-train", "fairseq-lot"):
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)

    def run(stage, **variables):
        environment = {
            "PATH": f"{tools}:{os.environ['PATH']}", "VIRTUAL_ENV": "/some/environment", "DEVICE": "cpu",
            "DATA": str(data), "SAVE": str(tmp_path / "save"), "SWAPPED": str(tmp_path / "swapped.pt"), **variables,
        }  # fmt: skip
        words = ["bash", str(ROOT / "scripts" / "stages" / f"{stage}.sh")]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return (tmp_path / "save.settings").read_text().strip()

    return run


def test_pretraining_as_the_papers(flags):
    assert flags("pretrain", BACKBONE="diff_transformer") == (
        "--arch diff_transformer_iwslt_de_en --attention softmax --lr-scheduler inverse_sqrt --lr 5e-4 "
        "--warmup-updates 4000 --dropout 0.3 --max-tokens 4096 --max-epoch 25 --seed 1 "
        f"--differential-lambda-init 0 {EVAL_BLEU}"
    )


def test_validation_joins_the_pieces_of_the_data(flags, tmp_path):
    (tmp_path / "data" / "sentencepiece.bpe.model").unlink()
    (tmp_path / "data" / "dict.de.txt").write_text("w@@ 7\n")
    found = flags("pretrain", SRC="en", TGT="de")
    assert ' {"target_lang": "de"} --eval-bleu-remove-bpe subword_nmt ' in found


def test_pretraining_can_end_when_validation_does_not_improve(flags):
    assert flags("pretrain", SIZE="small", BEST="loss", EPOCHS="40", PATIENCE="3").endswith(
        "--max-epoch 40 --seed 1 --patience 3"
    )


def test_fine_tuning_has_no_patience(flags):
    assert "--patience" not in flags("finetune", PATIENCE="3")


def test_quick_trainings_that_are_there_go_on(flags):
    """The settings are, word by word, those that folders have from before there were two protocols."""
    assert flags("pretrain", PROTOCOL="quick", SIZE="small", BACKBONE="diff_transformer") == (
        "--arch diff_transformer_small --attention softmax --lr-scheduler inverse_sqrt --lr 3e-3 "
        "--warmup-updates 800 --dropout 0.1 --max-tokens 4096 --max-epoch 7 --seed 1"
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "inverse_sqrt --lr 5e-5 --warmup-updates 4000 --dropout 0.3 --max-tokens 4096 --max-epoch 10"),
        ({"LR": "1e-04"}, "inverse_sqrt --lr 1e-5 --warmup-updates 4000 --dropout 0.3"),
        ({"LR": ".002", "WARMUP": "9"}, "inverse_sqrt --lr .002e-1 --warmup-updates 9 --dropout 0.3"),
        ({"SIZE": "small", "FINETUNE_EPOCHS": "2"}, "inverse_sqrt --lr 3e-4 --warmup-updates 800 --dropout 0.1"),
        ({"SIZE": "small", "PROTOCOL": "quick"}, "fixed --lr 3e-4 --dropout 0.1 --max-tokens 4096 --max-epoch 2"),
        (
            {"PROTOCOL": "quick", "FINETUNE_LR": "7e-5"},
            "fixed --lr 7e-5 --dropout 0.3 --max-tokens 4096 --max-epoch 10",
        ),
    ],
)
def test_fine_tuning_has_a_tenth_of_the_rate(flags, variables, expected):
    found = flags("finetune", ATTENTION="lot", **variables)
    assert f"--lr-scheduler {expected}" in found
    assert ("--eval-bleu" in found) == (variables.get("PROTOCOL") != "quick")
    assert "lambda-init" not in found


def test_the_differential_form_is_fine_tuned_with_the_same_lambda(flags):
    assert " --differential-lambda-init 0.5" in flags("finetune", BACKBONE="diff_transformer", LAMBDA_INIT="0.5")


@pytest.mark.parametrize(
    ("variables", "label"),
    [
        ({}, "papers"),
        ({"PROTOCOL": "quick"}, "quick"),
        ({"EPOCHS": "25", "LR": "5e-4"}, "papers"),
        ({"EPOCHS": "28", "LR": "1e-4", "BEST": "loss"}, "papers, EPOCHS=28 LR=1e-4 BEST=loss"),
    ],
)
def test_results_name_what_differs(variables, label):
    """A stage that gets the exported settings gives the same name."""
    use = "source scripts/lib/protocols.sh; SIZE=iwslt_de_en; use_protocol; echo $PROTOCOL_LABEL"
    done = subprocess.run(
        ["bash", "-c", f"{use}; bash -c '{use}'"], cwd=ROOT, env={"PATH": os.environ["PATH"], **variables},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [label, label]
