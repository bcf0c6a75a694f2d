"""The text of a record that has fields (a JSON value, a row of a table), and what becomes of bytes that are not UTF-8.

Idea: a field is a path. `text` is a name in an object, `page.body` a name inside the object under another name,
`messages.0.content` takes one element of a list by its number, and `messages.*.content` all of them, joined by "\\n".

Where several fields are asked for, the first of them that holds text is taken, in each record anew.

Contract: no exceptions, since a broken record is nothing special: the result is the text (`str`) or a `FieldError` that
says what stands there instead. A record that is a plain string is its own text if the field is `text`. Half of a
surrogate pair, which JSON can escape and no file can hold, is an error too.

Trap: a name that holds the rest of the path as it is wins over the path, so that the column `page.body` can be read
although it has a dot.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from flatout.corpus.document import REJECTED_UTF8, Document, InputFile, Problem, ReadOptions, Row, shown
from flatout.corpus.streams import LINE_LIMIT, decode

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
    """The text at the first of some paths that has one which is not empty; else what stands there instead."""
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
    names = ", ".join(map(_quoted, fields))
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
    """The same of a table of which only the names of the columns with text are known."""
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
        return FieldError(f"the record is a plain string and has no field {_quoted(field)}")
    found = _at(value, field, field, decoder)
    return _whole(found) if isinstance(found, str) else found


def document_of(row: Row, file: InputFile, options: ReadOptions) -> Document | Problem:
    """The document of a record with fields. Bytes in the place of a text are UTF-8, or go by the policy for others."""
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
    """The same, or a problem where the text of a row is too long."""
    if isinstance(found, Document) and len(found.text) > LINE_LIMIT // 4:
        size = len(found.text.encode("utf-8"))
        if size > LINE_LIMIT:
            return Problem(file.name, found.place, "too-long", too_long(size, LINE_LIMIT), records=1)
    return found


def too_long(size: int, limit: int) -> str:
    return f"the row has {size:,} bytes; the limit is {limit:,}"


def not_utf8(error: UnicodeDecodeError, file: InputFile, place: str, options: ReadOptions) -> Document | Problem:
    """What becomes of a record that cannot be decoded where the policy is not to replace what is wrong with it."""
    if options.invalid_utf8 == "skip":
        return Document("", place, rejected=REJECTED_UTF8)
    return Problem(file.name, f"{place}, byte {error.start} of it", "not-utf8", bad_byte(error), records=1)


def bad_byte(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} is not {error.encoding.upper()} ({error.reason})"


def no_column(fields: Sequence[str]) -> str:
    """That a table has none of the columns that were asked for."""
    return f"there is no column {' or '.join(map(_quoted, fields))}"


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
    return FieldError(f"the field {_quoted(field)} holds {_kind(value)}, not text", null=value is None)


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
    return _quoted(field) if name == field else f"{_quoted(name)} of {_quoted(field)}"


def _quoted(name: str) -> str:
    return f"'{shown(name)[:80]}'"
