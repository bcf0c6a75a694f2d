"""A prepared dataset on disk: its manifest, its shards written, and read in little memory.

A dataset is a folder. Each split is a run of shards of raw little-endian ids (`train-00000.bin`, ...), which are read
as one long stream, plus the token offset at which each document starts (`train.offsets.bin`, uint64). Beside them lie
`tokenizer.json`, `report.json` (what was kept and dropped), `problems.jsonl` (what could not be read), and
`manifest.json`, which names every file with its size and SHA-256.

The manifest equals its own canonical form and carries its own hash, so a single flipped bit is noticed. It holds no
time and no name of a machine: the same input and settings give the same bytes. `fingerprint` is over ids, documents and
tokenizer, not over where they came from.

Ranges of tokens are read by position straight into the rows of the result; the system's page cache is the only cache. A
shuffled batch is hundreds of short reads: all are announced before the first one is waited for, so that one thread
keeps the queue of the disk busy. Opening reads nothing of the shards. Manifest, tokenizer and file sizes are checked at
every opening; contents, the range of ids and the document offsets in a full check.

Trap: the files must not be changed while they are open. One that shrinks is noticed, one that is overwritten is not.
Where there are no positioned reads (Windows), shards are memory-mapped: pages that were read then count as the
process's memory, and a map of a file that shrinks kills it.
"""

import contextlib
import hashlib
import json
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, Annotated, Any, Literal, Protocol, final

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter, ValidationError

