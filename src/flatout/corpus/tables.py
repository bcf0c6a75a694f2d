"""Tables to documents: CSV and TSV, and Hugging Face datasets as they are streamed. Those of Arrow are in `arrow`.

Idea: a row is a record, and one column holds the text, or something with fields that holds it (see `fields`). A few
rows are read at a time, so that memory does not depend on the size of the file.

Contract: every row is one document, an empty one where the value is null, or is counted in one problem. What is damaged
costs as little as the format allows: in CSV a row, of a streamed dataset the rest of a file. Where the text is not in
the table at all, this is said once, not once a row. Rows are counted from 1 over the whole file, and lines of CSV too.

Trap: in CSV a quote that is never closed takes everything up to the next quote with it; the problem says from which
line to which. A quote inside of a value that does not begin with one is just a character. A last row without a line
end counts as whole, since many files end so. Blank lines are not rows. A file whose first row ends with b"\\r" alone
has all of its rows end so.
"""

import codecs
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

from flatout.corpus.document import InputFile, Problem, ReadOptions, Results, Row, needed, reason, shown
from flatout.corpus.fields import (
    bad_byte,
    document_of,
    likely_column,
    likely_field,
    limited,
    names_shown,
    no_column,
    too_long,
)
from flatout.corpus.streams import CHUNK, LINE_LIMIT, ByteStream
from flatout.errors import DataError

HUB = "hf:"
# Corpora by the names that people use: the dataset on the hub, and the config of it that is taken if none is named.
ALIASES = {
    "c4": ("allenai/c4", "en"),
    "fineweb": ("HuggingFaceFW/fineweb", "sample-10BT"),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "openwebtext": ("Skylion007/openwebtext", ""),
    "tinystories": ("roneneldan/TinyStories", ""),
}
DEFAULT_SPLIT = "train"

# Up to the first line end that is not inside of quotes.
_FIRST_ROW = re.compile(rb'(?:[^"\r\n]++|"[^"]*+")*+')


# CSV.


def read_csv(stream: ByteStream, file: InputFile, options: ReadOptions) -> Results:
    """The rows of a CSV file, whose first row names the columns."""
    for row in _named_rows(stream, file, options.fields):
        yield row if isinstance(row, Problem) else document_of(Row(row.values, row.place), file, options)


def read_csv_rows(stream: ByteStream, file: InputFile) -> Iterator[Row | Problem]:
    """The rows of a CSV file as objects of texts, named by its first row."""
    for row in _named_rows(stream, file):
        if isinstance(row, Problem):
            yield row
            continue
        try:
            yield Row({name: value.decode("utf-8") for name, value in row.values.items()}, row.place)
        except UnicodeDecodeError as error:
            yield Problem(file.name, row.place, "not-utf8", bad_byte(error), records=1)


class _NamedRow(NamedTuple):
    place: str
    values: dict[str, bytes]


def _named_rows(stream: ByteStream, file: InputFile, fields: Sequence[str] = ()) -> Iterator[_NamedRow | Problem]:
    """The rows with the names that the first row gives; where there are `fields`, with those columns alone.

    A problem that costs every row comes last, with their number, and what is wrong with single rows before it.
    """
    rows = iter(_Rows(stream, file))
    header = next(rows, None)
    names: list[str] = []
    wrong: Problem | None = None
    if header is None:
        return
    if isinstance(header, Problem):
        wrong = replace(header, message=f"the row with the names of the columns: {header.message}")
    else:
        names = [name.decode("utf-8", "replace") for name in header.values]
        if fields and not any(field in names for field in fields):
            message = f"{no_column(fields)}; there are: {names_shown(names)}"
            wrong = Problem(file.name, f"line {header.line}", "field", message, records=0)
    wanted = [names.index(field) for field in fields if field in names] if fields else range(len(names))
    lost, instead = 0, ""
    for row in rows:
        if isinstance(row, Problem):
            yield row
            continue
        place = f"line {row.line}"
        if wrong is not None:
            instead = instead or likely_field(dict(zip(names, row.values, strict=False)), fields)
            lost += 1
        elif len(row.values) != len(names):
            message = f"the row has {len(row.values):,} columns and the first row {len(names):,}"
            yield Problem(file.name, place, "csv", message, records=1)
        elif fields and row.binary:
            yield Problem(file.name, place, "binary", "the row holds NUL bytes", records=1)
        else:
            yield _NamedRow(place, {names[at]: row.values[at] for at in wanted})
    if wrong is not None:
        yield replace(wrong, records=lost, instead=instead if wrong.kind == "field" else "")


class _Row(NamedTuple):
    line: int
    values: list[bytes]
    binary: bool


class _Parsed(NamedTuple):
    end: int
    values: list[bytes]
    wrong: str


