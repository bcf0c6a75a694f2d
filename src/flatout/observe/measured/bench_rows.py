"""Rows that were measured before, read back from the bench.jsonl of a ladder or the ablate.jsonl of an ablation.

Contract: a last row that was being written when the process ended is cut off, and that is told. Anything else that is
not a row is an error that names its line, and the file stays as it is: it may be somebody else's.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from flatout.errors import DataError
from flatout.files import disk_errors
from flatout.records import AblateRow, BenchRow, ablate_row_from_json, bench_row_from_json

_Row = TypeVar("_Row", BenchRow, AblateRow)


def read_bench(path: Path, notice: Callable[[str], None] = lambda _: None) -> list[BenchRow]:
    """The rows of a bench.jsonl, in the order in which they were measured."""
    return _read(path, bench_row_from_json, b'{"type": "bench"', "its rung is measured again", notice)


def read_ablate(path: Path, notice: Callable[[str], None] = lambda _: None) -> list[AblateRow]:
    """The rows of an ablate.jsonl, in the order in which they were trained."""
    return _read(path, ablate_row_from_json, b'{"type": "ablate"', "its run is trained again", notice)


def _read(
    path: Path, parse: Callable[[str], _Row], beginning: bytes, again: str, notice: Callable[[str], None]
) -> list[_Row]:
    """`beginning` is that of every row as `record_to_json` writes it, `again` what becomes of one that is removed."""
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    lines = whole.split(b"\n") if newline else []
    rows = [_row(path, number, line, parse, again) for number, line in enumerate(lines, start=1)]
    if torn:
        number = len(lines) + 1
        if not torn.startswith(beginning[: len(torn)]):
            raise _damaged(path, number, "it is no row, and has no end", again)
        with disk_errors(str(path), safe=""):
            os.truncate(path, len(whole) + len(newline))
        notice(f"{path}: line {number}, the last one, was cut off while it was written, and is dropped")
    return rows


def _row(path: Path, number: int, line: bytes, parse: Callable[[str], _Row], again: str) -> _Row:
    try:
        return parse(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _damaged(path, number, f"byte {error.start + 1} is not UTF-8", again) from error
    except json.JSONDecodeError as error:
        raise _damaged(path, number, f"{error.msg} at column {error.colno}", again) from error
    except ValueError as error:
        raise DataError(
            f"{path}, line {number} is not a row of this version: {error}", "name a new folder with --out"
        ) from error


def _damaged(path: Path, number: int, why: str, again: str) -> DataError:
    return DataError(
        f"{path} is damaged in line {number}: {why}",
        f"remove that line, and {again}; or name a new folder with --out",
    )
