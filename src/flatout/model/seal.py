"""flatout.json: a manifest with the hash of every file in an exported folder.

Adapters, merges and exports use the formats of PEFT and transformers, which have no hashes. Other programs ignore this
file. When we open such a folder we check every byte against it: a damaged, changed or missing file is refused by name.
A folder without the manifest was not written by us and is read without a check.

Contract: the manifest is in canonical form and contains its own hash. Files that it does not name are ignored. If you
change a file on purpose, delete flatout.json.
Trap: adapters of earlier versions have a flatout.json with facts and no hashes. Such folders are not checked.
"""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from flatout.errors import CheckpointError
from flatout.files import (
    canonical_json,
    hash_file,
    leads_outside,
    parse_json,
    read_bounded,
    reading_hint,
    sync_and_hash,
    sync_folder,
    write_new,
)

SEAL = "flatout.json"
CARDS = ("README.md", "Modelfile")  # people edit them
FORMAT = "flatout-folder"
VERSION = 1
_OLD_FACTS = {"base", "quantize", "step"}
_MEANT = f"restore the file, or delete {SEAL} beside it if the change is meant"


def seal(folder: Path, facts: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]] | None = None) -> int:
    """Syncs every file in a folder to disk and writes the manifest; returns the bytes of all files.

    `known`: size and hash of files that are on disk and were hashed while they were written.
    """
    known = known or {}
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".flatout-"))
    names = [path.relative_to(folder).as_posix() for path in paths]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        entries = threads.map(lambda name: known.get(name) or sync_and_hash(folder / name), names)
        files = dict(zip(names, entries, strict=True))
    for inner in {path.parent for path in paths} - {folder}:
        sync_folder(inner)
    content = {"format": FORMAT, "version": VERSION, "facts": dict(facts), "files": files}
    raw = canonical_json({**content, "sha256": hashlib.sha256(canonical_json(content)).hexdigest()})
    write_new(folder / SEAL, raw)
    sync_and_hash(folder / SEAL)
    return len(raw) + sum(entry["bytes"] for entry in files.values())


def check_seal(folder: Path, *, cards: bool = False) -> dict[str, Any]:
    """Checks every file that the manifest names; returns its facts, or none if there is no manifest.

    `cards`: also those in `CARDS`, which no model is read from.
    """
    content = read_seal(folder)
    if content is None:
        return {}
    if "files" not in content:
        return content
    files = {name: entry for name, entry in content["files"].items() if cards or name not in CARDS}
    for name, entry in files.items():  # all sizes first: they take no time
        _check_size(folder, name, entry["bytes"])
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        hashes = threads.map(_hash, [folder / name for name in files])
        for (name, entry), found in zip(files.items(), hashes, strict=True):
            if found != entry["sha256"]:
                raise _damaged(folder / name, f"is not as {SEAL} has it: its SHA-256 is another")
    return content["facts"]


def read_seal(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, checked itself, without checking the files; None if there is none.

    A manifest of an earlier version is returned as it is: facts, and no `files`.
    """
    path = folder / SEAL
    if not os.path.lexists(path):
        return None
    refuse_link(path, folder)
    if not path.is_file():
        raise CheckpointError(f"{path} is not a plain file", f"delete {SEAL} to read the folder without its hashes")
    try:
        raw = read_bounded(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", reading_hint(error)) from error
    try:
        content = parse_json(raw)
        if not isinstance(content, dict) or raw != canonical_json(content):
            raise ValueError("it is not in the form it was written")
        if content.keys() == _OLD_FACTS:
            return content
        _check_shape(content)
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged: {error}", f"restore it, or delete {SEAL} to read the folder without its hashes"
        ) from error
    if content["version"] > VERSION:
        raise CheckpointError(
            f"{path} has version {content['version']}, and this Flatout knows up to {VERSION}", "update Flatout"
        )
    return content


def sealed_names(folder: Path) -> set[str]:
    """The files of a folder of ours by its manifest; none if the manifest is missing or damaged."""
    try:
        content = read_seal(folder)
    except CheckpointError:
        return set()
    return set() if content is None else {SEAL, *content.get("files", ())}


def refuse_link(path: Path, folder: Path) -> None:
    """Refuses a link that leads out of a model's folder: a folder from elsewhere could link to any file."""
    if leads_outside(path, folder):
        raise CheckpointError(
            f"{path} is a link that leads out of its folder", "put the file itself there, or name the folder it lies in"
        )


def _check_shape(content: dict[str, Any]) -> None:
    stated = content.get("sha256")
    body = {name: value for name, value in content.items() if name != "sha256"}
    if stated != hashlib.sha256(canonical_json(body)).hexdigest():
        raise ValueError("it does not match its own SHA-256")
    if content.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    version, facts, files = (content.get(name) for name in ("version", "facts", "files"))
    if type(version) is not int or version < 1:
        raise ValueError("its version is no number")
    if not isinstance(facts, dict):
        raise ValueError("its facts are no object")
    if not isinstance(files, dict) or not files:
        raise ValueError("it names no files")
    for name, entry in files.items():
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or place.as_posix() != name or "\\" in name or "\0" in name:
            raise ValueError(f"{name[:100]!r} is no name of a file in the folder")
        if not isinstance(entry, dict) or entry.keys() != {"bytes", "sha256"}:
            raise ValueError(f"what it says of {name[:100]!r} is no size and hash")
        if type(entry["bytes"]) is not int or entry["bytes"] < 0 or not isinstance(entry["sha256"], str):
            raise ValueError(f"what it says of {name[:100]!r} is no size and hash")


def _check_size(folder: Path, name: str, size: int) -> None:
    path = folder / name
    if not os.path.isfile(path):
        raise _damaged(path, f"is missing, and {SEAL} names it")
    refuse_link(path, folder)
    if (found := path.stat().st_size) != size:
        raise _damaged(path, f"is not as {SEAL} has it: it has {found:,} bytes, not {size:,}")


def _hash(path: Path) -> str:
    try:
        return hash_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", reading_hint(error)) from error


def _damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(f"{path} {how}", _MEANT)
