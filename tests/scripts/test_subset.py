"""scripts/subset.py: a subset of a training set by hashes of its pairs."""

import subprocess
import sys

from tests.conftest import ROOT

PAIRS = [
    ("ein haus .", "a house ."),
    ("es ist &quot; gut &quot; .", "it &apos;s good ."),
    ("ja !", "yes !"),
    ("ja .", "yes ."),
]


def write(folder, pairs):
    """Write the pairs as a folder's training set, and the first pair as its other splits; return the folder."""
    folder.mkdir()
    for number, language in enumerate(("de", "en")):
        for split in ("train", "valid", "test"):
            text = "".join(f"{pair[number]}\n" for pair in (pairs if split == "train" else pairs[:1]))
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")
    return folder


def run(*words):
    return subprocess.run([sys.executable, ROOT / "scripts/subset.py", *words], capture_output=True, text=True)


def test_the_pairs_of_a_list_are_taken_in_its_order_whatever_their_tokens(tmp_path):
    part, pairs = write(tmp_path / "part", PAIRS), tmp_path / "list"
    assert run(pairs, part, "--make").returncode == 0 and pairs.stat().st_size == 5 * len(PAIRS)
    tokens = ('Es ist "gut".', "it's good.")
    others = [("ein hund .", "a dog ."), PAIRS[2], ("ein haus .", "a mouse ."), tokens, tokens, PAIRS[0], PAIRS[3]]
    (write(tmp_path / "all", others) / "raw").mkdir()
    raw = ("raw/test.de", "raw/test.en")
    for name in raw:
        (tmp_path / "all" / name).write_text(f"{name}\n")
    done = run(pairs, tmp_path / "all", tmp_path / "out")
    assert done.stdout == f"{tmp_path / 'out'}: 4 of 4 pairs\n"
    taken = [(tmp_path / "out" / f"train.{language}").read_text(encoding="utf-8") for language in ("de", "en")]
    assert list(zip(*map(str.splitlines, taken), strict=True)) == [PAIRS[0], tokens, *PAIRS[2:]]
    for name in ("valid.en", "test.de", *raw):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "all" / name).read_bytes()


def test_a_wrong_list_or_text_is_refused_and_nothing_is_written(tmp_path):
    run(tmp_path / "list", write(tmp_path / "part", [*PAIRS, PAIRS[0]]), "--make")
    hashes = (tmp_path / "list").read_bytes()
    assert len(hashes) == 5 * len(PAIRS)  # a pair that is there twice is one
    (tmp_path / "cut").write_bytes(hashes[:13])
    part, other = tmp_path / "part", write(tmp_path / "other", [("ein hund .", "a dog .")])
    cases = (("cut", part, "has 13 bytes"), ("list", other, "has none of the 4 pairs of"), ("list", part, "valid.en"))
    (part / "valid.en").unlink()
    for name, text, message in cases:
        done = run(tmp_path / name, text, tmp_path / "out")
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    done = run(tmp_path / "list", other, other)
    assert done.returncode == 2 and "TEXT and OUT are both" in done.stderr
    for words in ([], [tmp_path / "out", "--make"]):
        done = run(tmp_path / "list", other, *words)
        assert done.returncode == 2 and "give either OUT or --make" in done.stderr
    assert (tmp_path / "list").read_bytes() == hashes


def test_the_tracked_list_has_as_many_pairs_as_the_page_says():
    pairs = (ROOT / "config" / "iwslt14-65k.pairs").read_bytes()
    hashes = {pairs[at : at + 5] for at in range(0, len(pairs), 5)}
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert len(pairs) == 5 * len(hashes) and f"{len(hashes):,} training pairs" in page
