"""Instruction files to samples of tokens with labels, in a folder that is whole or absent.

A few hundred rows at a time become conversations, text and labelled tokens. The result is kept in memory and written as
one safetensors file: for each split the tokens of all samples in a row, a label for each token, and where each sample
begins. Beside it lie the tokenizer, the chat template, the rows that could not be used, and a manifest with what was
asked for, what was counted and the SHA-256 of every file.

Contract: the result is a pure function of source, template, tokenizer and settings, whose hash the folder keeps. A
folder made from the same is used as it is; another one is replaced in one go, and the reason is reported. All bytes are
checked whenever a folder is opened. The manifest holds no time and no path. Rows that could not be used are listed,
samples that were cut or dropped are counted. A dataset in which nothing would be learned, or many of whose rows are
bad, is refused. The held-out split goes by a hash of a conversation's text, so the same conversation is never in both
splits, and more rows do not move those that are there.

Trap: a sample ends with its last labelled token. One of n tokens has n - 1 places at which something is predicted, so
one of context + 1 tokens fits. `fingerprint` is over tokens, labels and tokenizer; `key` is over what they were made
from. The same samples can have different keys.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from flatout.corpus.document import InputFile, Problem, Row, shown
from flatout.corpus.readers import read_rows
from flatout.corpus.sources import find_files
from flatout.data.chat_template import ChatTemplate
from flatout.data.conversations import LOOK_AT, Conversation, RowReading, choose_reading, conversation_of
from flatout.data.library_tokenizers import ModelTokenizer
from flatout.data.masking import COUNTS, Rendered, TrainOn, render, tokenize
from flatout.data.shards import MANIFEST, PROBLEMS, SAMPLES_FORMAT, TOKENIZER
from flatout.data.tokenizer import Ids, token_dtype
from flatout.errors import ConfigError, DataError, many
from flatout.files import (
    canonical_json,
    disk_errors,
    hash_file,
    parse_json,
    read_bounded,
    sync_and_hash,
    usual_mode,
    write_new,
)
from flatout.folders import foreign_entry, sweep, whole_folder
from flatout.records import PrepareProgress

VERSION = 2  # also changes when the same rows would give other tokens or labels
SAMPLES = "samples.safetensors"
TEMPLATE = "chat_template.jinja"
_FILES = (SAMPLES, PROBLEMS, TOKENIZER, TEMPLATE)
_NEEDED = {SAMPLES, PROBLEMS, TOKENIZER}
_AGAIN = "remove the folder, and it is made again"
_ANOTHER = "choose another folder for the samples: data.folder"


@final
@dataclass(frozen=True, eq=False)
class Samples:
    """Samples in a row: sample i has the tokens `offsets[i]` to `offsets[i + 1] - 1`, each with a label."""

    tokens: Ids
    labelled: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def labels(self) -> int:
        """How many tokens are learned in an epoch."""
        return int(np.count_nonzero(self.labelled))

    def facts(self) -> dict[str, Any]:
        """What a manifest and a reader want to know."""
        return {
            "samples": len(self),
            "tokens": len(self.tokens),
            "labelled": self.labels,
            "labelled_share": round(self.labels / len(self.tokens), 6),
            "longest": int(self.lengths.max()),
        }

    def sample(self, number: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
        place = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        return self.tokens[place], self.labelled[place]


@final
@dataclass(frozen=True, eq=False)
class SampleSet:
    """A folder of samples. `made` says why it was made just now; nothing if it was there already."""

    folder: Path
    train: Samples
    val: Samples | None
    manifest: Mapping[str, Any]
    made: str = ""

    @property
    def fingerprint(self) -> str:
        """Hash of all that training can see of it."""
        return self.manifest["fingerprint"]


def holds_samples(folder: Path) -> bool:
    """Whether a folder says of itself that it holds samples."""
    try:
        content = parse_json(read_bounded(folder / MANIFEST))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == SAMPLES_FORMAT


def open_samples(folder: str | Path) -> SampleSet:
    """The samples in `folder`, every byte of every file checked."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    for name, info in manifest["files"].items():
        path = folder / name
        try:
            size, found = path.stat().st_size, hash_file(path)
        except OSError as error:
            raise DataError(f"cannot read {shown(path)}: {error.strerror}", _AGAIN) from error
        if (size, found) != (info["bytes"], info["sha256"]):
            wrong = f"its SHA-256 is {found} and should be {info['sha256']}"
            if size != info["bytes"]:
                wrong = f"it has {size:,} bytes and should have {info['bytes']:,}"
            raise DataError(f"{shown(path)} is damaged: {wrong}", _AGAIN)
    splits = _read_splits(folder / SAMPLES, manifest)
    return SampleSet(folder, splits["train"], splits.get("val"), manifest)


