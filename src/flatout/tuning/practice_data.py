"""A dataset to measure on: the config's own where it is prepared, else one made for the occasion.

Idea: how fast a step is does not depend on what the text says, so a benchmark must not ask for ten billion prepared
tokens first. Ids are drawn by a falling law as in text (the n-th commonest about 1/n): a uniform draw has nothing to
learn, so the losses would hardly tell a wrong gradient from a right one, and rare ids in equal number are kinder to
the embedding's gradient than text is.

Contract: the user's folders are read and never written. What is made lies in a folder that the caller throws away.
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flatout.config.load import LoadedConfig
from flatout.config.schema import DataConfig
from flatout.config.sizes import learned_vocab
from flatout.data.limits import LIMITS
from flatout.data.manifest import MANIFEST, OFFSET_DTYPE, TOKENIZER, VERSION, FileInfo, Manifest, SplitInfo
from flatout.data.pack import pack_corpus
from flatout.data.plan import request_of
from flatout.data.prepare import data_folder
from flatout.data.tokenizer import (
    ByteTokenizer,
    Ids,
    IdTokenizer,
    Tokenizer,
    load_tokenizer,
    token_dtype,
)
from flatout.errors import ResourceError
from flatout.files import disk_errors

TRAIN_TOKENS = 2**22
VAL_TOKENS = 2**14
_DOCUMENT = 1024  # tokens
_MORE_SPACE = "free some space, or set TMPDIR to a folder with some"
_RANDOM = "random"
_SMALL_BYTES = 2**24  # a text up to this size is prepared in a second or two


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A folder for what has to be made, gone at the end of the block."""
    try:
        made = tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise ResourceError("no folder for temporary files can be written", _MORE_SPACE) from error
    with made as name:
        yield Path(name)


def practice_data(loaded: LoadedConfig, scratch: Path) -> tuple[DataConfig, str]:
    """The `data` section to measure with, and in words what it is. `scratch` is a folder for what has to be made."""
    config, data = loaded.config, loaded.config.data
    if not data.streaming and (data.folder is not None or data.source is not None):
        folder = data_folder(data)
        if (folder / MANIFEST).exists():
            return _prepared(data, folder), f"the prepared data in {folder}"
    if isinstance(data.source, str) and not data.streaming and _small(data.source):
        folder = scratch / "text"
        try:
            pack_corpus(request_of(data, config.clean), folder)
        except ResourceError as error:  # its hint is to go on later, but this folder is thrown away
            raise ResourceError(error.message, _MORE_SPACE) from error
        return _prepared(data, folder), data.source
    # The characters of `char` are those of a text that is not here: bytes take their place.
    learned = learned_vocab(data.tokenizer)
    if learned is not None:
        tokenizer = IdTokenizer(learned)
    else:
        tokenizer = ByteTokenizer() if data.tokenizer == "char" else load_tokenizer(data.tokenizer, None)
    vocab = min(config.model.vocab or tokenizer.vocab, tokenizer.vocab)
    windows = (TRAIN_TOKENS - 1) // config.model.context
    tokens = TRAIN_TOKENS if windows >= 64 else 64 * config.model.context + 1
    with disk_errors(f"random tokens to {scratch}", safe=", or set TMPDIR to a folder with some"):
        folder = write_random(scratch / _RANDOM, tokenizer, vocab=vocab, train_tokens=tokens, seed=config.train.seed)
    return _prepared(data, folder), f"random tokens of a vocabulary of {vocab:,}, because the config's data is not here"


def is_made_up(data: DataConfig, scratch: Path) -> bool:
    """Whether `practice_data` had to take random tokens."""
    return data.folder == str(scratch / _RANDOM)


def _prepared(data: DataConfig, folder: Path) -> DataConfig:
    # The limits are in the dataset already, and are refused beside a folder alone.
    without = {"source": None, "streaming": False, **dict.fromkeys(LIMITS)}
    return data.model_copy(update={"folder": str(folder), **without})


def _small(source: str) -> bool:
    return source == "shakespeare" or (Path(source).is_file() and Path(source).stat().st_size <= _SMALL_BYTES)


def write_random(
    folder: Path, tokenizer: Tokenizer, *, vocab: int, train_tokens: int, seed: int, val_tokens: int = VAL_TOKENS
) -> Path:
    """A dataset of random ids below `vocab` that opens as any other does; the same arguments give the same bytes."""
    folder.mkdir(parents=True)
    dtype = token_dtype(tokenizer.vocab)
    generator = np.random.default_rng(seed)
    names = generator.permutation(vocab)
    weights = np.cumsum(1.0 / np.arange(1, vocab + 1))

    def store(name: str, content: bytes) -> FileInfo:
        (folder / name).write_bytes(content)
        return FileInfo(name, len(content), hashlib.sha256(content).hexdigest())

    def split(name: str, count: int) -> SplitInfo:
        ranks = np.searchsorted(weights, generator.random(count) * weights[-1], side="right")
        ids: Ids = names[np.minimum(ranks, vocab - 1)].astype(dtype)
        starts = np.arange(0, count, _DOCUMENT).astype(OFFSET_DTYPE)
        shard, offsets = store(f"{name}-00000.bin", ids.tobytes()), store(f"{name}.offsets.bin", starts.tobytes())
        return SplitInfo(count, len(starts), 4 * count, (shard,), offsets)

    manifest = Manifest(
        version=VERSION,
        dtype=dtype.name,
        vocab=tokenizer.vocab,
        tokenizer_kind=tokenizer.kind,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer=store(TOKENIZER, json.dumps(tokenizer.to_json()).encode("utf-8")),
        splits={"train": split("train", train_tokens), "val": split("val", val_tokens)},
        settings={"source": "random", "source_bytes": 0, "seed": seed},
    )
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return folder
