"""A checkpoint of ours that is renamed to fairseq's own architecture is refused by every program that loads it."""

from argparse import Namespace

import fairseq.models
import pytest
import torch
from fairseq import checkpoint_utils, tasks
from omegaconf import OmegaConf

from fairseq_lot.attention.near_far import NearFar
from fairseq_lot.errors import InputError
from fairseq_lot.models.contradictions import check_configured
from fairseq_lot.models.pluggable_transformer import PluggableTransformerModel
from tests.end_to_end.conftest import edited, generate, hypotheses, refuse, swapped, train
from tests.plug_and_play import in_memory

MESSAGE = "has near_far attention under the name of fairseq's own architecture transformer.* arch and _name back to lot"


@pytest.fixture(scope="module")
def near_far(stock_checkpoint, tmp_path_factory):
    return swapped(stock_checkpoint, tmp_path_factory.mktemp("near_far") / "near_far.pt", "near_far")


@pytest.fixture(params=["arch _name", "arch", "_name"])
def renamed(request, near_far, tmp_path):
    """A near_far checkpoint whose ``arch``, ``_name`` or both say ``transformer``."""
    with edited(near_far, tmp_path / "renamed.pt") as state:
        for name in request.param.split():
            setattr(state["cfg"]["model"], name, "transformer")
    return tmp_path / "renamed.pt"


def test_every_loader_refuses_a_renamed_checkpoint(renamed, data, tmp_path, capsys):
    def fine_tune(flag):
        train(data / "bin", tmp_path / "out", "--arch", "pluggable_transformer", flag, renamed)

    with pytest.raises(InputError, match=f"renamed.pt {MESSAGE}"):
        generate(data / "bin", renamed)
    for flag in ("--finetune-from-model", "--restore-file"):
        with pytest.raises(InputError, match=f"renamed.pt {MESSAGE}"):
            fine_tune(flag)
    with pytest.raises(InputError, match=f"renamed.pt {MESSAGE}"):
        check_configured(Namespace(attention="near_far"), str(renamed))
    assert "near_far attention" in refuse(capsys, "check", data / "bin", "--path", renamed, naming=[renamed])


def test_a_program_that_builds_the_model_by_itself_is_refused(renamed, data):
    """CTranslate2's converter is such a program: it goes by ``arch`` and reads the projections of q, k and v."""
    args = torch.load(renamed, weights_only=True)["cfg"]["model"]
    args.data = str(data / "bin")
    with pytest.raises(InputError, match=f"the model {MESSAGE}") as caught:
        fairseq.models.build_model(args, tasks.setup_task(args))
    assert "\n" not in str(caught.value)


def test_an_override_of_the_attention_is_accepted(renamed, near_far, data):
    overrides = ("--model-overrides", "{'attention': 'near_far'}")
    assert hypotheses(generate(data / "bin", renamed, *overrides)) == hypotheses(generate(data / "bin", near_far))
    with pytest.raises(InputError, match=MESSAGE):
        generate(data / "bin", renamed, "--model-overrides", "{'near_far_window': 4}")


def test_a_model_of_fairseq_hydra_train_can_be_overridden(stock_checkpoint, data, tmp_path):
    """fairseq alone ignores overrides of a model whose arguments are a dict: it would silently keep softmax."""
    with edited(stock_checkpoint, tmp_path / "hydra.pt") as state:
        args = vars(state["cfg"]["model"])
        sizes = {name: value for name, value in args.items() if name.startswith(("encoder_", "decoder_", "share_"))}
        state["cfg"]["model"] = {"_name": "transformer", **sizes}

    def load(**overrides):
        words = [str(tmp_path / "hydra.pt")], {"data": str(data / "bin"), **overrides}
        return checkpoint_utils.load_model_ensemble_and_task(*words)[0][0]

    assert type(load()) is fairseq.models.ARCH_MODEL_REGISTRY["transformer"]
    model = load(attention="near_far", near_far_window=3)
    mechanism = model.encoder.layers[0].self_attn.mechanism
    assert isinstance(mechanism, NearFar) and mechanism.options.window == 3


def test_a_configuration_of_fairseq_hydra_train_is_named_as_ours():
    model = OmegaConf.create({"_name": "transformer_iwslt_de_en", "attention": "lot"})
    task = in_memory.load().task
    with pytest.raises(InputError, match="has lot attention .* set arch and _name back to lot_transformer_iwslt_de_en"):
        fairseq.models.build_model(model, task)
    model._name = "lot_transformer_iwslt_de_en"
    assert isinstance(fairseq.models.build_model(model, task), PluggableTransformerModel)
