"""Records with fields: the text in a JSON value or a row of a table, and the rows of CSV and TSV files.

A field is a path. `text` is a name in an object, `page.body` a name inside the object under another name,
`messages.0.content` takes one element of a list by its number, and `messages.*.content` all of them, joined by "\n". A
name that holds the rest of the path as it is wins over the path, so that a column `page.body` can be read. Where
several fields are asked for, the first one that holds text is taken, in each record anew.

Contract: a broken record raises nothing. Every record becomes one row or document, or is counted in one problem;
reading goes on with the next record. A record that is a plain string is its own text if the field is `text`. Half of a
surrogate pair, which JSON can escape and no file can hold, is an error. Where a table has no such column, one problem
says so, with the number of rows.

CSV: rows and lines are counted from 1. A quote that is never closed takes everything up to the next quote with it; the
problem names the lines. A quote inside a value that does not begin with one is a character. A last row without a line
end counts as whole. Blank lines are not rows.
"""

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from flatout.corpus.document import REJECTED_UTF8, Document, InputFile, Problem, ReadOptions, Results, Row, shown
from flatout.corpus.streams import LINE_LIMIT, ByteStream, decode, line_end, lines

TEXT_FIELD = "text"
EVERY = "*"
_NAMES_SHOWN = 8
# What files often call their text, the most usual first. Another name is suggested where its text is long, or alone.
USUAL = ("text", "content", "body", "document", "passage", "article", "story", "markdown", "code", "raw_content")
_LONG = 60  # characters: more than titles and names have
# Other names would have to be quoted for the shell or for YAML, and are not suggested.
_PLAIN = re.compile(r"[\w.*-]{1,80}")


@final
@dataclass(frozen=True)
class FieldError:
    """Why a record has no text. `null` if the field is there, or something above it is, and holds nothing at all."""

    message: str
    null: bool = False
    kind: Literal["field", "surrogate"] = "field"


def text_of_first(
    value: object, fields: Sequence[str], decoder: Callable[[bytes], str] | None = None
) -> str | FieldError:
    """The text at the first path that has one which is not empty; else the error of the first path that has none."""
    missing: list[FieldError] = []
    empty: str | FieldError | None = None
    for field in fields:
        found = text_of(value, field, decoder)
        if isinstance(found, str) and found:
            return found
        if isinstance(found, FieldError) and not found.null:
            missing.append(found)
        else:
            empty = found
    if empty is not None:
        return empty
    if len(fields) == 1 or missing[0].kind != "field" or not isinstance(value, Mapping):
        return missing[0]
    names = ", ".join(map(quoted, fields))
    return FieldError(f"the record has no text in {names}; there are: {names_shown(list(value))}")


def likely_field(value: object, tried: Sequence[str]) -> str:
    """The path in a record that seems to hold its text, other than those that were tried; nothing if there is none."""
    if isinstance(value, str):
        return TEXT_FIELD
    texts = {path: text for path, text in _texts_in(value).items() if path not in tried and _PLAIN.fullmatch(path)}
    usual = (path for name in USUAL for path in texts if path.lower() == name)
    longest = max(texts, key=lambda path: len(texts[path]), default="")
    return next(usual, longest if len(texts) == 1 or len(texts.get(longest, "")) >= _LONG else "")


def likely_column(names: Sequence[str], tried: Sequence[str]) -> str:
    """Like `likely_field`, for a table of which only the names of the columns with text are known."""
    left = [name for name in names if name not in tried and _PLAIN.fullmatch(name)]
    usual = (name for wanted in USUAL for name in left if name.lower() == wanted)
    return next(usual, left[0] if len(left) == 1 else "")


def _texts_in(value: object, deep: bool = True) -> dict[str, str]:
    """Texts that are not blank in a record, and in objects and lists of objects inside it, by their paths."""
    found: dict[str, str] = {}
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        if isinstance(inner, bytes):
            inner = inner.decode("utf-8", "replace")
        if isinstance(inner, str) and inner.strip() and isinstance(name, str) and name:
            found[name] = inner
        elif deep and isinstance(inner, Mapping):
            found |= {f"{name}.{path}": text for path, text in _texts_in(inner, deep=False).items()}
        elif deep and isinstance(inner, (list, tuple)) and inner:
            found |= {f"{name}.{EVERY}.{path}": text for path, text in _texts_in(inner[0], deep=False).items()}
    return found


