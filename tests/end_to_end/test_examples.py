"""The README's Python and examples/plug_and_play.py on a tiny model."""

import re
from functools import partial

import fairseq_lot
from tests.conftest import ROOT, program


def test_examples_plug_and_play(data, stock_checkpoint, capsys):
    program("examples/plug_and_play.py").main([str(stock_checkpoint), str(data / "bin"), "--steps", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"predictions change by \d\.\d+ nats a piece", lines.pop(0))
    names = [line.split(": ")[0] for line in lines if not line.startswith("  ")]
    assert names == ["softmax", "near_far"]
    masses = [[float(mass) for mass in re.findall(r"\d+\.\d+", line)] for line in lines if line.startswith("  ")]
    for received in masses:  # rows sum to 1, so all keys together receive one each; a figure is rounded by 0.005
        assert abs(sum(received) - len(received)) <= 0.005 * len(received) + 1e-6


def test_examples_near_far(data, stock_checkpoint, capsys):
    program("examples/near_far.py").main([str(stock_checkpoint), str(data / "bin"), "--steps", "2", "--tokens", "600"])
    first, _, *costs = capsys.readouterr().out.splitlines()
    same, all_ = map(int, re.fullmatch(r"(\d+) of (\d+) translations .* the same", first).groups())
    assert 0 <= same <= all_ == 60
    assert [line.split(":")[0].strip() for line in costs] == ["near_far", "softmax"]
    assert all(int(re.search(r"(\d+) MiB", line)[1]) > 0 for line in costs)


def test_ten_lines_of_the_readme(data, stock_checkpoint, capsys, monkeypatch):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL).group(1)
    assert len([line for line in code.splitlines() if line]) <= 10
    for name, path in (
        ("checkpoints/quickstart/seed1/transformer/base/checkpoint_best.pt", stock_checkpoint),
        ("data-bin/help", data / "bin"),
    ):
        assert name in code
        code = code.replace(name, str(path))
    short = partial(fairseq_lot.swap, steps=2, joint_steps=1, held_out=4)
    monkeypatch.setattr(fairseq_lot, "swap", short, raising=False)
    namespace = {}
    exec(compile(code, "README.md", "exec"), namespace)
    weights = namespace["seen"][0].weights
    assert weights.shape[-1] == weights.shape[-2] and str(weights[0, 0]) in capsys.readouterr().out
