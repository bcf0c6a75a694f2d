"""A server for tests: `flatout serve` as a process, and requests to it without any package."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"


class Server:
    """A running `flatout serve`."""

    def __init__(
        self,
        model: Path,
        *options: str,
        key: str = "",
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = (sys.executable, "-m", "flatout"),
    ) -> None:
        words = [*command, "serve", str(model), "--port", "0", "--device", "cpu", *options]
        path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "FLATOUT_API_KEY": key, **(env or {})}
        self.key, self.errors = key, None
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        found = re.search(r"serving at (http://\S+:(\d+)/)", line)
        assert found is not None, self.process.communicate()[1].decode()
        self.url, self.port = found[1], int(found[2])

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Its exit code, and what it wrote to stderr."""
        if self.errors is None:
            if self.process.poll() is None:
                self.process.send_signal(number)
            self.errors = self.process.communicate(timeout=120)[1].decode()
        return self.process.returncode, self.errors

    def pids(self) -> list[int]:
        """Of the server and of the process that decodes."""
        pid = self.process.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def connect(self, seconds: float = 120.0) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        with contextlib.closing(self.connect()) as connection:
            raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
            connection.request(method, path, raw, {"Content-Type": "application/json", **key, **(headers or {})})
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read()

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer to a request that is right."""
        status, _, raw = self.request("POST", path, body)
        assert status == 200, raw
        return json.loads(raw)

    @contextlib.contextmanager
    def stream(self, path: str, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        with contextlib.closing(self.connect()) as connection:
            key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
            raw = json.dumps({**body, "stream": True})
            connection.request("POST", path, raw, {"Content-Type": "application/json", **key})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            yield _events(answer)

    def metrics(self) -> dict[str, float]:
        text = self.request("GET", "/metrics")[2].decode()
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def wait(self, name: str, value: float, seconds: float = 60.0) -> None:
        """Until a number of /metrics is this one."""
        until = time.monotonic() + seconds
        while (found := self.metrics()[name]) != value:
            assert time.monotonic() < until, f"{name} is {found}"
            time.sleep(0.02)

    def raw(self, sent: bytes, seconds: float = 60.0) -> bytes:
        """What comes back for these bytes until the connection is closed or silent."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            connection.sendall(sent)
            return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    parts: list[bytes] = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(2**16):
            parts.append(part)
    return b"".join(parts)


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        if line.strip() == b"data: [DONE]":
            assert not answer.read().strip()
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise AssertionError("the stream ends without [DONE]")


def joined(events: Iterator[dict[str, Any]]) -> str:
    """The text of a stream with one text."""
    parts = [choice for event in events for choice in event["choices"]]
    return "".join(part["delta"].get("content") or "" if "delta" in part else part["text"] for part in parts)
