"""The text that a run is to read: whether it is there and can be read, by which tokenizer, and how much there is.

`look_at_data` reads files and writes none. A dataset that is prepared is opened as training opens it. A source that is
not prepared yet is listed, and the first quarter of a megabyte of it is read and tokenized, from which the number of
tokens is extrapolated and said to be so; for the tokenizer `char`, more is read for its characters, and one such as
`bpe-1024` is learned from that beginning for the occasion. No torch here.
"""

import dataclasses
import functools
import math
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flatout.config.schema import CleanConfig, DataConfig
from flatout.config.sizes import learned_vocab
from flatout.corpus.document import Document, Problem, Slice
from flatout.corpus.readers import read_slice
from flatout.corpus.sources import slices_of
from flatout.data.inspect import causes_of, mend_of
from flatout.data.library_tokenizers import HuggingFaceTokenizer
from flatout.data.part import LIMITS
from flatout.data.plan import (
    Inputs,
    Request,
    check_streamable,
    find_inputs,
    how_to_read,
    request_of,
)
from flatout.data.prepare import check_outside, data_folder, has_dataset, prepare_data
from flatout.data.shards import Dataset, open_dataset
from flatout.data.tokenizer import ByteTokenizer, Gpt2Tokenizer, Tokenizer, load_tokenizer, token_dtype
from flatout.data.tokenizer_files import train_bpe
from flatout.diagnose.check_environment import check_packages
from flatout.diagnose.machine import Machine
from flatout.errors import ConfigError, UserError, many
from flatout.finding import Check, Finding, finding_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenFacts:
    """What is known of the tokens; None for what was not counted. `exact` is False for an extrapolation."""

    exact: bool = False
    train_tokens: int | None = None
    val_tokens: int | None = None
    vocab: int | None = None
    document_tokens: float | None = None  # the median document's; None where there is one document only
    token_bytes: int = 2
    to_prepare_bytes: int | None = None  # of shards that are still to be written


_check = functools.partial(Check, "data")

_SAMPLE = 2**18  # bytes of a source that are read
_DOCUMENTS = 1_000_000  # whose lengths are looked at
# Formats with a fixed ratio of bytes to tokens.
_MEASURABLE = ("text", "jsonl", "json", "csv", "tsv", "smiles", "tokens")
Looking = Generator[Finding, None, TokenFacts]


def look_at_data(data: DataConfig, clean: CleanConfig, machine: Machine, *, quick: bool = False) -> Looking:
    """Yields what was found of the text and returns what is known of its tokens."""
    try:
        folder, fits = data_folder(data), True
    except ConfigError as error:
        yield finding_of(error, "config", "source")
        return TokenFacts(vocab=_known_vocab(data))
    try:
        if data.streaming:
            check_streamable(data, clean)
        elif has_dataset(folder) or data.source is None:
            prepare_data(data, clean)  # where nothing is to be prepared it only asks whether what is there fits
    except UserError as error:
        yield finding_of(error, "data", "source" if data.source is None else "dataset")
        fits = False
        if not has_dataset(folder):
            return TokenFacts(vocab=_known_vocab(data))
    if data.streaming or not has_dataset(folder):
        return (yield from _unprepared(data, clean, folder, machine, quick=quick))
    facts = yield from _prepared(data, folder, fits=fits)
    yield from check_packages(machine, clean, ())
    return facts


def _known_vocab(data: DataConfig) -> int | None:
    """The ids of the tokenizer before the text is read; of one that is learned from it, the most it may have."""
    fixed = {"gpt2": Gpt2Tokenizer.vocab, "bytes": ByteTokenizer.vocab}
    return fixed.get(data.tokenizer) or learned_vocab(data.tokenizer)


# --- prepared ---------------------------------------------------------------------------------------------------------


def _prepared(data: DataConfig, folder: Path, *, fits: bool) -> Looking:
    try:
        dataset = open_dataset(folder)
        train, val = dataset.train, dataset.val
        yield _check("dataset").ok(
            f"{folder}: {train.tokens:,} tokens to train on, {val.tokens:,} to validate, tokenizer "
            f"{dataset.tokenizer.kind} with {dataset.tokenizer.vocab:,} ids"
        )
        if fits:
            yield _tokenizer_of_folder(data, dataset)
    except UserError as error:
        yield finding_of(error, "data", "dataset")
        return TokenFacts(vocab=_known_vocab(data))
    return TokenFacts(
        exact=True,
        train_tokens=train.tokens,
        val_tokens=val.tokens,
        vocab=dataset.tokenizer.vocab,
        document_tokens=_median_document(dataset),
        token_bytes=train.dtype.itemsize,
    )