def _read_splits(path: Path, manifest: Mapping[str, Any]) -> dict[str, Samples]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    vocab = manifest["tokenizer"]["vocab"]
    try:
        arrays = load_file(path)
        return {name: _checked(name, arrays, vocab) for name in manifest["splits"]}
    except (SafetensorError, ValueError) as error:  # of one that was written so: its hash is right
        raise DataError(f"{shown(path)} does not hold samples: {error}", _AGAIN) from error


def _checked(split: str, arrays: Mapping[str, npt.NDArray[Any]], vocab: int) -> Samples:
    found = [arrays.get(f"{split}.{part}") for part in ("tokens", "labelled", "offsets")]
    tokens, labelled, offsets = found
    if tokens is None or labelled is None or offsets is None:
        raise ValueError(f"it has no split {split}")
    if any(part.ndim != 1 for part in (tokens, labelled, offsets)) or len(tokens) != len(labelled):
        raise ValueError(f"the parts of {split} do not fit each other")
    if (tokens.dtype, labelled.dtype, offsets.dtype) != (token_dtype(vocab), np.dtype("u1"), np.dtype("<i8")):
        raise ValueError(f"the parts of {split} are of other types")
    rising = len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == len(tokens) and bool((np.diff(offsets) > 0).all())
    if not rising or int(tokens.max()) >= vocab:
        raise ValueError(f"the offsets or tokens of {split} are out of range")
    return Samples(tokens, labelled.astype(bool), offsets)


def check_target(target: Path) -> None:
    """Refuse a folder with anything in it that is not ours to replace."""
    if not target.name:
        raise DataError(f"{shown(target)} cannot be replaced by samples", _ANOTHER)
    if not os.path.lexists(target):  # unlike Path.exists, it never raises; writing raises the error
        return
    if target.is_symlink() or not target.is_dir():
        what = "link" if target.is_symlink() else "file"
        raise DataError(f"{shown(target)} is a {what}, not a folder", _ANOTHER)
    if (foreign := foreign_entry(target, _own(target))) is not None:
        raise _occupied(target, foreign)


def _own(target: Path) -> tuple[str, ...]:
    """The names that may be replaced in a folder of samples; none in a folder that does not look like ours.

    Either of two files is enough to tell, since the other may be damaged or gone; `tokenizer.json` alone is not.
    """
    for name, sign in ((MANIFEST, SAMPLES_FORMAT), (SAMPLES, '"train.labelled"')):
        with contextlib.suppress(OSError), (target / name).open("rb") as file:
            if sign.encode("ascii") in file.read(2**20):
                return (*_FILES, MANIFEST)
    return ()


def _occupied(target: Path, name: str) -> DataError:
    return DataError(f"the folder {shown(target)} is not one of samples; it holds {shown(name)!r}", _ANOTHER)


NONE_YET = "there were none yet"


def why_not(target: Path, key: dict[str, Any]) -> str:
    """Why the folder cannot be used as it is; nothing if it can."""
    if not os.path.exists(target / MANIFEST):
        return NONE_YET
    try:
        manifest = open_samples(target).manifest
    except DataError as error:
        return f"those that were there could not be used: {error.message}"
    changed = [name for name in key if manifest["key"].get(name) != key[name]]
    return f"{' and '.join(changed)} changed since they were made" if changed else ""


