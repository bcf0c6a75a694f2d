"""The report's server: for this machine alone, two paths, two methods, and news only when there is some."""

import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.cli import dispatch
from flatout.errors import DataError, ResourceError, UsageError
from flatout.observe.report import ADDRESS, FollowedRuns, ReportServer, open_server, serve
from flatout.observe.sinks import read_history
from flatout.records import record_to_json
from tests.made_runs import finished_run, info_of, sign_lock, step_of, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [info_of(tmp_path), step_of(1), step_of(2)])


@pytest.fixture
def server(folder: Path) -> Iterator[ReportServer]:
    with open_server(FollowedRuns([folder]), None) as opened:
        thread = threading.Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


def ask(
    server: ReportServer, path: str, *, method: str = "GET", host: str | None = "localhost"
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(ADDRESS, server.server_port, timeout=600)
    connection.putrequest(method, path, skip_host=True)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def add_step(folder: Path, step: int) -> None:
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(record_to_json(step_of(step)) + "\n")


def test_the_page_and_its_data(server: ReportServer):
    status, headers, page = ask(server, "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert b"connect-src 'self'" in page
    status, headers, body = ask(server, "/data.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    news = json.loads(body)
    assert news["data"]["live"] is True
    assert f'"version":"{news["version"]}"'.encode() in page


def test_nothing_new_is_answered_in_a_word(server: ReportServer, folder: Path):
    version = json.loads(ask(server, "/data.json")[2])["version"]
    assert ask(server, f"/data.json?version={version}")[::2] == (304, b"")
    add_step(folder, 3)
    server.source.rest_until = 0.0
    status, _, body = ask(server, f"/data.json?version={version}")
    assert status == 200
    news = json.loads(body)
    assert news["version"] != version
    assert news["data"]["runs"][0]["curves"]["loss"]["s"] == [1, 2, 3]


def test_head_has_the_length_and_no_body(server: ReportServer):
    status, headers, body = ask(server, "/", method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) == len(ask(server, "/")[2])


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example:8484",
        "0.0.0.0",
        "",
        None,
        "localhost:x",
        "a@localhost",
    ],
)
def test_another_name_is_refused(server: ReportServer, host: str | None):
    for path in ("/", "/data.json"):
        status, _, body = ask(server, path, host=host)
        assert status == 403
        assert b"run" not in body


def test_two_names_are_refused(server: ReportServer):
    with socket.create_connection((ADDRESS, server.server_port), timeout=600) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.0 403")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "LOCALHOST:8484", "127.0.0.1:1"])
def test_our_own_names_are_answered(server: ReportServer, host: str):
    assert ask(server, "/data.json", host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "QUERY"])
def test_other_methods_are_refused(server: ReportServer, method: str):
    assert ask(server, "/", method=method)[0] == 501


@pytest.mark.parametrize(
    "path", ["/metrics.jsonl", "/../run/metrics.jsonl", "/%2e%2e/", "//etc/passwd", "/.", "/data.json/", "/favicon.ico"]
)
def test_there_are_no_other_files(server: ReportServer, path: str):
    status, _, body = ask(server, path)
    assert status == 404
    assert b"passwd" not in body


def test_it_listens_on_this_machine_only(server: ReportServer):
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/"


def test_bytes_that_are_no_request_do_no_harm(server: ReportServer):
    chance = random.Random(5)
    pieces = [
        b"GET / HTTP/1.1",
        b"\r\n",
        b"Host: localhost",
        b"\x00\xff",
        b"A" * 70_000,
        b"GET",
        b" / ",
        b"HTTP/9.9",
        b":",
        b"\n",
    ]
    for _ in range(60):
        content = b"".join(chance.choice(pieces) for _ in range(chance.randint(1, 8))) + b"\r\n\r\n"
        with socket.create_connection((ADDRESS, server.server_port), timeout=600) as connection:
            try:
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                answer = b""
                while part := connection.recv(65536):
                    answer += part
            except OSError:  # it hung up before all was said
                continue
        assert not answer.startswith(b"HTTP/1.0 50") or answer.startswith(b"HTTP/1.0 505")
    assert ask(server, "/data.json")[0] == 200


