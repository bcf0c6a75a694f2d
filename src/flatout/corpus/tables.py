"""Tables to documents: parquet, CSV and TSV, and Hugging Face datasets, saved in a folder or streamed.

Idea: a row is a record, and one column holds the text, or something with fields that holds it (see `fields`). Only that
column is read, a few rows at a time, so that memory does not depend on the size of the file.

Contract: every row is one document, an empty one where the value is null, or is counted in one problem. What is damaged
costs as little as the format allows: in parquet the rest of a row group, in a saved dataset the rest of a file, in CSV
a row. Where the text is not in the table at all, this is said once, not once a row. Rows are counted from 1 over the
whole file, and lines of CSV too.

Saved datasets are read with pyarrow, as they lie on disk: `datasets` takes seconds to import, and one damaged file
would keep it from reading any other.

Trap: in CSV a quote that is never closed takes everything up to the next quote with it; the problem says from which
line to which. A quote inside of a value that does not begin with one is just a character. A last row without a line
end counts as whole, since many files end so. Blank lines are not rows. A file whose first row ends with b"\\r" alone
has all of its rows end so.
"""

import codecs
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, final

from flatout.corpus.document import (
    INSTALL,
    Document,
    InputFile,
    InvalidUtf8,
    Problem,
    ProblemKind,
    ReadOptions,
    Row,
    shown,
)
from flatout.corpus.fields import EVERY, decoded, names_shown, not_utf8, text_of
from flatout.corpus.streams import CHUNK, LINE_LIMIT, ByteStream, decode
from flatout.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Results = Iterator[Document | Problem]

HUB = "hf:"
DEFAULT_SPLIT = "train"

# How much is decoded at once, in how many rows, since some are much longer than others.
_BATCH_BYTES = 2**21
_BATCH_ROWS = 16, 256
# Up to the first line end that is not inside of quotes.
_FIRST_ROW = re.compile(rb'(?:[^"\r\n]++|"[^"]*+")*+')
_PARQUET = b"PAR1"
_SMALLEST_PARQUET = 12
# What an arrow stream that was written to its end ends with.
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"


# Parquet.


def read_parquet(
    file: InputFile,
    first_group: int,
    last_group: int | None,
    options: ReadOptions,
    share: int = 0,
    shares: int = 1,
) -> Results:
    """The rows of the row groups from `first_group` up to `last_group`; of each, one of `shares` stretches of rows.

    What comes before the share in its row group is decoded and dropped, which costs little beside tokenizing.
    """
    pa = _import_arrow()
    problem = _no_parquet(file)
    if problem is None:
        # By a path of bytes, since the name of a file need not be text.
        with pa.OSFile(os.fsencode(file.path)) as source:
            try:
                parquet = _open_parquet(source)
                sizes = [parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups)]
                column = _find_column(parquet.schema_arrow, options.field)
            except Exception as error:  # noqa: BLE001  # pyarrow has many, and may raise any of them for damage
                message = f"its footer is damaged, so that nothing of it can be read: {_reason(error)}"
                problem = Problem(file.name, "", "format", message, records=0)
            else:
                more = parquet.metadata.num_rows - sum(sizes)
                if more and first_group == share == 0:
                    message = f"its footer is damaged: it tells of {parquet.metadata.num_rows:,} rows, and then of "
                    yield Problem(file.name, "", "format", f"{message}{sum(sizes):,}", records=max(more, 0))
                groups = range(len(sizes))[first_group:last_group]
                stretches = [_stretch(sizes[number], share, shares) for number in groups]
                if isinstance(column, str):
                    yield Problem(file.name, "", "field", column, sum(len(stretch) for stretch in stretches))
                    return
                for number, stretch in zip(groups, stretches, strict=True):
                    first = sum(sizes[:number]) + 1
                    last = share == shares - 1
                    yield from _row_group(parquet, number, first, stretch, column, file, options, last=last)
    if problem is not None and first_group == share == 0:
        yield problem


