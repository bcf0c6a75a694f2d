"""GGUF files of others: metadata and the table of tensors, read without trusting a byte.

A file has a header, key-value pairs, a table of tensors, and their data. Everything is little-endian. Numbers of
elements, lengths and offsets come from the file, so each is checked against the bytes that are there before memory is
taken for it. No values of tensors are read here (`model/gguf_weights.py`).

Contract: a damaged or hostile file is a `CheckpointError` that names the file, whatever its bytes are. Strings have at
most `_MOST_TEXT` bytes in all and there are at most `_MOST_STRINGS`; arrays of numbers are views of the mapped file.
Tensors do not overlap: otherwise a small file could stand for any amount of memory.
"""

import functools
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatout.errors import CheckpointError
from flatout.files import CHECK_ACCESS

SUFFIX = ".gguf"
# Types of tensors that are read: their number in a file, values in a block, and bytes of a block.
KINDS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_OTHER_KINDS = {6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 20: "IQ4_NL", 23: "IQ4_XS"}
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _FLOAT, _STRING, _ARRAY, _U64 = 4, 6, 8, 9, 10
_MOST_PAIRS = _MOST_TENSORS = 2**16
_MOST_STRINGS = 2**20  # the largest vocabularies have a quarter of that, and twice as many merges
_MOST_TEXT = 2**25
_AGAIN = "the file is damaged; fetch it again"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in the file. The shape is in torch's order, the reverse of the file's."""

    kind: str
    shape: tuple[int, ...]
    start: int
    bytes: int


@dataclass(frozen=True, eq=False)
class GgufFile:
    path: Path
    values: Mapping[str, Any]  # numbers, texts, lists of texts, and arrays of numbers
    tensors: Mapping[str, StoredTensor]
    raw: mmap.mmap

    @functools.cached_property
    def single(self) -> dict[str, Any]:
        """The values that are numbers or texts."""
        return {key: value for key, value in self.values.items() if isinstance(value, int | float | str)}

    def text(self, key: str, usual: str | None = None) -> str:
        value = self.values.get(key, usual)
        if not isinstance(value, str):
            raise self.refuse(f"its {key} is {'missing' if value is None else 'no text'}")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.refuse(f"its {key} is {'missing' if value is None else 'no list of texts'}")
        return value

    def refuse(self, what: str, hint: str = _AGAIN) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}", hint)


def is_gguf(path: Path) -> bool:
    """Whether this is the name of a GGUF file that is there."""
    return path.suffix.lower() == SUFFIX and os.path.isfile(path)


def gguf_at(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one of a folder."""
    if is_gguf(path):
        return path
    inside = sorted(path.glob(f"*{SUFFIX}")) if os.path.isdir(path) else []
    return inside[0] if len(inside) == 1 else None


