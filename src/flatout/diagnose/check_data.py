"""The text a config names: whether it is there and can be read, and whether tokenizer, vocabulary and length fit.

`look_at_data` reads files and writes none. A dataset that is prepared is opened as training opens it. A source that is
not prepared yet is listed, and the first quarter of a megabyte of it is read and tokenized, from which the number of
tokens is extrapolated and said to be so; for the tokenizer `char`, more is read for its characters, and one such as
`bpe-1024` is learned from that beginning for the occasion. No torch here.
"""

import dataclasses
import functools
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flatout.config.schema import RunConfig
from flatout.config.sizes import learned_vocab
from flatout.corpus.document import Document, Problem, Slice
from flatout.corpus.readers import read_slice
from flatout.corpus.sources import slices_of, told_by_type
from flatout.data.causes import causes_of, mend_of
from flatout.data.inspect import read_report
from flatout.data.limits import LIMITS, NONE_TAKEN
from flatout.data.part import Part, Recipe, characters_of_part
from flatout.data.plan import (
    STDIN,
    Done,
    Inputs,
    Request,
    documents_of,
    find_inputs,
    how_to_read,
    parts_of,
    request_of,
)
from flatout.data.prepare import data_folder, has_dataset, lies_inside, prepare_data
from flatout.data.shards import Dataset, open_dataset
from flatout.data.tokenizer import (
    ByteTokenizer,
    Gpt2Tokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
    token_dtype,
)
from flatout.data.train_tokenizer import train_bpe
from flatout.diagnose.check_environment import check_packages, source_paths
from flatout.diagnose.doctor import Check, DataFacts, Finding, Machine, finding_of
from flatout.errors import ConfigError, UserError, many

_check = functools.partial(Check, "data")

_SAMPLE = 2**18  # bytes of a source that are read
_CHARACTER_BYTES = 2**25  # of a source that are read for the characters in it
_DOCUMENTS = 1_000_000  # whose lengths are looked at
# Formats of which so many bytes are so many tokens, one stretch like the next.
_MEASURABLE = ("text", "jsonl", "json", "csv", "tsv", "smiles", "tokens")
Looking = Generator[Finding, None, DataFacts]


def look_at_data(config: RunConfig, machine: Machine, target: str | None, *, quick: bool = False) -> Looking:
    """Yields what was found of the data and returns what is known of its tokens. `target` is how the user named the
    config."""
    try:
        folder = data_folder(config.data)
    except ConfigError as error:
        yield finding_of(error, "config", "source")
        return DataFacts()
    if not config.data.streaming and has_dataset(folder):
        facts = yield from _prepared(config, folder)
        yield from check_packages(machine, config, ())
        return facts
    if config.data.source is None:
        yield _check("source").bad(
            f"{folder} holds no prepared data, and data.source is not set",
            f"Prepare your text first: `flatout prepare {target or 'CONFIG'} data.source=FILE-OR-FOLDER`, or set "
            "data.folder to shards that are prepared.",
        )
        return DataFacts(vocab=_known_vocab(config))
    return (yield from _unprepared(config, folder, machine, quick=quick))


def _known_vocab(config: RunConfig) -> int | None:
    """The ids of the tokenizer before the text is read; of one that is learned from it, the most it may have."""
    fixed = {"gpt2": Gpt2Tokenizer.vocab, "bytes": ByteTokenizer.vocab}
    return fixed.get(config.data.tokenizer) or learned_vocab(config.data.tokenizer)


# --- prepared ---------------------------------------------------------------------------------------------------------


def _prepared(config: RunConfig, folder: Path) -> Looking:
    try:
        dataset = open_dataset(folder)
    except UserError as error:
        yield finding_of(error, "data", "dataset")
        return DataFacts(vocab=_known_vocab(config))
    train, val = dataset.train, dataset.val
    yield _check("dataset").ok(
        f"{folder}: {train.tokens:,} tokens to train on, {val.tokens:,} to validate, tokenizer "
        f"{dataset.tokenizer.kind} with {dataset.tokenizer.vocab:,} ids"
    )
    try:
        prepare_data(config.data, config.clean)  # of a folder that is filled it only asks whether it fits
        yield _tokenizer_of_folder(config, dataset)
    except UserError as error:
        yield finding_of(error, "data", "fits config")
    try:
        report = read_report(folder) or {"passed_over": {}, "problem_count": 0}
        if report["passed_over"]:
            total = report["files"] + sum(report["passed_over"].values())
            yield _check("passed over").note(
                f"it was prepared from {report['files']:,} of {many(total, 'file')}; passed over "
                f"{told_by_type(report['passed_over'])}",
                _advice(config, report["passed_over"]),
            )
        if report["problem_count"]:
            yield _check("losses").note(
                f"{report['damaged']:,} of {many(report['records'], 'record')} of the source could not be used",
                f"They are listed in {folder / 'problems.jsonl'}; the dataset holds the rest.",
            )
    except UserError as error:
        yield finding_of(error, "data", "report")
    return DataFacts(
        exact=True,
        train_tokens=train.tokens,
        val_tokens=val.tokens,
        vocab=dataset.tokenizer.vocab,
        document_tokens=_median_document(dataset),
        token_bytes=train.dtype.itemsize,
    )


