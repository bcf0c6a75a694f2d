"""Inputs of every format, and ways to damage them and files on disk, for the campaigns in tests/end_to_end."""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import shutil
from collections.abc import Callable
from pathlib import Path

TEXT_START = "=== document"
SUFFIXES = {
    "text": ".txt", "jsonl": ".jsonl", "json": ".json", "csv": ".csv", "tsv": ".tsv", "parquet": ".parquet",
    "warc": ".warc", "wet": ".wet", "smiles": ".smi", "tokens": ".bin",
}  # fmt: skip
COMPRESSIONS = ("", ".gz", ".zst", ".xz", ".bz2")
DAMAGES = ("cut", "flip", "insert", "zeros", "empty", "noise", "remove", "none")


def texts_for(form: str, choose: random.Random, count: int) -> list[str]:
    if form == "smiles":
        return ["".join(choose.choices("CNOcno()=1", k=choose.randrange(5, 40))) + f"[{n}]" for n in range(count)]
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    made = [" ".join(choose.choices(words, k=choose.randrange(20, 120))) + f" {number}." for number in range(count)]
    return [f"{TEXT_START} {number}\n{text}\n" for number, text in enumerate(made)] if form == "text" else made


def build(form: str, texts: list[str]) -> bytes:
    return _BUILDERS[form](texts)


def compress(raw: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(raw, 6, mtime=0)
    if suffix == ".xz":
        return lzma.compress(raw, preset=0)
    if suffix == ".bz2":
        return bz2.compress(raw, 1)
    if suffix == ".zst":
        import zstandard

        return zstandard.ZstdCompressor(write_checksum=True).compress(raw)
    return raw


def damage(raw: bytes, how: str, choose: random.Random) -> bytes:
    place = choose.randrange(len(raw))
    if how == "cut":
        return raw[:place]
    if how == "flip":
        changed = bytearray(raw)
        for _ in range(choose.randrange(1, 9)):
            changed[choose.randrange(len(raw))] ^= 1 << choose.randrange(8)
        return bytes(changed)
    if how == "insert":
        return raw[:place] + choose.randbytes(choose.randrange(1, 200)) + raw[place:]
    if how == "zeros":
        return raw[:place] + bytes(min(200, len(raw) - place)) + raw[place + 200 :]
    if how == "remove":
        return raw[:place] + raw[place + choose.randrange(1, 300) :]
    if how == "noise":
        return choose.randbytes(2000)
    return b"" if how == "empty" else raw


DISK_DAMAGES = ("flip", "cut", "zeros", "delete")


def damage_on_disk(path: Path, how: str, choose: random.Random) -> None:
    """One damage of a file: a bit, its end, a stretch of other bytes, or all of it. It always changes something.

    A folder can only be deleted.
    """
    if path.is_dir():
        shutil.rmtree(path)
        return
    raw = bytearray(path.read_bytes())
    if how == "delete" or not raw:
        path.unlink()
        return
    place = choose.randrange(len(raw))
    end = min(len(raw), place + choose.randrange(1, 500))
    if how == "flip":
        raw[place] ^= 1 << choose.randrange(8)
    elif how == "zeros":
        raw[place:end] = bytes(end - place) if any(raw[place:end]) else b"\xff" * (end - place)
    else:
        del raw[place:]
    path.write_bytes(raw)


def damage_folder(folder: Path, choose: random.Random) -> str:
    """Damages one file of a folder, as disks and interrupted copies do; returns which and how."""
    path = choose.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    how = choose.choice(("flip", *DISK_DAMAGES))
    damage_on_disk(path, how, choose)
    return f"{path.name} {how}"


def _jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def _json(texts: list[str]) -> bytes:
    return json.dumps([{"text": text} for text in texts]).encode()


def _table(delimiter: str) -> Callable[[list[str]], bytes]:
    def build_table(texts: list[str]) -> bytes:
        out = io.StringIO()
        writer = csv.writer(out, delimiter=delimiter, lineterminator="\r\n")
        writer.writerow(["id", "text"])
        writer.writerows([number, text] for number, text in enumerate(texts))
        return out.getvalue().encode()

    return build_table


def _parquet(texts: list[str]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, out, row_group_size=10, write_page_checksum=True)
    return out.getvalue()


def _record(kind: str, content: bytes, more: str) -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:0>\r\n{more}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content + b"\r\n\r\n"


def _warc(texts: list[str]) -> bytes:
    records = [_record("warcinfo", b"software: test\r\n", "Content-Type: application/warc-fields\r\n")]
    for number, text in enumerate(texts):
        page = f"<html><body><article><h1>Page</h1><p>{text}</p></article></body></html>".encode()
        answer = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(page)}\r\n\r\n".encode() + page
        more = f"WARC-Target-URI: http://a.example/{number}\r\nContent-Type: application/http; msgtype=response\r\n"
        records.append(_record("response", answer, more))
    return b"".join(records)


def _wet(texts: list[str]) -> bytes:
    more = "WARC-Target-URI: http://a.example/\r\nContent-Type: text/plain\r\n"
    return b"".join(_record("conversion", text.encode(), more) for text in texts)


def _tokens(texts: list[str]) -> bytes:
    import numpy as np

    from flatout.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer("gpt2")
    return b"".join(np.append(tokenizer.encode(text), 50256).astype("<u2").tobytes() for text in texts)


_BUILDERS: dict[str, Callable[[list[str]], bytes]] = {
    "text": lambda texts: "".join(texts).encode(),
    "jsonl": _jsonl,
    "json": _json,
    "csv": _table(","),
    "tsv": _table("\t"),
    "parquet": _parquet,
    "warc": _warc,
    "wet": _wet,
    "smiles": lambda texts: "".join(f"{text}\n" for text in texts).encode(),
    "tokens": _tokens,
}
