"""Memory-mapped reading of a prepared dataset, refusing what is damaged or does not fit.

Idea: the shards of a split are one long array of ids to everyone else; where one file ends and the next begins is known
here only. The system's page cache is the only cache.

Contract: what opens is what was written. Manifest, tokenizer and file sizes are checked at every opening; contents, the
range of ids and the document offsets in a full check. A refusal names the file and both values.

Trap: the files must not be changed while they are open; a map of a file that shrinks kills the process.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from flatout.data.manifest import OFFSET_DTYPE, PREPARE_AGAIN, SPLITS, FileInfo, Manifest, SplitInfo, read_manifest
from flatout.data.tokenizer import Ids, Tokenizer, token_dtype, tokenizer_from_json
from flatout.errors import DataError

Verify = Literal["sizes", "full"]
_CHUNK_BYTES = 2**24


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
        for file in (*info.shards, info.offsets):
            _check_size(self.folder, file)
        self._shards = [_mapped(self.folder / file.name, self.dtype) for file in info.shards]
        self._offsets = _mapped(self.folder / info.offsets.name, OFFSET_DTYPE)
        # The stream position at which each shard begins, and at the end the number of tokens.
        self._bounds = np.cumsum([0, *(len(shard) for shard in self._shards)], dtype=np.int64)
        if verify == "full":
            self._check_content(info)

    def read(self, start: int, length: int) -> Ids:
        """Tokens `start` to `start + length - 1`, as a copy."""
        if start < 0 or length < 0 or start + length > self.tokens:
            raise IndexError(f"tokens {start} to {start + length} of a split with {self.tokens}")
        result = np.empty(length, dtype=self.dtype)
        filled = 0
        shard = int(np.searchsorted(self._bounds, start, side="right")) - 1
        while filled < length:
            first = start + filled - int(self._bounds[shard])
            piece = self._shards[shard][first : first + length - filled]
            result[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1
        return result

    def gather(self, starts: npt.NDArray[np.int64], length: int) -> Ids:
        """The windows of `length` tokens at `starts`, as rows."""
        if length < 1 or (starts.size and not 0 <= int(starts.min()) <= int(starts.max()) <= self.tokens - length):
            raise IndexError(f"windows of {length} tokens outside a split with {self.tokens}")
        result = np.empty((len(starts), length), dtype=self.dtype)
        first = np.searchsorted(self._bounds, starts, side="right") - 1
        last = np.searchsorted(self._bounds, starts + (length - 1), side="right") - 1
        for number in np.unique(first[first == last]):
            rows = np.flatnonzero((first == number) & (last == number))
            # A sliding view turns the gather into one copy per row; no matrix of indices is built.
            windows = np.lib.stride_tricks.sliding_window_view(self._shards[number], length)
            result[rows] = windows[starts[rows] - self._bounds[number]]
        for row in np.flatnonzero(first != last):
            result[row] = self.read(int(starts[row]), length)
        return result

    def document_starts(self) -> npt.NDArray[np.uint64]:
        """The token at which each document begins, strictly rising from 0; memory-mapped and read-only."""
        return self._offsets

    def _check_content(self, info: SplitInfo) -> None:
        for file in info.shards:
            largest = -1
            for chunk in _checked_chunks(self.folder, file):
                largest = max(largest, int(np.frombuffer(chunk, dtype=self.dtype).max()))
            if largest >= self.vocab:
                raise DataError(
                    f"{self.folder / file.name} holds token id {largest}, and the vocabulary has {self.vocab}",
                    PREPARE_AGAIN,
                )
        for _ in _checked_chunks(self.folder, info.offsets):
            pass
        starts = self._offsets
        if starts[0] != 0 or starts[-1] >= self.tokens or bool(np.any(starts[1:] <= starts[:-1])):
            raise DataError(
                f"{self.folder / info.offsets.name} is damaged: its document starts do not rise from 0 to below "
                f"{self.tokens}",
                PREPARE_AGAIN,
            )


@final
@dataclass(frozen=True)
class Dataset:
    """Both splits of a prepared corpus, with the tokenizer that made them."""

    train: TokenShards
    val: TokenShards
    manifest: Manifest
    tokenizer: Tokenizer


def open_dataset(
    folder: str | Path,
    tokenizer_fingerprint: str | None = None,
    vocab: int | None = None,
    verify: Verify = "sizes",
) -> Dataset:
    """Open a dataset, refusing one that is damaged or does not fit.

    `tokenizer_fingerprint` is the tokenizer it must have been made with. `vocab` is the number of ids the model knows:
    the dataset may use fewer, not more.
    """
    manifest = read_manifest(folder)
    tokenizer = _read_tokenizer(Path(folder), manifest)
    if tokenizer_fingerprint is not None and tokenizer_fingerprint != manifest.tokenizer_fingerprint:
        raise DataError(
            f"the dataset in {folder} was made with the {manifest.tokenizer_kind} tokenizer "
            f"{manifest.tokenizer_fingerprint}, not with {tokenizer_fingerprint}",
            "prepare the text again with the tokenizer that is wanted, in another folder",
        )
    if vocab is not None and manifest.vocab > vocab:
        raise DataError(
            f"the dataset in {folder} has a vocabulary of {manifest.vocab} ids, and the model's is {vocab}",
            f"set model.vocab to null or to {manifest.vocab}, or use a dataset with a smaller vocabulary",
        )
    train, val = (TokenShards(folder, split, verify=verify) for split in SPLITS)
    return Dataset(train, val, manifest, tokenizer)


def verify_dataset(folder: str | Path) -> Manifest:
    """Check every byte of a dataset: sizes, hashes, tokenizer, range of ids, document offsets."""
    return open_dataset(folder, verify="full").manifest


def _read_tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    _check_size(folder, manifest.tokenizer)
    raw = b"".join(_checked_chunks(folder, manifest.tokenizer))
    tokenizer = tokenizer_from_json(json.loads(raw))
    found = (tokenizer.fingerprint, tokenizer.vocab)
    if found != (manifest.tokenizer_fingerprint, manifest.vocab):
        raise DataError(
            f"{folder / manifest.tokenizer.name} is tokenizer {found[0]} with {found[1]} ids, and the dataset was made "
            f"with {manifest.tokenizer_fingerprint} with {manifest.vocab} ids",
            "prepare the dataset again with this version of flatout",
        )
    return tokenizer


def _check_size(folder: Path, file: FileInfo) -> None:
    path = folder / file.name
    try:
        found = path.stat().st_size
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; it should have {file.bytes} bytes", PREPARE_AGAIN) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if found != file.bytes:
        raise DataError(f"{path} has {found} bytes and should have {file.bytes}", PREPARE_AGAIN)


def _checked_chunks(folder: Path, file: FileInfo) -> Iterator[bytes]:
    """The content of a file in bounded pieces; after the last, a wrong hash is an error."""
    digest = hashlib.sha256()
    try:
        with (folder / file.name).open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                yield chunk
    except OSError as error:
        raise _unreadable(folder / file.name, error) from error
    if digest.hexdigest() != file.sha256:
        raise DataError(
            f"{folder / file.name} is damaged: its SHA-256 is {digest.hexdigest()} and should be {file.sha256}",
            PREPARE_AGAIN,
        )


def _mapped(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        # A plain array over the map: np.memmap's own bookkeeping slows every slice.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"cannot read {path}: {error}", "check that the file is there and that you may read it")
