"""The picture and the tables of a dataset: nothing overlaps, nothing acts on the terminal, any summary can be shown."""

import dataclasses
import io
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flatout.errors import DataError, ResourceError, UsageError
from flatout.observe import dataset as data_picture
from flatout.observe.dataset import draw_data, print_data
from flatout.records import DataSummary, DocumentSample, SplitSummary, TokenCount


def split(name: str, edges: tuple[int, ...], documents: tuple[int, ...], **named: Any) -> SplitSummary:
    tokens = tuple(count * low for count, low in zip(documents, edges, strict=False))
    quantiles = dict(
        zip(("min", "1%", "10%", "50%", "90%", "99%", "max"), sorted([edges[0]] * 6 + [edges[-1] - 1]), strict=True)
    )
    values: dict[str, Any] = {
        "documents": sum(documents), "tokens": sum(tokens) or 1, "text_bytes": 3 * sum(tokens), "bytes_per_token": 3.0,
        "shards": 1, "disk_bytes": 2 * sum(tokens), "quantiles": quantiles, "windows": None, "remainder": None,
    }  # fmt: skip
    return SplitSummary(
        name=name, edges=edges, documents_by_length=documents, tokens_by_length=tokens, **(values | named)
    )


def report(kept: dict[str, int], dropped: dict[str, int], damaged: int = 0, **named: Any) -> dict[str, Any]:
    counts = {"problem_count": 0, "replaced_characters": 0, "files": 1, "input_bytes": 10**6, "text_bytes": 10**6}
    records = sum(kept.values()) + sum(dropped.values()) + damaged
    return {
        "format": "flatout-report", "records": records, "kept": kept, "dropped": dropped, "damaged": damaged,
        "passed_over": {}, **counts, **named,
    }  # fmt: skip


def tokens(*texts: str) -> tuple[TokenCount, ...]:
    return tuple(TokenCount(id=n, text=text, count=1000 - n, share=0.3 / (n + 1)) for n, text in enumerate(texts))


def summary_of(**named: Any) -> DataSummary:
    values: dict[str, Any] = {
        "folder": "data/mine", "fingerprint": "0" * 64, "tokenizer": "gpt2", "vocab": 50257, "dtype": "uint16",
        "context": None, "splits": (split("train", (5, 6), (1,)), split("val", (5, 6), (0,))),
        "top_tokens": tokens(" the", "\\n"), "unused_ids": 5, "samples": (), "report": None, "problems": (),
    }  # fmt: skip
    return DataSummary(**(values | named))


def wide(seed: int) -> tuple[SplitSummary, SplitSummary]:
    rng = random.Random(seed)
    edges = tuple(round(4 * 1.25**n) + n for n in range(45))
    counts = tuple(rng.randrange(10**6) for _ in edges[:-1])
    named: dict[str, Any] = {"windows": 10**9, "remainder": 7} if seed % 2 else {}
    return split("train", edges, counts, **named), split("val", edges, (0,) * 44, **named)


def enormous() -> DataSummary:
    """A crawl with more of everything than fits."""
    dropped = {f"a_reason_with_a_very_long_name_number_{n}": 10 ** (n % 9) for n in range(30)}
    train, val = wide(1)
    train = dataclasses.replace(train, documents=10**11, tokens=15 * 10**12, text_bytes=6 * 10**13, shards=150_000)
    return summary_of(
        folder="/data/" + "a-very-long-name-" * 20,
        context=131072,
        vocab=2**20,
        tokenizer="huggingface",
        splits=(train, val),
        top_tokens=tokens(*(f" token{n}" * 9 for n in range(20))),
        report=report(
            {"train": 10**11, "val": 10**9},
            dropped,
            10**10,
            problem_count=10**9,
            replaced_characters=10**12,
            files=90_000,
            passed_over={f".suffix{n}": 10**6 for n in range(30)},
        ),
        problems=({"file": "a" * 500, "place": "line 5", "message": "b" * 900, "kind": "json", "records": 1},) * 20,
    )


ODD = (
    "日本語",
    "\\x1b[31m",
    "$\\\\frac{1}{0}$",
    "$",
    "_{x}^",
    "",
    "\u0301",
    "שלום",
    "🧬",
    " ",
    "a\\nb",
    "<b>[red]x[/red]",
    "語" * 40,
)
HUGE = (10**12, 10**12 + 1)
SUMMARIES = {
    "one document": summary_of(),
    "one token": summary_of(splits=(split("train", (1, 2), (1,)), split("val", (1, 2), (1,))), top_tokens=tokens("a")),
    "two lengths": summary_of(splits=(split("train", (10, 11, 12), (1, 5)), split("val", (10, 11, 12), (1, 0)))),
    "one huge document": summary_of(splits=(split("train", HUGE, (1,)), split("val", HUGE, (1,)))),
    "no drops": summary_of(splits=wide(0), report=report({"train": 10, "val": 2}, {})),
    "drops": summary_of(
        splits=wide(2), report=report({"train": 900, "val": 100}, {"exact_duplicate": 7, "weight": 0}, 2)
    ),
    "windows": summary_of(splits=wide(1), context=256, report=report({"train": 1, "val": 0}, {"language": 10**6})),
    "nothing": summary_of(report=report({"train": 0, "val": 0}, {})),
    "odd": summary_of(
        folder=f"data/日本 $x$ \x1b[31m\n{'日' * 50}",
        top_tokens=tokens(*ODD),
        report=report(
            {"train": 1, "val": 1}, {"日本_$x_1$": 3, "日" * 30: 4}, passed_over={"": 2, ".\x1b\n": 1}, problem_count=1
        ),
        problems=({"file": "a\x1b.txt", "place": "line\n1", "message": "\x07 [bold]m", "kind": "json", "records": 1},),
        samples=(DocumentSample(split="train", document=0, tokens=9, text="\x1b[2J日本\n\n[red]b\u202e", cut=True),),
    ),
    "enormous": enormous(),
}  # fmt: skip
every_summary = pytest.mark.parametrize("summary", SUMMARIES.values(), ids=SUMMARIES)


