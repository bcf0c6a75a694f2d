"""Text to a prepared dataset: tokenize a stream of documents into shards, whole or not at all.

Idea: everything is written into a hidden folder beside the target, flushed to the disk, and moved into place by one
rename. Whoever opens the target sees a complete dataset or none, wherever the packer was killed; the next packer of
the same target clears what a killed one left behind.

Contract: the bytes are a pure function of source and settings. Memory is bounded by the largest document, not by the
corpus. The end-of-text id follows every document, where the tokenizer has one; ids of different documents are never
merged, since each is tokenized by itself. The validation split shares no text position with the training split:
`document` gives each document to a split by the hash of its text, so that duplicates and later additions stay on their
side; `contiguous` takes the last share of the characters, cutting the one document in which the border falls.

Trap: `char` and `contiguous` need a pass over the source before the one that tokenizes. A source that changes between
the two is noticed and refused.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, final

import numpy as np
import numpy.typing as npt

from flatout.data.manifest import (
    FILE_NAME,
    MANIFEST,
    OFFSET_DTYPE,
    SPLITS,
    TOKENIZER,
    VERSION,
    FileInfo,
    Manifest,
    Settings,
    SplitInfo,
)
from flatout.data.readers import Document, read_documents, source_bytes
from flatout.data.tokenizer import Tokenizer, load_tokenizer, token_dtype
from flatout.errors import DataError, ResourceError
from flatout.files import sync_folder

if sys.platform != "win32":
    import fcntl

Split = Literal["contiguous", "document"]
# Called after each document with the documents, tokens and bytes of text so far.
Progress = Callable[[int, int, int], None]

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def pack_corpus(
    source: str,
    folder: str | Path,
    tokenizer_spec: str,
    split: Split = "contiguous",
    val_fraction: float = 0.1,
    shard_tokens: int = 100_000_000,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
) -> Manifest:
    """Prepare `source` into `folder`, which must not hold a dataset yet unless `overwrite` is given."""
    if split not in ("contiguous", "document") or not 0.0 < val_fraction < 1.0 or shard_tokens < 1:
        raise ValueError(f"cannot split {split!r} with fraction {val_fraction} into shards of {shard_tokens} tokens")
    target = Path(folder).resolve()
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_packer(target):
            _check_target(target, overwrite)
            _remove(partial)
            partial.mkdir()
            try:
                settings = Settings(source, source_bytes(source), split, val_fraction, shard_tokens)
                manifest = _write_dataset(settings, partial, tokenizer_spec, progress)
                _move_into_place(partial, target)
            finally:
                # After the rename there is nothing left to remove; before it, failing to must not hide why we are here.
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise _write_error(error, target) from error
    return manifest


def _write_dataset(settings: Settings, folder: Path, tokenizer_spec: str, progress: Progress | None) -> Manifest:
    characters = 0

    def texts() -> Iterator[str]:
        nonlocal characters
        characters = 0
        for document in read_documents(settings.source):
            characters += len(document.text)
            yield document.text

    tokenizer = load_tokenizer(tokenizer_spec, texts)
    if settings.split == "contiguous":
        if not characters:  # only `char` has read the source by now
            for _ in texts():
                pass
        pieces = _cut_at(read_documents(settings.source), characters, settings.val_fraction)
    else:
        pieces = _chosen_by_hash(read_documents(settings.source), settings.val_fraction)
    splits = _write_splits(pieces, folder, tokenizer, settings, progress)
    manifest = Manifest(
        version=VERSION,
        dtype=token_dtype(tokenizer.vocab).name,
        vocab=tokenizer.vocab,
        tokenizer_kind=tokenizer.kind,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer=_write_file(folder / TOKENIZER, [json.dumps(tokenizer.to_json()).encode("ascii"), b"\n"]),
        splits=splits,
        settings=settings,
    )
    _write_file(folder / MANIFEST, [manifest.to_bytes()])
    return manifest


# A piece of the corpus: its split, its text, and whether the document ends with it.
Piece = tuple[str, str, bool]


def _cut_at(documents: Iterable[Document], characters: int, val_fraction: float) -> Iterator[Piece]:
    border = int(characters * (1.0 - val_fraction))
    position = 0
    for document in documents:
        head, tail = document.text[: max(border - position, 0)], document.text[max(border - position, 0) :]
        position += len(document.text)
        if head:
            yield "train", head, not tail
        if tail:
            yield "val", tail, True
    if position != characters:
        raise DataError(
            f"the source had {characters} characters at first and then {position}: it changed while it was read",
            "prepare it again when nothing writes to it",
        )


def _chosen_by_hash(documents: Iterable[Document], val_fraction: float) -> Iterator[Piece]:
    for document in documents:
        digest = hashlib.sha256(document.text.encode("utf-8")).digest()
        share = int.from_bytes(digest[:8], "big") / 2**64
        yield "val" if share < val_fraction else "train", document.text, True


def _write_splits(
    pieces: Iterable[Piece], folder: Path, tokenizer: Tokenizer, settings: Settings, progress: Progress | None
) -> dict[str, SplitInfo]:
    with contextlib.ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab)
        writers = {
            name: stack.enter_context(contextlib.closing(_SplitWriter(folder, name, dtype, settings.shard_tokens)))
            for name in SPLITS
        }
        ending = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype=dtype)
        for documents, (name, text, is_whole) in enumerate(pieces, start=1):
            ids = tokenizer.encode(text)
            writers[name].add(np.concatenate([ids, ending]) if is_whole else ids, len(text.encode("utf-8")))
            if progress is not None:
                tokens = sum(writer.tokens for writer in writers.values())
                progress(documents, tokens, sum(writer.text_bytes for writer in writers.values()))
        for name, writer in writers.items():
            if not writer.tokens:
                raise DataError(f"the {name} split came out empty", _empty_hint(settings))
        return {name: writer.finish() for name, writer in writers.items()}


def _empty_hint(settings: Settings) -> str:
    other = "split=contiguous, which cuts inside a document, " if settings.split == "document" else ""
    return f"use more text, {other}or another val_fraction than {settings.val_fraction}"


@final
class _SplitWriter:
    """Appends documents to one split, beginning a new shard whenever the last one is full."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self.tokens = 0
        self.documents = 0
        self.text_bytes = 0
        self._folder = folder
        self._split = split
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._shards: list[FileInfo] = []
        self._shard: _HashedFile | None = None
        self._offsets = _HashedFile(folder / f"{split}.offsets.bin")

    def add(self, ids: npt.NDArray[Any], text_bytes: int) -> None:
        self.text_bytes += text_bytes
        if not len(ids):
            return  # a tokenizer may normalise a text away; a document has at least one token
        self._offsets.write(np.array([self.tokens], dtype=OFFSET_DTYPE).tobytes())
        self.documents += 1
        while len(ids):
            room = self._shard_tokens - self.tokens % self._shard_tokens
            if self._shard is None:
                self._shard = _HashedFile(self._folder / f"{self._split}-{len(self._shards):05d}.bin")
            self._shard.write(ids[:room].astype(self._dtype).tobytes())
            self.tokens += len(ids[:room])
            ids = ids[room:]
            if self.tokens % self._shard_tokens == 0:
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
class _HashedFile:
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