def _stretch(rows: int, share: int, shares: int) -> range:
    """The rows of a share; a damaged footer may tell of fewer than none."""
    rows = max(rows, 0)
    return range(rows * share // shares, rows * (share + 1) // shares)


def read_parquet_rows(file: InputFile) -> Iterator[Row | Problem]:
    """All rows with all their columns. A row group with damage, or with text that is not UTF-8, ends where it is."""
    pa = _import_arrow()
    if (problem := _no_parquet(file)) is not None:
        yield problem
        return
    with pa.OSFile(os.fsencode(file.path)) as source:
        try:
            parquet = _open_parquet(source)
            sizes = [parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups)]
        except Exception as error:  # noqa: BLE001  # as above
            message = f"its footer is damaged, so that nothing of it can be read: {_reason(error)}"
            yield Problem(file.name, "", "format", message, records=0)
            return
        first = 1
        for number, rows in enumerate(sizes):
            done = 0
            broken = "it has fewer rows than its metadata says"
            batches = (batch.to_pylist() for batch in _batches(parquet, number, None))
            for batch in _until_damage(batches):
                if isinstance(batch, Exception):
                    broken = f"it is damaged: {_reason(batch)}"
                    break
                for value in batch:
                    yield Row(value, f"row {first + done}")
                    done += 1
            if done < rows:
                message = f"row group {number} ends here: {broken}"
                yield Problem(file.name, f"row {first + done}", "format", message, records=rows - done)
            first += rows


def parquet_group_bytes(path: str) -> list[int]:
    """The size of each row group, decompressed; nothing where the file cannot be opened."""
    pa = _import_arrow()
    try:
        with pa.OSFile(os.fsencode(path)) as source:
            metadata = _open_parquet(source).metadata
            return [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
    except Exception:  # noqa: BLE001  # reading it will tell
        return []


def _open_parquet(source: Any) -> Any:
    from pyarrow.parquet import ParquetFile

    # Without a buffer, a column of a row group would be read at once, whatever its size.
    return ParquetFile(source, buffer_size=CHUNK, pre_buffer=False, page_checksum_verification=True)


def _no_parquet(file: InputFile) -> Problem | None:
    try:
        with open(file.path, "rb") as raw:
            begin = raw.read(len(_PARQUET))
            size = raw.seek(0, os.SEEK_END)
            raw.seek(max(size - len(_PARQUET), 0))
            end = raw.read()
    except OSError as error:
        return Problem(file.name, "", "unreadable", f"cannot read it: {error.strerror or error}", records=0)
    if begin != _PARQUET[: len(begin)]:
        return Problem(file.name, "", "format", "it does not begin like a parquet file", records=0)
    if end == _PARQUET and size >= _SMALLEST_PARQUET:
        return None
    message = "its end is missing, where parquet says what lies where, so that nothing of it can be read"
    return Problem(file.name, "", "truncated", message, records=0)


def _row_group(
    parquet: Any,
    number: int,
    first: int,
    stretch: range,
    column: "_Column",
    file: InputFile,
    options: ReadOptions,
    *,
    last: bool,
) -> Results:
    """A stretch of the rows of one group, of which the first in the file has the number `first`.

    `last`: the stretch goes on to the end of the group, wherever that is.
    """
    done = 0
    broken = "it has fewer rows than its metadata says"
    for batch in _until_damage(_batches(parquet, number, column.path)):
        if isinstance(batch, Exception):
            broken = f"it is damaged: {_reason(batch)}"
            break
        begin = max(stretch.start - done, 0)
        end = batch.num_rows if last else min(stretch.stop - done, batch.num_rows)
        if begin < end:
            found = batch.column(batch.schema.names.index(column.name))
            values = _values(found if end - begin == len(found) else found.slice(begin, end - begin))
            yield from _documents(values, first + done + begin, column, file, options)
        done += batch.num_rows
        if not last and done >= stretch.stop:
            return
    if done < stretch.stop:
        row = max(done, stretch.start)
        message = f"row group {number} ends here: {broken}"
        yield Problem(file.name, f"row {first + row}", "format", message, records=stretch.stop - row)


def _batches(parquet: Any, number: int, path: str | None) -> Iterator[Any]:
    # By the size of all columns: asked for one, pyarrow ends the process where the metadata is damaged.
    group = parquet.metadata.row_group(number)
    rows = _BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)
    rows = max(_BATCH_ROWS[0], min(_BATCH_ROWS[1], rows))
    columns = None if path is None else [path]
    yield from parquet.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False)


