"""A table says the same in Markdown and in HTML."""

import re

from fairseq_lot.output.tables import Table

TABLE = Table(
    ["name", "size"], [["a|b", 1], ["`c`\n<d>", 1000]], heading="**x<y**, z", notes=["f & g", "h"], align="<>"
)


def test_markdown_is_escaped_and_has_no_line_breaks_in_cells():
    assert TABLE.markdown() == (
        "**x<y**, z\n\n| name | size |\n| --- | ---: |\n| a\\|b | 1 |\n| `c` <d> | 1000 |\n\n- f & g\n- h"
    )


def test_padded_columns_are_aligned():
    assert Table(TABLE.head, TABLE.rows, align="<>").markdown(padded=True).split("\n") == [
        "| name    |   size |",
        "|:--------|-------:|",
        "| a\\|b    |      1 |",
        "| `c` <d> |   1000 |",
    ]


def test_html_is_escaped():
    text = re.sub(r"\s*\n\s*|(?<=>) +| +(?=<)", "", TABLE.html())
    assert text == (
        "<p><strong>x&lt;y</strong>, z</p>"
        '<div class="wide" tabindex="0"><table><thead><tr><th>name</th><th style="text-align: right;">size</th></tr>'
        '</thead><tbody><tr><td>a|b</td><td style="text-align: right;">1</td></tr>'
        '<tr><td><code>c</code>&lt;d&gt;</td><td style="text-align: right;">1000</td></tr></tbody></table></div>'
        "<ul><li>f &amp; g</li><li>h</li></ul>"
    )


def test_without_heading_and_notes_there_is_the_table_alone():
    table = Table(["a"], [["b"]])
    assert table.markdown() == "| a |\n| --- |\n| b |"
    assert table.html().startswith("<div") and table.html().endswith("</table></div>")
