"""``fairseq-lot diagnose`` on checkpoints and data folders, as a user runs it."""

import json

from fairseq_lot.inspection.per_head import CERTIFICATES, MEASURES
from tests.end_to_end.conftest import fairseq_lot, swapped

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
    """The cells that a table shows for a row of the JSON file."""
    return [*(str(row[key]) for key in keys), *(format(row[name], form) for name, (_, form) in figures.items())]


def test_the_json_of_diagnose_has_the_figures_of_its_table(data, stock_checkpoint, tmp_path, capsys):
    path, out = tmp_path / "swapped.pt", tmp_path / "new" / "out.json"
    swapped(stock_checkpoint, path, "sinkhorn", "--sinkhorn-epsilon", 1, "--sinkhorn-num-updates", 401)
    capsys.readouterr()
    fairseq_lot("diagnose", "--path", path, data / "bin", *FEW, "--json", out)
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
    for row in report["rows"]:
        assert row["attention"] == ("sinkhorn" if row["site"] == "encoder" else "softmax")
        assert (row["marginal_error"] < 1e-4) == (row["site"] == "encoder")
    widths = {len(line) for line in shown_text.splitlines() if line.startswith("| encoder")}
    assert len(widths) == 1
