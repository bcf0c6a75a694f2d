"""The tables of a dataset: nothing acts on the terminal, any summary can be shown."""

import dataclasses
import io
import random
from typing import Any

import pytest
from rich.console import Console

from flatout.observe.dataset import data_sheet, record_counts
from flatout.observe.sheets import print_sheet
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
    return SplitSummary(name=name, **(values | named))


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


def test_the_account_adds_up_and_names_the_largest_reasons() -> None:
    summary = enormous()
    account = summary.report
    assert account is not None
    counts = record_counts(summary, account)
    assert sum(counts.values()) == account["records"]
    names = list(counts)
    assert names[:2] == ["kept for training", "kept for validation"]
    assert names[-2:] == ["dropped: other reasons", "could not be read"]
    largest = [count for name, count in counts.items() if name.startswith("dropped: a reason")]
    assert len(largest) == 9
    assert largest == sorted(largest, reverse=True)


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
def test_a_document_in_both_splits_counts_once(kept, documents, rows) -> None:
    splits = tuple(split(name, (5, 6), (count,)) for name, count in zip(("train", "val"), documents, strict=True))
    account = report(kept, {})
    assert list(record_counts(summary_of(splits=splits, report=account), account).items()) == rows


@pytest.mark.grid
@every_summary
@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_cannot_act_on_the_terminal(summary: DataSummary, width: int) -> None:
    stream = io.StringIO()
    print_sheet(data_sheet(summary), console=Console(file=stream, width=width, highlight=False))
    shown = stream.getvalue()
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    for part in summary.splits:
        assert f"{part.tokens:,}" in shown
    for token in summary.top_tokens:
        assert f"{token.share:.2%}" in shown


def test_the_terminal_shows_what_was_dropped_and_samples() -> None:
    stream = io.StringIO()
    print_sheet(data_sheet(SUMMARIES["drops"]), console=Console(file=stream, width=80))
    lines = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
    assert "dropped: exact duplicate 7 0.69%" in lines
    assert "could not be read 2 0.20%" in lines
    stream = io.StringIO()
    print_sheet(data_sheet(SUMMARIES["odd"]), console=Console(file=stream, width=100))
    assert "\ufffd[2J日本 ↵ ↵ [red]b\ufffd..." in stream.getvalue()
    assert "problem: a\ufffd.txt, line ↵ 1: \ufffd [bold]m" in stream.getvalue()
    assert "<b>[red]x[/red]" in stream.getvalue()