from flatout.data.tokenizer import Ids, Tokenizer, token_dtype, tokenizer_from_json
from flatout.errors import DataError
from flatout.files import MOST_JSON, parse_json, read_bounded

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
    """What a split holds. `text_bytes` is the UTF-8 size of its text, from which bits per byte are computed."""

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
        described = [info for info in (self.report, self.problems) if info is not None]
        return (self.tokenizer, *described, *(info for part in parts for info in part))

    def to_bytes(self) -> bytes:
        """The manifest as it lies on disk."""
        content = {**self._content(), "fingerprint": self.fingerprint}
        return _canonical({**content, "manifest_sha256": hashlib.sha256(_canonical(content)).hexdigest()})

    def _content(self) -> dict[str, Any]:
        content = {"format": FORMAT, **asdict(self)}
        return {name: value for name, value in content.items() if value is not None}


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of the dataset in `folder`, checked; the files it names are not read."""
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
    """The schema of a manifest, built once: building takes longer than reading a manifest."""
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
    if not manifest.splits.keys() <= set(SPLITS):  # who asks for a missing one gets an error
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


Verify = Literal["sizes", "full"]
_CHUNK_BYTES = 2**24
_POSITIONED = hasattr(os, "preadv")
_SPARE_FILES = 512  # what the rest of the process may want to open beside the shards


class Tokens(Protocol):
    """What evaluation asks of a split, wherever its tokens are kept."""

    split: str
    tokens: int
    text_bytes: int

    @property
    def folder(self) -> str | Path: ...

    def read(self, start: int, length: int) -> Ids: ...


@final
@dataclass(eq=False)
class HeldTokens:
    """Validation tokens in memory; `text_bytes` is 0 where their size as text is not known."""

    ids: Ids
    folder: str | Path
    text_bytes: int = 0
    split: str = "val"

    def __post_init__(self) -> None:
        self.tokens = len(self.ids)

    def read(self, start: int, length: int) -> Ids:
        """Tokens `start` to `start + length - 1`, as a copy."""
        if start < 0 or length < 0 or start + length > self.tokens:
            raise IndexError(f"tokens {start} to {start + length} of a split with {self.tokens}")
        return self.ids[start : start + length].copy()


@final
class TokenShards:
    """The tokens of one split as one long array: opening reads nothing, and memory stays with the system."""

    def __init__(self, folder: str | Path, split: str, *, verify: Verify = "sizes") -> None:
        self.folder = Path(folder)
        self.split = split
        self.manifest = read_manifest(folder)
        if split not in self.manifest.splits:
            raise DataError(
                f"the dataset in {folder} has no split {split!r}",
                f"its splits are {' and '.join(self.manifest.splits)}",
            )
        info = self.manifest.splits[split]
        self.vocab = self.manifest.vocab
        self.dtype = token_dtype(self.vocab)
        self.tokens = info.tokens
        self.text_bytes = info.text_bytes
        for file in (*info.shards, info.offsets):
            check_size(self.folder, file)
        _allow_open_files(len(info.shards))
        self._files = [_open_shard(self.folder / file.name) for file in info.shards]
        self._offsets = _mapped(self.folder / info.offsets.name, OFFSET_DTYPE)
        # The stream position at which each shard begins, and at the end the number of tokens.
        sizes = [file.bytes // self.dtype.itemsize for file in info.shards]
        self._bounds = np.cumsum([0, *sizes], dtype=np.int64)
        if verify == "full":
            self._check_content(info)

    def read(self, start: int, length: int) -> Ids:
        """Tokens `start` to `start + length - 1`, as a copy."""
        return self.read_ranges(np.array([start]), np.array([length]))

    def gather(self, starts: npt.NDArray[np.int64], length: int) -> Ids:
        """The windows of `length` tokens at `starts`, as rows."""
        if length < 1:
            raise IndexError(f"windows of {length} tokens")
        return self.read_ranges(starts, np.full(len(starts), length)).reshape(len(starts), length)

    def read_ranges(self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Ids:
        """Ranges of `lengths` tokens at `starts`, one after the other in the order they were asked for."""
        outside = np.flatnonzero((starts < 0) | (lengths < 0) | (starts > self.tokens - lengths))
        if outside.size:
            start, length = int(starts[outside[0]]), int(lengths[outside[0]])
            raise IndexError(f"tokens {start} to {start + length} of a split with {self.tokens}")
        result = np.empty(int(lengths.sum()), dtype=self.dtype)
        buffer = result.view(np.uint8).data
        reads = self._reads(starts, lengths)
        if len(reads) > 1:
            for file, offset, _, size in reads:
                file.announce(offset, size)
        for file, offset, place, size in reads:
            file.read_into(buffer[place : place + size], offset)
        return result

    def _reads(
        self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> list[tuple["_ShardFile", int, int, int]]:
        """(file, byte in it, byte in the result, bytes) in the order of the disk; ranges are cut where shards end."""
        order = np.argsort(starts, kind="stable")
        numbers = np.searchsorted(self._bounds, starts, side="right") - 1
        places = np.cumsum(lengths) - lengths
        item, bounds = self.dtype.itemsize, self._bounds.tolist()
        reads: list[tuple[_ShardFile, int, int, int]] = []
        columns = (values[order].tolist() for values in (starts, lengths, numbers, places))
        for start, length, number, place in zip(*columns, strict=True):
            while length:
                count = min(length, bounds[number + 1] - start)
                if count:
                    reads.append((self._files[number], (start - bounds[number]) * item, place * item, count * item))
                start, length, number, place = start + count, length - count, number + 1, place + count
        return reads

    def document_starts(self) -> npt.NDArray[np.uint64]:
        """The token at which each document begins, strictly rising from 0; memory-mapped and read-only."""
        return self._offsets

    def check_document_starts(self) -> None:
        """Refuse offsets that do not rise from 0 to the last document; a full check has done so already."""
        starts, name = self._offsets, self.manifest.splits[self.split].offsets.name
        if starts[0] != 0 or starts[-1] >= self.tokens or not _rises(starts):
            raise DataError(
                f"{self.folder / name} is damaged: its document starts do not rise from 0 to below {self.tokens}",
                PREPARE_AGAIN,
            )

    def _check_content(self, info: SplitInfo) -> None:
        for file in info.shards:
            largest = -1
            for chunk in checked_chunks(self.folder, file):
                largest = max(largest, int(np.frombuffer(chunk, dtype=self.dtype).max()))
            if largest >= self.vocab:
                raise DataError(
                    f"{self.folder / file.name} holds token id {largest}, and the vocabulary has {self.vocab}",
                    PREPARE_AGAIN,
                )
        for _ in checked_chunks(self.folder, info.offsets):
            pass
        self.check_document_starts()


@final
@dataclass(frozen=True)
class Dataset:
    """Both splits of a prepared corpus, with the tokenizer that made them."""

    train: TokenShards
    val: TokenShards
    manifest: Manifest
    tokenizer: Tokenizer


def open_dataset(folder: str | Path, wanted: Tokenizer | None = None, verify: Verify = "sizes") -> Dataset:
    """Open a dataset, refusing one that is damaged or was not made with the tokenizer `wanted`."""
    manifest = read_manifest(folder)
    tokenizer = _read_tokenizer(Path(folder), manifest)
    if wanted is not None and wanted.fingerprint != manifest.tokenizer_fingerprint:
        made = f"{manifest.tokenizer_kind} ({manifest.tokenizer_fingerprint[:12]}, {manifest.vocab:,} ids)"
        way = (
            f"data.tokenizer={wanted.kind}"
            if wanted.kind in ("bytes", "gpt2")
            else "data.tokenizer=FILE, the tokenizer.json in a checkpoint of the model's run"
        )
        raise DataError(
            f"the dataset in {folder} was made with the tokenizer {made}, and the model has {wanted.kind} "
            f"({wanted.fingerprint[:12]}, {wanted.vocab:,} ids)",
            f"prepare the text again in another folder, with {way}",
        )
    train, val = (TokenShards(folder, split, verify=verify) for split in SPLITS)
    return Dataset(train, val, manifest, tokenizer)


def verify_dataset(folder: str | Path) -> Manifest:
    """Check every byte of a dataset: sizes, hashes, tokenizer, range of ids, document offsets, report."""
    manifest = open_dataset(folder, verify="full").manifest
    for file in filter(None, (manifest.report, manifest.problems)):
        for _ in checked_chunks(Path(folder), file):
            pass
    return manifest


def _read_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    raw = checked_bytes(folder, manifest.tokenizer)
    try:
        tokenizer = tokenizer_from_json(parse_json(raw))
    except ValueError as error:
        raise DataError(f"{folder / manifest.tokenizer.name} is not JSON: {error}", PREPARE_AGAIN) from error
    found = (tokenizer.fingerprint, tokenizer.vocab)
    if found != (manifest.tokenizer_fingerprint, manifest.vocab):
        raise DataError(
            f"{folder / manifest.tokenizer.name} is tokenizer {found[0]} with {found[1]} ids, and the dataset was made "
            f"with {manifest.tokenizer_fingerprint} with {manifest.vocab} ids",
            "prepare the dataset again with this version of flatout",
        )
    return tokenizer


def check_size(folder: Path, file: FileInfo) -> None:
    path = folder / file.name
    try:
        found = path.stat().st_size
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; it should have {file.bytes} bytes", PREPARE_AGAIN) from error
    except OSError as error:
        raise unreadable(path, error) from error
    if found != file.bytes:
        raise DataError(f"{path} has {found} bytes and should have {file.bytes}", PREPARE_AGAIN)


def checked_chunks(folder: Path, file: FileInfo) -> Iterator[bytes]:
    """The content of a file in bounded pieces; a wrong size is an error, and after the last of them a wrong hash."""
    check_size(folder, file)
    digest = hashlib.sha256()
    try:
        with (folder / file.name).open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                yield chunk
    except OSError as error:
        raise unreadable(folder / file.name, error) from error
    if digest.hexdigest() != file.sha256:
        raise DataError(
            f"{folder / file.name} is damaged: its SHA-256 is {digest.hexdigest()} and should be {file.sha256}",
            PREPARE_AGAIN,
        )


def checked_bytes(folder: Path, file: FileInfo) -> bytes:
    """The content of a file that describes something, whole."""
    if file.bytes > MOST_JSON:
        raise DataError(
            f"{folder / file.name} has {file.bytes:,} bytes; files of its kind have at most {MOST_JSON:,}",
            PREPARE_AGAIN,
        )
    return b"".join(checked_chunks(folder, file))


def _rises(values: npt.NDArray[np.uint64]) -> bool:
    """Whether each value is above the one before it, in bounded memory."""
    step = _CHUNK_BYTES // values.dtype.itemsize
    parts = (values[start : start + step + 1] for start in range(0, len(values), step))
    return all(bool(np.all(part[1:] > part[:-1])) for part in parts)


@final
class _PositionedFile:
    """A shard read by position: nothing of it stays in the process, and threads do not disturb each other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._can_announce = hasattr(os, "posix_fadvise")
        if self._can_announce:
            # Without it the system reads far more around each window than the window itself.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def announce(self, offset: int, size: int) -> None:
        """Let the disk begin to read, and do not wait for it."""
        if self._can_announce:
            os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def read_into(self, target: memoryview, offset: int) -> None:
        while target:
            try:
                count = os.preadv(self._descriptor, [target], offset)
            except OSError as error:
                raise unreadable(self._path, error) from error
            if not count:
                raise DataError(
                    f"{self._path} ends at byte {offset}: it was cut after it had been opened", PREPARE_AGAIN
                )
            target, offset = target[count:], offset + count


