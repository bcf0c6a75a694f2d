"""The summary of a dataset against plain counting, its report and problems, and what it says of damage."""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.data import inspect
from flatout.data.inspect import read_problems, read_report, shown, summarize
from flatout.data.manifest import VERSION, FileInfo, Manifest, SplitInfo
from flatout.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, token_dtype
from flatout.errors import DataError
from flatout.records import DataSummary, record_to_json

REPORT: dict[str, Any] = {
    "format": "flatout-report",
    "records": 100,
    "kept": {"train": 60, "val": 10},
    "dropped": {"exact_duplicate": 20, "language": 7},
    "damaged": 3,
    "problem_count": 2,
    "replaced_characters": 4,
    "files": 2,
    "passed_over": {".pdf": 3},
    "input_bytes": 5000,
    "text_bytes": 4000,
}
PROBLEM = {"file": "a.jsonl", "place": "line 3", "kind": "json", "message": "not JSON", "records": 1}


def store(folder: Path, name: str, content: bytes) -> FileInfo:
    (folder / name).write_bytes(content)
    return FileInfo(name, len(content), hashlib.sha256(content).hexdigest())


def write_ids(
    folder: Path,
    tokenizer: Tokenizer,
    splits: dict[str, Sequence[Sequence[int]]],
    *,
    shard_tokens: int = 10**9,
    report: Any = None,
    problems: Sequence[Any] | None = None,
) -> Path:
    """A dataset of documents given as ids, written without the packer."""
    folder.mkdir(parents=True, exist_ok=True)
    infos = {}
    for name, documents in splits.items():
        ids = np.concatenate([np.asarray(document) for document in documents]).astype(token_dtype(tokenizer.vocab))
        starts = np.cumsum([0, *(len(document) for document in documents)])[:-1].astype("<u8")
        cuts = range(0, len(ids), shard_tokens)
        infos[name] = SplitInfo(
            tokens=len(ids),
            documents=len(documents),
            text_bytes=len(tokenizer.decode(ids).encode("utf-8")),
            shards=tuple(
                store(folder, f"{name}-{number:05}.bin", ids[cut : cut + shard_tokens].tobytes())
                for number, cut in enumerate(cuts)
            ),
            offsets=store(folder, f"{name}.offsets.bin", starts.tobytes()),
        )
    manifest = Manifest(
        version=VERSION,
        dtype=token_dtype(tokenizer.vocab).name,
        vocab=tokenizer.vocab,
        tokenizer_kind=tokenizer.kind,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer=store(folder, "tokenizer.json", json.dumps(tokenizer.to_json()).encode()),
        splits=infos,
        settings={},
        report=None if report is None else store(folder, "report.json", _json(report)),
        problems=None if problems is None else store(folder, "problems.jsonl", b"".join(map(_json, problems))),
    )
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return folder


def _json(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode() + b"\n"


def write_texts(folder: Path, tokenizer: Tokenizer, train: Sequence[str], val: Sequence[str], **named: Any) -> Path:
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    documents = {
        name: [[*tokenizer.encode(text).tolist(), *end] for text in texts]
        for name, texts in (("train", train), ("val", val))
    }
    return write_ids(folder, tokenizer, documents, **named)
