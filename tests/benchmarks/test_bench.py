"""``python -m benchmarks``: its measurements, its files and its errors."""

import csv
from functools import partial

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY

from benchmarks import layer, translating
from benchmarks import model as whole_model
from benchmarks.__main__ import main
from benchmarks.measure import Job, LiveTensors, lower_quartile, measure, peak_memory
from benchmarks.render import Results, render
from fairseq_lot.attention.registry import MECHANISMS
from fairseq_lot.models.pluggable_transformer import PluggableTransformerModel

PEER = "def build(*, num_heads, head_dim, num_pivots):\n    return lambda q, k, v: v * num_pivots\n"
QUICK = ["--tokens", "8", "--repeats", "1", "--warm-up", "0"]
SMALL = [*QUICK, "--num-heads", "2", "--head-dim", "4"]
CPU = torch.device("cpu")
FACTORY = {"device": CPU, "dtype": torch.float32}
MODEL = ["--model", "lot_transformer_small"]
EVERYWHERE = "--attention-sites encoder,cross,decoder"


def table_of(folder):
    """The header and the rows of a folder's CSV."""
    header, *lines = (folder / "bench.csv").read_text().splitlines()
    return header, list(csv.DictReader(lines))


def checked_outputs(folder, names, lengths, capsys):
    """Check that every output has these contenders, and the CSV these lengths; return the CSV's header and rows."""
    header, rows = table_of(folder)
    assert [(row["contender"], row["length"]) for row in rows] == [(name, n) for n in lengths for name in names]
    assert all(float(value) > 0 for row in rows for key, value in row.items() if key != "contender")
    assert capsys.readouterr().out.strip() == (folder / "bench.md").read_text().strip()
    assert all(name in (folder / "bench.svg").read_text() for name in names)
    return header, rows


def test_live_tensors_are_counted_and_views_and_dead_ones_are_not():
    x = torch.zeros(1000)
    with LiveTensors() as live:
        y = x + 1
        y.view(10, 100)[2:] += 1
        for _ in range(5):
            z = y * 2  # allocated while the previous z is still alive
        del y, z
        x + 1
    assert live.peak == 3 * 4000


def test_attention_that_makes_a_square_matrix_needs_memory_for_it():
    def attend(q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    peaks = []
    for n in (50, 200):
        inputs = [torch.randn(1, 1, n, 2, requires_grad=True) for _ in range(3)]
        *_, both = layer.job(attend, inputs, torch.randn(1, 1, n, 2)).works.values()
        peaks.append(peak_memory(both, CPU))
    assert peaks[0] >= 50 * 50 * 4
    assert 12 < peaks[1] / peaks[0] < 17


def out_of_memory(turn):
    """A function that runs out of memory at its ``turn``-th call."""
    calls = []

    def work():
        calls.append(None)
        if len(calls) == turn:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to")

    return work


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_the_others_are_measured_when_one_runs_out_of_memory(turn):
    works = {"first": lambda: None, "last": lambda: torch.ones(10)}
    makers = {
        "large": lambda: Job({**works, "last": out_of_memory(turn)}),
        "small": lambda: Job(works, {"known": 7}, {"rate": (8, "last")}),
    }
    found = measure(makers, CPU, warm_up=1, repeats=1)
    small = found["small"]
    assert found["large"] is None and small["first"] > 0
    assert (small["peak_bytes"], small["known"], small["rate"]) == (40, 7, 8 / small["last"])


def test_an_error_that_is_not_about_memory_is_not_hidden():
    def wrong():
        raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="multiplied"):
        measure({"wrong": lambda: Job({"work": wrong})}, CPU, warm_up=0, repeats=1)


def test_after_the_limit_no_round_starts_but_one_is_measured():
    for limit, expected in ((0.0, 1 + 2 + 1), (60.0, 1 + 2 + 5)):  # calls: memory, warm-up, measured rounds
        calls = []
        makers = {"one": lambda calls=calls: Job({"work": lambda: calls.append(None)})}
        assert measure(makers, CPU, warm_up=2, repeats=5, limit=limit)["one"]["work"] >= 0
        assert len(calls) == expected


