"""The sentences that calibrations and sweeps run on."""

import copy
from argparse import Namespace
from itertools import islice

import pytest

from fairseq_lot.errors import InputError
from fairseq_lot.plug_and_play.calibrate import FitOptions, lengths_of_random
from fairseq_lot.plug_and_play.sentences import SHORTEST, from_text, random_pieces
from fairseq_lot.plug_and_play.sweep import total, validation_losses
from fairseq_lot.pretrained.checkpoint import Checkpoint
from tests.plug_and_play.in_memory import LENGTHS, load


@pytest.mark.parametrize("source_only", [False, True])
@pytest.mark.parametrize("max_tokens", [2, 8, 16, 100])
def test_a_sentence_longer_than_max_tokens_is_a_batch_of_its_own(source_only, max_tokens):
    loaded = load(source_only=source_only)
    sentences = from_text(loaded, "text", max_tokens=max_tokens, held_out=1, seed=1)
    pieces, found = loaded.sentences.num_tokens, set()
    for batch in islice(sentences.batches, 10):
        indices = batch["id"].tolist()
        assert len(indices) == 1 or len(indices) * max(map(pieces, indices)) <= max_tokens
        found.update(indices)
    assert found == {*range(len(loaded.sentences))} - {*sentences.held_out["id"].tolist()}


def test_the_number_of_left_out_sentences_is_printed_once(capsys):
    loaded = load(max_source_positions=6, max_target_positions=1024)
    sentences = from_text(loaded, "text", max_tokens=8, held_out=1, seed=3)
    assert capsys.readouterr().err.count("left out") == 1
    assert sentences.held_out["id"].tolist() == loaded.draw(1, 3)[0].tolist()


def test_at_most_half_of_the_sentences_may_be_held_out():
    loaded = load()
    assert len(from_text(loaded, "text", max_tokens=8, held_out=3, seed=1).held_out["id"]) == len(LENGTHS) // 2 == 3
    with pytest.raises(InputError, match="text has 6 sentences; give a --held-out of at most half of them"):
        from_text(loaded, "text", max_tokens=8, held_out=4, seed=1)


@pytest.mark.parametrize("option", ["learning_rate", "distill_rate", "max_tokens", "held_out", "steps"])
def test_numbers_too_large_to_compute_with_are_refused(option):
    value = 1e38 if option.endswith("rate") else 10**20
    with pytest.raises(InputError, match="must be at most"):
        FitOptions(**{option: value})


@pytest.mark.parametrize(
    ("longest", "positions", "most"), [(80, 1024, 80), (300, 1024, 300), (300, 200, 199), (2, 1024, 2)]
)
def test_random_sentences_are_as_long_as_asked_within_the_models_limit(longest, positions, most):
    model = load(max_source_positions=positions).model
    some = random_pieces(model, longest=longest, max_tokens=100, held_out=50, seed=1)
    batches = [some.held_out, *islice(some.batches, 50)]
    lengths = [length - 1 for batch in batches for length in batch["net_input"]["src_lengths"].tolist()]
    assert max(lengths) <= most and min(lengths) >= min(SHORTEST, most) * 3 // 4
    assert max(lengths) > 0.9 * most and min(lengths) < 0.2 * most + 2
    for batch in batches[1:]:
        tokens = batch["net_input"]["src_tokens"]
        assert len(tokens) == 1 or tokens.numel() <= 100
    symbols = model.encoder.dictionary
    for batch in batches:  # the only special symbols are the end of sentence and pads
        tokens, lengths = (batch["net_input"][name] for name in ("src_tokens", "src_lengths"))
        assert tokens[:, -1].eq(symbols.eos()).all() and tokens.ne(symbols.pad()).sum(1).equal(lengths)
        assert tokens.ge(symbols.nspecial).sum(1).equal(lengths - 1)


def test_counts_that_are_all_zero_make_all_pieces_equally_likely():
    model = load().model
    counted = copy.deepcopy(model.encoder.dictionary)
    counted.count = [0] * len(counted)
    some = random_pieces(model, counted, longest=80, max_tokens=100, held_out=50, seed=1)
    found = set(some.held_out["net_input"]["src_tokens"].flatten().tolist())
    assert found >= set(range(counted.nspecial, len(counted)))


def test_the_default_length_is_cut_to_the_models_limit_and_a_longer_typed_one_is_refused():
    state = Checkpoint({"args": Namespace(max_source_positions=60)}, "small.pt")
    assert lengths_of_random(state, None) == (1, 59)
    with pytest.raises(InputError, match="small.pt takes at most 59 pieces, not --longest 81; give at most 59"):
        lengths_of_random(state, 81)


@pytest.mark.parametrize(
    ("exact", "positions", "longest", "lengths"),
    [
        (0, 1024, None, (1, 80)),
        (20, 1024, None, (20, 80)),
        (512, 4096, None, (512, 1024)),
        (512, 1024, None, (512, 1023)),
        (512, 1024, 600, (512, 600)),
        (512, 512, None, (511, 511)),  # the model takes no longer sentence
    ],
)
def test_random_sentences_are_longer_than_those_on_which_near_far_is_exact(exact, positions, longest, lengths):
    args = Namespace(attention="near_far", near_far_exact_up_to=exact, max_source_positions=positions)
    assert lengths_of_random(Checkpoint({"args": args}, "model.pt"), longest) == lengths
    model = load(max_source_positions=positions).model
    some = random_pieces(model, shortest=lengths[0], longest=lengths[1], max_tokens=100, held_out=9, seed=1)
    for batch in (some.held_out, *islice(some.batches, 20)):
        tokens = batch["net_input"]["src_lengths"]
        assert tokens.min() > min(exact, positions - 1) and tokens.max() <= lengths[1] + 1


def test_a_length_on_which_near_far_is_exact_is_refused():
    state = Checkpoint({"args": Namespace(attention="near_far", near_far_exact_up_to=512)}, "model.pt")
    with pytest.raises(InputError, match="--longest 511 is too short .* exact up to 512 tokens; give at least 512"):
        lengths_of_random(state, 511)


@pytest.mark.parametrize("sentences", [2, None])
def test_the_loss_covers_as_many_sentences_as_asked(sentences):
    loaded = load()
    drawn = loaded.draw(sentences, 0)[0]
    assert total(validation_losses(loaded, sentences).values()).tokens == loaded.sentences.tgt_sizes[drawn].sum()


def test_losses_are_grouped_by_the_length_of_the_source():
    """Lengths of sources, with the end of sentence; targets have the same lengths in reverse order."""
    found = validation_losses(load(lengths=(2, 11, 12, 21, 22, 82)))
    assert {most: loss.tokens for most, loss in found.items()} == {
        "10": 82 + 22, "20": 21 + 12, "40": 11, "80": 0, "512": 2, "1024": 0, "2048": 0, "4096": 0, "more": 0
    }  # fmt: skip


@pytest.mark.parametrize("max_tokens", [2, 8])
def test_the_loss_covers_all_sentences_even_those_longer_than_max_tokens(max_tokens):
    loaded = load()
    one, other = (total(validation_losses(loaded, max_tokens=most).values()) for most in (max_tokens, 4096))
    assert one.tokens == other.tokens and one.nats == pytest.approx(other.nats, rel=1e-5)