@final
class _Rows:
    """The rows of a CSV file as bytes, and problems in the place of those that cannot be told apart."""

    def __init__(self, stream: ByteStream, file: InputFile) -> None:
        self._stream = stream
        self._name = file.name
        self._delimiter = b"," if file.format == "csv" else b"\t"
        self._stop = re.compile(b"[%s\n]" % self._delimiter)
        self._data = b""
        self._at = 0
        self._line = 1
        self._ended = False
        self._old_ends = False  # rows end at b"\r", which is read as b"\n"

    def __iter__(self) -> Iterator[_Row | Problem]:
        while len(self._data) < len(codecs.BOM_UTF8) and self._grow():
            pass
        self._at = len(codecs.BOM_UTF8) if self._data.startswith(codecs.BOM_UTF8) else 0
        self._find_ends()
        lost = 0
        while self._at < len(self._data) or self._grow():
            line = self._line
            parsed = self._parse()
            if parsed is None:
                size, closed = self._skip()
                if not closed and self._stream.problem is not None:
                    lost = 1
                elif not closed:
                    message = f"a quote is opened in this row and not closed; lines {line} to {self._line} are lost"
                    yield Problem(self._name, f"line {line}", "csv", message, records=1)
                else:
                    yield Problem(self._name, f"line {line}", "too-long", too_long(size, LINE_LIMIT), records=1)
                continue
            raw = self._data[self._at : parsed.end]
            self._at = parsed.end
            self._line += raw.count(b"\n")
            if not raw.strip(b"\r\n"):
                continue
            if self._stream.problem is not None and self._ended and not raw.endswith(b"\n"):
                lost = 1
            elif (size := len(raw.removesuffix(b"\n"))) > LINE_LIMIT:
                yield Problem(self._name, f"line {line}", "too-long", too_long(size, LINE_LIMIT), records=1)
            elif parsed.wrong:
                last = self._line - 1 if raw.endswith(b"\n") else self._line
                message = f"{parsed.wrong}; lines {line} to {last} are lost"
                yield Problem(self._name, f"line {line}", "csv", message, records=1)
            else:
                yield _Row(line, parsed.values, b"\0" in raw)
        if self._stream.problem is not None:
            yield replace(self._stream.problem, records=lost)

    def _find_ends(self) -> None:
        """Looks at the end of the first row, which tells what ends all of them."""
        while True:
            match = _FIRST_ROW.match(self._data, self._at)
            end = match.end() if match else self._at
            # A b"\r" at the end of what is read may be half of a line end.
            if end + 1 < len(self._data) or self._ended or len(self._data) > LINE_LIMIT:
                break
            self._grow()
        if self._data[end : end + 1] == b"\r" and self._data[end + 1 : end + 2] != b"\n":
            self._old_ends = True
            self._data = _new_ends(self._data)

    def _parse(self) -> _Parsed | None:
        """The next row; nothing if it has no end, or none within the limit."""
        while (parsed := self._parse_held()) is None:
            if self._ended or len(self._data) - self._at > LINE_LIMIT + 1:
                return None
            self._grow()
        return parsed

    def _parse_held(self) -> _Parsed | None:
        """The next row if it can be told from what was read so far."""
        data, at, values, wrong = self._data, self._at, [], ""
        end = data.find(b"\n", at)
        if end < 0 and not self._ended:
            return None
        end = len(data) if end < 0 else end
        if data.find(b'"', at, end) < 0:
            return _Parsed(min(end + 1, len(data)), data[at:end].removesuffix(b"\r").split(self._delimiter), "")
        while True:
            quoted = data.startswith(b'"', at)
            close = self._close(at + 1) if quoted else at
            if close < 0:
                return None
            stop = self._stop.search(data, close)
            if stop is None and not self._ended:
                return None
            end = len(data) if stop is None else stop.start()
            last = stop is None or stop[0] == b"\n"
            value = data[close:end].removesuffix(b"\r") if last else data[close:end]
            if quoted:
                if value != b'"':
                    wrong = "there is something between a quote that closes and what should follow it"
                value = data[at + 1 : close].replace(b'""', b'"')
            values.append(value)
            at = len(data) if stop is None else stop.end()
            if last:
                return _Parsed(at, values, wrong)

    def _close(self, at: int) -> int:
        """Where the quote is that closes a value; if it has not been read yet, ~place, from where to look for it."""
        data = self._data
        while (at := data.find(b'"', at)) >= 0:
            if at + 1 == len(data) and not self._ended:
                return ~at  # it may be the first of two
            if not data.startswith(b'"', at + 1):
                return at
            at += 2
        return ~len(data)

    def _skip(self) -> tuple[int, bool]:
        """Passes over the next row without holding it: its size, and whether it had an end."""
        size = 0
        quoted, begins = False, True
        while True:
            data, at = self._data, self._at
            if begins and at < len(data):
                begins, quoted = False, data.startswith(b'"', at)
                at += quoted
            end = len(data)
            if quoted:
                close = self._close(at)
                if close < 0:
                    end = ~close
                else:
                    quoted, at = False, close + 1
            stop = None if quoted else self._stop.search(data, at)
            if stop is not None:
                begins, end = True, stop.end()
            self._line += data.count(b"\n", self._at, end)
            size += end - self._at
            self._at = end
            if stop is not None and stop[0] == b"\n":
                return size - 1, True
            # What is left at the end is a quote of which it is clear now that no other follows.
            if stop is None and not self._grow() and self._at == len(self._data):
                return size, not quoted

    def _grow(self) -> bool:
        if self._ended:
            return False
        rest = self._data[self._at :]
        more = self._stream.read(max(CHUNK, min(len(rest), LINE_LIMIT)))
        more = _new_ends(more) if self._old_ends else more
        self._data, self._at, self._ended = rest + more, 0, not more
        return bool(more)