def test_a_client_that_stays_silent_is_cut_off(server: ReportServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flatout.observe.report._Handler.timeout", 0.2)
    with socket.create_connection((ADDRESS, server.server_port), timeout=600) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\nA: ")
        assert connection.recv(1000) == b""


def test_a_slow_client_does_not_block_another(server: ReportServer):
    slow = [socket.create_connection((ADDRESS, server.server_port), timeout=600) for _ in range(30)]
    for connection in slow:
        connection.sendall(b"GET / HT")
    assert ask(server, "/data.json")[0] == 200
    for connection in slow:
        connection.close()


def test_a_run_that_is_moved_away_stays_on_the_page(server: ReportServer, folder: Path):
    before = ask(server, "/data.json")[2]
    shutil.move(folder, folder.with_name("elsewhere"))
    server.source.rest_until = 0.0
    assert ask(server, "/data.json")[2] == before


def test_a_run_that_has_said_nothing_yet_is_waited_for(tmp_path: Path):
    sign_lock(tmp_path, os.getpid(), socket.gethostname())
    source = FollowedRuns([tmp_path])
    assert source.current().data["runs"][0]["state"]["kind"] == "running"
    write_run(tmp_path, [info_of(tmp_path), step_of(1)])
    source.rest_until = 0.0
    assert source.current().data["runs"][0]["curves"]["loss"]["s"] == [1]


def test_data_is_read_again_only_when_something_was_written(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from flatout.observe import report as report_server

    reads: list[Any] = []
    monkeypatch.setattr(report_server, "read_history", lambda folder: reads.append(1) or read_history(folder))
    source = FollowedRuns([folder])
    first = source.current()
    for _ in range(5):
        source.rest_until = 0.0
        assert source.current() is first
    add_step(folder, 3)
    assert source.current() is first or len(reads) == 2  # it may still rest from the first reading
    source.rest_until = 0.0
    assert source.current() is not first
    assert len(reads) == 2


def test_reading_rests_in_proportion_to_what_it_took(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from flatout.observe import report as report_server

    now = [100.0]

    def read(folder: Path) -> Any:
        now[0] += 2.0
        return read_history(folder)

    monkeypatch.setattr(report_server, "read_history", read)
    monkeypatch.setattr(report_server, "time", SimpleNamespace(monotonic=lambda: now[0], time_ns=time.time_ns))
    source = FollowedRuns([folder])
    first = source.current()
    add_step(folder, 3)
    now[0] += 2.0
    assert source.current() is first, "it rests for longer than it took"
    now[0] += 18.0
    assert source.current() is not first


def test_a_port_that_is_taken(server: ReportServer, folder: Path):
    with pytest.raises(ResourceError, match=f"port {server.server_port}"):
        open_server(FollowedRuns([folder]), server.server_port)
    with open_server(FollowedRuns([folder]), None) as other:  # without a port, the next free one
        assert other.server_port != server.server_port


def test_serving_ends_when_asked(folder: Path):
    told: list[str] = []
    serve([folder], ready=told.append, stop=lambda: bool(told))
    assert told[0].startswith("http://127.0.0.1:")


def test_mistakes_answer_before_anything_listens(tmp_path: Path):
    with pytest.raises(DataError):
        serve([tmp_path / "none"], ready=lambda url: pytest.fail(url))
    with pytest.raises(UsageError, match="port"):
        dispatch(["report", "--serve", str(tmp_path), "--port", "99999"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_verb_cleanly(tmp_path: Path, number: signal.Signals):
    folder = finished_run(tmp_path / "run", steps=20, every=10)
    code = f"import sys; from flatout.cli import main; sys.exit(main(['report', '--serve', {str(folder)!r}]))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "http://127.0.0.1:" in line
    process.send_signal(number)
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (0, "stopped\n")
