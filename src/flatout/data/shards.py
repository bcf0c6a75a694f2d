"""Reading a prepared dataset of any size in little memory, refusing what is damaged or does not fit.

Idea: the shards of a split are one long array of ids to everyone else; where one file ends and the next begins is known
here only. Ranges are read by position straight into the rows of the result. The system's page cache is the only cache,
and unlike the pages of a memory map it is not the process's own: memory does not grow with what has been read.

A shuffled batch is hundreds of short reads all over the disk. All of them are announced before the first one is waited
for, so that one thread keeps the whole queue of the disk busy.

Contract: what opens is what was written, and opening reads nothing of it. Manifest, tokenizer and file sizes are
checked at every opening; contents, the range of ids and the document offsets in a full check. A refusal names the file
and both values.

Trap: the files must not be changed while they are open. One that shrinks is noticed, one that is overwritten is not.
Where there are no positioned reads (Windows), shards are memory-mapped: the ids are the same, but pages that were read
count as the process's memory, and a map of a file that shrinks kills it.
"""

import contextlib
import hashlib
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, final

import numpy as np
import numpy.typing as npt

from flatout.data.manifest import OFFSET_DTYPE, PREPARE_AGAIN, SPLITS, FileInfo, Manifest, SplitInfo, read_manifest
from flatout.data.tokenizer import Ids, Tokenizer, token_dtype, tokenizer_from_json
from flatout.errors import DataError
from flatout.files import MOST_JSON, parse_json

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
    """Validation tokens in memory; without `text_bytes` nobody knows their size as text."""

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
        """Refuse offsets that are no rising line from 0 to the last document; a full check has done so already."""
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
        with contextlib.suppress(OSError, ValueError):  # opening will tell, should the limit matter
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        # A plain array over the map: np.memmap's own bookkeeping slows every slice.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"cannot read {path}: {error}", "check that the file is there and that you may read it")