# Saved datasets.


def read_saved(file: InputFile, first_row: int, last_row: int | None, options: ReadOptions) -> Results:
    """The rows from `first_row`, counted from 0, up to `last_row` of a folder that `datasets` has saved."""
    _import_arrow()
    paths = _saved_files(file.path)
    if isinstance(paths, str):
        if first_row == 0:
            yield Problem(file.name, "", "format", paths, records=0)
        return
    row = lost = 0
    missing = ""
    for path in paths:
        for found in _saved_batches(path):
            here = row
            if isinstance(found, _Broken):
                # Told by the slice in which it lies, and by no other.
                if first_row <= here and (last_row is None or here < last_row):
                    place = f"{shown(os.path.basename(path))}, row {here + 1}"
                    yield Problem(file.name, place, found.kind, found.message, found.records)
                continue
            row += found.num_rows
            if last_row is not None and here >= last_row:
                break
            if row <= first_row:
                continue
            start = max(first_row - here, 0)
            stop = found.num_rows if last_row is None else min(last_row - here, found.num_rows)
            sound = _sound_column(found, options.field)
            if isinstance(sound, str):
                missing, lost = sound, lost + stop - start
            elif isinstance(sound, Exception):
                message = f"{stop - start:,} rows from here on are damaged: {_reason(sound)}"
                yield Problem(file.name, f"row {here + start + 1}", "format", message, records=stop - start)
            else:
                column, values = sound
                for begin in range(start, stop, _BATCH_ROWS[1]):
                    part = _values(values.slice(begin, min(_BATCH_ROWS[1], stop - begin)))
                    yield from _documents(part, here + begin + 1, column, file, options)
        if last_row is not None and row >= last_row:
            break
    if lost:
        yield Problem(file.name, "", "field", missing, records=lost)


def _sound_column(batch: "pa.RecordBatch", field: str) -> "tuple[_Column, pa.Array] | str | Exception":
    """A column that can be read, or what is missing, or what is damaged."""
    try:
        column = _find_column(batch.schema, field)
        if isinstance(column, str):
            return column
        values = batch.column(batch.schema.names.index(column.name))
        # The batch is a view of the file, and offsets that lead nowhere would crash whoever follows them. First come
        # the sizes, which must be right for the rest. Texts are not looked at, since what becomes of those that are not
        # UTF-8 is a matter of policy.
        values.validate()
        _with_bytes(values).validate(full=True)
    except Exception as error:  # noqa: BLE001  # as above
        return error
    return column, values


def saved_rows(path: str) -> int:
    """How many rows of a saved dataset can be read; 0 where it cannot be opened."""
    _import_arrow()
    paths = _saved_files(path)
    if isinstance(paths, str):
        return 0
    return sum(found.num_rows for path in paths for found in _saved_batches(path) if not isinstance(found, _Broken))


class _Broken(NamedTuple):
    kind: ProblemKind
    message: str
    records: int


def _saved_batches(path: str) -> "Iterator[pa.RecordBatch | _Broken]":
    """The batches of an arrow file, as views of the file, and at the end why there are no more, if that is wrong."""
    import pyarrow as pa

    try:
        with pa.memory_map(os.fsencode(path)) as memory, pa.ipc.open_stream(memory) as stream:
            yield from stream
            size = memory.size()
            memory.seek(max(size - len(_ARROW_END), 0))
            if memory.read() != _ARROW_END:
                yield _Broken("truncated", "the file has no end, so that rows may be missing", records=0)
    except OSError as error:
        kind: ProblemKind = "unreadable" if error.errno else "truncated"
        yield _Broken(kind, f"the rest of the file cannot be read: {_reason(error)}", records=1)
    except pa.ArrowException as error:
        yield _Broken("format", f"the rest of the file cannot be read: {_reason(error)}", records=1)