def _tokenizer_of_folder(config: RunConfig, dataset: Dataset) -> Finding:
    """Where only a folder is named, nobody compares its tokenizer with the config's: training takes the folder's."""
    asked, kind = config.data.tokenizer, dataset.tokenizer.kind
    if config.data.source is not None:
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


def _unprepared(config: RunConfig, folder: Path, machine: Machine, *, quick: bool) -> Looking:
    tokenizer = yield from _tokenizer(config)
    facts = DataFacts(vocab=_known_vocab(config) if tokenizer is None else tokenizer.vocab)
    if STDIN in source_paths(config):
        yield _check("source").note("it comes from standard input, which is read only once: not looked at")
        return facts
    try:
        request = request_of(config.data, config.clean)
        inputs = find_inputs(request, Path())
    except UserError as error:
        yield finding_of(error, "data", "source")
        return facts
    formats = {file.format for file in inputs.files} | {"zst" for file in inputs.files if file.compression == "zst"}
    yield from _listing(config, inputs, formats)
    packages = list(check_packages(machine, config, sorted(formats)))
    yield from packages
    for source in request.sources:
        if lies_inside(folder, source.path):
            yield _check("folder").bad(
                f"the dataset {folder} would lie inside its own source {source.path}",
                "The next prepare would read it as text. Set data.folder to a folder outside of it.",
            )
    if not inputs.files or any(finding.status == "bad" for finding in packages):
        return facts
    sample = yield from _sampled(request, inputs, quick=quick)
    if sample is None:
        return facts
    try:
        _check_limits(request, inputs, tokenizer)
    except UserError as error:
        yield finding_of(error, "data", "limit")
        return facts
    if config.data.tokenizer == "char":
        facts = dataclasses.replace(facts, vocab=_characters(request, inputs, quick=quick))
    learned = learned_vocab(config.data.tokenizer)
    if learned is not None:
        tokenizer = HuggingFaceTokenizer(train_bpe(_first(sample.text, _SAMPLE), learned, exact=False))
        all_read = sample.whole and sample.piece.end is None and len(inputs.files) == 1
        facts = dataclasses.replace(facts, vocab=tokenizer.vocab if all_read else learned)
    return _extrapolated(config, inputs, sample, tokenizer, facts)


def _check_limits(request: Request, inputs: Inputs, tokenizer: Tokenizer | None) -> None:
    """Raises the error that preparing would raise where the first document of a source is larger than a limit."""
    for number, source in enumerate(request.sources):
        limits = request.limits(number)
        if limits is None or any(file.format == "hub" for file in inputs.files if file.source == number):
            continue
        documents = (item for item in documents_of(request, inputs, [number]) if isinstance(item, Document))
        first = next(documents, None)
        if first is None or first.divisible or learned_vocab(request.data.tokenizer) is not None:
            continue
        tokens = len(first.text) if tokenizer is None else len(tokenizer.encode(first.text))
        ending = tokenizer is None or tokenizer.end_of_text is not None
        limits.check(NONE_TAKEN, limits.exceeded((1, tokens + ending, 0)), source.path)


def _tokenizer(config: RunConfig) -> Generator[Finding, None, Tokenizer | None]:
    """The tokenizer, where it does not have to be made from the text first."""
    if config.data.tokenizer == "char" or learned_vocab(config.data.tokenizer) is not None:
        if config.data.streaming:
            yield _check("tokenizer").bad(
                f"data.streaming is set, and the tokenizer {config.data.tokenizer} has to read the whole text first",
                "Set data.tokenizer=gpt2 or bytes, or leave data.streaming out.",
            )
        return None
    try:
        return load_tokenizer(config.data.tokenizer, None)
    except UserError as error:
        yield finding_of(error, "data", "tokenizer")
        return None


def _listing(config: RunConfig, inputs: Inputs, formats: set[str]) -> Iterator[Finding]:
    source = config.data.source if isinstance(config.data.source, str) else "the sources"
    first = f"{inputs.problems[0].file}: {inputs.problems[0].message}" if inputs.problems else ""
    if first and not inputs.files:
        yield _check("source").bad(
            f"no file of {source} can be used: {first}",
            "Put text into it, or set data.source to a file or folder that holds some.",
        )
        return
    size = f"{inputs.bytes / 1e6:,.1f} MB" if inputs.bytes >= 1e5 else f"{inputs.bytes / 1e3:,.1f} kB"
    hub = " of the Hugging Face hub, which is not asked now" if "hub" in formats else ""
    then = "read while training" if config.data.streaming else "prepared when training starts, or by `flatout prepare`"
    count = len(inputs.files)
    plural = "file" if count == 1 else "files"
    yield _check("source").ok(f"{source}: {count:,} {plural}, {size}, {', '.join(sorted(formats))}{hub}; {then}")
    if first:
        yield _check("unusable").warn(
            f"{len(inputs.problems):,} of its files cannot be used, the first: {first}",
            "Mend or remove them; preparing leaves them out and lists them.",
        )
    if inputs.told:
        yield _check("passed over").note(inputs.told, _advice(config, inputs.passed_over))


