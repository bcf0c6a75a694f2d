"""A run as one archive for a bug report: what it was told, where it ran, what it said, and nothing of its data.

Contract: text of the data never goes in: samples, prompts and previews of rows are replaced by their length. The home
folder is written as `~`. What looks like a key or a password is replaced wherever it stands. No weights, no shards, no
checkpoints. The same run and machine give the same bytes but for what the doctor measures.

Trap: notices and the names of files and folders go in as they are, apart from that. README.txt in the archive says so.
"""

import dataclasses
import io
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.errors import ResourceError, UsageError
from flatout.files import check_replaceable, disk_errors, write_whole
from flatout.observe.history import read_history
from flatout.observe.human import human_bytes, printable
from flatout.observe.report.data import report_data
from flatout.observe.report.report import page_of

METRICS = "metrics.jsonl"
CONFIG = "config.yaml"
README = "README.txt"
_MARK = "A run of Flatout for a bug report."
_LEFT_OUT = "(left out)"
_MOST_FILES = 1000
# Keys by the forms that services give them, and whatever is assigned to a name that says what it is.
_KEYS = re.compile(r"\b(hf_|gh[opsu]_|github_pat_|sk-|xox[abpr]-|glpat-|AKIA|ASIA|AIza)[A-Za-z0-9_-]{12,}")
_LOGINS = re.compile(r"://[^/\s:@\"']+:[^/\s@\"']+@")
_NAMED = re.compile(r"(?i)\b((?:api[_-]?key|token|secret|password|passwd)[\"']?\s*[=:]\s*[\"']?)[^\s\"'\\,}&]{6,}")
_SECRETS = ((_KEYS, r"\1(secret)"), (_LOGINS, "://(secret)@"), (_NAMED, r"\1(secret)"))


def scrubbed(text: str, home: Path) -> str:
    """A text without keys, and with the home folder as `~`."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    place = str(home)
    return text if len(place) < 2 else re.sub(rf"{re.escape(place)}(?=[/\\\"'\s:,]|$)", "~", text)


def bundle_files(folder: Path, home: Path, *, machine: Mapping[str, Any] | None, doctor: list[str]) -> dict[str, str]:
    """The texts of an archive by name. `machine` and `doctor` are what the machine is and what the doctor found."""
    metrics = _without_data(_text(folder / METRICS))
    texts = {CONFIG: _text(folder / CONFIG), METRICS: metrics, "files.txt": _list(folder)}
    if machine is not None:
        texts["environment.json"] = json.dumps(machine, indent=2, sort_keys=True, default=str) + "\n"
    if doctor:
        texts["doctor.jsonl"] = "".join(f"{line}\n" for line in doctor)
    texts = {name: scrubbed(text, home) for name, text in texts.items() if text}
    return {README: _readme(texts), **texts}


def write_bundle(folder: Path, home: Path, target: Path, texts: Mapping[str, str]) -> int:
    """Writes the texts and a report made from them to a zip file; returns its size in bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(_entry(f"{target.stem}/{name}"), text.encode("utf-8", "replace"))
        archive.writestr(_entry(f"{target.stem}/report.html"), _report(folder, home, texts[METRICS]))
    content = buffer.getvalue()
    with disk_errors(f"the bundle {printable(str(target))}", safe=""):
        write_whole(target, content)
    return len(content)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuses a name at which no archive can be put."""
    shown = printable(str(target))
    if target.suffix.lower() != ".zip" or "\0" in str(target) or target.is_dir():
        raise UsageError(f"{shown!r} is not the name of a zip file", "for example --out bug.zip")
    if not target.parent.is_dir():
        raise ResourceError(f"could not write {shown}: there is no such folder", "create it first, or name another one")
    check_replaceable(target, is_bundle, overwrite=overwrite, way="name another file with --out")


def is_bundle(path: Path) -> bool:
    """Whether `write_bundle` wrote this file."""
    try:
        with zipfile.ZipFile(path) as archive:
            first = archive.namelist()[:1]
            return bool(first) and first[0].endswith(f"/{README}") and archive.read(first[0]).startswith(_MARK.encode())
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError):
        return False


def _entry(name: str) -> zipfile.ZipInfo:
    """With a fixed time, so that the same content gives the same bytes."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    return entry


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _without_data(metrics: str) -> str:
    """The records of a run, line by line; a line that is no record is left out, as it may be anything."""
    lines = []
    for line in metrics.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict) or row.get("type") == "preview":
            continue
        if row.get("type") == "sample":
            row |= {name: f"{_LEFT_OUT}, {len(str(row.get(name)))} characters" for name in ("prompt", "text")}
        lines.append(json.dumps(row, ensure_ascii=False))
    return "".join(f"{line}\n" for line in lines)


def _list(folder: Path) -> str:
    """Names and sizes of the run's files; links are named and not followed."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = printable(path.relative_to(folder).as_posix())
        if path.is_symlink():
            found.append(f"{'link':>12}  {name}")
        elif path.is_file():
            found.append(f"{human_bytes(path.stat().st_size):>12}  {name}")
    more = [f"and {len(found) - _MOST_FILES:,} more"] if len(found) > _MOST_FILES else []
    return "".join(f"{line}\n" for line in found[:_MOST_FILES] + more)


def _report(folder: Path, home: Path, metrics: str) -> bytes:
    """The page of the run as the archive tells it, without data."""
    import tempfile  # here: nothing else needs it

    with tempfile.TemporaryDirectory(prefix="flatout-bundle-") as scratch:
        (Path(scratch) / METRICS).write_text(metrics, encoding="utf-8")
        history = dataclasses.replace(read_history(Path(scratch)), folder=folder)
    return page_of(_scrubbed_values(report_data([history]), home))


def _scrubbed_values(value: Any, home: Path) -> Any:
    if isinstance(value, str):
        return scrubbed(value, home)
    if isinstance(value, dict):
        return {key: _scrubbed_values(item, home) for key, item in value.items()}
    return [_scrubbed_values(item, home) for item in value] if isinstance(value, list) else value


_TOLD = {
    CONFIG: "the settings of the run",
    METRICS: "what the run said, without samples and rows of the data",
    "files.txt": "names and sizes of the files in the run folder",
    "environment.json": "machine, versions, and variables that change what torch and CUDA do",
    "doctor.jsonl": "what `flatout doctor` found, just now",
}


def _readme(texts: Mapping[str, str]) -> str:
    rows = [f"  {name:<18}{_TOLD[name]}" for name in texts] + [f"  {'report.html':<18}the run as a page"]
    return "\n".join(
        [
            f"{_MARK} It holds:",
            *rows,
            "",
            "Not in it: data, samples, weights, checkpoints, and variables of the environment other than those named. "
            "Your home folder is written as ~, and what looks like a key as (secret). Names of files and folders and "
            "the run's notices are as they were: look through them before you send this.",
            "",
        ]
    )
