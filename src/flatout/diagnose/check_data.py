"""The text a config names: whether it is there and can be read, and whether tokenizer, vocabulary and length fit.

`look_at_data` reads files and writes none. A dataset that is prepared is opened as training opens it. A source that is
not prepared yet is listed, and the first quarter of a megabyte of it is read and tokenized, from which the number of
tokens is extrapolated and said to be so. No torch here.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from flatout.config.schema import RunConfig
from flatout.corpus.document import Document, Problem
from flatout.corpus.readers import read_slice
from flatout.corpus.sources import slices_of, told_by_type
from flatout.data.inspect import read_report
from flatout.data.plan import STDIN, Inputs, Request, find_inputs, request_of
from flatout.data.prepare import data_folder, has_dataset, lies_inside, prepare_data
from flatout.data.shards import Dataset, open_dataset
from flatout.data.tokenizer import Tokenizer, load_tokenizer, token_dtype
from flatout.diagnose.check_environment import check_packages, source_paths
from flatout.diagnose.doctor import DataFacts, Finding, Machine, Status, finding_of
from flatout.errors import ConfigError, UserError

_SAMPLE = 2**18  # bytes of a source that are read
_DOCUMENTS = 1_000_000  # whose lengths are looked at
# Formats of which so many bytes are so many tokens, one stretch like the next.
_MEASURABLE = ("text", "jsonl", "json", "csv", "tsv", "smiles", "tokens")


def _finding(name: str, status: Status, found: str, advice: str = "") -> Finding:
    return Finding(area="data", name=name, status=status, found=found, advice=advice)


def look_at_data(
    config: RunConfig, machine: Machine, target: str | None, *, quick: bool = False
) -> tuple[list[Finding], DataFacts]:
    """What was found of the data, and what is known of its tokens. `target` is how the user named the config."""
    findings: list[Finding] = []
    try:
        folder = data_folder(config.data)
    except ConfigError as error:
        return [finding_of(error, "config", "source")], DataFacts()
    if not config.data.streaming and has_dataset(folder):
        facts = _prepared(config, folder, findings)
        findings += check_packages(machine, config, ())
        return findings, facts
    if config.data.source is None:
        findings.append(
            _finding(
                "source",
                "bad",
                f"{folder} holds no prepared data, and data.source is not set",
                f"Prepare your text first: `flatout prepare {target or 'CONFIG'} data.source=FILE-OR-FOLDER`, or set "
                "data.folder to shards that are prepared.",
            )
        )
        return findings, DataFacts(vocab=_known_vocab(config))
    return findings, _unprepared(config, folder, machine, findings, quick=quick)


def _known_vocab(config: RunConfig) -> int | None:
    return {"gpt2": 50257, "bytes": 257}.get(config.data.tokenizer)


# --- prepared ---------------------------------------------------------------------------------------------------------


def _prepared(config: RunConfig, folder: Path, findings: list[Finding]) -> DataFacts:
    try:
        dataset = open_dataset(folder)
    except UserError as error:
        findings.append(finding_of(error, "data", "dataset"))
        return DataFacts(vocab=_known_vocab(config), folder=str(folder))
    train, val = dataset.train, dataset.val
    findings.append(
        _finding(
            "dataset",
            "ok",
            f"{folder}: {train.tokens:,} tokens to train on, {val.tokens:,} to validate, tokenizer "
            f"{dataset.tokenizer.kind} with {dataset.tokenizer.vocab:,} ids",
        )
    )
    try:
        prepare_data(config.data, config.clean)  # of a folder that is filled it only asks whether it fits
        findings += _tokenizer_of_folder(config, dataset)
    except UserError as error:
        findings.append(finding_of(error, "data", "fits config"))
    try:
        report = read_report(folder)
        if report is not None and report["passed_over"]:
            total = report["files"] + sum(report["passed_over"].values())
            findings.append(
                _finding(
                    "passed over",
                    "note",
                    f"it was prepared from {report['files']:,} of {total:,} files; passed over "
                    f"{told_by_type(report['passed_over'])}",
                    "Where those files hold text, data.format=text reads every file as text.",
                )
            )
        if report is not None and report["problem_count"]:
            findings.append(
                _finding(
                    "losses",
                    "note",
                    f"{report['damaged']:,} of {report['records']:,} records of the source could not be used",
                    f"They are listed in {folder / 'problems.jsonl'}; the dataset holds the rest.",
                )
            )
    except UserError as error:
        findings.append(finding_of(error, "data", "report"))
    return DataFacts(
        exact=True,
        train_tokens=train.tokens,
        val_tokens=val.tokens,
        vocab=dataset.tokenizer.vocab,
        document_tokens=_median_document(dataset),
        token_bytes=train.dtype.itemsize,
        folder=str(folder),
    )


def _tokenizer_of_folder(config: RunConfig, dataset: Dataset) -> Iterable[Finding]:
    """Where only a folder is named, nobody compares its tokenizer with the config's: training takes the folder's."""
    asked = config.data.tokenizer
    if config.data.source is not None:
        yield _finding("fits config", "ok", "it was prepared with the settings of this config")
        return
    kind, made_with = dataset.tokenizer.kind, dataset.manifest.tokenizer_fingerprint
    if asked in ("char", "bytes", "gpt2"):
        same = asked == kind
    else:
        same = load_tokenizer(asked, None).fingerprint == made_with
    if same:
        yield _finding("tokenizer", "ok", f"{asked}, as the config says")
    else:
        yield _finding(
            "tokenizer",
            "warn",
            f"the shards were made with the tokenizer {kind}, and data.tokenizer is {asked}",
            f"Training would use the shards' own. Set data.tokenizer={kind}, or prepare the text again with the "
            "tokenizer that you want, into another data.folder.",
        )


def _median_document(dataset: Dataset) -> float | None:
    starts = dataset.train.document_starts()[: _DOCUMENTS + 1]
    if len(starts) < 3:
        return None
    return float(np.median(np.diff(starts.astype(np.int64))))


# --- not prepared yet -------------------------------------------------------------------------------------------------


def _unprepared(
    config: RunConfig, folder: Path, machine: Machine, findings: list[Finding], *, quick: bool
) -> DataFacts:
    tokenizer = _tokenizer(config, findings)
    facts = DataFacts(vocab=_known_vocab(config) if tokenizer is None else tokenizer.vocab, folder=str(folder))
    if STDIN in source_paths(config):
        findings.append(
            _finding("source", "note", "it comes from standard input, which is read only once: not looked at")
        )
        return facts
    try:
        request = request_of(config.data, config.clean)
        inputs = find_inputs(request, Path())
    except UserError as error:
        findings.append(finding_of(error, "data", "source"))
        return facts
    formats = {file.format for file in inputs.files} | {"zst" for file in inputs.files if file.compression == "zst"}
    findings += _listing(config, inputs, formats)
    packages = list(check_packages(machine, config, sorted(formats)))
    findings += packages
    findings += _inside(folder, request)
    if not inputs.files or any(finding.status == "bad" for finding in packages):
        return facts
    return _sampled(config, request, inputs, tokenizer, facts, findings, quick=quick)


def _tokenizer(config: RunConfig, findings: list[Finding]) -> Tokenizer | None:
    """The tokenizer, where it does not have to be made from the text first."""
    if config.data.tokenizer == "char":
        if config.data.streaming:
            findings.append(
                _finding(
                    "tokenizer",
                    "bad",
                    "data.streaming is set, and the tokenizer char has to read the whole text first",
                    "Set data.tokenizer=gpt2 or bytes, or leave data.streaming out.",
                )
            )
        return None
    try:
        return load_tokenizer(config.data.tokenizer, None)
    except UserError as error:
        findings.append(finding_of(error, "data", "tokenizer"))
        return None


def _listing(config: RunConfig, inputs: Inputs, formats: set[str]) -> Iterable[Finding]:
    source = config.data.source if isinstance(config.data.source, str) else "the sources"
    count, size = len(inputs.files), _size(inputs.bytes)
    if inputs.problems and not inputs.files:
        first = inputs.problems[0]
        yield _finding(
            "source",
            "bad",
            f"no file of {source} can be used: {first.file}: {first.message}",
            "Put text into it, or set data.source to a file or folder that holds some.",
        )
        return
    plural = "file" if count == 1 else "files"
    hub = " of the Hugging Face hub, which is not asked now" if "hub" in formats else ""
    then = "read while training" if config.data.streaming else "prepared when training starts, or by `flatout prepare`"
    yield _finding("source", "ok", f"{source}: {count:,} {plural}, {size}, {', '.join(sorted(formats))}{hub}; {then}")
    if inputs.problems:
        first = inputs.problems[0]
        yield _finding(
            "unusable",
            "warn",
            f"{len(inputs.problems):,} of its files cannot be used, the first: {first.file}: {first.message}",
            "Mend or remove them; preparing leaves them out and lists them.",
        )
    if inputs.passed_over:
        yield _finding(
            "passed over",
            "note",
            inputs.passed_over_told,
            "That is often right. Where those files hold text, data.format=text reads every file as text.",
        )


def _inside(folder: Path, request: Request) -> Iterable[Finding]:
    for source in request.sources:
        if lies_inside(folder, source.path):
            yield _finding(
                "folder",
                "bad",
                f"the dataset {folder} would lie inside its own source {source.path}",
                "The next prepare would read it as text. Set data.folder to a folder outside of it.",
            )


def _sampled(
    config: RunConfig,
    request: Request,
    inputs: Inputs,
    tokenizer: Tokenizer | None,
    facts: DataFacts,
    findings: list[Finding],
    *,
    quick: bool,
) -> DataFacts:
    """Reads the beginning of the first file and reckons with the rest being like it."""
    file = inputs.files[0]
    if file.format == "hub":
        return facts
    slices = slices_of(file, _SAMPLE // (4 if quick else 1))
    if not slices:
        return facts
    documents, problems, whole = _read(slices[0], request.options[file.source])
    text = [document.text for document in documents if document.rejected is None]
    if problems and not any(text):
        first = problems[0]
        place = f", {first.place}" if first.place else ""
        mend = "Set data.field to where the text is" if first.kind == "field" else "Mend the file, or set data.format"
        findings.append(
            _finding(
                "content",
                "bad",
                f"nothing at the beginning of {file.name} can be used{place}: {first.message}",
                f"{mend}; `flatout prepare` lists every problem.",
            )
        )
        return facts
    if not any(part.strip() for part in text):
        findings.append(
            _finding(
                "content",
                "bad",
                f"the beginning of {file.name} holds no text",
                "Set data.source to a file with text in it, or data.field to the field that holds it.",
            )
        )
        return facts
    if problems:
        first = problems[0]
        findings.append(
            _finding(
                "content",
                "warn",
                f"{_problems(problems)} at the beginning of {file.name}: {first.message}",
                "What cannot be used is left out and listed by `flatout prepare`. Mend the file if it is much.",
            )
        )
    else:
        findings.append(_finding("content", "ok", f"the beginning of {file.name} reads as text"))
    return _extrapolated(config, inputs, slices[0], text, tokenizer, facts, whole=whole)


def _read(piece: Any, options: Any) -> tuple[list[Document], list[Problem], bool]:
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
    config: RunConfig,
    inputs: Inputs,
    piece: Any,
    text: list[str],
    tokenizer: Tokenizer | None,
    facts: DataFacts,
    *,
    whole: bool,
) -> DataFacts:
    if tokenizer is None and config.data.tokenizer != "char":
        return facts
    first = _first(text, _SAMPLE)
    if tokenizer is None:
        lengths, vocab = [len(part) for part in first], len(set("".join(text)))
    else:
        lengths, vocab = [len(ids) for ids in tokenizer.encode_batch(first)], tokenizer.vocab
    share_of_text = _share_of_text(piece, text, inputs, whole=whole)
    size = sum(len(part.encode("utf-8", "replace")) for part in first)
    tokens = None if share_of_text is None or not size else round(inputs.bytes * share_of_text * sum(lengths) / size)
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
        folder=facts.folder,
    )


def _size(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


def _problems(problems: list[Problem]) -> str:
    return "a problem" if len(problems) == 1 else f"{len(problems):,} problems, the first"


def _first(text: list[str], most: int) -> list[str]:
    """The first texts, up to so many characters; the last one may be cut."""
    chosen: list[str] = []
    for part in text:
        chosen.append(part[:most])
        most -= len(part)
        if most <= 0:
            break
    return chosen


def _share_of_text(piece: Any, text: list[str], inputs: Inputs, *, whole: bool) -> float | None:
    """Bytes of text for each byte on disk, if the files are all of a kind and one stretch is like the next."""
    file = piece.file
    if any((other.format, other.compression) != (file.format, file.compression) for other in inputs.files):
        return None
    if file.format in ("text", "smiles") and file.compression == "none":
        return 1.0
    end = file.bytes if piece.end is None else piece.end
    read = min(end, file.bytes) - piece.start
    if not whole or read <= 0 or file.format not in _MEASURABLE:
        return None
    return sum(len(part.encode("utf-8", "replace")) for part in text) / read
