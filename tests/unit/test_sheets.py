"""Rows of measurements, shown: any sheet fits the terminal, and in a picture nothing overlaps or leaves the paper."""

import io
import itertools
from pathlib import Path

import pytest

from flatout.observe.sheets import as_markdown, draw_picture, figure_of, print_sheet
from flatout.rows import (
    OWN,
    Bar,
    BarPanel,
    ChartPanel,
    Heading,
    Picture,
    Points,
    ResultRow,
    Sentence,
    Sheet,
    Table,
)

ROWS = [
    ResultRow(name="one", cells={"ms": "1.5", "where": "here"}, verdict="keep 4 threads", tone=OWN),
    ResultRow(name="\x1b[2Jtwo", cells={"ms": "22.5", "where": "a|b <i>"}, verdict="", reason="it was\nslow"),
]
SHEET = Sheet(
    blocks=[
        Sentence("a device"),
        Heading("rows"),
        Table(rows=ROWS, names="name", left=("where",), extras=("where",), marks=True),
    ]
)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_in_a_pipe_has_no_colours_and_no_spaces_at_its_ends():
    stream = io.StringIO()
    print_sheet(SHEET, stream)
    lines = stream.getvalue().splitlines()
    assert lines[:3] == ["a device", "", "rows"]
    assert lines[3].split() == ["name", "ms", "where", "verdict"]
    assert lines[4] == "*  one       1.5  here     keep 4 threads"
    assert lines[-1].endswith("two: it was slow")
    assert not any(line != line.rstrip() or "\x1b" in line for line in lines)


@pytest.mark.parametrize(("width", "shown"), [(80, True), (35, False)])
def test_a_narrow_terminal_goes_without_the_columns_that_may_be_left_out(
    width: int, shown: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    print_sheet(SHEET, screen)
    assert ("where" in screen.getvalue()) == shown
    assert "keep 4 threads" in screen.getvalue()


def test_markdown_has_the_same_rows_and_no_markup_of_others():
    text = as_markdown(SHEET)
    assert "| one | 1.5 | here |" in text
    assert "a\\|b &lt;i>" in text
    assert "\x1b" not in text


PICTURE = Picture(
    title="A title that is far too long for a picture of this width " * 3,
    lines=["a line " * 60, "$a_b^{c}$"],
    names=[Heading("group"), "first", "second \u65e5\u672c" * 20, "third"],
    bars=[
        BarPanel(
            title="bars",
            bars=[
                Bar(line=1, parts=[(3.0, "blue"), (90.0, "orange")], words="words " * 20),
                Bar(line=2, words="out of memory: it needs more than there is", colour="red"),
            ],
            limits=(0.0, 10.0),
            at=5.0,
        ),
        BarPanel(
            title="gains",
            bars=[
                Bar(line=1, dot=1.5, interval=(1.2, 99.0), words="1.50\u00d7"),
                Bar(line=3, dot=0.5, interval=(0.4, 0.6), pale=True, words="no difference seen " * 5),
            ],
            limits=(0.2, 4.0),
            at=1.0,
            log=True,
        ),
    ],
    charts=[
        ChartPanel(
            title="over rates",
            curves=[Points(points=[(10.0**-n, float(n)) for n in range(7)], name="loss")],
            log=True,
            limits=(0.0, 5.0),
            marks=[(1e-3, "steepest", "purple"), (1.1e-3, "valley", "red"), (0.5, "minimum", "teal")],
            wide=True,
        ),
        ChartPanel(title="choices", curves=[Points(points=[(0, 1.0), (1, 2.0)], look="dots")], ticks=["a", "b" * 40]),
        ChartPanel(title="whole", curves=[Points(points=[(2, 1.0), (6, 2.0)], look="crosses")]),
    ],
)


def test_nothing_overlaps_and_nothing_leaves_the_picture():
    figure = figure_of(PICTURE)
    labels = {label for axes in figure.axes for label in (*axes.get_xticklabels(), *axes.get_yticklabels())}
    from matplotlib.text import Text

    figure.canvas.draw()
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if text.get_text().strip() and text.get_visible() and text not in labels
    ]
    assert len(boxes) > 12
    for words, box in boxes:
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1, words
        assert 0 <= box.y0 <= box.y1 <= figure.bbox.y1, words
    for (first, one), (second, other) in itertools.combinations(boxes, 2):
        apart = one.x1 <= other.x0 or other.x1 <= one.x0 or one.y1 <= other.y0 or other.y1 <= one.y0
        assert apart, (first, second)


def test_the_same_picture_gives_the_same_bytes(tmp_path: Path):
    for name in ("a.png", "b.png"):
        draw_picture(PICTURE, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    draw_picture(Picture(title="nothing", bars=[BarPanel(title="none", bars=[])]), tmp_path / "none.svg")
