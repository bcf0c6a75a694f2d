"""A run as one archive for a bug report: its settings, its machine and its records, and nothing of its data.

Contract: text of the data never goes in: samples, previews of rows and settings that hold text (`eval.sample_prompt`,
`data.document_start`) are replaced by their length or left out, and so are records that this version does not know. The
home folder is written as `~`, other users' names in paths as (user).
What looks like a key or a password is replaced wherever it stands, and so is every value that a variable of the
environment keeps secret by its name. No weights, no shards, no checkpoints. The same run and machine give the same
bytes but for what the doctor measures.

Trap: notices and the names of files and folders go in as they are, apart from that. README.txt in the archive says so.
"""

import dataclasses
import io
import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.config.yaml_loader import format_sections, read_yaml
from flatout.errors import ConfigError
from flatout.files import disk_errors, write_whole
from flatout.observe.human import human_bytes, printable
from flatout.observe.report import check_named
from flatout.observe.runs import record_of
from flatout.records import PreviewRecord, SampleRecord

METRICS = "metrics.jsonl"
CONFIG = "config.yaml"
README = "README.txt"
_MARK = "A run of Flatout for a bug report."
_LEFT_OUT = "(left out)"
_SECRET = "(secret)"
# Settings that hold text of the data, or text for the model.
_TEXTS = ("sample_prompt", "document_start")
# A pattern never tries a word again from each of its letters: a text may hold a million of them without a space.
_SECRETS = tuple(
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", _SECRET),
        # Keys by the forms that services give them.
        (r"\b(hf_|gh[opsu]_|github_pat_|sk-|xox[abpr]-|glpat-|AKIA|ASIA|AIza)[A-Za-z0-9_-]{12,}", rf"\1{_SECRET}"),
        (r"\beyJ[\w-]{8,}(?:\.[\w-]+)*", _SECRET),
        (r"(?i)\b((?:bearer|authorization[\"']?\s*[=:]\s*[\"']?basic)\s+)[\w.~+/=-]{6,}", rf"\1{_SECRET}"),
        (r"://[^/\s\"']+@", f"://{_SECRET}@"),  # logins in addresses
    )
)
_WORD = re.compile(r"[^\s\"']+")
_NAME = re.compile(r"(?<![\w-])([\w-]++)[\"']?\s*+[=:]\s*+(?!(?i:null|none|true|false)\b)")
_VALUE = re.compile(
    r"""(")(?:\\.|[^"\\\n])++"|(')(?:\\.|[^'\\\n])++'|(?!(?i:bearer|basic)\b)(?:[^\s"'\\,}&]|,(?!\s)){3,}+"""
)
_SECRET_PART = re.compile(r"(?i)secret|passw|credential|(?:api|access|private|auth)[_-]?key")
_USERS = re.compile(r"((?:/home|/Users|[A-Za-z]:[/\\]+Users)[/\\]+)[^/\\\s\"':,]+")


@dataclasses.dataclass(frozen=True)
class Private:
    """What is known of who runs this: the home folder, and values that the environment keeps secret."""

    home: Path
    values: tuple[str, ...] = ()

    @classmethod
    def of(cls, environment: Mapping[str, str], home: Path) -> "Private":
        secret = {value for name, value in environment.items() if is_secret(name) and len(value) >= 8}
        return cls(home, tuple(sorted(secret, key=len, reverse=True)))


def is_secret(name: str) -> bool:
    """Whether a variable of the environment may hold a secret, by its name."""
    return re.search(r"(?i)token|key|secret|passw|credential|auth", name) is not None


def scrubbed(text: str, private: Private) -> str:
    """A text without keys, with the home folder as `~` and without names of users in paths."""
    for value in private.values:
        text = text.replace(value, _SECRET)
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    text = _without_named(_WORD.sub(_without_query, text))
    end, place = r"(?=[/\\\"'\s:,]|$)", str(private.home)
    if len(place) >= 2:
        text = re.sub(re.escape(place) + end, "~", text)
    text = _USERS.sub(r"\1(user)", text)
    name = private.home.name
    return text if len(name) < 2 else re.sub(rf"(?<=[/\\]){re.escape(name)}{end}", "(user)", text)


def _without_query(word: re.Match[str]) -> str:
    """An address without what comes after its question mark."""
    text = word[0]
    begin = text.find("://") + 3
    query = text.find("?", begin + 1) + 1 if begin > 3 else 0
    return f"{text[:query]}{_SECRET}" if 0 < query < len(text) else text


def _without_named(text: str) -> str:
    """A text without the values of settings, parameters and variables whose names say that they hold a secret."""
    parts, at = [], 0
    for name in _NAME.finditer(text):
        if name.start() < at or not _holds_secret(name[1]):
            continue
        if value := _VALUE.match(text, name.end()):
            quote = value[1] or value[2] or ""
            parts += [text[at : name.end()], quote, _SECRET, quote]
            at = value.end()
    return "".join([*parts, text[at:]])