def _saved_files(folder: str) -> list[str] | str:
    """The data files of a saved dataset in order, or what is wrong with it."""
    try:
        splits = _json_file(folder, "dataset_dict.json").get("splits")
    except FileNotFoundError:
        splits = [""]
    except (OSError, ValueError) as error:
        return f"dataset_dict.json cannot be read: {_reason(error)}"
    if not isinstance(splits, list) or not all(isinstance(name, str) and _is_plain(name) for name in splits):
        return "dataset_dict.json has no list of splits"
    paths: list[str] = []
    for name in [DEFAULT_SPLIT] if DEFAULT_SPLIT in splits else splits:
        try:
            state = _json_file(os.path.join(folder, name), "state.json")
        except (OSError, ValueError) as error:
            return f"{shown(os.path.join(name, 'state.json'))} cannot be read: {_reason(error)}"
        entries = state.get("_data_files")
        if not isinstance(entries, list) or state.get("_indices_data_files"):
            return "state.json is not as `datasets` writes it today; load the dataset and save it again"
        files = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
        if not all(isinstance(file, str) and file and _is_plain(file) for file in files):
            return "state.json names data files that are not in its folder"
        paths += [os.path.join(folder, name, str(file)) for file in files]
    return paths


def _is_plain(name: str) -> bool:
    return os.path.basename(name) == name and name not in (os.curdir, os.pardir) and "\0" not in name


def _json_file(folder: str, name: str) -> dict[str, object]:
    with open(os.path.join(folder, name), "rb") as file:
        value = json.load(file)
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    return value


# Columns of either.


class _Column(NamedTuple):
    """A column to read: its name in the schema, and the path to as much of it as is needed."""

    name: str
    path: str


def _find_column(schema: "pa.Schema", field: str) -> _Column | str:
    """The column that holds a field, or what is wrong with the table."""
    names = schema.names
    if field in names:
        name, rest = field, ""
    else:
        name, _, rest = field.partition(".")
    if name not in names:
        return f"there is no column '{shown(name)[:80]}'; there are: {names_shown(names)}"
    type = schema.field(names.index(name)).type
    return _checked_path(type, rest, _Column(name, name), field)


def _checked_path(type: "pa.DataType", rest: str, column: _Column, field: str) -> _Column | str:
    """Follows a path down a type, as far as the type tells, so that what no row has is known before any is read."""
    import pyarrow as pa

    inside_struct = True
    while True:
        if isinstance(type, pa.BaseExtensionType):
            type = type.storage_type
        elif isinstance(type, pa.DictionaryType):
            type = type.value_type
        elif pa.types.is_map(type) or pa.types.is_null(type):
            return column
        elif not rest:
            break
        elif pa.types.is_struct(type):
            name, _, after = rest.partition(".")
            names = [type.field(number).name for number in range(type.num_fields)]
            name, rest = (rest, "") if rest in names else (name, after)
            if name not in names:
                below = field.removesuffix(rest).removesuffix(".")
                return f"there is no field '{shown(below)[:80]}'; there are: {names_shown(names)}"
            type = type.field(names.index(name)).type
            # A name with a dot would be taken for a path.
            inside_struct = inside_struct and "." not in column.name and "." not in name
            if inside_struct:
                column = _Column(column.name, f"{column.path}.{name}")
        elif _is_list(type):
            name, _, rest = rest.partition(".")
            if name != EVERY and not (name.isascii() and name.isdigit()):
                return f"there is a list where '{shown(name)[:80]}' of '{shown(field)[:80]}' is looked for"
            type = type.value_type
            inside_struct = False
        else:
            return f"there is {type} where '{shown(rest)[:80]}' of '{shown(field)[:80]}' is looked for"
    if not _is_text(type) and not _is_bytes(type):
        return f"the column '{shown(field)[:80]}' holds {shown(type)[:200]}, not text"
    return column


def _is_list(type: "pa.DataType") -> bool:
    import pyarrow as pa

    kinds = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)
    return isinstance(type, kinds)


def _is_text(type: "pa.DataType") -> bool:
    from pyarrow import types

    return types.is_string(type) or types.is_large_string(type) or types.is_string_view(type)