def write_samples(
    target: Path,
    key: Mapping[str, Any],
    splits: Mapping[str, Samples],
    counted: Mapping[str, Any],
    problems: Sequence[Problem],
    tokenizer: ModelTokenizer,
    template: ChatTemplate | None,
) -> None:
    """Put samples into `target`, in the place of any that are there. `counted` goes into the manifest as it is."""
    from safetensors.numpy import save_file

    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, samples in splits.items():
        arrays |= {
            f"{name}.tokens": samples.tokens,
            f"{name}.labelled": samples.labelled.astype(np.uint8),
            f"{name}.offsets": samples.offsets,
        }
    with disk_errors(f"the samples {target}", safe=""):
        sweep(target.parent, re.escape(target.name), locked=False)
        with whole_folder(target, replaces=_own(target), occupied=_occupied) as work:
            with usual_mode(work / SAMPLES):
                save_file(arrays, work / SAMPLES)
            listed = (json.dumps(dataclasses.asdict(problem)) + "\n" for problem in problems)
            write_new(work / PROBLEMS, "".join(listed).encode("ascii"))
            write_new(work / TOKENIZER, (json.dumps(tokenizer.to_json()) + "\n").encode("ascii"))
            if template is not None:
                write_new(work / TEMPLATE, template.text.encode("utf-8"))
            files = {name: sync_and_hash(work / name) for name in _FILES if (work / name).exists()}
            learned_from = json.dumps([files[SAMPLES]["sha256"], tokenizer.fingerprint])
            content = {
                **counted,
                "format": SAMPLES_FORMAT,
                "version": VERSION,
                "key": key,
                "template": None if template is None else {"name": template.name, "fingerprint": template.fingerprint},
                "tokenizer": {"kind": tokenizer.kind, "fingerprint": tokenizer.fingerprint, "vocab": tokenizer.vocab},
                "splits": {name: samples.facts() for name, samples in splits.items()},
                "files": files,
                "fingerprint": hashlib.sha256(learned_from.encode("ascii")).hexdigest(),
            }
            write_new(work / MANIFEST, _sealed(content))
            sync_and_hash(work / MANIFEST)


def _sealed(content: Mapping[str, Any]) -> bytes:
    """A manifest as it lies on disk, with a hash of its content."""
    stated = hashlib.sha256(canonical_json(content)).hexdigest()
    return canonical_json({**content, "manifest_sha256": stated})


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        raw = read_bounded(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"there are no samples in {shown(folder)}: no {MANIFEST}", "prepare them first") from error
    except OSError as error:
        raise DataError(f"cannot read {shown(path)}: {error.strerror}", "check that you may read it") from error
    try:
        content = parse_json(raw)
        if not isinstance(content, dict) or content.get("format") != SAMPLES_FORMAT:
            raise ValueError(f"its format is not {SAMPLES_FORMAT!r}")
        content.pop("manifest_sha256", None)
        if raw != _sealed(content):
            raise ValueError("it is not as it was written")
        version = content.get("version")
        if type(version) is not int or version < 1:
            raise ValueError("its version is no number")
        if version > VERSION:
            raise DataError(
                f"{shown(path)} has format version {version}, and this flatout knows up to {VERSION}",
                "update flatout, or remove the folder, and it is made again",
            )
        _check_shape(content)
    except ValueError as error:
        raise DataError(f"{shown(path)} is damaged: {error}", _AGAIN) from error
    return content


def _check_shape(content: Mapping[str, Any]) -> None:
    """Refuses a manifest with unexpected values. Its hash proves nothing: anyone can write one."""
    for name in ("key", "tokenizer", "splits", "files", "counts"):
        if not isinstance(content.get(name), dict):
            raise ValueError(f"its {name} is no object")
    if not isinstance(content.get("fingerprint"), str):
        raise ValueError("its fingerprint is no text")
    vocab = content["tokenizer"].get("vocab")
    if type(vocab) is not int or not 1 <= vocab <= 2**32:
        raise ValueError("its tokenizer has no vocabulary")
    if "train" not in content["splits"] or not content["splits"].keys() <= {"train", "val"}:
        raise ValueError("its splits are not train and val")
    for name, kind, words in (("splits", dict, "objects"), ("counts", int, "numbers")):
        if not all(type(value) is kind for value in content[name].values()):
            raise ValueError(f"its {name} are no {words}")
    if not isinstance(content["key"].get("source", []), list):
        raise ValueError("its source is no list")
    readings = content.get("reading") or []
    if not isinstance(readings, list) or not all(isinstance(reading, dict) for reading in readings):
        raise ValueError("its reading is no list of objects")
    files = content["files"]
    if not _NEEDED <= files.keys() <= set(_FILES):
        raise ValueError("it does not name the files of samples")
    for name, info in files.items():
        size = info.get("bytes") if isinstance(info, dict) else None
        if type(size) is not int or size < 0 or not isinstance(info.get("sha256"), str):
            raise ValueError(f"what it says of {name} is no size and hash")