@every_summary
def test_nothing_overlaps_and_nothing_leaves_the_picture(
    summary: DataSummary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    figure_of = data_picture._figure
    monkeypatch.setattr(data_picture, "_figure", lambda given: drawn.append(figure_of(given)) or drawn[0])
    draw_data(summary, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    figure = drawn[0]
    from matplotlib.text import Text

    boxes = [
        (text.get_text(), text.get_window_extent()) for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip()
    ]  # fmt: skip
    assert len(boxes) > 8
    for words, box in boxes:
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.x1, words
        assert 0 <= box.y0 <= box.y1 <= figure.bbox.y1, words
    for (first, one), (second, other) in itertools.combinations(boxes, 2):
        apart = one.x1 <= other.x0 or other.x1 <= one.x0 or one.y1 <= other.y0 or other.y1 <= one.y0
        assert apart, (first, second)


def test_vector_pictures_are_written_and_the_same_every_time(tmp_path: Path) -> None:
    for file in ("a.svg", "b.SVG"):
        draw_data(SUMMARIES["odd"], tmp_path / file)
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.SVG").read_bytes()


def test_a_picture_is_the_same_every_time_and_a_users_own_style_is_left_alone(tmp_path: Path) -> None:
    import matplotlib

    draw_data(SUMMARIES["drops"], tmp_path / "a.png")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black"}):
        draw_data(SUMMARIES["drops"], tmp_path / "b.png")
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert "matplotlib.pyplot" not in sys.modules


def test_pictures_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = SUMMARIES["one document"]
    for name in ("a.jpg", "a", "png", "a.png.txt"):
        with pytest.raises(UsageError, match="cannot be written as"):
            draw_data(summary, tmp_path / name)
    for name in ("none/a.png", "a\0b.png"):
        with pytest.raises(ResourceError, match="could not write the picture"):
            draw_data(summary, tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DataError, match="needs the package matplotlib"):
        draw_data(summary, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_the_account_adds_up_and_names_the_largest_reasons() -> None:
    summary = enormous()
    account = summary.report
    assert account is not None
    rows = data_picture._where_records_went(summary, account)
    assert sum(count for _, count, _ in rows) == account["records"]
    assert [kind for _, _, kind in rows] == ["kept"] * 2 + ["dropped"] * 9 + ["damaged"]
    assert rows[-2][0] == "dropped: 22 other reasons"
    counts = [count for _, count, kind in rows[:-2] if kind == "dropped"]
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ("kept", "documents", "rows"),
    [
        ({"train": 1, "val": 0}, (1, 1), [("kept for both, cut in two", 1)]),
        ({"train": 9, "val": 2}, (9, 3), [
            ("kept for both, cut in two", 1), ("kept for training", 8), ("kept for validation", 2),
        ]),
        ({"train": 9, "val": 2}, (9, 2), [("kept for training", 9), ("kept for validation", 2)]),
    ],
)  # fmt: skip
def test_a_document_in_both_splits_is_told_as_one(kept, documents, rows) -> None:
    splits = tuple(split(name, (5, 6), (count,)) for name, count in zip(("train", "val"), documents, strict=True))
    account = report(kept, {})
    found = data_picture._where_records_went(summary_of(splits=splits, report=account), account)
    assert [(what, count) for what, count, _ in found] == rows


@pytest.mark.grid
@every_summary
@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_fit_the_terminal_and_cannot_act_on_it(summary: DataSummary, width: int) -> None:
    stream = io.StringIO()
    print_data(summary, Console(file=stream, width=width, highlight=False))
    shown = stream.getvalue()
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    from rich.cells import cell_len

    assert max(cell_len(line) for line in shown.splitlines()) <= width
    for part in summary.splits:
        assert f"{part.tokens:,}" in shown
    for token in summary.top_tokens:
        assert data_picture._percent(token.share) in shown


def test_the_terminal_tells_what_was_dropped_and_shows_samples() -> None:
    stream = io.StringIO()
    print_data(SUMMARIES["drops"], Console(file=stream, width=80))
    lines = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
    assert "dropped: exact duplicate 7 0.69%" in lines
    assert "could not be read 2 0.20%" in lines
    stream = io.StringIO()
    print_data(SUMMARIES["odd"], Console(file=stream, width=100))
    assert "\ufffd[2J日本 ↵ ↵ [red]b\ufffd..." in stream.getvalue()
    assert "problem: a\ufffd.txt, line ↵ 1: \ufffd [bold]m" in stream.getvalue()
    assert "<b>[red]x[/red]" in stream.getvalue()


def test_terminals_without_unicode_get_escapes() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1")
    for width in (40, 100):
        print_data(SUMMARIES["odd"], Console(file=stream, width=width))
    stream.flush()
    assert "\\u65e5\\u672c" in raw.getvalue().decode("latin-1")


def test_shares_in_words() -> None:
    words = [data_picture._percent(share) for share in (0, 1e-9, 0.001, 0.0999, 0.25, 0.99951, 0.9999, 1)]
    assert words == ["0%", "<0.01%", "0.10%", "9.99%", "25.0%", "99.95%", "99.99%", "100%"]