def _is_bytes(type: "pa.DataType") -> bool:
    from pyarrow import types

    return (
        types.is_binary(type)
        or types.is_large_binary(type)
        or types.is_binary_view(type)
        or types.is_fixed_size_binary(type)
    )


def _as_bytes(type: "pa.DataType") -> "pa.DataType":
    """A type with bytes in the place of texts, and otherwise the same in memory."""
    import pyarrow as pa

    if _is_text(type):
        view, large = pa.types.is_string_view(type), pa.types.is_large_string(type)
        return pa.binary_view() if view else pa.large_binary() if large else pa.binary()
    if isinstance(type, pa.BaseExtensionType):
        return _as_bytes(type.storage_type)
    if isinstance(type, pa.DictionaryType):
        return pa.dictionary(type.index_type, _as_bytes(type.value_type), type.ordered)
    if pa.types.is_map(type):
        return pa.map_(_as_bytes(type.key_type), _as_bytes(type.item_type))
    if pa.types.is_struct(type):
        fields = [type.field(number) for number in range(type.num_fields)]
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in fields])
    if pa.types.is_fixed_size_list(type):
        return pa.list_(_as_bytes(type.value_type), type.list_size)
    for is_kind, kind in (
        (pa.types.is_list, pa.list_),
        (pa.types.is_large_list, pa.large_list),
        (pa.types.is_list_view, pa.list_view),
        (pa.types.is_large_list_view, pa.large_list_view),
    ):
        if is_kind(type):
            return kind(_as_bytes(type.value_type))
    return type


@final
class _WithBytes:
    """An array to import under another type, by the protocol that Arrow has for it."""

    def __init__(self, values: "pa.Array") -> None:
        self._values = values

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        return _as_bytes(self._values.type).__arrow_c_schema__(), self._values.__arrow_c_array__()[1]


def _with_bytes(values: "pa.Array") -> "pa.Array":
    import pyarrow as pa

    return pa.array(_WithBytes(values))


@final
class _Decoder:
    """Bytes to text under a policy; `replaced` counts what is wrong with them."""

    def __init__(self, options: ReadOptions) -> None:
        self.replaced = 0
        self._policy: InvalidUtf8 = options.invalid_utf8

    def __call__(self, raw: bytes) -> str:
        text, replaced = decode(raw, self._policy)
        self.replaced += replaced
        return text


def _values(values: "pa.Array") -> list[Any]:
    """The values as Python has them, with bytes for all texts if one of them is not UTF-8."""
    try:
        return values.to_pylist(maps_as_pydicts="lossy")
    except UnicodeDecodeError:
        return _with_bytes(values).to_pylist(maps_as_pydicts="lossy")


def _documents(values: list[Any], first: int, column: _Column, file: InputFile, options: ReadOptions) -> Results:
    """One result for each value; `first` is the number of the first row."""
    decoder = _Decoder(options)
    direct = column.name == options.field
    for row, value in enumerate(values, start=first):
        if direct and isinstance(value, str):
            yield _checked(value, 0, f"row {row}", file)
        else:
            yield _document({column.name: value}, f"row {row}", file, options, decoder)


def _document(row: object, place: str, file: InputFile, options: ReadOptions, decoder: _Decoder) -> Document | Problem:
    decoder.replaced = 0
    try:
        text = text_of(row, options.field, decoder)
    except UnicodeDecodeError as error:
        return not_utf8(error, file, place, options)
    if isinstance(text, str):
        return _checked(text, decoder.replaced, place, file)
    return Document("", place) if text.null else Problem(file.name, place, text.kind, text.message, records=1)


def _checked(text: str, replaced: int, place: str, file: InputFile) -> Document | Problem:
    if len(text) > LINE_LIMIT // 4 and (size := len(text.encode("utf-8"))) > LINE_LIMIT:
        return Problem(file.name, place, "too-long", _too_long(size, LINE_LIMIT), records=1)
    return Document(text, place, replaced=replaced)


def _too_long(size: int, limit: int) -> str:
    return f"the row has {size:,} bytes; the limit is {limit:,}"


# CSV.


