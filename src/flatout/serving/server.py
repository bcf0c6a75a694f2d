"""`flatout serve`: the listening socket, the HTTP server, its signals, and the process that decodes. No torch here."""

import asyncio
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flatout.errors import ResourceError, UsageError
from flatout.serving.link import EngineLink

KEY = "FLATOUT_API_KEY"
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def serve(
    model: str | Path | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    rows: int | None = None,
    batch_invariant: bool = False,
    queue: int = 100,
    seconds: float = 600.0,
    drain: float = 30.0,
    device: str = "auto",
    best: bool = True,
    base: str | None = None,
    weights: str = "auto",
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serves a model by an OpenAI-compatible interface, with a chat page, until SIGINT or SIGTERM.

    `model`, `device`, `best`, `base` and `weights` are as for `load_model`. `rows` texts are decoded together, by
    default as many as fit; `queue` more may wait. `seconds` is the most for one request, `drain` the time that live
    ones have to finish in when the server ends. Port 0 is any free one; `ready` gets the address. `batch_invariant`
    makes a text the same to the bit whatever runs beside it, and every step as slow as one of all rows.

    A `host` beyond this machine needs an API key in the environment variable FLATOUT_API_KEY.
    """
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        message = f"serving needs the package {missing[0]}, which is not installed"
        raise UsageError(message, "pip install 'flatout[serve]'")
    key = os.environ.get(KEY, "")
    if not key and not _is_loopback(host):
        message = f"--host {host} lets other machines in, and no API key is set"
        raise UsageError(message, f"set {KEY} to a key that clients must send, or leave --host out")
    with _listening(host, port) as listener:
        which = {"device": device, "best": best, "base": base, "weights": weights}
        asked = {"model": model and str(model), "which": which, "rows": rows, "invariant": batch_invariant}
        how = {"queue": queue, "seconds": seconds, "drain": drain, "key": key}
        asyncio.run(_serve(listener, host, asked, ready, **how))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = "name another one with --port, or 0 for any free one; --host is an address of this machine"
        raise ResourceError(f"could not listen on {host} port {port}: {reason}", hint) from error


async def _serve(
    listener: socket.socket,
    host: str,
    asked: dict[str, Any],
    ready: Callable[[str], None] | None,
    *,
    queue: int,
    seconds: float,
    drain: float,
    key: str,
) -> None:
    from flatout.serving.app import Service, application
    from flatout.serving.protocol import server_of

    link = EngineLink()
    try:
        service = Service(link, await link.start(asked), queue=queue, seconds=seconds)
        shown = f"[{host}]" if ":" in host else host
        everywhere = host in ("0.0.0.0", "::")
        hosts = None if everywhere else frozenset([*_LOOPBACK, shown.lower()])
        signals: list[int] = []
        server = server_of(application(service, hosts=hosts, key=key), signals.append)
        serving = asyncio.create_task(server.serve([listener]))
        while not (server.started or serving.done()):
            await asyncio.sleep(0.01)
        if ready is not None:
            ready(f"http://{shown}:{listener.getsockname()[1]}/")
        while not (signals or link.ended.is_set() or serving.done()):
            await asyncio.sleep(0.05)
        service.draining = True
        until = time.monotonic() + drain
        while service.texts and len(signals) < 2 and time.monotonic() < until and not link.ended.is_set():
            await asyncio.sleep(0.05)
        link.fail_all("the server is shutting down")
        server.should_exit = True
        await serving
        if link.ended.is_set():
            raise link.why_ended()
    finally:
        await link.close()
