"""A stand-in for the Hub: what huggingface_hub asks for to send a folder, on this machine."""

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class StandIn(ThreadingHTTPServer):
    """Keeps the files of one commit by name. With `refuses`, nothing is taken."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refuses = refuses
        self.created: dict[str, Any] = {}
        self.blobs: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self, home: Path) -> dict[str, str]:
        """Settings of the library for a process that talks to this server."""
        own = {"HF_ENDPOINT": self.address, "HF_TOKEN": "hf_none", "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        return own | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


class _Handler(BaseHTTPRequestHandler):
    server: StandIn  # pyright: ignore[reportIncompatibleVariableOverride]

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, value = (403, {"error": "forbidden"}) if self._is_refused() else (200, self._value(body))
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST = do_PUT = do_HEAD = _answer

    def _is_refused(self) -> bool:
        return self.server.refuses and "/commit/" in self.path

    def _value(self, body: bytes) -> Any:
        here = self.server.address
        if self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            return {"url": f"{here}/{self.server.created['organization']}/{self.server.created['name']}"}
        if "/preupload/" in self.path:
            names = [entry["path"] for entry in json.loads(body)["files"]]
            large = (".safetensors", ".gguf")
            return {"files": [{"path": name, "uploadMode": "lfs" if name.endswith(large) else "regular",
                               "shouldIgnore": False} for name in names]}  # fmt: skip
        if self.path.endswith("/objects/batch"):
            return {"transfer": "basic", "objects": [
                {**entry, "actions": {"upload": {"href": f"{here}/blob/{entry['oid']}"}}}
                for entry in json.loads(body)["objects"]]}  # fmt: skip
        if self.path.startswith("/blob/"):
            self.server.blobs[hashlib.sha256(body).hexdigest()] = body
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[line["value"]["path"]] = self.server.blobs[line["value"]["oid"]]
            return {"success": True, "commitOid": "a" * 40, "commitUrl": f"{here}/org/name/commit/{'a' * 40}"}
        return {"id": "org/name", "sha": "0" * 40, "siblings": [], "tags": [], "private": True}

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def stand_in(**how: Any) -> Iterator[StandIn]:
    server = StandIn(**how)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
