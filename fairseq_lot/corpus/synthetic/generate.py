"""Write the synthetic German-English corpus: train, valid and test files of raw, cased, detokenised sentences.

The sentences come from a small probabilistic grammar, and some are odd. A few German words have two English
translations (klein is small or little), which no model can foresee.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from random import Random

from tqdm import tqdm

from fairseq_lot.corpus.synthetic.sampler import Sampler
from fairseq_lot.corpus.synthetic.sentences import Sentence, draw_sentence
from fairseq_lot.errors import InputError
from fairseq_lot.output.files import atomic_write

SPLITS = ("train", "valid", "test")
# beyond this the grammar repeats itself more and more, and the corpus teaches nothing new
MAX_SENTENCES = 500_000
# words without punctuation, on both sides
MIN_WORDS, MAX_WORDS = 3, 16


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``fairseq-lot synthetic``."""
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for {train,valid,test}.{de,en}")
    parser.add_argument("--train", type=int, default=12_000, metavar="N", help="training pairs (default %(default)s)")
    parser.add_argument("--valid", type=int, default=500, metavar="N", help="validation pairs (default %(default)s)")
    parser.add_argument("--test", type=int, default=500, metavar="N", help="test pairs (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed; the same seed, the same bytes")


def run(args: Namespace) -> None:
    """Generate everything, then write the six files.

    Raises:
        InputError: a count is below 1 or their sum is more than the grammar can fill, or the folder is not writable.
    """
    sizes = {split: getattr(args, split) for split in SPLITS}
    pairs = generate(**sizes, seed=args.seed)
    folder = Path(args.out)
    for split, split_pairs in pairs.items():
        for language, index in (("de", 0), ("en", 1)):
            with atomic_write(folder / f"{split}.{language}") as file:
                file.writelines(pair[index] + "\n" for pair in split_pairs)
    counts = ", ".join(f"{size} {split}" for split, size in sizes.items())
    print(f"wrote the synthetic corpus to {folder}: {counts} pairs")


def generate(*, train: int, valid: int, test: int, seed: int) -> dict[str, list[Sentence]]:
    """Return the sentence pairs of each split; no German sentence occurs twice anywhere.

    Raises:
        InputError: a count is below 1, the seed is negative, or the grammar cannot make so many distinct sentences.
    """
    sizes = {"train": train, "valid": valid, "test": test}
    for split, size in sizes.items():
        if size < 1:
            raise InputError(f"--{split} {size}: every split needs at least 1 sentence pair; give a positive number")
    if seed < 0:  # random.Random takes the absolute value: -1 would repeat 1
        raise InputError(f"--seed {seed}: a seed is not negative; give 0 or more")
    total = sum(sizes.values())
    if total > MAX_SENTENCES:
        largest = max(sizes, key=sizes.get)
        raise InputError(
            f"--{largest} {sizes[largest]}: with the other splits that is {total} sentence pairs, and the grammar "
            f"makes at most {MAX_SENTENCES} distinct ones; lower it"
        )
    pairs = _distinct(total, seed)
    return {"train": pairs[:train], "valid": pairs[train : train + valid], "test": pairs[train + valid :]}


def _distinct(total, seed):
    sampler = Sampler(Random(seed))
    pairs: dict[str, Sentence] = {}
    with tqdm(total=total, desc="sentences", unit="", delay=2, disable=None) as progress:
        while len(pairs) < total:
            pair = draw_sentence(sampler)
            fits = all(MIN_WORDS <= len(text.split()) <= MAX_WORDS for text in pair)
            if pair[0] not in pairs and fits:
                pairs[pair[0]] = pair
                progress.update()
    return list(pairs.values())
