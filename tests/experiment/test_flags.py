"""Taking one flag out of others."""

import pytest

from fairseq_lot.experiment.flags import take


@pytest.mark.parametrize(
    ("flags", "value", "others"),
    [
        ("--beam 4", "none", "--beam 4"),
        ("--lenpen 2 --beam 4", "2", "--beam 4"),
        ("--beam 4 --lenpen=2 --cpu --lenpen chosen", "chosen", "--beam 4 --cpu"),
        ("--lenpen --cpu", "", "--cpu"),
        ("--lenpens 3 --len 3", "none", "--lenpens 3 --len 3"),
        ("--max-len-a -1 --lenpen -1.5", "-1.5", "--max-len-a -1"),
    ],
)
def test_the_last_value_counts_and_the_others_keep_their_order(flags, value, others):
    assert take("lenpen", flags.split(), "none") == (value, others.split())


def test_words_with_spaces_stay_whole():
    assert take("lenpen", ["--model-overrides", "{'a': -1}", "--lenpen", "2"]) == (
        "2",
        ["--model-overrides", "{'a': -1}"],
    )
