"""Beam search with fairseq's own generator: its scores equal those of a teacher-forced pass over the hypothesis."""

import copy
from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.sequence_generator import SequenceGenerator

from fairseq_lot.pretrained.loading import untrained
from tests.plug_and_play.in_memory import load

ALL = {"attention_sites": "encoder,cross,decoder"}
SMALL_LOT = {"attention": "lot", "lot_num_pivots": 6}
NEAR_FAR = {"attention": "near_far", "near_far_num_features": 6, "near_far_window": 1}
WITHOUT_CROSS = {"no_cross_attention": True, "cross_self_attention": True}
MODELS = {
    "softmax": {"attention": "softmax", **ALL},
    "lot": {**SMALL_LOT, **ALL},
    "lot-cross": {**SMALL_LOT, "attention_sites": "encoder,cross"},
    "lot-decoder": {**SMALL_LOT, "attention_sites": "decoder"},
    "near_far": {**NEAR_FAR, **ALL},
    "differential-softmax": {"differential": True, "attention": "softmax"},
    "differential-lot": {**SMALL_LOT, **ALL, "differential": True},
    "differential-lot-constant": {**SMALL_LOT, **ALL, "differential": True, "differential_lambda_init": 0.0},
    "differential-sinkhorn": {"attention": "sinkhorn", "differential": True},
    "differential-esp": {"attention": "esp", "esp_hard": True, "differential": True},
    "lot-without-cross": {**SMALL_LOT, **ALL, **WITHOUT_CROSS},
    "near_far-without-cross": {**NEAR_FAR, **WITHOUT_CROSS, "attention_sites": "encoder,decoder"},
}


def tiny(name):
    """A model, its target dictionary and a batch of sentences of several lengths, padded on the left as in fairseq."""
    loaded = load(**MODELS[name])
    # float64, because the norm of a difference of plans magnifies rounding; the generator's scores stay float32
    model = loaded.model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 2  # far from uniform, so that the beams differ
    return model, loaded.task.target_dictionary, loaded.batch(range(4))["net_input"]


def teacher_forced_scores(model, source, tokens):
    """Log-probability of every token of one hypothesis, from one unpadded pass."""
    previous = torch.cat([tokens[-1:], tokens[:-1]])[None]  # fairseq begins with the end-of-sentence symbol
    output = model(source[None], torch.tensor([len(source)]), previous)
    log_probabilities = model.get_normalized_probs(output, log_probs=True)[0]
    return log_probabilities.gather(-1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prefixed", [False, True])
@torch.no_grad()
def test_beam_scores_are_teacher_forced_scores(name, prefixed):
    model, words, batch = tiny(name)
    # the second sentence has a shorter prefix
    prefix = torch.tensor([[5, 9, 6], [7, 8, words.pad()], [4, 4, 4], [10, 5, 7]]) if prefixed else None
    generator = SequenceGenerator([copy.deepcopy(model)], words, max_len_b=9, beam_size=4)
    found = generator.generate([], {"net_input": batch}, prefix_tokens=prefix)
    distinct = set()
    for sentence, beams in enumerate(found):
        assert len(beams) == 4
        source = batch["src_tokens"][sentence]
        for hypothesis in beams:
            tokens = hypothesis["tokens"]
            assert tokens[-1] == words.eos()
            distinct.add((sentence, tuple(tokens.tolist())))
            if prefixed:
                wanted = prefix[sentence][prefix[sentence] != words.pad()]
                assert torch.equal(tokens[: len(wanted)], wanted)
            expected = teacher_forced_scores(model, source[source != words.pad()], tokens)
            torch.testing.assert_close(hypothesis["positional_scores"], expected, atol=1e-5, rtol=1e-5)
    assert len(distinct) == 4 * 4


@pytest.mark.parametrize("name", MODELS)
def test_no_score_depends_on_a_later_target_token(name):
    model, words, batch = tiny(name)
    source = batch["src_tokens"], batch["src_lengths"]
    previous = torch.randint(words.nspecial, len(words), (4, 8))
    changed = previous.clone()
    changed[:, 5:] = previous[:, 5:].roll(1, 1)
    expected, _ = model(*source, previous)
    actual, _ = model(*source, changed)
    torch.testing.assert_close(actual[:, :5], expected[:, :5], atol=1e-5, rtol=1e-5)
    assert (actual - expected)[:, 5:].abs().max() > 1e-3
    expected.square().mean().backward()
    assert all(x.grad.isfinite().all() for x in model.parameters() if x.grad is not None)


def of_full_size(arch):
    """An untrained model with the architecture's own sizes."""
    args = Namespace(arch=arch)
    ARCH_CONFIG_REGISTRY[arch](args)
    return untrained(args, 100, 100)


def count(model):
    """The number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def test_differential_has_as_many_parameters_as_the_plain_model():
    plain = count(of_full_size("transformer_iwslt_de_en"))
    differential = of_full_size("diff_transformer_iwslt_de_en")
    sites = [name for name, _ in differential.named_modules() if name.endswith(".mechanism")]
    assert len(sites) == 18  # encoder, decoder and cross-attention in six layers
    assert 0 < count(differential) - plain <= 1e-3 * plain
