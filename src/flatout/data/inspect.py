"""What a prepared dataset holds, counted: lengths, frequent tokens, samples; and why records are missing from it.

One pass over the tokens and one over the document starts, in pieces. Problems of the input are grouped by file and
cause, with the settings that fix them: a file whose rows lack the field has a problem for each row, and one cause. A
cause counts records, as the report of a dataset does.

Contract: memory grows with the number of different document lengths only. The same dataset gives the same summary,
samples included, on every machine. A dataset without a report, made before there were any, has None for it; a damaged
one is a `DataError`.

Trap: hashes of shards are checked by `verify_dataset` only; here sizes, the range of ids and the order of documents.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.config.suggest import close_matches
from flatout.corpus.document import Problem
from flatout.corpus.rows import USUAL
from flatout.data.sampler import remainder, window_count
from flatout.data.shards import (
    PREPARE_AGAIN,
    SPLITS,
    Dataset,
    TokenShards,
    check_size,
    checked_bytes,
    open_dataset,
    read_manifest,
    unreadable,
)
from flatout.data.tokenizer import Tokenizer
from flatout.errors import DataError, many
from flatout.records import DataSummary, DocumentSample, SplitSummary, TokenCount

Counts = npt.NDArray[np.int64]
QUANTILES = {"1%": 0.01, "10%": 0.1, "50%": 0.5, "90%": 0.9, "99%": 0.99}
REPORT_FORMAT = "flatout-report"
_REPORT_NUMBERS = ("records", "damaged", "problem_count", "replaced_characters", "files", "input_bytes", "text_bytes")
_REPORT_TABLES = ("kept", "dropped", "passed_over")
_CHUNK = 2**20  # larger ones leave the processor's cache and are counted at two thirds of the speed
_SAMPLE_CHARACTERS = 300
_PROBLEMS = 20


def summarize(folder: str | Path, *, context: int | None = None, samples: int = 5, top: int = 20) -> DataSummary:
    """Everything there is to see about the dataset in `folder`; with `context`, its windows are counted too."""
    dataset = open_dataset(folder)
    report = read_report(folder)
    splits = {"train": dataset.train, "val": dataset.val}
    counts = np.zeros(dataset.manifest.vocab, dtype=np.int64)
    for shards in splits.values():
        _count_tokens(shards, counts)
    lengths = {name: _count_lengths(shards) for name, shards in splits.items()}
    return DataSummary(
        folder=str(folder),
        fingerprint=dataset.manifest.fingerprint,
        tokenizer=dataset.tokenizer.kind,
        vocab=dataset.manifest.vocab,
        dtype=dataset.manifest.dtype,
        context=context,
        splits=tuple(_split_summary(dataset, name, lengths[name], context) for name in splits),
        top_tokens=_most_frequent(dataset.tokenizer, counts, top),
        unused_ids=int(np.count_nonzero(counts == 0)),
        samples=_samples(dataset, samples),
        report=report,
        problems=tuple(read_problems(folder, _PROBLEMS)),
    )


def read_report(folder: str | Path) -> dict[str, Any] | None:
    """The counts of a dataset's preparation, or None if it was made before there were reports."""
    info = read_manifest(folder).report
    if info is None:
        return None
    path = Path(folder) / info.name
    raw = checked_bytes(Path(folder), info)
    try:
        report = json.loads(raw)
        _check_report(report)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}", PREPARE_AGAIN) from error
    return report


def read_problems(folder: str | Path, most: int) -> list[dict[str, Any]]:
    """The first `most` problems that preparing the dataset in `folder` met, in the order of the input."""
    return list(itertools.islice(all_problems(folder), most))


