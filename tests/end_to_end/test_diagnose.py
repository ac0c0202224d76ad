"""``fairseq-lot diagnose`` on checkpoints and data folders, as a user runs it."""

import json

from fairseq_lot.inspection.per_head import CERTIFICATES, MEASURES
from tests.end_to_end.conftest import fairseq_lot, refuse, swapped

FEW = ("--sentences", 5, "--batch", 3, "--perturbations", 2)


def tables(text):
    """The cells of every Markdown table, header first, without the rule."""
    found = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [[rows[0], *rows[2:]] for rows in found if rows]


def shown(row, keys, figures):
    return [*(str(row[key]) for key in keys), *(format(row[name], form) for name, (_, form) in figures.items())]


def test_json_holds_what_the_table_shows(data, stock_checkpoint, tmp_path, capsys):
    out = tmp_path / "new" / "out.json"
    capsys.readouterr()
    fairseq_lot("diagnose", "--path", stock_checkpoint, data / "bin", *FEW, "--json", out)
    shown_text = capsys.readouterr().out
    report = json.loads(out.read_text(encoding="utf-8"))
    heads, certificates = tables(shown_text)
    keys = ("site", "layer", "head", "attention")
    assert heads == [[*keys, *(title for title, _ in MEASURES.values())]] + [
        shown(row, keys, MEASURES) for row in report["rows"]
    ]
    assert certificates == [["layer", "attention", *(title for title, _ in CERTIFICATES.values())]] + [
        shown(row, ("layer", "attention"), CERTIFICATES) for row in report["certificates"]
    ]
    assert len(report["rows"]) == 3 * 2 * 2, "three sites, two layers, two heads"
    assert (report["split"], report["sentences"], report["seed"]) == ("valid", 5, 1)
    assert all(row["marginal_error"] > 1e-3 for row in report["rows"] if row["site"] == "encoder")
    widths = {len(line) for line in shown_text.splitlines() if line.startswith("| encoder")}
    assert len(widths) == 1


def test_a_swapped_checkpoint_is_balanced(data, stock_checkpoint, tmp_path, capsys):
    path, out = tmp_path / "swapped.pt", tmp_path / "out.json"
    swapped(stock_checkpoint, path, "sinkhorn", "--sinkhorn-epsilon", 1, "--sinkhorn-num-updates", 401)
    fairseq_lot("diagnose", "--path", path, data / "bin", "--split", "test", *FEW, "--json", out)
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert {row["attention"] for row in rows if row["site"] == "encoder"} == {"sinkhorn"}
    assert all(row["marginal_error"] < 1e-4 for row in rows if row["site"] == "encoder")
    assert all(row["attention"] == "softmax" for row in rows if row["site"] != "encoder")


def test_json_that_cannot_be_written_is_known_at_once(data, stock_checkpoint, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "out.json"):
        refuse(capsys, "diagnose", "--path", stock_checkpoint, data / "bin", "--json", out, naming=[out])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