def _advice(config: RunConfig, passed_over: Mapping[str, int]) -> str:
    """How files with text are read, too; binary ones are passed over rightly."""
    advice = how_to_read(config.data.source, passed_over)
    return f"That is often right: {advice}." if advice else "None of those passed over is text."


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
    documents, problems, whole = _read(slices[0], request.options[file.source])
    text = [document.text for document in documents if document.rejected is None]
    causes = causes_of(problems)
    if problems and not any(text):
        mend = mend_of(causes) if causes[0].first.kind == "field" else "mend the file, or set data.format"
        yield check.bad(
            f"nothing at the beginning of {file.name} can be used: {causes[0].told}",
            f"To mend it: {mend}. `flatout prepare` lists every problem.",
        )
        return None
    if not any(part.strip() for part in text):
        yield check.bad(
            f"the beginning of {file.name} holds no text",
            "Set data.source to a file with text in it, or data.field to the field that holds it.",
        )
        return None
    if problems:
        yield check.warn(
            f"not all at the beginning of {file.name} can be used: {causes[0].told}",
            "What cannot be used is left out and listed by `flatout prepare`. If it is much, mend it: "
            f"{mend_of(causes, request.options[file.source].fields)}.",
        )
    else:
        yield check.ok(f"the beginning of {file.name} reads as text")
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


def _characters(request: Request, inputs: Inputs, *, quick: bool) -> int | None:
    """The ids that preparing would find in the text, by its own count; of a long text, those of its beginning."""
    if any(file.format == "hub" for file in inputs.files):
        return None
    recipe, found, read = Recipe(request.options, request.rules), set[str](), 0
    for part in parts_of(inputs, request.options, Done()):
        assert isinstance(part, Part), "nothing is done yet"
        found.update(characters_of_part(recipe, part))
        read += part.bytes
        if read >= _CHARACTER_BYTES // (8 if quick else 1):
            break
    return len(found) + (request.data.unknown_characters == "replace") + 1 if found else None  # one is the end of text


def _extrapolated(
    config: RunConfig, inputs: Inputs, sample: _Sample, tokenizer: Tokenizer | None, facts: DataFacts
) -> DataFacts:
    """Reckons with the rest being like the beginning."""
    if tokenizer is None and config.data.tokenizer != "char":
        return facts
    first = _first(sample.text, _SAMPLE)
    if tokenizer is None:
        lengths, vocab = [len(part) for part in first], facts.vocab or len(set("".join(sample.text)))
    else:
        lengths, vocab = [len(ids) for ids in tokenizer.encode_batch(first)], facts.vocab or tokenizer.vocab
    share_of_text, size = _share_of_text(sample, inputs), _bytes_of(first)
    tokens = None if share_of_text is None or not size else round(inputs.bytes * share_of_text * sum(lengths) / size)
    if tokens is not None:
        tokens = min([tokens, *_limits(config, sum(lengths) / len(lengths), sum(lengths) / size)])
    own_val = config.data.val_source is not None
    share = 0.0 if own_val else config.data.val_fraction
    width = token_dtype(max(1, vocab)).itemsize
    return DataFacts(
        train_tokens=None if tokens is None else round(tokens * (1 - share)),
        val_tokens=None if tokens is None or own_val else round(tokens * share),
        vocab=vocab,
        document_tokens=float(np.median(lengths)) if len(lengths) > 2 else None,
        token_bytes=width,
        to_prepare_bytes=None if tokens is None or config.data.streaming else tokens * width,
    )


def _limits(config: RunConfig, tokens_of_document: float, tokens_of_byte: float) -> list[int]:
    """The most tokens that each limit of the config leaves of all sources."""
    data = config.data
    sources = len(data.source) if isinstance(data.source, list) else 1
    each = {"max_documents": tokens_of_document, "max_tokens": 1.0, "max_bytes": tokens_of_byte}
    return [round(sources * most * each[name]) for name in LIMITS if (most := getattr(data, name)) is not None]


def _bytes_of(text: list[str]) -> int:
    return sum(len(part.encode("utf-8", "replace")) for part in text)


def _first(text: list[str], most: int) -> list[str]:
    """The first texts, up to so many characters; the last one may be cut."""
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
