"""What loading the models changes in fairseq's registries."""

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel

from fairseq_lot.models import fairseq_hooks


def test_stock_architectures_are_wrapped_once_and_by_install_alone():
    stock = [arch for arch, model in ARCH_MODEL_REGISTRY.items() if model is TransformerModel]
    before = {arch: ARCH_CONFIG_REGISTRY[arch] for arch in stock}
    assert "transformer_iwslt_de_en" in stock
    assert {architecture.__module__ for architecture in before.values()} == {fairseq_hooks.__name__}
    fairseq_hooks.install()
    assert before == {arch: ARCH_CONFIG_REGISTRY[arch] for arch in stock}
