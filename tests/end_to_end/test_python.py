"""The package from Python: its results are readable, and its errors have one line."""

import contextlib
import pydoc
import shutil

import pytest
import torch

import fairseq_lot
from fairseq_lot.attention.options import SITES
from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.errors import InputError
from fairseq_lot.inspection.capture import capture
from fairseq_lot.pretrained.checkpoint import load_checkpoint


@pytest.fixture(scope="module")
def model(stock_checkpoint):
    return fairseq_lot.Translator(stock_checkpoint)


def test_a_string_gives_a_string_and_a_list_gives_a_list(data, model):
    sentence = (data / "raw" / "test.de").read_text(encoding="utf-8").splitlines()[0]
    translation = model.translate(sentence)
    assert isinstance(translation, str) and len(translation.split()) > 1
    assert model.translate([sentence, ""]) == [translation, ""]
    assert (model.translate(""), model.translate([])) == ("", [])


def test_a_sentence_may_be_as_long_as_the_model_has_positions_for(model):
    assert len(model.symbols(["x"] * 1023, "line 1")) == 1024
    with pytest.raises(InputError, match="^line 1: 1025 pieces with the end of sentence, the model takes 1024"):
        model.symbols(["x"] * 1024, "line 1")


def test_translating_leaves_the_model_as_it_was(model):
    """This holds even between two translations."""
    before = [layer.need_attn for layer in model.loaded.model.decoder.layers]
    model.translate("der alte Mann")
    assert [layer.need_attn for layer in model.loaded.model.decoder.layers] == before == [True] * len(before)
    sources = model.loaded.with_sources([model.loaded.source(["x"])] * 2)
    translations = sources.translate(beam=1, batch=1)
    for _ in range(2):
        next(translations)
        assert all(layer.need_attn for layer in model.loaded.model.decoder.layers)


def test_a_translation_captures_the_encoder_s_attention(model):
    """The decoder's incremental steps are not captured."""
    with capture(model.loaded.model) as seen:
        model.translate("der alte Mann")
    assert [(one.site, one.layer) for one in seen] == [("encoder", 0), ("encoder", 1)]


def test_calibrates_where_gradients_are_off(stock_checkpoint):
    swapped = fairseq_lot.swap(stock_checkpoint, attention="lot", calibrate=False, lot_num_pivots=3)
    found = []
    for off in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with off():
            found.append(fairseq_lot.calibrate(swapped, steps=2, joint_steps=1, held_out=20).after)
    assert found[0].isfinite().all() and torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("sentences", "naming"),
    [
        (b"das", "bytes"),
        (None, "NoneType"),
        (("das",), "tuple"),
        ({"das": 1}, "dict"),
        (["das", 3], "line 2.*int"),
        (["das", "\udce4"], r"line 2.*'\\udce4'.*surrogate"),
    ],
)
def test_input_that_is_no_text_is_refused(sentences, naming, model):
    with pytest.raises(InputError, match=f"^.*{naming}.*$"):
        model.translate(sentences)


def test_a_split_needs_no_target_side(data, stock_checkpoint, tmp_path):
    folder = shutil.copytree(data / "bin", tmp_path / "bin", ignore=shutil.ignore_patterns("text", "test.de-en.en.*"))
    assert len(fairseq_lot.Translator(stock_checkpoint, folder, split="test").loaded.sentences) == 60
    (folder / "valid.de-en.en.bin").write_bytes(b"")
    with pytest.raises(InputError, match="valid.de-en.en.bin or .idx is damaged"):  # existing targets are checked
        fairseq_lot.Translator(stock_checkpoint, folder, split="valid")


def test_text_is_not_taken_for_pieces_of_a_split(stock_checkpoint):
    with pytest.raises(InputError, match="without split"):
        fairseq_lot.Translator(stock_checkpoint, split="test").translate("der alte Mann")


@pytest.mark.parametrize("sites", [["encoder", "cross"], ("encoder", "cross"), "encoder,cross"])
def test_sites_may_be_a_list(sites, stock_checkpoint):
    swapped = fairseq_lot.swap(
        stock_checkpoint, attention="lot", calibrate=False, attention_sites=sites, lot_num_pivots=3
    )
    assert swapped.model_args.attention_sites == "encoder,cross"


@pytest.mark.parametrize(
    ("options", "naming"),
    [
        ({"attention_sites": ["encoder", "middle"]}, "'middle'"),
        ({"attention_sites": []}, r"\[\]"),
        ({"attention_sites": 3}, "encoder, cross, decoder, got 3"),
        ({"attention": None}, "None"),
    ],
)
def test_wrong_options_are_refused(options, naming, stock_checkpoint):
    with pytest.raises(InputError, match=f"^.*{naming}.*$"):
        fairseq_lot.swap(stock_checkpoint, **({"attention": "lot", "calibrate": False} | options))


@pytest.mark.parametrize("wrong", ["nothing", "empty", "weights alone", "a number"])
@pytest.mark.parametrize("call", ["swap", "calibrate", "Translator"])
def test_values_that_are_no_checkpoint_are_refused(call, wrong, stock_checkpoint):
    given = {"nothing": None, "empty": {}, "a number": 3, "weights alone": load_checkpoint(stock_checkpoint)["model"]}
    options = {"attention": "lot"} if call == "swap" else {}
    with pytest.raises(InputError, match="^.*checkpoint.*$"):
        getattr(fairseq_lot, call)(given[wrong], **options)


def test_results_fit_on_a_screen_and_are_saved_as_plain_data(stock_checkpoint, tmp_path):
    swapped = fairseq_lot.swap(stock_checkpoint, attention="lot", calibrate=False, lot_num_pivots=3)
    done = fairseq_lot.calibrate(swapped, steps=2, joint_steps=1, held_out=4)
    for result in (swapped, done.state, done):
        assert len(repr(result)) < 400 and "\n" not in repr(result), repr(result)[:1000]
    assert "fairseq's own attention" in repr(load_checkpoint(stock_checkpoint))
    assert "lot at encoder" in repr(swapped) and "calibrated on random pieces" in repr(done)
    torch.save(done.state, tmp_path / "saved.pt")  # as a user saves it
    saved = load_checkpoint(tmp_path / "saved.pt")
    assert saved.keys() == done.state.keys()
    same = {"rtol": 0, "atol": 0, "equal_nan": True}  # fairseq never fills its buffer _float_tensor
    torch.testing.assert_close(dict(saved["model"]), dict(done.state["model"]), **same)


def test_help_names_mechanisms_and_sites():
    text = pydoc.render_doc(fairseq_lot.swap)
    assert all(name in text for name in (*MECHANISMS, *SITES, "fairseq-lot swap --help"))