def text_of(value: object, field: str, decoder: Callable[[bytes], str] | None = None) -> str | FieldError:
    """The text at the path `field` of a record. Bytes are text only if there is a `decoder`, which may raise."""
    if type(value) is dict and type(text := value.get(field)) is str:
        return _whole(text)  # nearly every record there is
    if isinstance(value, str):
        if field == TEXT_FIELD:
            return _whole(value)
        return FieldError(f"the record is a plain string and has no field {quoted(field)}")
    found = _at(value, field, field, decoder)
    return _whole(found) if isinstance(found, str) else found


def document_of(row: Row, file: InputFile, options: ReadOptions) -> Document | Problem:
    """The document of a record with fields. Bytes in the place of a text are decoded by the policy."""
    replaced = row.replaced

    def decoder(raw: bytes) -> str:
        nonlocal replaced
        text, more = decode(raw, options.invalid_utf8)
        replaced += more
        return text

    try:
        text = text_of_first(row.value, options.fields, decoder)
    except UnicodeDecodeError as error:
        return not_utf8(error, file, row.place, options)
    if isinstance(text, str):
        return Document(text, row.place, replaced=replaced)
    if text.null:
        return Document("", row.place)
    instead = likely_field(row.value, options.fields) if text.kind == "field" else ""
    return Problem(file.name, row.place, text.kind, text.message, records=1, instead=instead)


def limited(found: Document | Problem, file: InputFile) -> Document | Problem:
    """The document, or a problem if the text of its row is too long."""
    if isinstance(found, Document) and len(found.text) > LINE_LIMIT // 4:
        size = len(found.text.encode("utf-8"))
        if size > LINE_LIMIT:
            return Problem(file.name, found.place, "too-long", too_long(size, LINE_LIMIT), records=1)
    return found


def too_long(size: int, limit: int) -> str:
    return f"the row has {size:,} bytes; the limit is {limit:,}"


def not_utf8(error: UnicodeDecodeError, file: InputFile, place: str, options: ReadOptions) -> Document | Problem:
    """A dropped document or a problem, by the policy, for a record that cannot be decoded."""
    if options.invalid_utf8 == "skip":
        return Document("", place, rejected=REJECTED_UTF8)
    return Problem(file.name, f"{place}, byte {error.start} of it", "not-utf8", bad_byte(error), records=1)


def bad_byte(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} is not {error.encoding.upper()} ({error.reason})"


def no_column(fields: Sequence[str]) -> str:
    """The message for a table that has none of the columns asked for."""
    return f"there is no column {' or '.join(map(quoted, fields))}"


def names_shown(names: Sequence[object]) -> str:
    """Names for a message: the first few, and how many more there are."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(shown(name)[:80] for name in names[:_NAMES_SHOWN]) or "none") + more


def _at(value: object, path: str, field: str, decoder: Callable[[bytes], str] | None) -> str | FieldError:
    while path:
        if isinstance(value, Mapping):
            if path in value:
                value, path = value[path], ""
                continue
            name, _, path = path.partition(".")
            if name not in value:
                names = names_shown(list(value))
                return FieldError(f"the record lacks the field {_at_path(name, field)}; there are: {names}")
            value = value[name]
        elif isinstance(value, (list, tuple)):
            name, _, path = path.partition(".")
            if name == EVERY:
                return _every(value, path, field, decoder)
            if not (name.isascii() and name.isdigit()):
                return FieldError(f"the record has a list where the field {_at_path(name, field)} is looked for")
            if len(name) > 18 or int(name) >= len(value):
                return FieldError(f"the record lacks element {_at_path(name, field)}; the list has {len(value)}")
            value = value[int(name)]
        else:
            what = f"the record holds {_kind(value)} where the field {_at_path(path, field)} is looked for"
            return FieldError(what, null=value is None)
    if isinstance(value, str):
        return value
    if decoder is not None and isinstance(value, bytes):
        return decoder(value)
    return FieldError(f"the field {quoted(field)} holds {_kind(value)}, not text", null=value is None)


def _every(values: Sequence[object], path: str, field: str, decoder: Callable[[bytes], str] | None) -> str | FieldError:
    texts: list[str] = []
    for value in values:
        text = _at(value, path, field, decoder)
        if isinstance(text, FieldError):
            # One null among texts is damage, unlike a field that is null as a whole.
            return replace(text, null=False)
        texts.append(text)
    return "\n".join(texts)


def _whole(text: str) -> str | FieldError:
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!a} at character {error.start}"
        message = f"the text escapes half of a surrogate pair, {half}, which is not Unicode text"
        return FieldError(message, kind="surrogate")
    return text


def _kind(value: object) -> str:
    """What JSON calls a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, Mapping):
        return f"an object with {names_shown(list(value))}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return f"a value of type {type(value).__name__}"