def all_problems(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Every problem that preparing the dataset in `folder` met, in the order of the input."""
    info = read_manifest(folder).problems
    if info is None:
        return
    path, number = Path(folder) / info.name, 0
    check_size(Path(folder), info)
    try:
        with path.open("rb") as lines:
            for line in lines:
                number += 1
                yield _problem_from(line)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        place = f"line {number}"
        raise DataError(f"{path} is damaged in {place}: {type(error).__name__}: {error}", PREPARE_AGAIN) from error


def shown(text: str) -> str:
    """The text of a token with whatever cannot be seen, or could act on a terminal, as an escape."""
    return "".join(
        letter if letter.isprintable() and letter != "\\" else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def _check_report(report: Any) -> None:
    if report["format"] != REPORT_FORMAT:
        raise ValueError(f"its format is not {REPORT_FORMAT!r}")
    numbers = [report[name] for name in _REPORT_NUMBERS]
    numbers += [number for name in _REPORT_TABLES for number in report[name].values()]
    if any(type(number) is not int or number < 0 for number in numbers) or set(report["kept"]) != set(SPLITS):
        raise ValueError("it holds something else than counts")
    found = sum(report["kept"].values()) + sum(report["dropped"].values()) + report["damaged"]
    if found != report["records"]:
        raise ValueError(f"of {report['records']} records it accounts for {found}")


def _problem_from(line: bytes) -> dict[str, Any]:
    problem = json.loads(line)
    texts = {name: problem[name] for name in ("file", "place", "kind", "message")}
    records = problem["records"]
    if not all(isinstance(text, str) for text in texts.values()) or type(records) is not int:
        raise ValueError("it does not have the fields of a problem")
    instead = problem.get("instead")
    return {**texts, "records": records, **({"instead": str(instead)} if instead else {})}


def _count_tokens(shards: TokenShards, counts: Counts) -> None:
    for start in range(0, shards.tokens, _CHUNK):
        ids = shards.read(start, min(_CHUNK, shards.tokens - start))
        # Before counting: a damaged id of four bytes would ask for a table of 32 GiB.
        if (largest := int(ids.max())) >= len(counts):
            raise DataError(
                f"split {shards.split} of {shards.folder} holds token id {largest} between tokens {start} and "
                f"{start + len(ids)}, and the vocabulary has {len(counts)}",
                PREPARE_AGAIN,
            )
        counts += np.bincount(ids, minlength=len(counts))


def _document_lengths(shards: TokenShards) -> Iterator[Counts]:
    """The tokens of each document, in pieces."""
    starts = shards.document_starts()
    for first in range(0, len(starts), _CHUNK):
        bounds = starts[first : first + _CHUNK + 1].astype(np.int64)
        yield np.diff(np.append(bounds, shards.tokens) if first + _CHUNK >= len(starts) else bounds)


def tokens_in_long_documents(shards: TokenShards, context: int) -> dict[str, int]:
    """How many documents have `context` tokens or more, and how many tokens those have."""
    found = {"documents": 0, "tokens": 0}
    for lengths in _document_lengths(shards):
        long = lengths[lengths >= context]
        found = {"documents": found["documents"] + len(long), "tokens": found["tokens"] + int(long.sum())}
    return found


def _count_lengths(shards: TokenShards) -> tuple[Counts, Counts]:
    """The different lengths of documents, rising, and how many documents have each."""
    values = times = np.empty(0, dtype=np.int64)
    begins = int(shards.document_starts()[0])
    for lengths in _document_lengths(shards):
        if begins or int(lengths.min()) < 1 or int(lengths.max()) > shards.tokens:
            raise DataError(
                f"the document starts of split {shards.split} in {shards.folder} do not rise from 0 to below "
                f"{shards.tokens}",
                PREPARE_AGAIN,
            )
        more, count = np.unique(lengths, return_counts=True)
        values, places = np.unique(np.concatenate([values, more]), return_inverse=True)
        # Sums of whole numbers below 2**53 are exact in floating point.
        times = np.bincount(places, weights=np.concatenate([times, count])).astype(np.int64)
    return values, times


def _split_summary(dataset: Dataset, name: str, lengths: tuple[Counts, Counts], context: int | None) -> SplitSummary:
    info, (values, times) = dataset.manifest.splits[name], lengths
    return SplitSummary(
        name=name,
        documents=info.documents,
        tokens=info.tokens,
        text_bytes=info.text_bytes,
        bytes_per_token=info.text_bytes / info.tokens,
        shards=len(info.shards),
        disk_bytes=sum(file.bytes for file in (*info.shards, info.offsets)),
        quantiles=_quantiles(values, times),
        windows=None if context is None else _windows(name, info.tokens, context),
        remainder=None if context is None else 0 if name == "val" else remainder(info.tokens, context, context),
    )


def _windows(split: str, tokens: int, context: int) -> int:
    """How many windows a run reads. An evaluation reads all of its split, so its last window may be short."""
    return -(-(tokens - 1) // context) if split == "val" else window_count(tokens, context, context)


def _quantiles(values: Counts, times: Counts) -> dict[str, int]:
    """For each share, the shortest length that at least this share of the documents does not exceed."""
    below = np.cumsum(times)
    ranks = {name: max(1, int(np.ceil(share * int(below[-1])))) for name, share in QUANTILES.items()}
    inner = {name: int(values[np.searchsorted(below, rank)]) for name, rank in ranks.items()}
    return {"min": int(values[0]), **inner, "max": int(values[-1])}


def _most_frequent(tokenizer: Tokenizer, counts: Counts, top: int) -> tuple[TokenCount, ...]:
    # A stable sort of the negated counts gives the smaller id of two that are equally frequent.
    order = np.argsort(-counts, kind="stable")[:top]
    total = int(counts.sum())
    return tuple(
        TokenCount(id=int(i), text=_token_text(tokenizer, int(i)), count=int(counts[i]), share=int(counts[i]) / total)
        for i in order
        if counts[i]
    )


def _token_text(tokenizer: Tokenizer, number: int) -> str:
    if tokenizer.kind == "bytes" and 128 <= number < 256:
        return f"\\x{number:02x}"
    text = tokenizer.decode([number])
    # Part of a character has no text of its own, and U+FFFD in its place would look like a damaged corpus.
    return "" if "\ufffd" in text and tokenizer.kind != "char" else shown(text)


def _samples(dataset: Dataset, samples: int) -> tuple[DocumentSample, ...]:
    documents = dataset.manifest.splits["train"].documents
    chosen: set[int] = set(range(documents)) if documents <= samples else set()
    draw = 0
    while len(chosen) < min(samples, documents):
        digest = hashlib.sha256(f"{dataset.manifest.fingerprint} {draw}".encode("ascii")).digest()
        chosen.add(int.from_bytes(digest, "big") % documents)
        draw += 1
    return tuple(_sample(dataset, number) for number in sorted(chosen))


def _sample(dataset: Dataset, number: int) -> DocumentSample:
    shards = dataset.train
    starts = shards.document_starts()
    start = int(starts[number])
    end = int(starts[number + 1]) if number + 1 < len(starts) else shards.tokens
    # No tokenizer gives less than a quarter of a character for a token: that is a byte of four-byte UTF-8.
    ids = shards.read(start, min(end - start, 4 * _SAMPLE_CHARACTERS))
    whole = len(ids) == end - start
    if whole and len(ids) and int(ids[-1]) == dataset.tokenizer.end_of_text:
        ids = ids[:-1]
    text = dataset.tokenizer.decode(ids)
    return DocumentSample(
        split="train",
        document=number,
        tokens=end - start,
        text=text[:_SAMPLE_CHARACTERS],
        cut=not whole or len(text) > _SAMPLE_CHARACTERS,
    )


_OTHER_MENDS: Mapping[str, str] = {
    "field": "set data.field to where the text is",
    "binary": "take binary files out of the source",
}
_NEAR = 0.85  # similarity from which a field that was asked for is a typing mistake for one that is there
_LISTED = 3  # causes of one kind that are listed
_KINDS = 6


@dataclass(frozen=True)
class Cause:
    """One kind of problem in one file: the first of them, how many there are, and the records lost by all."""

    first: Problem
    count: int
    records: int

    @property
    def text(self) -> str:
        """Where it is, what is wrong, and which field these records have: `mend_of` names the setting that fits all
        files."""
        first = self.first
        if max(self.count, self.records) <= 1:
            return f"{first.text}{f'; it has the field {first.instead}' if first.instead else ''}"
        instead = f"; these rows have the field {first.instead}" if first.instead else ""
        place = f", the first in {first.place}" if first.place else ""
        count = many(self.records, "record") if self.records else many(self.count, "place")
        return f"{first.file}: {count}{place}: {first.message}{instead}"


def cause_of(problem: Problem) -> Cause:
    """The cause of one problem."""
    return Cause(problem, 1, problem.records)


def causes_of(problems: Iterable[Problem]) -> list[Cause]:
    """The causes of problems, those with the most records first."""
    found: dict[tuple[str, str, str], Cause] = {}
    for problem in problems:
        key = (problem.file, problem.kind, problem.instead)
        if (cause := found.get(key)) is None:
            found[key] = cause_of(problem)
        else:
            found[key] = replace(cause, count=cause.count + 1, records=cause.records + problem.records)
    return sorted(found.values(), key=lambda cause: -cause.records)


def lines_of(causes: Sequence[Cause]) -> list[str]:
    """Causes as lines: the first few of each kind and how many more there are, so that none hides the others."""
    kinds: dict[tuple[str, str], list[Cause]] = {}
    for cause in causes:
        kinds.setdefault((cause.first.kind, cause.first.instead), []).append(cause)
    lines: list[str] = []
    for alike in list(kinds.values())[:_KINDS]:
        lines += [cause.text for cause in alike[:_LISTED]]
        lines += _counted(alike[_LISTED:], " with the same problem")
    others = [cause for alike in list(kinds.values())[_KINDS:] for cause in alike]
    return [*lines, *_counted(others, "")]


def _counted(causes: Sequence[Cause], which: str) -> list[str]:
    if not causes:
        return []
    files, records = len({cause.first.file for cause in causes}), sum(cause.records for cause in causes)
    count = f"{many(records, 'more record')} of {many(files, 'file')}" if records else many(files, "more file")
    return [f"... and {count}{which}"]


def names_to_read(causes: Iterable[Cause], fields: Sequence[str] = ()) -> list[str]:
    """`fields` with the names that read records which lack them; empty if no such name is known.

    A field that is nearly one of those names, and no usual one, was a typing mistake and is left out.
    """
    others = [cause.first.instead for cause in causes if cause.first.instead]
    meant = [field for field in fields if field in USUAL or not close_matches(field, others, _NEAR)]
    return list(dict.fromkeys([*meant, *others])) if set(others) - set(fields) else []


def mend_of(causes: Sequence[Cause], fields: Sequence[str] = ()) -> str:
    """Which settings make the records readable. `fields` are those that some records have."""
    mends: dict[str, None] = {}
    if names := names_to_read(causes, fields):
        # In quotes, since brackets mean something to a shell.
        setting = f"data.field={names[0]}" if len(names) == 1 else f"'data.field=[{','.join(names)}]'"
        count = sum(cause.records for cause in causes if cause.first.instead)
        mends[f"{setting} reads {count:,} of them" if count else f"set {setting}"] = None
    for cause in causes:
        if not cause.first.instead and not (names and cause.first.kind == "field"):
            is_encoding = cause.first.kind == "not-utf8"
            mends[encoding_mend(causes) if is_encoding else _OTHER_MENDS.get(cause.first.kind, "mend the input")] = None
    return "; ".join(list(mends)[:3])


def encoding_mend(causes: Iterable[Cause]) -> str:
    """How to fix text that is not UTF-8, and what the setting that reads it loses; empty where all is UTF-8."""
    files = list(dict.fromkeys(cause.first.file for cause in causes if cause.first.kind == "not-utf8"))
    if not files:
        return ""
    which = f"{files[0]} and {many(len(files) - 1, 'more file')}" if len(files) > 1 else files[0]
    return (
        f"convert {which} to UTF-8 (from latin-1: `iconv -f latin1 -t utf-8`), or data.invalid_utf8=replace loses "
        "those letters"
    )
