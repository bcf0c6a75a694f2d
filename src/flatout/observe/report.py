"""Runs as one HTML page, and the server that shows it in the browser while runs go on.

Idea: the page is our own template, style and script, and one JSON text with the values of `report_data`. It loads no
other file. The script makes every element from that text with textContent alone.

Contract: text of a run never becomes markup or code. The JSON has no character that could end its element; a
Content-Security-Policy allows only the script and the style with the hashes in it. A file is written whole or not at
all, and never over a file that is no report. The server listens on 127.0.0.1 alone and answers GET and HEAD of the
page and its data, asked for under the name localhost or 127.0.0.1: a foreign page could make another name mean this
machine (DNS rebinding) and read along. No path in a request is used to open a file.

Traps: the hashes are of the exact bytes between the tags, so nothing may be changed there after hashing. Reading a
long run takes time that training needs more: data is read again only when a file has changed, by one thread at a time,
and for at most a tenth of the time.
"""

import base64
import dataclasses
import hashlib
import html
import http.server
import importlib.resources
import json
import os
import re
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from flatout.errors import DataError, ResourceError, UsageError, UserError
from flatout.files import check_replaceable, disk_errors, write_whole
from flatout.observe.human import printable
from flatout.observe.report_data import report_data
from flatout.observe.runs import at_work
from flatout.observe.sinks import RunHistory, read_history

MARK = "<!doctype html>\n<!-- flatout report -->\n"
MOST_RUNS = 24
_SCRIPTS = ("axes.js", "chart.js", "sections.js", "page.js")  # the last one starts it all
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def read_runs(folders: Sequence[str | Path]) -> list[RunHistory]:
    """The runs in these folders."""
    return [read_history(folder) for folder in chosen_folders(folders)]


def chosen_folders(folders: Sequence[str | Path]) -> list[Path]:
    """These folders, each once, in the order in which they are named."""
    if not folders:
        raise UsageError("no run was named", "name a run folder, such as runs/NAME")
    chosen: dict[Path, Path] = {}
    for folder in folders:
        if "\0" in str(folder):
            raise UsageError("a folder's name cannot hold a zero byte", "name a run folder, such as runs/NAME")
        chosen.setdefault(Path(folder).resolve(), Path(folder))
    if len(chosen) > MOST_RUNS:
        raise UsageError(f"{len(chosen)} runs are too many for one page", f"name at most {MOST_RUNS}")
    return list(chosen.values())


def write_report(
    folders: Sequence[str | Path], path: str | Path, *, overwrite: bool = False, price: float | None = None
) -> int:
    """Writes the page of these runs to `path` and returns its size in bytes.

    With `overwrite`, also in the place of a file that is no report. `price` is what an hour of the machine costs.
    """
    path, histories = Path(path), read_runs(folders)
    check_target(path, overwrite=overwrite)
    content = page_of(report_data(histories, price=price))
    with disk_errors(f"the report {printable(str(path))}", safe=""):
        write_whole(path, content)
    return len(content)


def check_target(path: Path, *, overwrite: bool = False) -> None:
    """Refuses a name at which no report can be put."""
    check_named(path, (".html", ".htm"), "an HTML file", "report.html", is_report, overwrite=overwrite)


def check_named(
    path: Path, endings: Sequence[str], kind: str, example: str, is_ours: Callable[[Path], bool], *, overwrite: bool
) -> None:
    """Refuses a name at which no file of this kind can be put."""
    shown = printable(str(path))
    if path.suffix.lower() not in endings or "\0" in str(path) or path.is_dir():
        raise UsageError(f"{shown!r} is not the name of {kind}", f"for example --out {example}")
    if not path.parent.is_dir():
        raise ResourceError(f"could not write {shown}: there is no such folder", "create it first, or name another one")
    check_replaceable(path, is_ours, overwrite=overwrite, way="name another file with --out")


def is_report(path: Path) -> bool:
    """Whether `write_report` wrote this file."""
    with path.open("rb") as file:
        return file.read(len(MARK)) == MARK.encode()


def page_of(data: dict[str, Any], *, live: bool = False) -> bytes:
    """The whole page, as bytes. A live one asks the server it came from for news, and no other."""
    style = _part("report.css")
    script = "\n".join(['"use strict";', *(_part(name) for name in _SCRIPTS)])
    values = {
        "policy": policy(script, style, live=live),
        "title": html.escape(data["title"][:200]),
        "style": style,
        "script": script,
        "data": json_for_page(data),
    }
    # One pass over the template: what is put in is not looked at again, so a run's text cannot name a place.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _part("page.html"))
    return (MARK + page).encode("utf-8", "replace")