def read_csv(
    stream: ByteStream, file: InputFile, options: ReadOptions, delimiter: str, *, limit: int = LINE_LIMIT
) -> Results:
    """The rows of a CSV file, whose first row names the columns. `limit` for a row is lower in tests only."""
    rows = iter(_Rows(stream, file, delimiter.encode(), limit))
    header = _header(rows, stream, file)
    if not isinstance(header, _Row):
        yield from _all_lost(header, rows)
        return
    names = [name.decode("utf-8", "replace") for name in header.values]
    if options.field not in names:
        message = f"there is no column '{shown(options.field)[:80]}'; there are: {names_shown(names)}"
        yield from _all_lost(Problem(file.name, f"line {header.line}", "field", message, records=0), rows)
        return
    column = names.index(options.field)
    for row in rows:
        if isinstance(row, Problem):
            yield row
            continue
        place = f"line {row.line}"
        if len(row.values) != len(names):
            yield _other_columns(row, names, file)
        elif row.binary:
            yield Problem(file.name, place, "binary", "the row holds NUL bytes", records=1)
        else:
            yield decoded(row.values[column], file, place, options)


def read_csv_rows(stream: ByteStream, file: InputFile, delimiter: str) -> Iterator[Row | Problem]:
    """The rows of a CSV file as objects of texts, named by its first row."""
    rows = iter(_Rows(stream, file, delimiter.encode(), LINE_LIMIT))
    header = _header(rows, stream, file)
    if not isinstance(header, _Row):
        yield from _all_lost(header, rows)
        return
    names = [name.decode("utf-8", "replace") for name in header.values]
    for row in rows:
        if isinstance(row, Problem):
            yield row
            continue
        place = f"line {row.line}"
        if len(row.values) != len(names):
            yield _other_columns(row, names, file)
            continue
        try:
            texts = [value.decode("utf-8") for value in row.values]
        except UnicodeDecodeError as error:
            message = f"byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason})"
            yield Problem(file.name, place, "not-utf8", message, records=1)
        else:
            yield Row(dict(zip(names, texts, strict=True)), place)


class _Row(NamedTuple):
    line: int
    values: list[bytes]
    binary: bool


class _Parsed(NamedTuple):
    end: int
    values: list[bytes]
    wrong: str


def _header(rows: "Iterator[_Row | Problem]", stream: ByteStream, file: InputFile) -> "_Row | Problem | None":
    """The row with the names of the columns, or what there is to say where it cannot be had."""
    header = next(rows, None)
    if header is None:
        words = "there is no row with the names of the columns"
        return Problem(file.name, "", "empty", words, records=0) if stream.problem is None else None
    if isinstance(header, Problem):
        # The row itself was none of data.
        return replace(header, message=f"the row with the names of the columns: {header.message}", records=0)
    return header


def _all_lost(problem: Problem | None, rows: "Iterator[_Row | Problem]") -> Iterator[Problem]:
    """A problem that costs every row, with their number. What is wrong with single rows comes before it."""
    lost = 0
    for row in rows:
        if isinstance(row, Problem):
            yield row
        else:
            lost += 1
    if problem is not None:
        yield replace(problem, records=problem.records + lost)


def _other_columns(row: _Row, names: list[str], file: InputFile) -> Problem:
    message = f"the row has {len(row.values):,} columns and the first row {len(names):,}"
    return Problem(file.name, f"line {row.line}", "csv", message, records=1)