def _at_path(name: str, field: str) -> str:
    return quoted(field) if name == field else f"{quoted(name)} of {quoted(field)}"


def quoted(name: str) -> str:
    return f"'{shown(name)[:80]}'"


# CSV.


def read_csv(stream: ByteStream, file: InputFile, options: ReadOptions) -> Results:
    """The rows of a CSV file, whose first row names the columns."""
    for row in _named_rows(stream, file, options.fields):
        yield row if isinstance(row, Problem) else document_of(row, file, options)


def read_csv_rows(stream: ByteStream, file: InputFile) -> Iterator[Row | Problem]:
    """The rows of a CSV file as objects of texts, named by its first row."""
    for row in _named_rows(stream, file):
        if isinstance(row, Row) and isinstance(row.value, dict):
            try:
                row = Row({name: value.decode("utf-8") for name, value in row.value.items()}, row.place)
            except UnicodeDecodeError as error:
                row = Problem(file.name, row.place, "not-utf8", bad_byte(error), records=1)
        yield row


def _named_rows(stream: ByteStream, file: InputFile, fields: Sequence[str] = ()) -> Iterator[Row | Problem]:
    """The rows as bytes, named by the first row; where there are `fields`, with those columns alone.

    A problem that costs every row comes last, with their number, and what is wrong with single rows before it.
    """
    rows = _csv_rows(stream, file)
    header = next(rows, None)
    names: list[str] = []
    wrong: Problem | None = None
    if header is None:
        return
    if isinstance(header, Problem):
        wrong = replace(header, message=f"the row with the names of the columns: {header.message}")
    else:
        line, values = header
        names = [name.decode("utf-8", "replace") for name in values]
        if fields and not any(field in names for field in fields):
            message = f"{no_column(fields)}; there are: {names_shown(names)}"
            wrong = Problem(file.name, f"line {line}", "field", message, records=0)
    wanted = [names.index(field) for field in fields if field in names] if fields else range(len(names))
    lost, instead = 0, ""
    for row in rows:
        if isinstance(row, Problem):
            yield row
            continue
        line, values = row
        place = f"line {line}"
        if wrong is not None:
            instead = instead or likely_field(dict(zip(names, values, strict=False)), fields)
            lost += 1
        elif len(values) != len(names):
            message = f"the row has {len(values):,} columns and the first row {len(names):,}"
            yield Problem(file.name, place, "csv", message, records=1)
        elif fields and any(b"\0" in value for value in values):
            yield Problem(file.name, place, "binary", "the row holds NUL bytes", records=1)
        else:
            yield Row({names[at]: values[at] for at in wanted}, place)
    if wrong is not None:
        yield replace(wrong, records=lost, instead=instead if wrong.kind == "field" else "")


# Stands for b"\r" inside a line, where Python's reader takes it for a line end; no decoded text has this character.
_CARRIAGE_RETURN = "\ud800"


def _csv_rows(stream: ByteStream, file: InputFile) -> Iterator[tuple[int, list[bytes]] | Problem]:
    """Rows as the line that each begins in and its values, and problems in the place of broken ones."""
    long = 0  # bytes of a line above the limit
    lost = 0

    def texts() -> Iterator[str]:
        nonlocal long, lost
        for line in lines(stream, LINE_LIMIT, ending=line_end(file)):
            if line.raw is None:
                long = line.length
                yield '"x"x\n'  # an error of Python's reader, inside a quoted value and outside
                continue
            if stream.problem is not None and not line.ended:
                lost = 1
                return
            text = line.raw.decode("utf-8", "surrogateescape")
            yield text[:-1].replace("\r", _CARRIAGE_RETURN) + text[-1:] + "\n" * line.ended

    csv.field_size_limit(LINE_LIMIT)
    reader = csv.reader(texts(), delimiter="," if file.format == "csv" else "\t", strict=True)
    while True:
        first = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            # What the file breaks off in is no problem of its own.
            if stream.problem is not None and "unexpected end" in str(error):
                lost = 1
            elif long:
                yield Problem(file.name, f"line {first}", "too-long", too_long(long, LINE_LIMIT), records=1)
                long = 0
            else:
                message = f"the row cannot be read ({error}); lines {first} to {reader.line_num} are lost"
                yield Problem(file.name, f"line {first}", "csv", message, records=1)
            continue
        if values:
            yield first, [value.replace(_CARRIAGE_RETURN, "\r").encode("utf-8", "surrogateescape") for value in values]
    if stream.problem is not None:
        yield replace(stream.problem, records=lost)
