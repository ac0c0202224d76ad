"""The synthetic corpus of the tests: its bytes never change."""

import hashlib
import lzma
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "synthetic"
SHA256 = {
    "test.de": "86f280e47a95c7f0fdac7523f8b6d4d3a61c46ec49f70750d7059b0ef4d7fbb0",
    "test.en": "494e948625dba9c217cc3c41e47b2de7863f08d3bf5650d488f353ea0d68b1ae",
    "train.de": "369f07fed6a858bc508cbcf1a7402df13d1d24ff0462f11fa1b15a128990cec1",
    "train.en": "cc680e5896d2040e91c2268316b8769fa726f80a9984aba29d8d460af134abcd",
    "valid.de": "7b9b1d6a2f8bb1e41c00057f9762b9df4b04f3ddc3ab57220802260d6168ef99",
    "valid.en": "8ca392ac016c90c4bdb5a9833bc3dc9d026737cb153dffc1cda8f517d5897c84",
}


def test_the_text_has_its_recorded_checksums():
    found = {path.stem: hashlib.sha256(lzma.decompress(path.read_bytes())) for path in FOLDER.glob("*.xz")}
    assert {name: text.hexdigest() for name, text in found.items()} == SHA256
