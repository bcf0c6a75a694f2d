"""Parquet files, and datasets of the hub as they are streamed.

One column holds the text, or something with fields that holds it (see `rows`). Only that column is read, a few rows at
a time, so that memory does not depend on the size of the file. Text that is not UTF-8 follows the policy in a column of
texts; inside of lists and objects it is damage.

Contract: every row is one document, an empty one where the value is null, or is counted in one problem. Damage costs as
little as the format allows: in parquet the rest of a row group, in a streamed dataset the rest of a file. Where the
table has no such column, one problem says so. Rows are counted from 1.

Trap: importing this module needs pyarrow, so it is imported only where there is such a table to read.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

from flatout.corpus.document import (
    Document,
    InputFile,
    Problem,
    ReadOptions,
    Results,
    Row,
    Slice,
    needed,
    reason,
    shown,
)
from flatout.corpus.rows import document_of, likely_column, limited, names_shown, no_column, quoted
from flatout.corpus.sources import HUB, hub_parts
from flatout.corpus.streams import CHUNK
from flatout.errors import DataError

try:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile
except ImportError:
    needed("pyarrow", "parquet files need")
    raise


# How much is decoded at once, and in how many rows: some are much longer than others.
_BATCH_BYTES = 2**21
_BATCH_ROWS = 16, 256
_PARQUET = b"PAR1"
_SMALLEST_PARQUET = 12
# Types of texts, and those of bytes that are the same in memory.
_AS_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


# Parquet.


def read_parquet(slice: Slice, options: ReadOptions) -> Results:
    """The rows of the row groups of a slice: of each group, one of `shares` stretches of rows.

    Rows before the share in its group are decoded and dropped, which costs little beside tokenizing.
    """
    file, share, shares = slice.file, slice.share, slice.shares
    is_first = slice.start == share == 0
    with _open_parquet(file, options.fields) as opened:
        if isinstance(opened, Problem):
            if is_first:
                yield opened
            return
        sizes, columns = opened.sizes, opened.columns
        stated, rows = opened.parquet.metadata.num_rows, sum(sizes)
        if stated != rows and is_first:
            message = f"its footer is damaged: it states {stated:,} rows, and then {rows:,}"
            yield Problem(file.name, "", "format", message, records=max(stated - rows, 0))
        groups = range(len(sizes))[slice.start : slice.end]
        stretches = [_stretch(sizes[number], share, shares) for number in groups]
        if isinstance(columns, str):
            lost, instead = sum(len(stretch) for stretch in stretches), _likely(opened.parquet.schema_arrow, options)
            yield Problem(file.name, "", "field", columns, lost, instead)
            return

        def values(batch: pa.RecordBatch) -> list[Any]:
            return _values_of(batch, columns)

        for number, stretch in zip(groups, stretches, strict=True):
            for found in _row_group(opened, number, stretch, columns, values, last=share == shares - 1):
                if isinstance(found, Problem):
                    yield found
                else:
                    yield from _documents(*found, columns, file, options)


def read_parquet_rows(file: InputFile) -> Iterator[Row | Problem]:
    """All rows with all their columns, up to the first damage, or text that is not UTF-8, in each row group."""
    with _open_parquet(file) as opened:
        if isinstance(opened, Problem):
            yield opened
            return
        for number, rows in enumerate(opened.sizes):
            for found in _row_group(opened, number, range(rows), None, pa.RecordBatch.to_pylist, last=True):
                if isinstance(found, Problem):
                    yield found
                else:
                    values, first = found
                    yield from (Row(value, f"row {row}") for row, value in enumerate(values, start=first))


def parquet_group_bytes(path: str) -> list[int]:
    """The size of each row group, decompressed; nothing where the file cannot be opened."""
    try:
        with pa.OSFile(os.fsencode(path)) as source:
            metadata = ParquetFile(source).metadata
            return [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
    except Exception:  # noqa: BLE001  # reading the file reports the damage
        return []


class _Parquet(NamedTuple):
    """An opened file, the rows in each row group, and the columns to read, or what is wrong with the table."""

    name: str
    parquet: Any
    sizes: list[int]
    columns: list[str] | str


@contextlib.contextmanager
def _open_parquet(file: InputFile, fields: Sequence[str] = ()) -> Iterator[_Parquet | Problem]:
    """The file, or why nothing of it can be read."""
    if problem := _no_parquet(file):
        yield problem
        return
    # By a path of bytes, since the name of a file need not be text.
    with pa.OSFile(os.fsencode(file.path)) as source:
        try:
            # Without a buffer, a column of a row group would be read at once, whatever its size.
            parquet = ParquetFile(source, buffer_size=CHUNK, pre_buffer=False, page_checksum_verification=True)
            sizes = [parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups)]
            opened = _Parquet(file.name, parquet, sizes, _find_columns(parquet.schema_arrow, fields))
        except Exception as error:  # noqa: BLE001  # pyarrow has many, and may raise any of them for damage
            message = f"its footer is damaged, so that nothing of it can be read: {reason(error)}"
            opened = Problem(file.name, "", "format", message, records=0)
        yield opened


def _stretch(rows: int, share: int, shares: int) -> range:
    """The rows of a share. A damaged footer may state a negative number of rows."""
    rows = max(rows, 0)
    return range(rows * share // shares, rows * (share + 1) // shares)


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
    opened: _Parquet,
    number: int,
    stretch: range,
    columns: list[str] | None,
    values_of: Callable[[pa.RecordBatch], list[Any]],
    *,
    last: bool,
) -> Iterator[tuple[list[Any], int] | Problem]:
    """A stretch of the rows of one group, as values and the number in the file of the first of them.

    `columns` are those to read, if not all. `last`: the stretch goes on to the end of the group, wherever that is.
    """
    first = sum(opened.sizes[:number]) + 1
    group = opened.parquet.metadata.row_group(number)
    # By the size of all columns: asked for one, pyarrow ends the process where the metadata is damaged.
    rows = _BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)
    rows = max(_BATCH_ROWS[0], min(_BATCH_ROWS[1], rows))
    done = 0
    broken = "it has fewer rows than its metadata says"
    try:
        for batch in opened.parquet.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False):
            begin = max(stretch.start - done, 0)
            end = batch.num_rows if last else min(stretch.stop - done, batch.num_rows)
            if begin < end:
                yield values_of(batch.slice(begin, end - begin)), first + done + begin
            done += batch.num_rows
            if not last and done >= stretch.stop:
                return
    except Exception as error:  # noqa: BLE001  # as above
        broken = f"it is damaged: {reason(error)}"
    if done < stretch.stop:
        row = max(done, stretch.start)
        message = f"row group {number} ends here: {broken}"
        yield Problem(opened.name, f"row {first + row}", "format", message, records=stretch.stop - row)


# Columns.


def _find_columns(schema: pa.Schema, fields: Sequence[str]) -> list[str] | str:
    """The columns that hold the fields which are there, or what is wrong with the table."""
    found, wrong = list[str](), ""
    for field in fields:
        name = field if field in schema.names else field.partition(".")[0]
        if name not in schema.names:
            continue
        type = schema.field(schema.names.index(name)).type
        if name == field and pa.types.is_primitive(type):
            wrong = f"the column {quoted(field)} holds {shown(type)[:200]}, not text"
        else:
            found.append(name)
    return found or wrong or f"{no_column(fields)}; there are: {names_shown(schema.names)}"


def _likely(schema: pa.Schema, options: ReadOptions) -> str:
    texts = [field.name for field in schema if field.type in _AS_BYTES]
    return likely_column(texts, options.fields)


def _values(values: pa.Array) -> list[Any]:
    """The values as Python has them; bytes for all of a column of texts if one of them is not UTF-8."""
    try:
        return values.to_pylist(maps_as_pydicts="lossy")
    except UnicodeDecodeError:
        texts = values.dictionary_decode() if isinstance(values, pa.DictionaryArray) else values
        if texts.type not in _AS_BYTES:
            raise
        return texts.cast(_AS_BYTES[texts.type]).to_pylist()


def _values_of(batch: pa.RecordBatch, columns: Sequence[str]) -> list[Any]:
    """For each row its values in the columns."""
    lists = [_values(batch.column(batch.schema.names.index(column))) for column in columns]
    return list(zip(*lists, strict=True))


def _documents(rows: list[Any], first: int, columns: Sequence[str], file: InputFile, options: ReadOptions) -> Results:
    """One result for each row; `first` is the number of the first."""
    direct = columns[0] == options.fields[0]
    for number, values in enumerate(rows, start=first):
        place = f"row {number}"
        if direct and values[0] and isinstance(values[0], str):
            yield limited(Document(values[0], place), file)
        else:
            yield limited(document_of(Row(dict(zip(columns, values, strict=True)), place), file, options), file)


# Datasets of the hub.


def open_hub(path: str) -> Any:
    """The dataset of `datasets` that `hf:NAME:CONFIG:SPLIT` means, for streaming."""
    datasets = needed("datasets", "Hugging Face datasets need")
    datasets.disable_progress_bars()
    # It logs what it raises as well.
    datasets.logging.set_verbosity(logging.CRITICAL)
    name, config, split = hub_parts(path)
    # Our error says what cannot be reached; the library would log every try.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:
        raise _hub_error(path, error) from error


@final
class HubStream:
    """Documents of a dataset of the hub, read one file after the other; reading can be resumed.

    Each `iter` resumes where the last one stopped, or from the beginning after one that came to the end. A damaged file
    costs the rest of its rows; a network that fails is a `DataError`, and the state stays that of the last document.
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
        """The position of the reading as plain JSON, for `load_state_dict` of a stream of the same dataset."""
        inside = self._state if self._part is None else self._part.state_dict()
        return {"file": self._number, "row": self._row, "inside": inside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next `iter` resume after the document that was the last when `state` was taken."""
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
