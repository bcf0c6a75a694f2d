"""uvicorn, with limits that it does not have: on the time of a head, on clients that do not read, on connections.

Its own way of ending is replaced too: a signal only tells the caller, who lets live requests finish first.
"""

import asyncio
import json
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any, final

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from flatout.serving.fields import Refused

HEAD_SECONDS = 10.0  # from the first byte of a request to the end of its head; also for the first byte
KEEP_SECONDS = 30  # of a connection without a request
STALLED_SECONDS = 30.0  # of a client that reads nothing
MOST_HEAD = 2**15  # bytes
MOST_CONNECTIONS = 900  # most systems allow 1,024 open files


@final
class _Protocol(H11Protocol):
    _waiting: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # asyncio does it for sockets whose protocol is named, which an inherited listener's is not
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._waiting, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        waits = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if not waits and self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        elif waits and self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def send_400_response(self, msg: str) -> None:
        """As uvicorn's, with an error object for a body; only closes the connection where an answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(Refused(msg).body()).encode()
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()


@final
class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_signal: Callable[[int], None]) -> None:
        super().__init__(config)
        self.on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.on_signal(sig)


def server_of(app: ASGIApp, on_signal: Callable[[int], None]) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_SECONDS,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=MOST_HEAD,
    )
    return _Server(config, on_signal)
