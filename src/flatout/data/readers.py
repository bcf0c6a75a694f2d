"""Sources of text, as one stream of documents.

Idea: whatever the source, the rest of the pipeline sees `Document(text, source)` in an order that depends on names and
content only, never on the file system, so that preparing twice gives the same bytes.

Contract: text is what the file holds. Decoding is strict UTF-8 (a byte-order mark at the start of a file is a
signature, not text, and is dropped), line ends are not translated, and JSON lines end at "\\n" and nowhere else: the
other characters Unicode calls line ends may stand inside a row. Documents without any text are skipped. What cannot be
read is a `DataError` with file and place.

Trap: a document is held in memory whole, so a .txt file should fit; the corpus need not. In folders, names that begin
with a dot and files of other types are passed over.
"""

import codecs
import difflib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from flatout.errors import DataError

SHAKESPEARE = "shakespeare"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SUFFIXES = (".txt", ".jsonl")
TEXT_FIELD = "text"


@dataclass(frozen=True)
class Document:
    """One text, never empty, and where it came from (file, and line where a file holds many), for messages."""

    text: str
    source: str


def read_documents(source: str) -> Iterator[Document]:
    """Every document of `source`: `shakespeare`, a .txt file, a .jsonl file, or a folder of such files.

    A source without a single document is an error, which comes when the stream ends.
    """
    found = False
    for document in _read_all(source):
        found = True
        yield document
    if not found:
        raise DataError(f"the source {_shown(source)} holds no text", "give a file or folder with text in it")


def source_bytes(source: str) -> int:
    """Size of the source's files: a quick sign of whether a dataset prepared earlier may be out of date."""
    if source == SHAKESPEARE:
        return len(_shakespeare())
    try:
        return sum(path.stat().st_size for path in source_files(source))
    except OSError as error:
        raise _cannot_read(source, error) from error


def source_files(source: str) -> list[Path]:
    """The files of a source that is a path, in the order they are read; `shakespeare` is not a path and has none."""
    if source == SHAKESPEARE:
        return []
    path = Path(source)
    if path.is_dir():
        return _files_in(path)
    if not path.exists():
        raise DataError(f"there is no source {_shown(source)}", _missing_hint(source, path))
    if not path.is_file():
        raise DataError(f"the source {_shown(source)} is neither a file nor a folder", "give a .txt or .jsonl file")
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(
            f"the source {_shown(source)} is of a type that cannot be read: {_shown(path.suffix or 'no suffix')}",
            f"the types are {', '.join(SUFFIXES)}; rename a plain text to end in .txt",
        )
    return [path]


def _read_all(source: str) -> Iterator[Document]:
    if source == SHAKESPEARE:
        yield Document(_shakespeare().decode("utf-8"), SHAKESPEARE)
        return
    for path in source_files(source):
        try:
            yield from _read_text(path) if path.suffix.lower() == ".txt" else _read_json_lines(path)
        except OSError as error:
            raise _cannot_read(path, error) from error


def _read_text(path: Path) -> Iterator[Document]:
    raw = path.read_bytes()
    mark = len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0
    text = _decoded(memoryview(raw)[mark:], path, mark)
    if text:
        yield Document(text, _shown(path))


def _read_json_lines(path: Path) -> Iterator[Document]:
    offset = 0
    with path.open("rb") as file:
        # A binary file is iterated by b"\n" alone; text mode would also end lines at "\r".
        for number, line in enumerate(file, start=1):
            mark = len(codecs.BOM_UTF8) if number == 1 and line.startswith(codecs.BOM_UTF8) else 0
            row = _decoded(memoryview(line)[mark:], path, offset + mark)
            offset += len(line)
            if row.isspace() or not row:
                continue
            text = _text_of_row(row, f"{_shown(path)}, line {number}")
            if text:
                yield Document(text, f"{_shown(path)}:{number}")


def _text_of_row(row: str, place: str) -> str:
    try:
        value = json.loads(row)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place} is not JSON: {error}", 'every line must be one object such as {"text": "..."}; mend or remove it'
        ) from error
    if not isinstance(value, dict):
        raise DataError(
            f"{place} holds a JSON {type(value).__name__}, not an object",
            'every line must be one object such as {"text": "..."}',
        )
    text = value.get(TEXT_FIELD)
    if not isinstance(text, str):
        fields = ", ".join(_shown(name) for name in list(value)[:8]) or "none"
        problem = f"holds {type(text).__name__}, not text, in" if TEXT_FIELD in value else "lacks"
        raise DataError(
            f"{place} {problem} the field {TEXT_FIELD!r}; its fields are: {fields}",
            f"every line must carry its text under {TEXT_FIELD!r}; rename the field",
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} escapes half of a surrogate pair, {text[error.start]!a}, at character {error.start} of its text",
            "that is not Unicode text; mend or remove the line",
        ) from error
    return text


def _decoded(raw: memoryview, path: Path, offset: int) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        place = offset + error.start
        raise DataError(
            f"{_shown(path)} is not UTF-8: byte 0x{raw[error.start]:02x} at byte offset {place} ({error.reason})",
            "convert the file to UTF-8, or remove it from the source",
        ) from error


def _files_in(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        # os.walk would pass over an unreadable folder without a word.
        raise _cannot_read(error.filename or folder, error) from error

    files: list[Path] = []
    others: Counter[str] = Counter()
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if name.startswith("."):
                continue
            if path.suffix.lower() in SUFFIXES and path.is_file():
                files.append(path)
            else:
                others[path.suffix or "no suffix"] += 1
    if not files:
        found = ", ".join(f"{count} of {_shown(suffix)}" for suffix, count in others.most_common(4)) or "no files"
        raise DataError(
            f"the folder {_shown(folder)} holds no file that can be read; it has {found}",
            f"the types are {' and '.join(SUFFIXES)}",
        )
    return sorted(files, key=lambda path: path.relative_to(folder).parts)


def _shakespeare() -> bytes:
    raw = resources.files("flatout.data").joinpath("bundled", "tiny_shakespeare.txt").read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != SHAKESPEARE_SHA256:
        raise DataError(
            f"the shipped file tiny_shakespeare.txt is damaged: its SHA-256 is {found} "
            f"and should be {SHAKESPEARE_SHA256}",
            "install flatout again",
        )
    return raw


def _missing_hint(source: str, path: Path) -> str:
    beside = [str(entry) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(str(path), [SHAKESPEARE, *beside], n=1, cutoff=0.75)
    hint = f"give {SHAKESPEARE!r}, a .txt or .jsonl file, or a folder of them"
    return f"did you mean {_shown(close[0])}? {hint}" if close else hint


def _cannot_read(path: Path | str, error: OSError) -> DataError:
    return DataError(
        f"cannot read {_shown(path)}: {error.strerror or error}",
        "check that the file is there and that you may read it",
    )


def _shown(path: Path | str) -> str:
    """A name for a message: control characters and undecodable bytes, which could upset a terminal, are escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(path))