def test_a_work_is_repeated_until_its_turn_is_over(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr("benchmarks.measure.timer", lambda: now[0])

    def work(name, seconds):
        calls.append(name)
        now[0] += seconds

    works = {"long": partial(work, "long", 0.75), "short": partial(work, "short", 0.125)}
    found = measure({"one": lambda: Job(works)}, CPU, warm_up=0, repeats=2, turn=0.5)["one"]
    assert (found["long"], found["short"]) == (0.75, 0.125)
    assert calls == ["short"] + 2 * ["long", *4 * ["short"]]  # the first call measures memory


def test_the_lower_quartile_counts():
    assert [lower_quartile(list(range(n, 0, -1))) for n in (1, 3, 4, 9)] == [1, 1, 2, 3]


def test_a_contender_that_ran_out_of_memory_has_a_cell_that_says_so(tmp_path, monkeypatch, capsys):
    def attend(q, k, v):
        if q.size(2) > 2:
            raise MemoryError
        return v * 1

    monkeypatch.setattr(layer, "products", lambda _, *inputs: attend(*inputs))
    assert main(["--out", str(tmp_path), "--lengths", "2", "4", "8", *SMALL]) == 0
    _, rows = table_of(tmp_path)
    cells = {row["length"]: row["forward_seconds"] for row in rows if row["contender"] == "products alone r=32"}
    assert float(cells.pop("2")) > 0 and cells == {"4": "out of memory"}
    assert "| out of memory | – |" in capsys.readouterr().out


def test_every_mechanism_is_measured_and_those_with_pivots_at_every_rank():
    def contenders(mechanisms, ranks):
        return layer.LayerBench(mechanisms, ranks, **FACTORY, num_heads=2, head_dim=4).contenders

    found = contenders(None, [3, 5])
    assert {name.partition(" ")[0] for name in found} == {*MECHANISMS, "sdpa", "products"}
    assert [name for name in found if name.startswith("lot")] == ["lot r=3", "lot r=5"]
    assert "lot --lot-num-updates 2 r=7" in contenders(["lot --lot-num-pivots 7 --lot-num-updates 2"], [3])
    features = contenders(["near_far --near-far-window 4", "near_far --near-far-num-features 7"], [3, 5])
    assert {"near_far --near-far-window 4 r=3", "near_far --near-far-window 4 r=5", "near_far r=7"} <= features.keys()
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    for attend in found.values():
        assert attend(q, k, v).shape == v.shape


def test_the_table_says_how_many_times_better_than_the_base():
    measures, rows = layer.LayerBench.measures, {}
    times = {"sdpa": [1, 2, 4, 8], "late": [2, 1, 5, 7], "stopped": [2, 1], "large": [0.5, None]}
    for name, row in times.items():
        for i, x in enumerate(row):
            rows[name, 2**i] = None if x is None else {measure.key: x for measure in measures}
    text = render(Results("", "sdpa", measures, rows))
    assert "| late | 2000 (0.5) | 1000 (2) | 5000 (0.8) | 7000 (1.1) |" in text
    assert "| stopped | 2000 (0.5) | 1000 (2) | – | – |" in text
    assert "| large | 500 (2) | out of memory | – | – |" in text


def test_more_words_per_second_are_better():
    (speed,) = (one for one in whole_model.ModelBench.measures if one.more_is_better)
    assert speed.lead({"words_per_second": 30.0}, {"words_per_second": 10.0}) == 3
    forward = layer.LayerBench.measures[0]
    assert forward.lead({"forward_seconds": 30.0}, {"forward_seconds": 10.0}) == pytest.approx(1 / 3)


def test_the_command_writes_its_table_and_figure(tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "peer.py").write_text(PEER)
    out = tmp_path / "out"
    words = ["--lengths", "4", "2", "--num-pivots", "2", "--peer", f"other={tmp_path / 'other'}", "--mechanism", "lot"]
    assert main(["--out", str(out), *SMALL, *words, "--threads", "1"]) == 0
    header, _ = checked_outputs(out, ["sdpa", "lot r=2", "other r=2", "products alone r=2"], ["2", "4"], capsys)
    assert all(word in header for word in ("1 threads", "torch", "commit", "float32", "warm-up 0", "quartile of 1"))


@pytest.mark.slow
def test_a_slow_mechanism_is_left_out_at_longer_lengths(tmp_path):
    words = ["--mechanism", "softmax", "--lengths", "2", "4", "--patience", "0"]
    assert main(["--out", str(tmp_path), *SMALL, *words]) == 0
    assert {row["length"] for row in table_of(tmp_path)[1]} == {"2"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mechanism", "lots"], "'lots'"),
        (["--mechanism", "lot --lot-pivots 3"], "--lot-pivots"),
        (["--mechanism", "lot --lot-num-pivots many"], "--lot-num-pivots"),
        (["--mechanism", "lot --esp-hard"], "'esp_hard'"),
        (["--peer", "nowhere"], "'nowhere'"),
        (["--lengths", "0"], "--lengths"),
        (["--repeats", "0"], "--repeats"),
        (["--device", "abacus"], "'abacus'"),
        (["--mechanism", "lot --attention-sites cross"], "'attention_sites'"),
        (["--prefix", "0"], "--prefix"),
        (["--graphs", "--device", "cpu"], "--graphs is for a layer on a GPU"),
        (["--model", "lots"], "'lots'"),
        (["--model", "transformer_lm"], "lot_transformer"),
        ([*MODEL, "--mechanism", "lot --attention-sites middle"], "'middle'"),
        ([*MODEL, "--mechanism", "sinkhorn --attention-sites cross"], "couples the queries"),
        ([*MODEL, "--mechanism", "lot --esp-hard"], "--esp-hard"),
        ([*MODEL, "--vocabulary", "4"], "--vocabulary"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, capsys, words, message):
    assert main(["--out", str(tmp_path / "out"), *QUICK, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_peer_that_fails_is_named(tmp_path):
    (tmp_path / "peer.py").write_text("import no_such_module_here\n")
    with pytest.raises(ValueError, match="no_such_module_here"):
        layer.read_peer(f"broken={tmp_path}", 2, 4, 3)


@pytest.fixture
def tiny_architecture(monkeypatch):
    """Register an architecture with one layer per side, width 8 and 2 heads; return words that measure it."""

    def tiny(args):
        for side in ("encoder", "decoder"):
            for name, value in {"embed_dim": 8, "ffn_embed_dim": 8, "layers": 1, "attention_heads": 2}.items():
                setattr(args, f"{side}_{name}", value)

    monkeypatch.setitem(ARCH_CONFIG_REGISTRY, "tiny", tiny)
    monkeypatch.setitem(whole_model.ARCH_MODEL_REGISTRY, "tiny", PluggableTransformerModel)
    monkeypatch.setattr(whole_model.ModelBench, "turn", 0.0)
    return ["--model", "tiny", "--vocabulary", "20", "--prefix", "3", *QUICK]


@pytest.fixture
def bench_factory(tiny_architecture):
    """Makes the ``ModelBench`` of the tiny architecture; takes ``longest``."""
    return partial(whole_model.ModelBench, "tiny", None, [3], prefix=3, vocabulary=20, **FACTORY)


def test_a_whole_model_is_measured_with_softmax_and_with_lot_at_some_sites(tiny_architecture, tmp_path, capsys):
    # 1,030 tokens are beyond fairseq's 1,024
    words = [*tiny_architecture, "--lengths", "4", "1030", "--num-pivots", "3", "--limit", "0"]
    assert main(["--out", str(tmp_path), *words, "--mechanism", f"lot {EVERYWHERE}", "--mechanism", "set"]) == 0
    names = ["softmax", f"lot {EVERYWHERE} r=3", "set r=3"]
    header, rows = checked_outputs(tmp_path, names, ["4", "1030"], capsys)
    assert all(word in header for word in ("tiny", "vocabulary 20", "3 tokens behind", "batch of 8 tokens"))
    for row, words in zip(rows, [8] * 3 + [1030] * 3, strict=True):
        assert float(row["words_per_second"]) == pytest.approx(words / float(row["training_seconds"]), rel=1e-4)


def jobs(bench, length):
    return {name: make() for name, make in bench.jobs(bench.contenders, 2, length).items()}


def test_a_job_of_a_model_repeats_the_same_work(bench_factory):
    """A step adds nothing to the state that the next one starts from, and a training step leaves no gradient."""
    bench = bench_factory(longest=6)
    for name, job in jobs(bench, 6).items():
        model, calls = bench.contenders[name], []
        handle = model.decoder.register_forward_hook(lambda *_, calls=calls: calls.append("training"))
        before = {key: value.clone() for key, value in model.state_dict().items()}
        for _ in range(2):
            for work in job.works.values():
                work()
        assert calls == ["training"] * 2  # decoding runs in a copy of the model
        assert all(x.grad is None for x in model.parameters()) and model.training
        same = {"rtol": 0, "atol": 0, "equal_nan": True}  # fairseq never fills its buffer _float_tensor
        torch.testing.assert_close(dict(model.state_dict()), before, **same)
        peaks = [peak_memory(job.works["decoding_seconds"], CPU) for _ in range(2)]
        assert peaks[0] == peaks[1] > 0
        handle.remove()


def test_the_decoding_state_grows_with_softmax_and_not_with_lot(bench_factory):
    bench = bench_factory(longest=60)
    short, long = ({name: job.known["state_bytes"] for name, job in jobs(bench, n).items()} for n in (30, 60))
    # 2 sentences, 30 more tokens, keys and values of width 8 in float32
    assert long["softmax"] - short["softmax"] == long["lot r=3"] - short["lot r=3"] >= 2 * 30 * 2 * 8 * 4
    name = f"lot {EVERYWHERE} r=3"
    assert long[name] == short[name] > 0


def test_all_models_take_equally_many_decoding_steps(tiny_architecture, monkeypatch, capsys):
    found, translate = [], translating.translate

    def noted(model, source, beam):
        steps, forward = [], model.decoder.forward
        monkeypatch.setattr(model.decoder, "forward", lambda *x, **more: steps.append(1) or forward(*x, **more))
        seconds = translate(model, source, beam)
        found.append((len(steps), seconds))
        assert "forward" not in vars(model.encoder), "a clock was left on the model"
        return seconds

    monkeypatch.setattr(translating, "translate", noted)
    words = ["--model", "tiny", "--vocabulary", "20", "--length", "6", "--turns", "2", "--beam", "2"]
    assert main(["translate", *words, "--mechanism", "near_far --attention-sites encoder,cross,decoder"]) == 0
    assert [steps for steps, _ in found] == [6] * 4
    for _, seconds in found:
        assert set(seconds) == {*translating.PARTS, "all"} and all(x > 0 for x in seconds.values())
        assert sum(seconds[part] for part in translating.PARTS) < seconds["all"]
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == [
        "| softmax",
        "| near_far --attention-sites encoder,cross,decoder r=32",
    ]


def test_a_document_of_one_piece_is_refused(capsys):
    assert main(["translate", "--length", "1"]) == 2
    assert capsys.readouterr().err.strip().endswith("--length must be at least 2, got 1")