def _new_ends(raw: bytes) -> bytes:
    return raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


# Datasets of the hub.


def open_hub(path: str) -> Any:
    """The dataset of `datasets` that `hf:NAME:CONFIG:SPLIT` means, for streaming."""
    datasets = needed("datasets", "Hugging Face datasets need")
    datasets.disable_progress_bars()
    # It logs what it raises as well.
    datasets.logging.set_verbosity(logging.CRITICAL)
    name, config, split = hub_parts(path)
    # What cannot be reached is told by our error; the library's account of each try would drown it.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:
        raise _hub_error(path, error) from error


def hub_parts(path: str) -> tuple[str, str | None, str]:
    """Name, config and split of `hf:NAME`, `hf:NAME:CONFIG`, `hf:NAME::SPLIT` or `hf:NAME:CONFIG:SPLIT`."""
    name, *others = path.removeprefix(HUB).split(":")
    if not path.startswith(HUB) or not name or len(others) > 2:
        raise DataError(f"{shown(path)} names no dataset", "write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    config, split = [*others, "", ""][:2]
    if name.lower() in ALIASES and not os.path.isdir(name):
        name, usual = ALIASES[name.lower()]
        config = config or usual
    return name, config or None, split or DEFAULT_SPLIT


@final
class HubStream:
    """Documents of a dataset of the hub, read one file of it after the other, which can be left and taken up again.

    Each `iter` goes on where the last one was left, or from the beginning after one that came to the end. A damaged
    file costs the rest of its rows; a network that fails is a `DataError`, and the state stays that of the last
    document.
    """

    def __init__(self, path: str, options: ReadOptions, name: str | None = None) -> None:
        self._path = path
        self._options = options
        self._file = InputFile(path, shown(path) if name is None else name, "hub", "none", 0)
        self._dataset = open_hub(path)
        self._part: Any = None
        self._number = 0  # of the file that is being read
        self._row = 0
        self._state: dict[str, Any] | None = None  # where to go on in it

    def __iter__(self) -> Results:
        dataset = self._dataset
        if dataset.column_names is not None:
            columns, fields = dataset.column_names, self._options.fields
            asked = [name for field in fields for name in (field, field.partition(".")[0]) if name in columns]
            if not asked:
                message = f"{no_column(fields)}; there are: {names_shown(columns)}"
                instead = likely_column(columns, fields)
                yield Problem(self._file.name, "", "field", message, records=0, instead=instead)
                return
            dataset = dataset.select_columns(list(dict.fromkeys(asked)))
        if self._part is not None:
            self._state = self._part.state_dict()
        parts = dataset.num_shards
        while self._number < parts:
            self._part = dataset.shard(num_shards=parts, index=self._number)
            if self._state is not None:
                self._part.load_state_dict(self._state)
            rows: Iterator[Any] | None = None
            while True:
                try:
                    rows = iter(self._part) if rows is None else rows
                    row = next(rows)
                except StopIteration:
                    break
                except Exception as error:  # each library has its own
                    if _is_network(error):
                        raise _hub_error(self._path, error) from error
                    message = f"the rest of file {self._number + 1} of {parts} cannot be read: {reason(error)}"
                    yield Problem(self._file.name, f"row {self._row + 1}", "format", message, records=1)
                    break
                self._row += 1
                yield limited(document_of(Row(row, f"row {self._row}"), self._file, self._options), self._file)
            self._part = self._state = None
            self._number += 1
        self._number = self._row = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the reading is, for `load_state_dict` of a stream of the same dataset; fit for JSON."""
        inside = self._state if self._part is None else self._part.state_dict()
        return {"file": self._number, "row": self._row, "inside": inside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next `iter` go on after the document that was the last when `state` was taken."""
        self._part = None
        self._number, self._row, self._state = state["file"], state["row"], state["inside"]


def _is_network(error: BaseException) -> bool:
    """Whether something between us and the hub failed, rather than the data."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "requests", "huggingface_hub", "aiohttp")


def _hub_error(path: str, error: Exception) -> DataError:
    name, config, _ = hub_parts(path)
    alias = "" if path.startswith(f"{HUB}{name}") else f" ({':'.join(filter(None, (name, config)))})"
    message = f"the dataset {shown(path)}{alias} cannot be read: {reason(error)}"
    if _is_network(error):
        return DataError(
            message, "check the network and HF_HUB_OFFLINE, run `hf auth login` if it needs a login, or give a folder"
        )
    if isinstance(error, FileNotFoundError):
        return DataError(message, "check the name, and run `hf auth login` if the dataset needs a login")
    return DataError(message, "write hf:NAME:CONFIG:SPLIT with a config and a split that the dataset has")
