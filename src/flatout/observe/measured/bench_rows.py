"""The rows of a ladder that was measured before, read back from its bench.jsonl.

Contract: a last row that was being written when the process ended is cut off, and that is told. Anything else that is
not a row is an error that names its line, and the file stays as it is: it may be somebody else's.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

from flatout.errors import DataError
from flatout.files import disk_errors
from flatout.records import BenchRow, bench_row_from_json

_BEGINNING = b'{"type": "bench"'  # of every row as `record_to_json` writes it


def read_bench(path: Path, notice: Callable[[str], None] = lambda _: None) -> list[BenchRow]:
    """The rows of a bench.jsonl, in the order in which they were measured."""
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    lines = whole.split(b"\n") if newline else []
    rows = [_row(path, number, line) for number, line in enumerate(lines, start=1)]
    if torn:
        number = len(lines) + 1
        if not torn.startswith(_BEGINNING[: len(torn)]):
            raise _damaged(path, number, "it is no row, and has no end")
        with disk_errors(str(path), safe=""):
            os.truncate(path, len(whole) + len(newline))
        notice(f"{path}: line {number}, the last one, was cut off while it was written, and is dropped")
    return rows


def _row(path: Path, number: int, line: bytes) -> BenchRow:
    try:
        return bench_row_from_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _damaged(path, number, f"byte {error.start + 1} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise _damaged(path, number, f"{error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise DataError(
            f"{path}, line {number} is not a row of this version: {error}", "name a new folder with --out"
        ) from error


def _damaged(path: Path, number: int, why: str) -> DataError:
    return DataError(
        f"{path} is damaged in line {number}: {why}",
        "remove that line, and its rung is measured again; or name a new folder with --out",
    )
