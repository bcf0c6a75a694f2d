"""TensorBoard's event files, written by hand: no package is needed to write them, only to look at them.

A file is a row of frames: length (8 bytes), its checksum, the message, its checksum. A message is a protobuf `Event`;
of it only a few fields are used, so they are put together here:

    Event    1 wall_time double, 2 step varint, 3 file_version string, 5 summary, 7 session_log
    Summary  1 value*: 1 tag, 2 simple_value float, 8 tensor, 9 metadata
    Tensor   1 dtype (7 is string), 2 shape (empty: one string), 8 string_val;   Metadata  1 plugin_data: 1 plugin_name

Contract: the folder belongs to us. Each start of the run adds a file; a resumed one first says at which step it goes
on, and TensorBoard then forgets what it has from that step on. Text comes as a code block, which TensorBoard escapes: a
sample cannot bring a link or a picture of its own into the page.
"""

import os
import socket
import struct
import time
from pathlib import Path
from typing import final

from flatout.observe.track.values import code_block, values_of
from flatout.records import Record, RunInfo

FLUSH_SECONDS = 1.0
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_STRING = 7  # DT_STRING
_START = 1  # SessionLog.START


@final
class TensorBoard:
    """Writes a run's records below `folder`/tensorboard."""

    def __init__(self, folder: Path, info: RunInfo) -> None:
        place = folder / "tensorboard"
        place.mkdir(parents=True, exist_ok=True)
        # The name orders files by their start; two starts within one second still get two files.
        moment = time.time()
        name = f"events.out.tfevents.{moment:017.6f}.{socket.gethostname()}.{os.getpid()}.flatout"
        self._file = (place / name).open("xb")
        self._flushed = time.monotonic()
        self._told_odd: set[str] = set()
        self._write(_text_field(3, "brain.Event:2"), 0)
        # What lies behind a later start is forgotten. TensorBoard's own reader wants to have seen a first one for that;
        # its faster server, which not every machine has, does not.
        self._write(_field(7, _varint_field(1, _START)), info.start_step + 1)

    def write(self, record: Record) -> None:
        values = values_of(record)
        parts = [_scalar(tag, value) for tag, value in values.scalars.items()]
        parts += [_text(tag, text) for tag, text in values.texts.items()]
        for note in values.odd_notes(self._told_odd):
            parts.append(_text("notices", f"{note}; such values are left out of the curve"))
        if parts:
            self._write(_field(5, b"".join(_field(1, part) for part in parts)), values.step)
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()

    def _write(self, content: bytes, step: int) -> None:
        message = _key(1, _FIXED64) + struct.pack("<d", time.time()) + _varint_field(2, step) + content
        length = struct.pack("<Q", len(message))
        self._file.write(length + _checksum(length) + message + _checksum(message))


def _scalar(tag: str, value: float) -> bytes:
    single = max(min(value, 3.4e38), -3.4e38)  # larger ones would become infinite
    return _text_field(1, tag) + _key(2, _FIXED32) + struct.pack("<f", single)


def _text(tag: str, text: str) -> bytes:
    tensor = _varint_field(1, _STRING) + _field(2, b"") + _text_field(8, code_block(text))
    metadata = _field(1, _text_field(1, "text"))
    return _text_field(1, tag) + _field(8, tensor) + _field(9, metadata)


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _varint_field(number: int, value: int) -> bytes:
    return _key(number, _VARINT) + _varint(value)


def _field(number: int, content: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(content)) + content


def _text_field(number: int, text: str) -> bytes:
    return _field(number, text.encode("utf-8", "replace"))


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _checksum(content: bytes) -> bytes:
    """CRC-32C, rotated and shifted as these files want it."""
    value = 0xFFFFFFFF
    for byte in content:
        value = _TABLE[(value ^ byte) & 255] ^ value >> 8
    value ^= 0xFFFFFFFF
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


_TABLE = list(range(256))
for _ in range(8):
    _TABLE = [value >> 1 ^ (0x82F63B78 if value & 1 else 0) for value in _TABLE]
