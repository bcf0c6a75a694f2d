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
from flatout.data.manifest import SAMPLES_FORMAT
from flatout.data.tokenizer import Ids, ModelTokenizer
from flatout.errors import DataError
from flatout.files import canonical_json, disk_errors, hash_file, sync_and_hash, usual_mode
from flatout.folders import foreign_entry, sweep, whole_folder

FORMAT = SAMPLES_FORMAT
VERSION = 1  # also changes when the same rows would give other tokens or labels
MANIFEST = "manifest.json"
SAMPLES = "samples.safetensors"
PROBLEMS = "problems.jsonl"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
_FILES = (SAMPLES, PROBLEMS, TOKENIZER, TEMPLATE)


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
        return json.loads((folder / MANIFEST).read_bytes())["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def open_samples(folder: str | Path) -> SampleSet:
    """The samples in `folder`, every byte of them checked."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    info = manifest["files"][SAMPLES]
    path = folder / SAMPLES
    again = "remove the folder, and it is made again"
    try:
        found = hash_file(path)
    except OSError as error:
        raise DataError(f"cannot read {shown(path)}: {error.strerror}", again) from error
    if found != info["sha256"]:
        raise DataError(f"{shown(path)} is damaged: its SHA-256 is {found} and should be {info['sha256']}", again)
    from safetensors.numpy import load_file

    arrays = load_file(path)
    splits = {
        name: Samples(arrays[f"{name}.tokens"], arrays[f"{name}.labelled"].astype(bool), arrays[f"{name}.offsets"])
        for name in manifest["splits"]
    }
    return SampleSet(folder, splits["train"], splits.get("val"), manifest)


def check_target(target: Path) -> None:
    """Refuse a folder with anything in it that is not ours to replace."""
    if not target.name:
        raise DataError(f"{shown(target)} cannot be replaced by samples", "choose another folder: data.folder")
    if not os.path.exists(target):  # unlike Path.exists, it never raises; writing tells what is wrong with the name
        return
    if not target.is_dir():
        raise DataError(
            f"{shown(target)} is a file, not a folder", "choose another folder for the samples: data.folder"
        )
    foreign = foreign_entry(target, _own(target))
    if foreign is not None:
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
    return DataError(
        f"the folder {shown(target)} is not one of samples; it holds {shown(name)!r}",
        "choose another folder for the samples: data.folder",
    )


def why_not(target: Path, key: dict[str, Any]) -> str:
    """Why the folder cannot be used as it is; nothing if it can."""
    if not os.path.exists(target / MANIFEST):
        return "there were none yet"
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
    sweep(target.parent, re.escape(target.name), locked=False)
    with (
        disk_errors(f"the samples {target}", safe=""),
        whole_folder(target, replaces=_own(target), occupied=_occupied) as work,
    ):
        with usual_mode(work / SAMPLES):
            save_file(arrays, work / SAMPLES)
        listed = (json.dumps(dataclasses.asdict(problem)) + "\n" for problem in problems)
        (work / PROBLEMS).write_text("".join(listed), encoding="ascii")
        (work / TOKENIZER).write_text(json.dumps(tokenizer.to_json()) + "\n", encoding="ascii")
        if template is not None:
            (work / TEMPLATE).write_bytes(template.text.encode("utf-8"))
        files = {name: sync_and_hash(work / name) for name in _FILES if (work / name).exists()}
        manifest = _manifest(key, splits, told, files, tokenizer, template)
        (work / MANIFEST).write_bytes(manifest)
        sync_and_hash(work / MANIFEST)


def _manifest(
    key: Mapping[str, Any],
    splits: Mapping[str, Samples],
    told: Mapping[str, Any],
    files: Mapping[str, Any],
    tokenizer: ModelTokenizer,
    template: ChatTemplate | None,
) -> bytes:
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
    return canonical_json({**content, "manifest_sha256": hashlib.sha256(canonical_json(content)).hexdigest()})


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    again = "remove the folder, and it is made again"
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"there are no samples in {shown(folder)}", "prepare them first") from error
    except OSError as error:
        raise DataError(f"cannot read {shown(path)}: {error.strerror}", "check that you may read it") from error
    try:
        content = json.loads(raw)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        stated = content.pop("manifest_sha256")
        if stated != hashlib.sha256(canonical_json(content)).hexdigest():
            raise ValueError("it is not as it was written")
        if content["version"] > VERSION:
            raise DataError(
                f"{shown(path)} has format version {content['version']}, and this flatout knows up to {VERSION}",
                "update flatout, or remove the folder, and it is made again",
            )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{shown(path)} is damaged: {type(error).__name__}: {error}", again) from error
    return content