_SEED = 0  # of the hash that rows are held out by: the same rows whatever the seed of the run
_CHUNK = 512
_CHUNK_CHARACTERS = 2**21  # the library that tokenizes takes 130 bytes for each
# A row is rendered and tokenized whole, which takes 150 bytes for each of its characters. One with more than these is
# longer than any context; natural text has about 4 characters a token.
_ROW_CHARACTERS, _ROW_CHARACTERS_A_TOKEN = 2**20, 32
_MOST_BAD = 0.2  # the share of rows that may be unusable before the dataset is refused
# Folders of samples are known by these, too.
_FORMER_SETTINGS = {"val_rows": None, "seed": _SEED, "most_bad": _MOST_BAD, "too_long": "truncate", "format": "auto"}
_ROWS = ("json", "jsonl", "csv", "tsv", "parquet")
Progress = Callable[[PrepareProgress], None]


@dataclass(frozen=True)
class SampleRequest:
    """What samples are made of. Held out are about `val_fraction` of the rows, or those of `val_source`.

    `limit` is the setting that `context` comes from, for messages alone.
    """

    source: str
    context: int
    val_source: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    train_on: TrainOn = "assistant"
    val_fraction: float = 0.0
    limit: str = "model.context"


def prepare_samples(
    request: SampleRequest,
    tokenizer: ModelTokenizer,
    template: ChatTemplate | None,
    folder: str | Path,
    progress: Progress | None = None,
) -> SampleSet:
    """The samples that `request` asks for, in `folder`: those that are there, or made anew where they do not fit.

    The process that renders the template has ended afterwards.
    """
    try:
        target, train_files, val_files, key = _asked(request, tokenizer, template, folder)
        why = why_not(target, key)
        if not why:
            return open_samples(target)
        maker = _Maker(request, tokenizer, template, progress, [*train_files, *val_files])
        train = maker.read(train_files, request.source)
        held_out = None if request.val_source is None else maker.read(val_files, request.val_source)
        splits = _split(train, request.val_fraction) if held_out is None else {"train": train, "val": held_out}
        for name, made in splits.items():
            _check_learnable(made, name, request, maker)
        maker.report("merging")
        arrays = {name: _arrays(made, token_dtype(tokenizer.vocab)) for name, made in splits.items()}
        write_samples(target, key, arrays, maker.summary(), maker.problems, tokenizer, template)
        return dataclasses.replace(open_samples(target), made=why)
    finally:
        if template is not None:
            template.release()


def why_made(
    request: SampleRequest, tokenizer: ModelTokenizer, template: ChatTemplate | None, folder: str | Path
) -> str:
    """Why `prepare_samples` would make samples now; nothing where those that it is asked for are there."""
    target, _, _, key = _asked(request, tokenizer, template, folder)
    return why_not(target, key)