def read_gguf(path: Path) -> GgufFile:
    """The metadata and the table of tensors of a file; read again only if the file has changed."""
    try:
        found = os.stat(path)
        return _read(path, found.st_size, found.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", CHECK_ACCESS) from error


@functools.lru_cache(maxsize=2)
def _read(path: Path, size: int, changed: int) -> GgufFile:
    if size < 24:
        raise CheckpointError(f"{path} is no GGUF file: it has {size} bytes", _AGAIN)
    with path.open("rb") as file:
        raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Reader(path, raw).read()
    except _Wrong as error:
        raise CheckpointError(f"{path} is no GGUF file that can be read: {error}", error.hint) from None


class _Wrong(Exception):
    def __init__(self, what: str, hint: str = _AGAIN) -> None:
        super().__init__(what)
        self.hint = hint


class _Reader:
    def __init__(self, path: Path, raw: mmap.mmap) -> None:
        self.path, self.raw, self.place = path, raw, 0
        self.strings, self.text = _MOST_STRINGS, _MOST_TEXT  # that may still come

    def read(self) -> GgufFile:
        if self._bytes(4) != b"GGUF":
            raise _Wrong("it does not begin with GGUF")
        version = self._number(_U32)
        if version not in (2, 3):
            raise _Wrong(f"it has version {version}, and versions 2 and 3 in little-endian order are read")
        tensors, pairs = self._number(_U64), self._number(_U64)
        if tensors > _MOST_TENSORS or pairs > _MOST_PAIRS:
            raise _Wrong(f"its header promises {tensors:,} tensors and {pairs:,} values")
        values: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            if key in values:
                raise _Wrong(f"it has {key!r:.80} twice")
            values[key] = self._value(self._number(_U32))
        align = values.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= 2**20 or align & (align - 1):
            raise _Wrong(f"its alignment is {align!r:.40}, no power of two")
        table = [self._tensor() for _ in range(tensors)]
        begin = -(-self.place // align) * align
        return GgufFile(self.path, values, self._placed(table, begin, align), self.raw)

    def _placed(self, table: list[tuple[str, StoredTensor]], begin: int, align: int) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        end, last = begin, ""
        for name, one in sorted(table, key=lambda entry: entry[1].start):
            start = begin + one.start
            if name in found:
                raise _Wrong(f"it has the tensor {name!r:.80} twice")
            if one.start % align or start + one.bytes > len(self.raw):
                raise _Wrong(f"the tensor {name!r:.80} does not lie inside of the file")
            if start < end:
                raise _Wrong(f"the tensors {last!r:.80} and {name!r:.80} overlap")
            found[name] = StoredTensor(one.kind, one.shape, start, one.bytes)
            end, last = start + one.bytes, name
        return found

    def _tensor(self) -> tuple[str, StoredTensor]:
        name, dims = self._string(), self._number(_U32)
        if not 1 <= dims <= 4:
            raise _Wrong(f"the tensor {name!r:.80} has {dims} dimensions")
        shape = tuple(self._number(_U64) for _ in range(dims))[::-1]
        kind, offset = self._number(_U32), self._number(_U64)
        if kind not in KINDS:
            raise _Wrong(
                f"the tensor {name!r:.80} is stored as {_OTHER_KINDS.get(kind, f'type {kind}')}; "
                f"{', '.join(entry[0] for entry in KINDS.values())} can be read",
                "take a file of this model in Q8_0 or F16",
            )
        label, block, size = KINDS[kind]
        if min(shape) < 1 or max(shape) > 2**40 or shape[-1] % block:
            raise _Wrong(f"the tensor {name!r:.80} cannot have the shape {shape}")
        return name, StoredTensor(label, shape, offset, math.prod(shape) // block * size)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            value = self._number(kind)
            # Others wrote a decimal number and meant it: 1e-05, not 9.999999747378752e-06.
            return float(str(np.float32(value))) if kind == _FLOAT else value
        kind, count = self._number(_U32), self._number(_U64)
        if kind == _STRING:
            if count > self.strings:
                raise _Wrong(f"it has more than {_MOST_STRINGS:,} texts")
            self.strings -= count
            return [self._string() for _ in range(count)]
        if kind not in _NUMBERS:
            raise _Wrong(f"it has an array of type {kind}")
        dtype = np.dtype(f"<{_NUMBERS[kind]}")
        start = self._skip(count * dtype.itemsize)
        return np.frombuffer(self.raw, dtype, count, start)

    def _string(self) -> str:
        size = self._number(_U64)
        if size > self.text:
            raise _Wrong(f"its texts have more than {_MOST_TEXT:,} bytes")
        self.text -= size
        try:
            return self._bytes(size).decode("utf-8")
        except UnicodeDecodeError:
            raise _Wrong("a text in it is not UTF-8") from None

    def _number(self, kind: int) -> Any:
        if kind not in _NUMBERS:
            raise _Wrong(f"it has a value of type {kind}")
        form = f"<{_NUMBERS[kind]}"
        return struct.unpack_from(form, self.raw, self._skip(struct.calcsize(form)))[0]

    def _bytes(self, size: int) -> bytes:
        start = self._skip(size)
        return self.raw[start : start + size]

    def _skip(self, size: int) -> int:
        """The place of the next `size` bytes, which are there."""
        start = self.place
        if start + size > len(self.raw):
            raise _Wrong("it ends in the middle")
        self.place += size
        return start
