"""The two languages of a model: from options, its checkpoint or the data folder, or an error."""

from argparse import Namespace

import pytest

from fairseq_lot.errors import InputError
from fairseq_lot.pretrained.checkpoint import Checkpoint
from fairseq_lot.pretrained.languages import languages, pairs_in, typed_pair, with_languages


def folder(path, *names):
    """Make empty files of these names in a folder; return the folder."""
    for name in names:
        (path / name).write_bytes(b"")
    return path


def test_languages_come_from_the_checkpoint_or_else_from_the_folder(tmp_path):
    data = folder(tmp_path, "train.de-en.de.idx", "train.de-en.en.idx", "valid.de-en.de.idx", "dict.de.txt", "a.b-c.x")
    assert languages({"source_lang": "en", "target_lang": "fr"}, data, "c.pt") == ("en", "fr")
    for saved in ({"source_lang": None, "target_lang": None}, {"source_lang": "en", "target_lang": None}, {}):
        assert languages(saved, data, "c.pt") == ("de", "en")


@pytest.mark.parametrize(
    "names, pairs",
    [
        (["train.zh-CN-en.zh-CN.idx", "train.zh-CN-en.en.idx"], [("zh-CN", "en")]),
        (["test.en-de.de.idx"], [("en", "de")]),
        (["train.de-en.de.idx", "train.fr-en.en.idx"], [("de", "en"), ("fr", "en")]),
        (["train.align.de-en.idx", "dict.de.txt", "train.de-en.de.bin", "train.idx", "best.a-b.pt"], []),
    ],
    ids=["dashes", "target-only", "two", "none"],
)
def test_language_pairs_are_read_from_names_of_files(names, pairs, tmp_path):
    assert pairs_in(folder(tmp_path, *names)) == pairs


def test_unknown_languages_are_refused_with_the_options_to_give(tmp_path):
    empty, two = tmp_path / "empty", tmp_path / "two"
    empty.mkdir()
    two.mkdir()
    folder(two, "train.de-en.de.idx", "train.fr-en.fr.idx")
    for data, words in [
        (tmp_path / "gone", ["gone"]),
        (empty, ["empty", "c.pt", "--source-lang and --target-lang"]),
        (two, ["de-en and fr-en", "--source-lang and --target-lang"]),
    ]:
        with pytest.raises(InputError) as caught:
            languages({"source_lang": None, "target_lang": None}, data, "c.pt")
        assert all(word in str(caught.value) for word in words)


def test_one_typed_language_without_the_other_is_refused():
    assert typed_pair(Namespace(source_lang=None, target_lang=None)) is None
    assert typed_pair(Namespace(source_lang="zh-CN", target_lang="en")) == ("zh-CN", "en")
    for pair in (("de", None), (None, "en")):
        with pytest.raises(InputError, match="-lang"):
            typed_pair(Namespace(source_lang=pair[0], target_lang=pair[1]))


@pytest.mark.parametrize("form", ["cfg", "args"])
def test_typed_languages_win_and_the_checkpoint_is_not_changed(form):
    task = {"source_lang": "de", "target_lang": None, "data": "d"}
    state = Checkpoint({"cfg": {"task": task, "model": Namespace()}} if form == "cfg" else {"args": Namespace(**task)})
    assert with_languages(state, None) is state
    changed = with_languages(state, ("fr", "en")).task_options()
    assert changed == task | {"source_lang": "fr", "target_lang": "en"}
    assert state.task_options() == task


def test_the_opposite_direction_is_refused_unless_the_model_has_both():
    task = {"source_lang": "de", "target_lang": "en", "data": "d"}
    with pytest.raises(InputError, match="translates de to en, not en to de; give --source-lang de --target-lang en"):
        with_languages(Checkpoint({"cfg": {"task": task}}), ("en", "de"))
    both = {"source_lang": "en", "target_lang": "en", "data": "d"}
    assert with_languages(Checkpoint({"cfg": {"task": both}}), ("en", "en")).task_options() == both
    for name in ("_name", "task"):  # the key in today's checkpoints and in early ones
        many = Checkpoint({"cfg": {"task": task | {name: "translation_multi_simple_epoch"}}})
        assert with_languages(many, ("en", "de")).task_options()["source_lang"] == "en"


def test_task_options_of_early_checkpoints_are_converted():
    args = Namespace(data=["data-bin/a"], left_pad_source="True", left_pad_target="False", source_lang="de")
    pads = {"left_pad_source": True, "left_pad_target": False}
    assert Checkpoint({"args": args}).task_options() == {"data": "data-bin/a", "source_lang": "de"} | pads