def _asked(
    request: SampleRequest, tokenizer: ModelTokenizer, template: ChatTemplate | None, folder: str | Path
) -> tuple[Path, list[InputFile], list[InputFile], dict[str, Any]]:
    """(folder, files to train on, files to evaluate on, what samples made of them are known by)"""
    if not 0.0 <= request.val_fraction < 1.0:
        raise ConfigError(
            f"chat.validation is {request.val_fraction}", "give a share from 0 up to, but not including, 1"
        )
    target = Path(folder).resolve()
    train_files = row_files(request.source, "chat.source")
    val_files = [] if request.val_source is None else row_files(request.val_source, "chat.validation")
    settings = dataclasses.asdict(request)
    del settings["source"], settings["val_source"]  # content counts, not where it lies
    del settings["limit"]  # the number counts
    key = {
        "version": VERSION,
        "settings": {**_FORMER_SETTINGS, **settings},
        "source": [[file.format, hash_file(Path(file.path))] for file in train_files],
        "val_source": [[file.format, hash_file(Path(file.path))] for file in val_files],
        "tokenizer": tokenizer.fingerprint,
        "template": None if template is None else template.fingerprint,
    }
    check_target(target)
    return target, train_files, val_files, key


def row_files(source: str, field: str) -> list[InputFile]:
    """The files of rows that a source means; `field` is the setting that names it."""
    rows = "give .jsonl, .json, .csv, .tsv or .parquet files"
    try:
        found = find_files(source)
    except DataError as error:  # its hint is about text
        raise DataError(error.message, f"check {field}: {rows}, or a folder of them") from error
    if found.problems:
        first = found.problems[0]
        raise DataError(f"{first.file}: {first.message}", "mend the source, or leave the file out")
    for file in found.files:
        if file.format not in _ROWS:
            raise DataError(
                f"{file.name} holds no rows of instructions: its format is {file.format}",
                f"{rows}; text for pretraining goes to `flatout train`",
            )
    return list(found.files)


@final
@dataclass(frozen=True, eq=False)
class _Made:
    """Samples with the number of the conversation each is of, and for each conversation a hash of its text."""

    samples: list[tuple[Ids, npt.NDArray[np.bool_], int]]  # ids, labels, conversation
    hashes: list[int]

    def chosen(self, which: npt.NDArray[np.bool_]) -> "_Made":
        """The samples of the conversations that are chosen."""
        return _Made([sample for sample in self.samples if which[sample[2]]], self.hashes)