def _tokenizer_of_folder(data: DataConfig, dataset: Dataset) -> Finding:
    """Where only a folder is named, its tokenizer is not compared with the config's: training takes the folder's."""
    asked, kind = data.tokenizer, dataset.tokenizer.kind
    if data.source is not None:
        return _check("fits config").ok("it was prepared with the settings of this config")
    if asked in ("char", "bytes", "gpt2") or learned_vocab(asked) is not None:
        same = asked == dataset.manifest.settings.get("tokenizer", kind)
    else:
        same = load_tokenizer(asked, None).fingerprint == dataset.manifest.tokenizer_fingerprint
    if same:
        return _check("tokenizer").ok(f"{asked}, as the config says")
    return _check("tokenizer").warn(
        f"the shards were made with the tokenizer {kind}, and data.tokenizer is {asked}",
        f"Training would use the shards' own. Set data.tokenizer={kind}, or prepare the text again with the "
        "tokenizer that you want, into another data.folder.",
    )


def _median_document(dataset: Dataset) -> float | None:
    starts = dataset.train.document_starts()[: _DOCUMENTS + 1]
    return None if len(starts) < 3 else float(np.median(np.diff(starts.astype(np.int64))))


# --- not prepared yet -------------------------------------------------------------------------------------------------


def _unprepared(data: DataConfig, clean: CleanConfig, folder: Path, machine: Machine, *, quick: bool) -> Looking:
    tokenizer = yield from _tokenizer(data)
    facts = TokenFacts(vocab=_known_vocab(data) if tokenizer is None else tokenizer.vocab)
    try:
        request = request_of(data, clean)
        inputs = find_inputs(request)
        check_outside(folder, request)
    except UserError as error:
        yield finding_of(error, "data", "source")
        return facts
    formats = {file.format for file in inputs.files} | {"zst" for file in inputs.files if file.compression == "zst"}
    yield from _listing(data, inputs, formats)
    packages = list(check_packages(machine, clean, sorted(formats)))
    yield from packages
    if not inputs.files or any(finding.status == "bad" for finding in packages):
        return facts
    sample = yield from _sampled(request, inputs, quick=quick)
    if sample is None:
        return facts
    if data.tokenizer == "char":
        extra = (data.unknown_characters == "replace") + 1  # one is the end of text
        facts = dataclasses.replace(facts, vocab=len(set("".join(sample.text))) + extra)
    learned = learned_vocab(data.tokenizer)
    if learned is not None:
        tokenizer = HuggingFaceTokenizer(train_bpe(_first(sample.text, _SAMPLE), learned))
        all_read = sample.whole and sample.piece.end is None and len(inputs.files) == 1
        facts = dataclasses.replace(facts, vocab=tokenizer.vocab if all_read else learned)
    return _extrapolated(data, inputs, sample, tokenizer, facts)


def _tokenizer(data: DataConfig) -> Generator[Finding, None, Tokenizer | None]:
    """The tokenizer, where it does not have to be made from the text first."""
    if data.tokenizer == "char" or learned_vocab(data.tokenizer) is not None:
        return None
    try:
        return load_tokenizer(data.tokenizer, None)
    except UserError as error:
        yield finding_of(error, "data", "tokenizer")
        return None


def _listing(data: DataConfig, inputs: Inputs, formats: set[str]) -> Iterator[Finding]:
    source = data.source if isinstance(data.source, str) else "the sources"
    first = f"{inputs.problems[0].file}: {inputs.problems[0].message}" if inputs.problems else ""
    if first and not inputs.files:
        yield _check("source").bad(
            f"no file of {source} can be used: {first}",
            "Put text into it, or set data.source to a file or folder that holds some.",
        )
        return
    size = f"{inputs.bytes / 1e6:,.1f} MB" if inputs.bytes >= 1e5 else f"{inputs.bytes / 1e3:,.1f} kB"
    hub = " of the Hugging Face hub, which is not asked now" if "hub" in formats else ""
    then = "read while training" if data.streaming else "prepared when training starts, or by `flatout prepare`"
    count = many(len(inputs.files), "file")
    yield _check("source").ok(f"{source}: {count}, {size}, {', '.join(sorted(formats))}{hub}; {then}")
    if first:
        yield _check("unusable").warn(
            f"{len(inputs.problems):,} of its files cannot be used, the first: {first}",
            "Mend or remove them; preparing leaves them out and lists them.",
        )
    if inputs.summary:
        # How files with text are read, too; binary ones are passed over rightly.
        advice = how_to_read(data.source, inputs.passed_over)
        right = f"That is often right: {advice}." if advice else "None of those passed over is text."
        yield _check("passed over").note(inputs.summary, right)


@dataclasses.dataclass(frozen=True)
class _Sample:
    """The beginning of a source: which stretch, the texts in it, and whether they are all of it."""

    piece: Slice
    text: list[str]
    whole: bool


