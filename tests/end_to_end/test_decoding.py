"""Beam search with fairseq's own generator: every score is that of a teacher-forced pass over the hypothesis."""

import copy
from argparse import Namespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator

from fairseq_lot import models  # noqa: F401 - registers the architectures
from fairseq_lot.models.pluggable_transformer import PluggableTransformerModel

SYMBOLS, SENTENCES = 20, (7, 2, 4, 1)
ALL = {"attention_sites": "encoder,cross,decoder"}
SMALL_LOT = {"attention": "lot", "lot_num_pivots": 6}

NEAR_FAR = {"near_far_num_features": 6, "near_far_window": 1}
WITHOUT_CROSS = {"no_cross_attention": True, "cross_self_attention": True}
MODELS = {
    "softmax": {"attention": "softmax", **ALL},
    "lot": {**SMALL_LOT, **ALL},
    "lot-cross": {**SMALL_LOT, "attention_sites": "encoder,cross"},
    "lot-decoder": {**SMALL_LOT, "attention_sites": "decoder"},
    "near_far": {"attention": "near_far", **NEAR_FAR, **ALL},
    "differential-softmax": {"differential": True, "attention": "softmax"},
    "differential-lot": {**SMALL_LOT, **ALL, "differential": True},
    "differential-lot-constant": {**SMALL_LOT, **ALL, "differential": True, "differential_lambda_init": 0.0},
    "differential-sinkhorn": {"attention": "sinkhorn", "differential": True},
    "differential-esp": {"attention": "esp", "esp_hard": True, "differential": True},
    "lot-without-cross": {**SMALL_LOT, **ALL, **WITHOUT_CROSS},
    "near_far-without-cross": {
        "attention": "near_far",
        **NEAR_FAR,
        "attention_sites": "encoder,decoder",
        **WITHOUT_CROSS,
    },
}


def dictionary(symbols=SYMBOLS):
    made = Dictionary()
    for i in range(symbols):
        made.add_symbol(f"word{i}")
    return made


def build(arch, symbols=SYMBOLS, kind=PluggableTransformerModel, **options):
    args = Namespace(max_source_positions=64, max_target_positions=64, **options)
    ARCH_CONFIG_REGISTRY[arch](args)
    words = dictionary(symbols)
    return kind.build_model(args, Namespace(source_dictionary=words, target_dictionary=words)).eval()


def tiny(**options):
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
             {"embed_dim": 16, "ffn_embed_dim": 24, "layers": 2, "attention_heads": 4}.items()}  # fmt: skip
    model = build("lot_transformer", dropout=0.0, **sizes, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 2  # far from uniform, so that the beams differ
    # float64, because the norm of a difference of plans magnifies rounding; the generator's scores stay float32
    return model.double()


def sources():
    """A ragged batch, padded on the left as fairseq pads sources."""
    words = dictionary()
    batch = torch.full((len(SENTENCES), max(SENTENCES) + 1), words.pad())
    for row, length in zip(batch, SENTENCES, strict=True):
        row[-length - 1 : -1] = torch.randint(4, len(words), (length,))
        row[-1] = words.eos()
    return batch, torch.tensor(SENTENCES) + 1


def generate(model, batch, lengths, prefix=None, **options):
    generator = SequenceGenerator([copy.deepcopy(model)], dictionary(), max_len_b=9, **options)
    sample = {"net_input": {"src_tokens": batch, "src_lengths": lengths}}
    return generator.generate([], sample, prefix_tokens=prefix)


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
    model = tiny(**MODELS[name])
    words, (batch, lengths) = dictionary(), sources()
    # the second sentence has a shorter prefix
    prefix = torch.tensor([[5, 9, 6], [7, 8, words.pad()], [4, 4, 4], [10, 5, 7]]) if prefixed else None
    found = generate(model, batch, lengths, prefix, beam_size=4)
    distinct = set()
    for sentence, beams in enumerate(found):
        assert len(beams) == 4
        source = batch[sentence][batch[sentence] != words.pad()]
        for hypothesis in beams:
            tokens = hypothesis["tokens"]
            assert tokens[-1] == words.eos()
            distinct.add((sentence, tuple(tokens.tolist())))
            if prefixed:
                wanted = prefix[sentence][prefix[sentence] != words.pad()]
                assert torch.equal(tokens[: len(wanted)], wanted)
            expected = teacher_forced_scores(model, source, tokens)
            torch.testing.assert_close(hypothesis["positional_scores"], expected, atol=1e-5, rtol=1e-5)
    assert len(distinct) == 4 * len(SENTENCES)


@pytest.mark.parametrize("name", MODELS)
def test_no_score_depends_on_a_later_target_token(name):
    model = tiny(**MODELS[name])
    batch, lengths = sources()
    previous = torch.randint(4, SYMBOLS, (len(SENTENCES), 8))
    changed = previous.clone()
    changed[:, 5:] = (changed[:, 5:] - 3) % (SYMBOLS - 4) + 4
    expected, _ = model(batch, lengths, previous)
    actual, _ = model(batch, lengths, changed)
    torch.testing.assert_close(actual[:, :5], expected[:, :5], atol=1e-5, rtol=1e-5)
    assert (actual - expected)[:, 5:].abs().max() > 1e-3
    expected.square().mean().backward()
    assert all(x.grad.isfinite().all() for x in model.parameters() if x.grad is not None)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_differential_has_as_many_parameters_as_the_plain_model():
    plain = count(build("transformer_iwslt_de_en", 100, TransformerModel))
    differential = build("diff_transformer_iwslt_de_en", 100)
    sites = [name for name, _ in differential.named_modules() if name.endswith(".mechanism")]
    assert len(sites) == 18  # encoder, decoder and cross-attention in six layers
    assert 0 < count(differential) - plain <= 1e-3 * plain
