"""Inputs of the evaluation commands: output of fairseq-generate, rows of results, a corpus."""

import random

import pytest

from fairseq_lot.experiment.spec import MetricScore, Row


@pytest.fixture
def write_generated(tmp_path):
    """A function that writes the output of fairseq-generate for these hypotheses to a file, in a random order."""

    def write(name, hypotheses):
        lines = ["2024-01-01 00:00:00 | INFO | fairseq_cli.generate | {'_name': None}"]
        for number, text in random.Random(1).sample(list(enumerate(hypotheses)), len(hypotheses)):
            lines += [f"S-{number}\tein satz", f"T-{number}\ta sentence", f"H-{number}\t-0.5\t{text}"]
            lines += [f"D-{number}\t-0.5\t{text}", f"P-{number}\t-0.1 -0.9"]
        lines.append("Generate test with beam=5: BLEU4 = 20.00, 50.0/30.0/20.0/10.0 (BP=1.000)")
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


def write_rows(path, *rows):
    """Write a results file; return its path."""
    path.write_text("".join(row.line + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def make_row():
    """A function that makes a row; keywords replace its fields."""

    def make(system="softmax", *, score=30.0, delta=None, p=None, **values):
        values.setdefault("settings", {"attention": system.split()[0].lower()})
        base = None if delta is None else round(score - delta, 2)
        found = {"low": score - 1, "high": score + 1, "base": base, "delta": delta, "p": p}
        row = {
            "dataset": "toy",
            "experiment": "short",
            "system": system,
            "stage": "base",
            "sentences": 500,
            "tokenised": MetricScore(score=score, signature="tok:none", **found),
            "sacrebleu": MetricScore(score=score + 0.5, signature="tok:13a", **found),
            "reference": "raw",
            "bootstrap_samples": 1000,
            "bootstrap_seed": 12345,
            "device": "cpu",
            "precision": "fp32",
            "seconds": 2.5,
            "commit": "abc1234",
            "command": "fairseq-generate data-bin/toy",
        }
        return Row(**(row | values))

    return make


@pytest.fixture
def corpus():
    """References, and the translations of two systems; the second has twice as many wrong words."""
    generator = random.Random(7)
    words = [f"word{number}" for number in range(200)] + [",", "&apos;s", "ü"]

    def spoil(tokens, share):
        return " ".join(generator.choice(words) if generator.random() < share else token for token in tokens)

    sentences = [[generator.choice(words) for _ in range(generator.randint(4, 15))] for _ in range(151)]
    good, bad = ([spoil(tokens, share) for tokens in sentences] for share in (0.15, 0.3))
    return [" ".join(tokens) for tokens in sentences], good, bad
