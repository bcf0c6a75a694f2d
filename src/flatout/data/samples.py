"""Samples of tokens with labels, in a folder that is whole or absent.

Idea: instruction data is small, so a dataset is one safetensors file: for each split the tokens of all samples in a
row, a label for each token, and where each sample begins. Beside it lie the tokenizer, the chat template, the rows that
could not be used, and a manifest with what was asked for, what was counted and the SHA-256 of every file.

Contract: a folder appears under its name only when it is whole, and takes the place of an older one in one go. Its
bytes are checked whenever it is opened. The manifest holds no time and no path: the same content gives the same bytes.
`make_samples` fills it.

Trap: `fingerprint` is over what is learned from, tokens and labels with their tokenizer; `key` is over what it was made
from. The same samples can have different keys.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from flatout.corpus.document import Problem, shown
from flatout.data.chat_template import ChatTemplate
from flatout.data.shards import SAMPLES_FORMAT
from flatout.data.tokenizer import Ids, ModelTokenizer, token_dtype
from flatout.errors import DataError
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

FORMAT = SAMPLES_FORMAT
VERSION = 2  # also changes when the same rows would give other tokens or labels
MANIFEST = "manifest.json"
SAMPLES = "samples.safetensors"
PROBLEMS = "problems.jsonl"
TOKENIZER = "tokenizer.json"
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
    return isinstance(content, dict) and content.get("format") == FORMAT


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
            told = f"its SHA-256 is {found} and should be {info['sha256']}"
            if size != info["bytes"]:
                told = f"it has {size:,} bytes and should have {info['bytes']:,}"
            raise DataError(f"{shown(path)} is damaged: {told}", _AGAIN)
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
    if not os.path.lexists(target):  # unlike Path.exists, it never raises; writing tells what is wrong with the name
        return
    if target.is_symlink() or not target.is_dir():
        what = "link" if target.is_symlink() else "file"
        raise DataError(f"{shown(target)} is a {what}, not a folder", _ANOTHER)
    if (foreign := foreign_entry(target, _own(target))) is not None:
        raise _occupied(target, foreign)


def _own(target: Path) -> tuple[str, ...]:
    """The names that may be replaced in a folder of samples; none in one that does not look like ours.

    One of two files says whose it is, since the other may be damaged or gone: `tokenizer.json` alone is anybody's.
    """
    for name, sign in ((MANIFEST, FORMAT), (SAMPLES, '"train.labelled"')):
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
    told: Mapping[str, Any],
    problems: Sequence[Problem],
    tokenizer: ModelTokenizer,
    template: ChatTemplate | None,
) -> None:
    """Put samples into `target`, in the place of whatever samples are there. `told` goes into the manifest as it is."""
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
                **told,
                "format": FORMAT,
                "version": VERSION,
                "key": key,
                "template": None if template is None else {"name": template.name, "fingerprint": template.fingerprint},
                "tokenizer": {"kind": tokenizer.kind, "fingerprint": tokenizer.fingerprint, "vocab": tokenizer.vocab},
                "splits": {name: samples.facts() for name, samples in splits.items()},
                "files": files,
                "fingerprint": hashlib.sha256(learned_from.encode("ascii")).hexdigest(),
            }
            stated = hashlib.sha256(canonical_json(content)).hexdigest()
            write_new(work / MANIFEST, canonical_json({**content, "manifest_sha256": stated}))
            sync_and_hash(work / MANIFEST)


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
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        stated = content.pop("manifest_sha256", None)
        if stated != hashlib.sha256(canonical_json(content)).hexdigest():
            raise ValueError("it is not as it was written")
        if raw != canonical_json({**content, "manifest_sha256": stated}):
            raise ValueError("it is not in the form it was written")
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
    """Refuses a manifest that says other things than ours do. Its hash proves nothing: anybody can write one."""
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
    if not all(isinstance(facts, dict) for facts in content["splits"].values()):
        raise ValueError("its splits are no objects")
    if not all(type(count) is int for count in content["counts"].values()):
        raise ValueError("its counts are no numbers")
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