@final
class _Maker:
    """Reads sources into samples, and counts what happens on the way."""

    def __init__(
        self,
        request: SampleRequest,
        tokenizer: ModelTokenizer,
        template: ChatTemplate | None,
        progress: Progress | None,
        files: list[InputFile],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[Problem] = []
        self.readings: list[RowReading] = []
        self._request = request
        self._tokenizer = tokenizer
        self._template = template
        self._progress = progress
        self._state = PrepareProgress("reading", 0, len(files), 0, sum(file.bytes for file in files), 0, 0, 0)
        self._bytes = 0  # of the file that is being read
        self._pending: list[tuple[int, Rendered]] = []  # with the number of the conversation; not tokenized yet
        self._most = max(_ROW_CHARACTERS, _ROW_CHARACTERS_A_TOKEN * request.context)
        # Hardly any text holds one of these, so that most need not be searched for hundreds of tokens.
        self._special_beginnings = {text[:2] for text in tokenizer.special_texts}

    def read(self, files: list[InputFile], source: str) -> _Made:
        made = _Made([], [])
        rows_before, problems_before = self.counts["rows"], len(self.problems)
        stream = iter(itertools.chain.from_iterable(self._rows(file) for file in files))
        head = list(itertools.islice(stream, LOOK_AT))
        first = [row for _, row in head if isinstance(row, Row)]
        if first:
            reading = choose_reading(self._request.fields, first, source)
            self.readings.append(reading)
            characters = 0
            for file, row in itertools.chain(head, stream):
                said = row if isinstance(row, Problem) else conversation_of(row, reading, file.name)
                characters += self._note(said) if isinstance(said, Problem) else self._take(said, made)
                if len(self._pending) >= _CHUNK or characters > _CHUNK_CHARACTERS:
                    self._flush(made)
                    characters = 0
            self._flush(made)
        else:
            for _, row in head:
                if isinstance(row, Problem):
                    self._note(row)
        self._check_share(source, self.counts["rows"] - rows_before, self.problems[problems_before:], bool(made.hashes))
        return made

    def _rows(self, file: InputFile) -> Iterator[tuple[InputFile, Row | Problem]]:
        def watch(position: int) -> None:
            self._bytes = position

        for row in read_rows(file, watch=watch):
            if isinstance(row, Problem):
                _check_readable(file, row)
            elif (size := _characters(row.value)) > self._most:
                message = f"the row has {size:,} characters; the limit for this context is {self._most:,}"
                row = Problem(file.name, row.place, "too-long", message, records=1)
            yield file, row
        self._state = self._state.plus(files=1, bytes=file.bytes)
        self._bytes = 0

    def _take(self, row: Conversation, made: _Made) -> int:
        """Renders a row, and returns how many characters that gives."""
        counts: Counter[str] = Counter()
        rendered = render(row, self._template, self._request.train_on, self._tokenizer.special_texts, counts)
        if isinstance(rendered, Problem):
            return self._note(rendered)
        if rendered[-1].bare and self._tokenizer.end_of_text is None:
            raise DataError(
                "the tokenizer names no end-of-text token, so that a model could never learn to stop",
                "name an eos_token in tokenizer_config.json, or use a chat template with an end of turn of its own",
            )
        self.counts["rows"] += 1
        self.counts.update(counts)
        self.counts["special_in_content"] += self._spells_special(row)
        self._pending += [(len(made.hashes), sample) for sample in rendered]
        made.hashes.append(_hash_of(rendered[-1].text))
        return sum(len(sample.text) for sample in rendered)

    def _spells_special(self, row: Conversation) -> bool:
        """Whether a row's own text spells a special token: it becomes that token, as in other libraries."""
        said = [message["content"] for message in row.messages] or [row.prompt or "", row.completion or ""]
        return any(
            any(beginning in text for beginning in self._special_beginnings)
            and any(token in text for token in self._tokenizer.special_texts)
            for text in said
        )

    def _note(self, problem: Problem) -> int:
        """Lists a row that cannot be used, which gives no text."""
        self.problems.append(problem)
        self.counts["rows"] += problem.records
        self.counts["rows_not_used"] += problem.records
        return 0

    def _flush(self, made: _Made) -> None:
        most, pending = self._request.context + 1, self._pending
        tokenized = tokenize([sample for _, sample in pending], self._tokenizer, self.counts)
        for (owner, _), (ids, labelled) in zip(pending, tokenized, strict=True):
            if not labelled.any():
                self.counts["dropped_unlabelled"] += 1
                continue
            # What comes after the last label is not predicted, and nothing that is predicted sees it.
            last = int(np.flatnonzero(labelled)[-1]) + 1
            ids, labelled = ids[:last], labelled[:last]
            self.counts["longest"] = max(self.counts["longest"], len(ids))
            if len(ids) > most:
                self.counts["truncated"] += 1
                self.counts["labels_cut"] += int(np.count_nonzero(labelled[most:]))
                ids, labelled = ids[:most], labelled[:most]
                if not labelled.any():
                    self.counts["dropped_labels_cut"] += 1
                    continue
            made.samples.append((ids, labelled, owner))
            self.counts["tokens"] += len(ids)
        pending.clear()
        self.report("reading")

    def report(self, phase: str) -> None:
        if self._progress is not None:
            read = min(self._state.bytes + self._bytes, self._state.total_bytes)
            counts = {"documents": self.counts["rows"], "tokens": self.counts["tokens"]}
            state = dataclasses.replace(self._state, phase=phase, bytes=read, problems=len(self.problems), **counts)
            self._progress(state)

    def summary(self) -> dict[str, Any]:
        """What the manifest keeps of how the samples were made."""
        kinds = Counter(problem.kind for problem in self.problems)
        return {
            "reading": [dataclasses.asdict(reading) for reading in self.readings],
            "counts": {name: int(self.counts[name]) for name in COUNTS},
            "problems": {"all": len(self.problems), **dict(sorted(kinds.items()))},
        }

    def _check_share(self, source: str, rows: int, problems: list[Problem], any_left: bool) -> None:
        if any_left and sum(problem.records for problem in problems) <= _MOST_BAD * rows:
            return
        if not problems:
            raise DataError(f"{shown(source)} has no rows", "give a file with at least one row")
        first, bad = problems[0], sum(problem.records for problem in problems)
        what = (
            f"{bad:,} of {many(rows, 'row')} of {shown(source)} cannot be used"
            if rows
            else f"{shown(source)} cannot be read"
        )
        kinds = Counter(problem.kind for problem in problems)
        others = ", ".join(f"{count:,} of {kind}" for kind, count in kinds.most_common(4)) if len(kinds) > 1 else ""
        kind = "no-template" if first.kind == "template" and self._template is None else first.kind
        raise DataError(
            f"{what}; the first: {first.text}{f' (problems: {others})' if others else ''}",
            _HINTS.get(kind, "mend the rows, or set chat.fields"),
        )


def _check_readable(file: InputFile, problem: Problem) -> None:
    """Refuse a file that breaks off: how many rows are missing is not known. A bad row among good ones is no such."""
    broken = ("truncated", "compression", "checksum", "bomb", "format")
    if problem.records and problem.kind not in broken and not (file.format == "json" and problem.kind != "not-utf8"):
        return
    hint = "fetch or write the file again: it cannot be read to its end"
    raise DataError(problem.text, _HINTS[problem.kind] if problem.kind in ("json", "truncated") else hint)


_HINTS = {
    "json": "one JSON value on each line is .jsonl, one list of all rows is .json: check the name and the content",
    "truncated": "the file ends too early: fetch or write it again",
    "role": "rename the role in the file to one of those known; chat.fields maps names of columns, not what they hold",
    "template": "look at the order of the roles, or set chat.template to another one: chatml, plain, or a file",
    "no-template": "set chat.template to model, chatml, plain or a file; none is for rows without turns",
    "turns": "give rows with an assistant turn to learn, or set chat.train_on=all",
    "field": "map the columns that the file has with chat.fields",
    "empty": "leave empty rows out",
}


def _characters(value: object) -> int:
    """The characters of all texts in a row, and one for each value in it."""
    total, left = 0, [value]
    while left:
        one = left.pop()
        total += 1
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            left += one
    return total


def _hash_of(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, key=str(_SEED).encode("ascii"))
    return int.from_bytes(digest.digest(), "big")


def _split(made: _Made, val_fraction: float) -> dict[str, _Made]:
    """Some conversations held out, by their hashes. Where rows are few, at least one is on either side."""
    if val_fraction == 0.0 or not made.samples:
        return {"train": made}
    hashes = np.array(made.hashes, dtype=np.uint64)
    used = np.unique(hashes[[owner for *_, owner in made.samples]])
    if len(used) < 2:
        raise DataError(
            "there are fewer than two different conversations, of which one cannot be held out",
            "give more rows, or name a file to evaluate on in chat.validation",
        )
    within = int(np.searchsorted(used, np.uint64(min(int(val_fraction * 2.0**64), 2**64 - 1))))
    border = used[min(max(within, 1), len(used) - 1) - 1]
    held_out = hashes <= border
    return {"train": made.chosen(~held_out), "val": made.chosen(held_out)}


def _check_learnable(made: _Made, split: str, request: SampleRequest, maker: _Maker) -> None:
    if made.samples:
        return
    counts = maker.counts
    which = "" if split == "train" else " of the rows that are held out"
    if counts["dropped_labels_cut"]:
        most = "the context of" if request.limit == "model.context" else f"{request.limit}, which is"
        raise DataError(
            f"nothing{which} is left to learn: every sample is longer than {most} {many(request.context, 'token')} "
            f"(the longest has {counts['longest']:,}) and what it teaches lies behind the cut",
            f"raise {request.limit}, or shorten the prompts",
        )
    raise DataError(
        f"nothing{which} is left to learn: no token of {many(counts['rows'], 'row')} is labelled",
        "look at a sample with its template: does it show what the assistant says, and does chat.train_on fit?",
    )


def _arrays(made: _Made, dtype: np.dtype[Any]) -> Samples:
    ids, labelled, _ = zip(*made.samples, strict=True)
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    return Samples(np.concatenate(ids).astype(dtype), np.concatenate(labelled), offsets)