def _write_file(path: Path, chunks: Iterable[bytes]) -> FileInfo:
    with contextlib.closing(_HashedFile(path)) as file:
        for chunk in chunks:
            file.write(chunk)
        return file.finish()


@contextlib.contextmanager
def _only_packer(target: Path) -> Iterator[None]:
    """Hold a lock that the system releases even when the process is killed, so that two packers never mix files."""
    if sys.platform == "win32":
        yield
        return
    path = target.with_name(f".{target.name}.lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise DataError(
                f"another process is preparing {target}", "wait until it has finished, or choose another folder"
            ) from error
        # The holder before us may have removed the file between our opening and locking it; then the lock is void.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _check_target(target: Path, overwrite: bool) -> None:
    """Refuse a target that holds a dataset (unless told to overwrite it) or anything that is not ours to remove."""
    if not target.exists():
        return
    if not target.is_dir():
        raise DataError(f"{target} is a file, not a folder", "choose another folder for the dataset")
    names = sorted(entry.name for entry in target.iterdir())
    if (foreign := [name for name in names if not FILE_NAME.fullmatch(name)]) or (names and MANIFEST not in names):
        raise DataError(
            f"the folder {target} is not empty and not a dataset; it holds {(foreign or names)[0]!r}",
            "choose another folder for the dataset, or empty this one",
        )
    if names and not overwrite:
        raise DataError(
            f"the folder {target} already holds a dataset", "use it as it is, remove it, or choose another folder"
        )


def _move_into_place(partial: Path, target: Path) -> None:
    sync_folder(partial)
    old = target.with_name(f".{target.name}.old")
    _remove(old)
    if target.exists():
        # A kill between the two renames leaves no dataset at the target, never a mixed one.
        target.rename(old)
    partial.rename(target)
    sync_folder(target.parent)
    _remove(old)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _write_error(error: OSError, target: Path) -> DataError | ResourceError:
    if error.errno in _DISK_FULL:
        return ResourceError(
            f"no room to write the dataset {target}: {error.strerror}",
            "free some disk space or choose another folder; nothing was left behind",
        )
    return DataError(
        f"cannot write the dataset {target}: {error.strerror or error}", "check that the folder can be written to"
    )