@final
class _MappedFile:
    """A shard for systems without positioned reads."""

    def __init__(self, path: Path) -> None:
        self._bytes = _mapped(path, np.dtype(np.uint8))

    def announce(self, offset: int, size: int) -> None:
        """Nothing to do."""

    def read_into(self, target: memoryview, offset: int) -> None:
        target[:] = self._bytes[offset : offset + len(target)].data


_ShardFile = _PositionedFile | _MappedFile


def _open_shard(path: Path) -> _ShardFile:
    try:
        return _PositionedFile(path) if _POSITIONED else _MappedFile(path)
    except OSError as error:
        raise unreadable(path, error) from error


def _allow_open_files(count: int) -> None:
    """Lift this process's own limit of open files where a dataset of many shards would meet it."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):  # opening raises the error, should the limit matter
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        # A plain array over the map: np.memmap's own bookkeeping slows every slice.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"cannot read {path}: {error}", "check that the file is there and that you may read it")


SHARD_TOKENS = 100_000_000  # in a file


@final
class _SplitWriter:
    """Appends documents to one split, beginning a new shard whenever the last one is full."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any]) -> None:
        self.tokens = 0
        self.documents = 0
        self.text_bytes = 0
        self._folder = folder
        self._split = split
        self._dtype = dtype
        self._shards: list[FileInfo] = []
        self._shard: HashedFile | None = None
        self._offsets = HashedFile(folder / f"{split}.offsets.bin")

    def add(self, ids: npt.NDArray[Any], starts: npt.NDArray[np.int64], text_bytes: int) -> None:
        """Append `ids`, in which documents begin at `starts`; what comes before the first goes on with the last one."""
        self.text_bytes += text_bytes
        if not len(ids):
            return
        if not self.tokens and (not len(starts) or starts[0]):
            starts = np.concatenate([[0], starts])  # the split begins inside a document
        self._offsets.write((starts + self.tokens).astype(OFFSET_DTYPE).tobytes())
        self.documents += len(starts)
        while len(ids):
            room = SHARD_TOKENS - self.tokens % SHARD_TOKENS
            if self._shard is None:
                self._shard = HashedFile(self._folder / f"{self._split}-{len(self._shards):05d}.bin")
            self._shard.write(ids[:room].astype(self._dtype, copy=False).tobytes())
            self.tokens += len(ids[:room])
            ids = ids[room:]
            if self.tokens % SHARD_TOKENS == 0:
                self._finish_shard()

    def finish(self) -> SplitInfo:
        self._finish_shard()
        return SplitInfo(self.tokens, self.documents, self.text_bytes, tuple(self._shards), self._offsets.finish())

    def close(self) -> None:
        """Let go of the files, whatever state they are in."""
        for file in (self._shard, self._offsets):
            if file is not None:
                file.close()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self._shards.append(self._shard.finish())
            self._shard = None


@final
class HashedFile:
    """A new file that knows the size and SHA-256 of what was written to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = 0
        self._digest = hashlib.sha256()
        self._file: IO[bytes] = path.open("xb", buffering=2**20)

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._bytes += len(data)

    def finish(self) -> FileInfo:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileInfo(self._path.name, self._bytes, self._digest.hexdigest())

    def close(self) -> None:
        # On a full disk closing tries to flush and fails again, which must not hide the first failure.
        with contextlib.suppress(OSError):
            self._file.close()


def write_file(path: Path, chunks: Iterable[bytes]) -> FileInfo:
    """Write a file whole and flushed, and describe it."""
    with contextlib.closing(HashedFile(path)) as file:
        for chunk in chunks:
            file.write(chunk)
        return file.finish()