@final
class _Rows:
    """The rows of a CSV file as bytes, and problems in the place of those that cannot be told apart."""

    def __init__(self, stream: ByteStream, file: InputFile, delimiter: bytes, limit: int) -> None:
        self._stream = stream
        self._name = file.name
        self._delimiter = delimiter
        self._limit = limit
        self._stop = re.compile(b"[%s\n]" % re.escape(delimiter))
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
                    yield Problem(self._name, f"line {line}", "too-long", _too_long(size, self._limit), records=1)
                continue
            raw = self._data[self._at : parsed.end]
            self._at = parsed.end
            self._line += raw.count(b"\n")
            if not raw.strip(b"\r\n"):
                continue
            if self._stream.problem is not None and self._ended and not raw.endswith(b"\n"):
                lost = 1
            elif (size := len(raw.removesuffix(b"\n"))) > self._limit:
                yield Problem(self._name, f"line {line}", "too-long", _too_long(size, self._limit), records=1)
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
            if end + 1 < len(self._data) or self._ended or len(self._data) > self._limit:
                break
            self._grow()
        if self._data[end : end + 1] == b"\r" and self._data[end + 1 : end + 2] != b"\n":
            self._old_ends = True
            self._data = _new_ends(self._data)

    def _parse(self) -> _Parsed | None:
        """The next row; nothing if it has no end, or none within the limit."""
        while (parsed := self._parse_held()) is None:
            if self._ended or len(self._data) - self._at > self._limit + 1:
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
        more = self._stream.read(max(CHUNK, min(len(rest), self._limit)))
        more = _new_ends(more) if self._old_ends else more
        self._data, self._at, self._ended = rest + more, 0, not more
        return bool(more)


def _new_ends(raw: bytes) -> bytes:
    return raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


# Datasets of the hub.


def read_hub(file: InputFile, options: ReadOptions) -> Results:
    """The rows of `hf:NAME:CONFIG:SPLIT`, of which the last two may be missing, as they come over the network."""
    yield from HubStream(file.path, options, file.name)


def open_hub(path: str) -> Any:
    """The dataset of `datasets` that `hf:NAME:CONFIG:SPLIT` means, for streaming."""
    datasets = _import_datasets()
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
            name = _hub_column(dataset.column_names, self._options.field)
            if name is None:
                message = f"there is no column for '{shown(self._options.field)[:80]}'; there are: "
                message += names_shown(dataset.column_names)
                yield Problem(self._file.name, "", "field", message, records=0)
                return
            dataset = dataset.select_columns([name])
        decoder = _Decoder(self._options)
        if self._part is not None:
            self._state = self._part.state_dict()
        parts = dataset.num_shards
        while self._number < parts:
            self._part = dataset.shard(num_shards=parts, index=self._number)
            if self._state is not None:
                self._part.load_state_dict(self._state)
            for row in _until_damage(self._part):
                if isinstance(row, Exception):
                    if _is_network(row):
                        raise _hub_error(self._path, row) from row
                    message = f"the rest of file {self._number + 1} of {parts} cannot be read: {_reason(row)}"
                    yield Problem(self._file.name, f"row {self._row + 1}", "format", message, records=1)
                    break
                self._row += 1
                yield _document(row, f"row {self._row}", self._file, self._options, decoder)
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


def _hub_column(names: list[str], field: str) -> str | None:
    return next((name for name in (field, field.partition(".")[0]) if name in names), None)


def _is_network(error: BaseException) -> bool:
    """Whether something between us and the hub failed, rather than the data."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "requests", "huggingface_hub", "aiohttp")


def _hub_error(path: str, error: Exception) -> DataError:
    message = f"the dataset {shown(path)} cannot be read: {_reason(error)}"
    if _is_network(error):
        return DataError(
            message, "check the network and HF_HUB_OFFLINE, run `hf auth login` if it needs a login, or give a folder"
        )
    if isinstance(error, FileNotFoundError):
        return DataError(message, "check the name, and run `hf auth login` if the dataset needs a login")
    return DataError(message, "write hf:NAME:CONFIG:SPLIT with a config and a split that the dataset has")


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError("Hugging Face datasets need the package datasets", INSTALL) from error
    datasets.disable_progress_bars()
    # It logs what it raises as well.
    datasets.logging.set_verbosity(logging.CRITICAL)
    return datasets


def _import_arrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError("parquet and saved datasets need the package pyarrow", INSTALL) from error
    return pyarrow


def _until_damage(items: Iterable[Any]) -> Iterator[Any]:
    """The items, and at the end the error that came instead of the next one, if there was any."""
    iterator: Iterator[Any] | None = None
    while True:
        try:
            iterator = iter(items) if iterator is None else iterator
            item = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001  # each library has its own
            yield error
            return
        yield item


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    return shown(words or type(error).__name__)[:200]