def _sampled(request: Request, inputs: Inputs, *, quick: bool) -> Generator[Finding, None, _Sample | None]:
    """Reads the beginning of the first file."""
    file, check = inputs.files[0], _check("content")
    slices = [] if file.format == "hub" else slices_of(file, _SAMPLE // (4 if quick else 1))
    if not slices:
        return None
    documents, problems, whole = _read(slices[0], request.options)
    text = [document.text for document in documents if document.rejected is None]
    causes = causes_of(problems)
    if problems and not any(text):
        mend = mend_of(causes) if causes[0].first.kind == "field" else "mend the file, or set data.format"
        yield check.bad(
            f"nothing at the beginning of {file.name} can be used: {causes[0].text}",
            f"To mend it: {mend}. `flatout prepare` lists every problem.",
        )
        return None
    if not any(part.strip() for part in text):
        yield check.bad(
            f"the beginning of {file.name} holds no text",
            "Set data.source to a file with text in it, or data.field to the field that holds it.",
        )
        return None
    if not problems:
        yield check.ok(f"the beginning of {file.name} reads as text")
    else:
        left_out = "What cannot be used is left out and listed by `flatout prepare`. If it is much, mend it:"
        mend = mend_of(causes, request.options.fields)
        not_all = f"not all at the beginning of {file.name} can be used: {causes[0].text}"
        yield check.warn(not_all, f"{left_out} {mend}.")
    return _Sample(slices[0], text, whole)


def _read(piece: Slice, options: Any) -> tuple[list[Document], list[Problem], bool]:
    """Documents and problems at the beginning of a slice, and whether that was all of it."""
    documents: list[Document] = []
    problems: list[Problem] = []
    size = 0
    for item in read_slice(piece, options):
        if isinstance(item, Document):
            documents.append(item)
            size += len(item.text)
        else:
            problems.append(item)
        if size > 2 * _SAMPLE or len(problems) > 1000:
            return documents, problems, False
    return documents, problems, True


def _extrapolated(
    data: DataConfig, inputs: Inputs, sample: _Sample, tokenizer: Tokenizer | None, facts: TokenFacts
) -> TokenFacts:
    """Estimates the tokens of all files from those at the beginning of the first one."""
    if tokenizer is None and data.tokenizer != "char":
        return facts
    first = _first(sample.text, _SAMPLE)
    lengths = [len(part) for part in (first if tokenizer is None else tokenizer.encode_batch(first))]
    share_of_text, size = _share_of_text(sample, inputs), _bytes_of(first)
    tokens = None if share_of_text is None or not size else round(inputs.bytes * share_of_text * sum(lengths) / size)
    if tokens is not None:
        tokens = min([tokens, *_limits(data, sum(lengths) / len(lengths), sum(lengths) / size)])
    own_val = data.val_source is not None
    share = 0.0 if own_val else data.val_fraction
    width = token_dtype(max(1, facts.vocab or 1)).itemsize
    return TokenFacts(
        train_tokens=None if tokens is None else round(tokens * (1 - share)),
        val_tokens=None if tokens is None or own_val else round(tokens * share),
        vocab=facts.vocab,
        document_tokens=float(np.median(lengths)) if len(lengths) > 2 else None,
        token_bytes=width,
        to_prepare_bytes=None if tokens is None or data.streaming else tokens * width,
    )


def _limits(data: DataConfig, tokens_of_document: float, tokens_of_byte: float) -> list[int]:
    """The most tokens that each limit of the config leaves of all sources."""
    sources = len(data.source) if isinstance(data.source, list) else 1
    each = {"max_documents": tokens_of_document, "max_tokens": 1.0, "max_bytes": tokens_of_byte}
    return [round(sources * most * each[name]) for name in LIMITS if (most := getattr(data, name)) is not None]


def _bytes_of(text: list[str]) -> int:
    return sum(len(part.encode("utf-8", "replace")) for part in text)


def _first(text: list[str], most: int) -> list[str]:
    """The first texts, up to this many characters; the last one may be cut."""
    chosen: list[str] = []
    for part in text:
        chosen.append(part[:most])
        most -= len(part)
        if most <= 0:
            break
    return chosen


def _share_of_text(sample: _Sample, inputs: Inputs) -> float | None:
    """Bytes of text for each byte on disk, if the files are all of a kind and one stretch is like the next."""
    piece, file = sample.piece, sample.piece.file
    if any((other.format, other.compression) != (file.format, file.compression) for other in inputs.files):
        return None
    if file.format in ("text", "smiles") and file.compression == "none":
        return 1.0
    end = file.bytes if piece.end is None else piece.end
    read = min(end, file.bytes) - piece.start
    if not sample.whole or read <= 0 or file.format not in _MEASURABLE:
        return None
    return _bytes_of(sample.text) / read


# --- documents --------------------------------------------------------------------------------------------------------


def check_documents(facts: TokenFacts, context: int, packing: str) -> Iterator[Finding]:
    """How long documents are beside a window of `context` tokens."""
    length, packed = facts.document_tokens, packing == "best_fit"
    if length is None:
        return
    found = f"half of the documents have at most {length:,.0f} tokens, and a window has {context}"
    if length * 16 < context and not packed:
        yield _check("documents").warn(
            found,
            "A window is then a row of unrelated short texts, and attention over them is mostly wasted. Set "
            f"model.context={max(16, 2 ** math.ceil(math.log2(2 * length)))}, or data.packing=best_fit to keep "
            "documents whole.",
        )
    elif length * 2 < context and not packed:
        yield _check("documents").note(
            found,
            "Several documents share a window. data.packing=best_fit keeps each of them whole; a shorter model.context "
            "is faster.",
        )
    else:
        yield _check("documents").ok(found)
