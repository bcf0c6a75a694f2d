"""A prepared dataset as tables: its size, the lengths of its documents, what became of the records, and samples."""

from typing import Any

from flatout.errors import many
from flatout.observe.human import human_bytes, printable
from flatout.records import DataSummary, TokenCount
from flatout.rows import Block, Heading, ResultRow, Sentence, Sheet, Table

_MOST_REASONS = 9
_LONGEST_TOKEN = 16
_PROBLEMS_SHOWN = 5
_SPACE = "\u2423"  # the open box that stands for a space
_SPLIT_NAMES = {"train": "training", "val": "validation"}


def data_sheet(summary: DataSummary) -> Sheet:
    """What a dataset holds, for the terminal."""
    return Sheet(
        blocks=[
            Heading(_one_line(summary.folder), level=1),
            *_size_blocks(summary),
            *_record_blocks(summary),
            Heading("most frequent tokens"),
            Table(names="token", rows=[_token_row(token) for token in summary.top_tokens]),
            *_sample_blocks(summary),
        ]
    )


def _size_blocks(summary: DataSummary) -> list[Block]:
    splits = summary.splits
    tokens = sum(split.tokens for split in splits)
    documents = sum(split.documents for split in splits)
    text_bytes = sum(split.text_bytes for split in splits)
    unused = f"{summary.unused_ids:,} never used" if summary.unused_ids else "all used"
    sizes = {
        "documents": [f"{split.documents:,}" for split in splits],
        "tokens": [f"{split.tokens:,}" for split in splits],
        "text": [human_bytes(split.text_bytes) for split in splits],
        "bytes per token": [f"{split.bytes_per_token:.3f}" for split in splits],
        "shards": [f"{split.shards:,}" for split in splits],
        "disk": [human_bytes(split.disk_bytes) for split in splits],
    }
    if summary.context is not None:
        sizes[f"windows of {summary.context:,}"] = [f"{split.windows:,}" for split in splits]
        sizes["tokens left over"] = [f"{split.remainder:,}" for split in splits]
    lengths = {name: [f"{split.quantiles[name]:,}" for split in splits] for name in splits[0].quantiles}
    columns = [split.name for split in splits]

    def rows_of(table: dict[str, list[str]]) -> list[ResultRow]:
        return [ResultRow(name=name, cells=dict(zip(columns, cells, strict=True))) for name, cells in table.items()]

    return [
        Sentence(
            f"{many(tokens, 'token')}, {many(documents, 'document')}, {human_bytes(text_bytes)} of text, "
            f"{text_bytes / tokens:.2f} bytes per token"
        ),
        Sentence(f"tokenizer {summary.tokenizer} ({many(summary.vocab, 'id')}, {unused})"),
        Heading("size of the splits"),
        Table(rows=rows_of(sizes)),
        Heading("length of documents"),
        Table(names="in tokens", rows=rows_of(lengths)),
    ]


def _record_blocks(summary: DataSummary) -> list[Block]:
    report = summary.report
    if report is None:
        note = "This dataset was made without a report, so it is not known what was dropped."
        return [Heading("where the records went"), Sentence(note), *_problem_lines(summary, len(summary.problems))]
    counts = record_counts(summary, report)
    total = sum(counts.values()) or 1
    rows = [
        ResultRow(name=_one_line(name), cells={"records": f"{count:,}", "share": f"{count / total:.2%}"})
        for name, count in counts.items()
    ]
    notes = [f"{many(report['records'], 'record')} from {many(report['files'], 'file')}"]
    notes.append(human_bytes(report["input_bytes"]))
    if report["replaced_characters"]:
        notes.append(f"{report['replaced_characters']:,} invalid byte sequences replaced")
    if report["passed_over"]:
        kinds = sorted(report["passed_over"].items(), key=lambda pair: (-pair[1], pair[0]))
        skipped = ", ".join(f"{count:,} {_one_line(kind) or 'without suffix'}" for kind, count in kinds)
        notes.append(f"files passed over: {skipped}")
    table = Table(rows=rows)
    return [
        Heading("where the records went"),
        table,
        Sentence(", ".join(notes)),
        *_problem_lines(summary, report["problem_count"]),
    ]


def record_counts(summary: DataSummary, report: dict[str, Any]) -> dict[str, int]:
    """Records by what became of them; the sum is the number of all records."""
    kept = dict(report["kept"])
    # The report counts a document that is cut in two where it begins, in training.
    documents = {split.name: split.documents for split in summary.splits}
    cut = 1 if documents.get("val", 0) > kept.get("val", 0) and kept.get("train", 0) else 0
    counts = {"kept for both, cut in two": cut} if cut else {}
    for name, count in kept.items():
        alone = count - (cut if name == "train" else 0)
        if alone or not cut:
            counts[f"kept for {_SPLIT_NAMES.get(name, name)}"] = alone
    reasons = sorted(report["dropped"].items(), key=lambda pair: (-pair[1], pair[0]))
    reasons = [(reason, count) for reason, count in reasons if count]
    for reason, count in reasons[:_MOST_REASONS]:
        counts[f"dropped: {reason.replace('_', ' ')}"] = count
    if others := reasons[_MOST_REASONS:]:
        counts["dropped: other reasons"] = sum(count for _, count in others)
    if report["damaged"]:
        counts["could not be read"] = report["damaged"]
    return counts


def _problem_lines(summary: DataSummary, count: int) -> list[Block]:
    lines: list[Block] = []
    for problem in summary.problems[:_PROBLEMS_SHOWN]:
        place = f", {problem['place']}" if problem["place"] else ""
        lines.append(Sentence(_one_line(f"problem: {problem['file']}{place}: {problem['message']}")))
    if count > _PROBLEMS_SHOWN:
        lines.append(Sentence(f"problem: ... and {count - _PROBLEMS_SHOWN:,} more in problems.jsonl"))
    return lines


def _token_row(token: TokenCount) -> ResultRow:
    """A token with its spaces visible; part of a character is shown by its id."""
    text = token.text.replace(" ", _SPACE)
    if len(text) > _LONGEST_TOKEN:
        text = text[: _LONGEST_TOKEN - 3] + "..."
    return ResultRow(
        name=text or f"(id {token.id})", cells={"count": f"{token.count:,}", "share": f"{token.share:.2%}"}
    )


def _sample_blocks(summary: DataSummary) -> list[Block]:
    blocks: list[Block] = []
    for sample in summary.samples:
        blocks.append(Heading(f"{sample.split} document {sample.document:,}, {many(sample.tokens, 'token')}"))
        blocks.append(Sentence(_one_line(sample.text) + ("..." if sample.cut else "")))
    return blocks


def _one_line(text: str) -> str:
    return printable(" ".join(text.replace("\n", " \u21b5 ").split()))
