"""The manifest of a prepared dataset: what its folder holds, and proof that nothing in it has changed.

Idea: a dataset is a folder. Each split is a run of shards of raw little-endian ids (`train-00000.bin`, ...), which are
read as one long stream, plus the token offset at which each document starts (`train.offsets.bin`, uint64). Beside them
lie `tokenizer.json`, `report.json` (what was kept and dropped), `problems.jsonl` (what could not be read), and
`manifest.json`, which names every file with its size and SHA-256.

Contract: the manifest equals its own canonical form and carries its own hash, so a single flipped bit in it is noticed.
It holds no time and no name of a machine: the same input and settings give the same bytes.

Trap: `fingerprint` is over what is learned from (ids, documents, tokenizer) and not over where that came from: the same
text prepared from another path has the same fingerprint and another manifest.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from flatout.data.tokenizer import token_dtype
from flatout.errors import DataError
from flatout.files import parse_json, read_bounded

FORMAT = "flatout-tokens"
SAMPLES_FORMAT = "flatout-samples"  # of the other kind of folder with a manifest.json
VERSION = 2  # version 1 had no report
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
REPORT = "report.json"
PROBLEMS = "problems.jsonl"
SPLITS = ("train", "val")
# Every file a dataset may consist of. Names from a manifest are matched against it before they touch the file system.
FILE_NAME = re.compile(r"(train|val)(-\d{5,}|\.offsets)\.bin|(tokenizer|report|manifest)\.json|problems\.jsonl")
OFFSET_DTYPE = np.dtype("<u8")
Whole = Annotated[int, Field(strict=True, ge=0)]
PREPARE_AGAIN = "prepare the dataset again with --overwrite, or restore its folder from a copy"


@dataclass(frozen=True)
class FileInfo:
    """A file of the dataset: its name in the folder, its size and the SHA-256 of its content."""

    name: str
    bytes: Whole
    sha256: str


@dataclass(frozen=True)
class SplitInfo:
    """What a split holds. `text_bytes` is the UTF-8 size of its text, from which bits per byte are reckoned."""

    tokens: Whole
    documents: Whole
    text_bytes: Whole
    shards: tuple[FileInfo, ...]
    offsets: FileInfo


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a dataset."""

    version: Whole
    dtype: str
    vocab: Whole
    tokenizer_kind: str
    tokenizer_fingerprint: str
    tokenizer: FileInfo
    splits: Mapping[str, SplitInfo]
    # How the dataset was asked for, as far as it decides the result.
    settings: Mapping[str, Any]
    report: FileInfo | None = None
    problems: FileInfo | None = None

    @property
    def fingerprint(self) -> str:
        """Hash of all that training can see of the dataset."""
        content = self._content()
        for name in ("settings", "report", "problems"):
            content.pop(name, None)
        return hashlib.sha256(_canonical(content)).hexdigest()

    @property
    def files(self) -> tuple[FileInfo, ...]:
        """Every file of the dataset but the manifest itself."""
        parts = [(*split.shards, split.offsets) for split in self.splits.values()]
        told = [info for info in (self.report, self.problems) if info is not None]
        return (self.tokenizer, *told, *(info for part in parts for info in part))

    def to_bytes(self) -> bytes:
        """The manifest as it lies on disk."""
        content = {**self._content(), "fingerprint": self.fingerprint}
        return _canonical({**content, "manifest_sha256": hashlib.sha256(_canonical(content)).hexdigest()})

    def _content(self) -> dict[str, Any]:
        content = {"format": FORMAT, **asdict(self)}
        return {name: value for name, value in content.items() if value is not None}


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of the dataset in `folder`, itself unharmed; the files it names are not looked at."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        what = "there is no dataset in" if Path(folder).is_dir() else "there is no folder"
        raise DataError(f"{what} {folder}", "prepare it first, or check data.folder")
    try:
        raw = read_bounded(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", "check that you may read it") from error
    try:
        return _verified(raw, path)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}", PREPARE_AGAIN) from error


@lru_cache(maxsize=2)  # a run asks for the manifest of its dataset seven times
def _verified(raw: bytes, path: Path) -> Manifest:
    content = parse_json(raw)
    _check_version(content, path)
    manifest = _manifest_from(content)
    _check_consistent(manifest)
    found, wanted = hashlib.sha256(raw).hexdigest(), hashlib.sha256(manifest.to_bytes()).hexdigest()
    if found != wanted:
        raise ValueError(f"its SHA-256 is {found}, and its own content asks for {wanted}")
    return manifest


def _canonical(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return f"{text}\n".encode("ascii")


def _check_version(content: Any, path: Path) -> None:
    if isinstance(content, dict) and content.get("format") == SAMPLES_FORMAT:
        raise DataError(
            f"{path.parent} holds samples for fine-tuning, not shards of text",
            "`flatout eval RUN` without --data measures a fine-tuned run on its own samples; shards of text are made "
            "by `flatout prepare`",
        )
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    version = content["version"]
    if type(version) is int and version > VERSION:
        raise DataError(
            f"{path} has format version {version}, and this flatout knows versions up to {VERSION}",
            "update flatout, or prepare the dataset again with this version",
        )


@cache
def _schema() -> TypeAdapter[Manifest]:
    """What a manifest may hold, worked out once: that takes longer than reading one."""
    return TypeAdapter(Manifest)


def _manifest_from(content: dict[str, Any]) -> Manifest:
    try:
        return _schema().validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _check_consistent(manifest: Manifest) -> None:
    dtype = token_dtype(manifest.vocab)
    if manifest.dtype != dtype.name:
        raise ValueError(f"its dtype is {manifest.dtype}, and a vocabulary of {manifest.vocab} has {dtype.name}")
    if not manifest.splits.keys() <= set(SPLITS):  # a missing one is told by who asks for it
        raise ValueError(f"its splits are not {' and '.join(SPLITS)}")
    names = [file.name for file in manifest.files]
    for name in names:
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a file of a dataset")
    if len(set(names)) != len(names):
        raise ValueError("it names a file twice")
    for name, split in manifest.splits.items():
        stored = sum(shard.bytes for shard in split.shards)
        if stored != split.tokens * dtype.itemsize or any(shard.bytes % dtype.itemsize for shard in split.shards):
            raise ValueError(f"split {name} has {split.tokens} tokens in {stored} bytes of {dtype.name}")
        if split.offsets.bytes != split.documents * OFFSET_DTYPE.itemsize or not split.documents:
            raise ValueError(f"split {name} has {split.documents} documents in {split.offsets.bytes} bytes of offsets")
