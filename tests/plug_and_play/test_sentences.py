"""What a calibration runs on, and a sweep."""

from itertools import islice

import pytest

from fairseq_lot.plug_and_play.sentences import from_text
from fairseq_lot.plug_and_play.sweep import total, validation_losses
from tests.plug_and_play.in_memory import load


@pytest.mark.parametrize("source_only", [False, True])
@pytest.mark.parametrize("max_tokens", [2, 8, 16, 100])
def test_a_sentence_of_more_pieces_than_a_batch_is_a_batch(source_only, max_tokens):
    loaded = load(source_only=source_only)
    sentences = from_text(loaded, "text", max_tokens=max_tokens, held_out=1, seed=1)
    pieces, found = loaded.sentences.num_tokens, set()
    for batch in islice(sentences.batches, 10):
        indices = batch["id"].tolist()
        assert len(indices) == 1 or len(indices) * max(map(pieces, indices)) <= max_tokens
        found.update(indices)
    assert found == {*range(len(loaded.sentences))} - {*sentences.held_out["id"].tolist()}


@pytest.mark.parametrize("max_tokens", [2, 8])
def test_the_loss_is_of_all_sentences_whatever_their_length(max_tokens):
    loaded = load()
    one, other = (total(validation_losses(loaded, max_tokens=most)) for most in (max_tokens, 4096))
    assert one.tokens == other.tokens and one.nats == pytest.approx(other.nats, rel=1e-5)
