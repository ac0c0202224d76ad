"""A model with an attention of this package is stored under an architecture of this package."""

from argparse import Namespace

import pytest
from omegaconf import OmegaConf

from fairseq_lot.errors import InputError
from fairseq_lot.models.architecture import override_attention, own_architecture, refuse_renamed


@pytest.mark.parametrize(
    ("arch", "own"),
    [
        ("transformer_iwslt_de_en", "lot_transformer_iwslt_de_en"),
        ("transformer_wmt_en_de_big", "lot_transformer"),  # we have no such size
    ],
)
def test_each_stock_architecture_has_one_of_ours(arch, own):
    assert own_architecture(arch) == own


@pytest.mark.parametrize("make", [lambda args: Namespace(**args), OmegaConf.create], ids=["namespace", "omegaconf"])
def test_overrides_rename_a_stock_architecture(make):
    args = make({"arch": "transformer", "_name": "transformer"})
    override_attention(args, {"attention": "lot"})
    assert (args.arch, args._name) == ("lot_transformer", "lot_transformer")
    other = make({"arch": "transformer", "_name": "transformer"})
    override_attention(other, {})
    assert (other.arch, other._name) == ("transformer", "transformer")


@pytest.mark.parametrize("named", [{"arch": "transformer"}, {"_name": "transformer_iwslt_de_en"}])
def test_our_attention_under_a_stock_name_is_refused(named):
    with pytest.raises(InputError, match="^x.pt has lot attention .*own architecture transformer.*set arch and _name"):
        refuse_renamed(Namespace(attention="lot", **named), "x.pt")
    refuse_renamed(Namespace(**named), "x.pt")
    refuse_renamed(Namespace(attention="lot", arch="lot_transformer"), "x.pt")