def _holds_secret(name: str) -> bool:
    """By the name of a setting, a parameter or a variable. `per_token` is a count."""
    lower = name.lower()
    by_end = lower.endswith(("token", "authorization")) and not lower.endswith("per_token")
    return by_end or _SECRET_PART.search(lower) is not None


def bundle_files(
    folder: Path, private: Private, *, machine: Mapping[str, Any] | None, doctor: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """The texts of an archive by name. `machine` and `doctor` are what the machine is and what the doctor found."""
    texts = {
        CONFIG: _settings(folder / CONFIG, private),
        METRICS: _lines(_without_data(_text(folder / METRICS)), private),
        "files.txt": scrubbed(_list(folder), private),
    }
    if machine is not None:
        facts = scrubbed_values(dict(machine), private)
        texts["environment.json"] = json.dumps(facts, indent=2, sort_keys=True, default=str) + "\n"
    texts["doctor.jsonl"] = _lines(doctor, private)
    texts = {name: text for name, text in texts.items() if text}
    return {README: _readme(texts), **texts}


def write_bundle(target: Path, texts: Mapping[str, str]) -> int:
    """Writes the texts to a zip file; returns its size in bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(_entry(f"{target.stem}/{name}"), text.encode("utf-8", "replace"))
    content = buffer.getvalue()
    with disk_errors(f"the bundle {printable(str(target))}", safe=""):
        write_whole(target, content)
    return len(content)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuses a name at which no archive can be put."""
    check_named(target, (".zip",), "a zip file", "bug.zip", is_bundle, overwrite=overwrite)


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


def _settings(path: Path, private: Private) -> str:
    """A run's config.yaml without texts and secrets, in the form in which runs write it."""
    if not path.is_file():
        return ""
    try:
        sections = {name: node.plain for name, node in read_yaml(path).items()}
    except ConfigError:  # without its structure, texts and settings look alike
        return f"# {_LEFT_OUT}: it is not a config that can be read\n"
    return format_sections(scrubbed_values(sections, private))


def _without_data(metrics: str) -> Iterator[dict[str, Any]]:
    """The records of a run; a line that is no record of ours is left out, as it may be anything."""
    for line in metrics.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict) or (record := record_of(row)) is None or isinstance(record, PreviewRecord):
            continue
        if isinstance(record, SampleRecord):
            lengths = {name: f"{_LEFT_OUT}, {len(getattr(record, name))} characters" for name in ("prompt", "text")}
            row = {"type": row["type"], "step": record.step, **lengths}
        yield row


def _lines(rows: Iterable[Mapping[str, Any]], private: Private) -> str:
    return "".join(f"{json.dumps(scrubbed_values(dict(row), private), ensure_ascii=False)}\n" for row in rows)


def _list(folder: Path) -> str:
    """Names and sizes of the run's files; links are named and not followed."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = printable(path.relative_to(folder).as_posix())
        if path.is_symlink():
            found.append(f"{'link':>12}  {name}")
        elif path.is_file():
            found.append(f"{human_bytes(path.stat().st_size):>12}  {name}")
    return "".join(f"{line}\n" for line in found)


def scrubbed_values(value: Any, private: Private) -> Any:
    """The same value without secrets, names of users and texts of the data."""
    if isinstance(value, str):
        return scrubbed(value, private)
    if isinstance(value, dict):
        return {key: _scrubbed_item(str(key), item, private) for key, item in value.items()}
    return [scrubbed_values(item, private) for item in value] if isinstance(value, list | tuple) else value


def _scrubbed_item(key: str, item: Any, private: Private) -> Any:
    if item not in (None, "") and key in _TEXTS:
        return _LEFT_OUT
    return _SECRET if isinstance(item, str) and item and _holds_secret(key) else scrubbed_values(item, private)


_CONTENTS = {
    CONFIG: "the settings of the run",
    METRICS: "the records of the run, without samples and rows of the data; `flatout report` makes a page of them",
    "files.txt": "names and sizes of the files in the run folder",
    "environment.json": "machine, versions, and variables that change what torch and CUDA do",
    "doctor.jsonl": "what `flatout doctor` found, just now",
}


def _readme(texts: Mapping[str, str]) -> str:
    rows = [f"  {name:<18}{_CONTENTS[name]}" for name in texts]
    return "\n".join(
        [
            f"{_MARK} It holds:",
            *rows,
            "",
            "Not in it: data, samples, weights, checkpoints, and variables of the environment other than those named. "
            "Your home folder is written as ~, names of users in paths as (user), and what looks like a key as "
            "(secret). Names of other files and folders and the run's notices are as they were: look through them "
            "before you send this.",
            "",
        ]
    )