def json_for_page(data: Any) -> str:
    """JSON that can stand inside a script element: it holds no character with a meaning in HTML, nor beyond ASCII."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return re.sub("[<>&\u2028\u2029]", lambda match: _ESCAPES[match[0]], text)


def policy(script: str, style: str, *, live: bool) -> str:
    """What the browser may do with the page: run our script, apply our style, and if live ask its own server."""
    rules = [
        "default-src 'none'",
        f"script-src '{_hash(script)}'",
        f"style-src '{_hash(style)}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        *(["connect-src 'self'"] if live else []),
    ]
    return "; ".join(rules)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _part(name: str) -> str:
    part = importlib.resources.files("flatout.observe") / "page" / name
    return part.read_text(encoding="utf-8").replace("\r\n", "\n")


FIRST_PORT, TRIED_PORTS = 8484, 20
ADDRESS = "127.0.0.1"
_NAMES = ("localhost", "127.0.0.1")
_READING_SHARE = 0.1  # of the time may go into reading what was written
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


def serve(
    folders: Sequence[str | Path],
    *,
    port: int | None = None,
    ready: Callable[[str], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> None:
    """Serves the report of these runs until Ctrl-C, or until `stop()` is true; `ready` gets the address.

    Without a port it takes a free one, the first from 8484 on.
    """
    source = FollowedRuns(chosen_folders(folders))
    source.current()  # mistakes in the folders answer before anything listens
    with open_server(source, port) as server:
        server.stop = stop
        if ready is not None:
            ready(server.url)
        server.serve_forever(poll_interval=0.25)


def open_server(source: "FollowedRuns", port: int | None = None) -> "ReportServer":
    """A server that listens already, and answers once `serve_forever` is called."""
    ports = [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + TRIED_PORTS), 0]
    for number in ports:
        try:
            return ReportServer(source, number)
        except (OSError, OverflowError) as error:
            if port is not None:
                reason = getattr(error, "strerror", None) or str(error)
                raise ResourceError(
                    f"could not listen on port {port}: {reason}",
                    "name another one with --port, or leave it out for a free one",
                ) from error
    raise ResourceError("no port is free on this machine", "close a program that listens, then try again")


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The data of the runs up to now; `version` changes with it."""

    version: str
    data: dict[str, Any]


class FollowedRuns:
    """The report's data, read again when a run has written something; for several threads."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self.lock = threading.Lock()
        self.snapshot: Snapshot | None = None
        self.marks: list[Any] = []
        self.rest_until = 0.0

    def current(self) -> Snapshot:
        with self.lock:
            if self.snapshot is not None and time.monotonic() < self.rest_until:
                return self.snapshot
            marks = [_mark(folder) for folder in self.folders]
            if self.snapshot is None or marks != self.marks:
                self.snapshot = self._read(marks)
            return self.snapshot

    def _read(self, marks: list[Any]) -> Snapshot:
        began = time.monotonic()
        try:
            data = report_data([_read_begun(folder) for folder in self.folders], live=True)
        except UserError:
            if self.snapshot is None:
                raise
            return self.snapshot  # a folder that was moved away: what is known of it stays on the page
        finally:
            ended = time.monotonic()
            self.rest_until = ended + (ended - began) * (1 / _READING_SHARE - 1)
        self.marks = marks
        return self.snapshot if self.snapshot and self.snapshot.data == data else Snapshot(f"{time.time_ns():x}", data)


def _read_begun(folder: Path) -> RunHistory:
    """The run in a folder; an empty history if it was just started and has written no record."""
    try:
        return read_history(folder)
    except DataError:
        if not (folder / "run.lock").is_file():
            raise
        return RunHistory(folder, ({},), *[()] * 9)


def _mark(folder: Path) -> tuple[int, int, int, bool] | None:
    """Changes when the run writes something, and when its process ends without an end record."""
    try:
        status = (folder / "metrics.jsonl").stat()
        return status.st_ino, status.st_size, status.st_mtime_ns, at_work(folder)
    except OSError:
        return None


class ReportServer(http.server.ThreadingHTTPServer):
    """Listens on this machine's own address; each request has a thread of its own."""

    request_queue_size = 64  # of connections not yet taken up: with the usual 5, some slow ones keep others waiting
    # So that a port is free again at once after Ctrl-C; on Windows the same word would let two programs share it.
    allow_reuse_address = os.name == "posix"

    def __init__(self, source: FollowedRuns, port: int) -> None:
        self.source = source
        self.stop: Callable[[], bool] | None = None
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def server_bind(self) -> None:
        # Not HTTPServer's own, which asks the network for this machine's name and may wait long for an answer.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def service_actions(self) -> None:
        if self.stop is not None and self.stop():
            threading.Thread(target=self.shutdown).start()  # it waits for the loop that this is called from

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a browser that hangs up in the middle; any other error is our mistake and keeps its traceback."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # one answer per connection: nothing is left open when the server ends
    server_version, sys_version = "flatout", ""
    timeout = 10.0  # seconds without a byte from the other side, after which the connection is closed
    server: ReportServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        if not self._is_for_us():
            return
        parts = urlsplit(self.path)
        if parts.path in ("/", "/index.html"):
            snapshot = self.server.source.current()
            page = page_of({**snapshot.data, "version": snapshot.version}, live=True)
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page)
        elif parts.path == "/data.json":
            snapshot = self.server.source.current()
            if parse_qs(parts.query).get("version") == [snapshot.version]:
                self._answer(HTTPStatus.NOT_MODIFIED, None, b"")
                return
            body = json_for_page({"version": snapshot.version, "data": snapshot.data})
            self._answer(HTTPStatus.OK, "application/json", body.encode("ascii"))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here; the report is at /")

    do_HEAD = do_GET

    def _is_for_us(self) -> bool:
        host = self.headers.get_all("Host") or []
        name, colon, port = (host[0] if len(host) == 1 else "").strip().lower().partition(":")
        if name in _NAMES and (not colon or (port.isascii() and port.isdigit())):
            return True
        self._refuse(HTTPStatus.FORBIDDEN, f"this server answers to {' and '.join(_NAMES)} only")
        return False

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _answer(self, status: HTTPStatus, kind: str | None, body: bytes) -> None:
        self.send_response(status)
        if kind is not None:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The page asks every two seconds: a line for each request would hide all others."""
