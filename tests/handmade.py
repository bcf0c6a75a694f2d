"""Datasets and streams made by hand: for tests of what reads them, without any of what makes them for users."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flatout.corpus.document import Problem
from flatout.data.shards import MANIFEST, OFFSET_DTYPE, TOKENIZER, VERSION, FileInfo, Manifest, SplitInfo
from flatout.data.tokenizer import ByteTokenizer, Tokenizer, token_dtype

Documents = Sequence[Sequence[int] | bytes | np.ndarray]


def write_dataset(
    folder: Path,
    train: Documents,
    val: Documents = (b"validation",),
    tokenizer: Tokenizer | None = None,
    shard_tokens: int = 10**8,
) -> Path:
    """The documents, as ids, in a dataset that opens as any other does. Without a tokenizer they are bytes."""
    tokenizer = tokenizer or ByteTokenizer()
    folder.mkdir(parents=True)

    def store(name: str, data: bytes) -> FileInfo:
        (folder / name).write_bytes(data)
        return FileInfo(name, len(data), hashlib.sha256(data).hexdigest())

    dtype = token_dtype(tokenizer.vocab)

    def split(name: str, documents: Documents) -> SplitInfo:
        lengths = [len(document) for document in documents]
        values = [list(document) if isinstance(document, bytes) else document for document in documents]
        stream = np.concatenate([np.asarray(document, dtype=dtype) for document in values])
        shards = [
            store(f"{name}-{number:05d}.bin", stream[start : start + shard_tokens].tobytes())
            for number, start in enumerate(range(0, len(stream), shard_tokens))
        ]
        offsets = (np.cumsum(lengths) - lengths).astype(OFFSET_DTYPE)
        stored = store(f"{name}.offsets.bin", offsets.tobytes())
        return SplitInfo(len(stream), len(documents), len(stream), tuple(shards), stored)

    settings: dict[str, Any] = {"source": "by hand"}
    manifest = Manifest(
        version=VERSION,
        dtype=dtype.name,
        vocab=tokenizer.vocab,
        tokenizer_kind=tokenizer.kind,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer=store(TOKENIZER, json.dumps(tokenizer.to_json()).encode()),
        splits={"train": split("train", train), "val": split("val", val)},
        settings=settings,
    )
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return folder


class Memory:
    """A stream without a file, which is faster; it may end by damage, and give little at a time."""

    def __init__(self, data: bytes, problem: Problem | None = None, step: int = 2**20) -> None:
        self.problem: Problem | None = None
        self._data, self._after, self._step, self._at = data, problem, step, 0

    def read(self, count: int = 2**20) -> bytes:
        part = self._data[self._at : self._at + min(count, self._step)]
        self._at += len(part)
        self.problem = None if part else self._after
        return part
