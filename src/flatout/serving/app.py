"""Routes, limits and answers of the server, as an ASGI application. No torch here.

Contract: every error is OpenAI's error object. A request holds its place until its answer is written, its client has
gone or its time is over; then its rows are free. Nothing is answered under a foreign host name or to a foreign page.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import importlib.resources
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any, final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flatout.serving.fields import Asked, Refused, read_request
from flatout.serving.link import EngineLink, raise_for

MOST_BODY = 2**21  # bytes
BODY_SECONDS = 30.0
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_PARTS = {
    "/": ("chat.html", "text/html"),
    "/chat.css": ("chat.css", "text/css"),
    "/chat.js": ("chat.js", "text/javascript"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
_STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}


@dataclasses.dataclass
class Histogram:
    name: str
    about: str
    counts: list[int] = dataclasses.field(default_factory=lambda: [0] * len(_BUCKETS))
    count: int = 0
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts = [count + (seconds <= most) for count, most in zip(self.counts, _BUCKETS, strict=True)]
        self.count, self.sum = self.count + 1, self.sum + seconds

    def lines(self) -> list[str]:
        pairs = [*zip(_BUCKETS, self.counts, strict=True), ("+Inf", self.count)]
        return [
            *_heading(self.name, "histogram", self.about),
            *(f'{self.name}_bucket{{le="{most}"}} {count}' for most, count in pairs),
            f"{self.name}_sum {self.sum:.6f}",
            f"{self.name}_count {self.count}",
        ]


def _heading(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


@final
class Service:
    """The model that is served, what is open, and what has been counted."""

    def __init__(self, link: EngineLink, model: Mapping[str, Any], *, queue: int, seconds: float) -> None:
        """`model` is what the link said at its start; `queue` texts may wait, `seconds` are the most for a request."""
        self.link, self.model, self.queue, self.seconds = link, model, queue, seconds
        self.created = int(time.time())
        self.texts = 0  # open
        self.draining = False
        self.codes: Counter[int] = Counter()
        self.cancelled = 0
        self.first = Histogram("flatout_time_to_first_token_seconds", "From a request's arrival to its first text.")
        self.whole = Histogram("flatout_request_seconds", "From a request's arrival to the end of its answer.")

    def check(self, asked: Asked) -> None:
        """Refuses a request that cannot be taken now."""
        if asked.model not in (None, self.model["model"]):
            message = f"there is no model {asked.model[:100]!r} here; this server has {self.model['model']!r}"
            raise Refused(message, "model", "model_not_found", status=404)
        room = self.model["rows"] + self.queue
        if asked.texts > room:
            raise Refused(f"{asked.texts} texts in one request; this server takes {room}", "n")
        if self.texts + asked.texts > room:
            message = f"{self.texts} texts are open, and {room} is the most; try again later"
            raise Refused(message, None, "queue_full", status=429, headers={"Retry-After": "2"})

    def check_open(self) -> None:
        if self.draining:
            message = "the server is shutting down"
            raise Refused(message, None, "shutting_down", status=503, headers={"Connection": "close"})

    def described(self) -> dict[str, Any]:
        about = {"context": self.model["context"], "chat": self.model["chat"]}
        return {"id": self.model["model"], "object": "model", "created": self.created, "owned_by": "flatout", **about}

    def metrics(self) -> str:
        values = [
            ("texts_running", "gauge", "Texts that have a row.", self.link.stats.get("running", 0)),
            ("texts_waiting", "gauge", "Texts that wait for a row.", self.link.stats.get("waiting", 0)),
            ("texts_open", "gauge", "Texts of requests that are not answered yet.", self.texts),
            ("rows", "gauge", "Texts that are decoded together at most.", self.model["rows"]),
            ("queue", "gauge", "Texts that may wait.", self.queue),
            ("prompt_tokens_total", "counter", "Tokens of prompts.", self.link.stats.get("prompt_tokens", 0)),
            ("generated_tokens_total", "counter", "Tokens made.", self.link.stats.get("generated_tokens", 0)),
            ("cancelled_total", "counter", "Requests whose client went away.", self.cancelled),
        ]
        lines = _heading("flatout_requests_total", "counter", "Answers of /v1 by status.")
        lines += [f'flatout_requests_total{{code="{code}"}} {count}' for code, count in sorted(self.codes.items())]
        for name, kind, about, value in values:
            lines += [*_heading(f"flatout_{name}", kind, about), f"flatout_{name} {value}"]
        return "\n".join([*lines, *self.first.lines(), *self.whole.lines()]) + "\n"


# --- answers ----------------------------------------------------------------------------------------------------------


@final
class Completion(Response):
    """The answer to a request for text, whole or as a stream."""

    def __init__(self, service: Service, asked: Asked) -> None:
        super().__init__()
        self.service, self.asked = service, asked
        self.began = time.monotonic()
        self.started = False
        self.prompt_tokens = 0
        self.tokens: Counter[int] = Counter()  # of each text
        self.head = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"chat.completion{'.chunk' if asked.stream else ''}" if asked.chat else "text_completion",
            "created": int(time.time()),
            "model": service.model["model"],
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self.service
        service.check(self.asked)
        id, events = service.link.open(self.asked.work)
        service.texts += self.asked.texts
        work = asyncio.ensure_future(self._write(events, scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, timeout=service.seconds, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return
            await _ended(work)
            if gone.done():
                service.cancelled += 1
                return
            late = f"the request took more than {service.seconds:g} seconds"
            await self._fail(Refused(late, None, "timeout", status=408, headers={"X-Should-Retry": "false"}), send)
        finally:
            service.link.close_job(id)
            service.texts -= self.asked.texts
            service.whole.add(time.monotonic() - self.began)
            await asyncio.gather(_ended(work), _ended(gone))

    async def _write(self, events: asyncio.Queue[dict[str, Any]], scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.prompt_tokens = raise_for(await events.get())["prompt_tokens"]
            if self.asked.stream:
                await self._stream(self._events(events), send)
            else:
                await _as_json(await self._whole(self._events(events)))(scope, receive, send)
        except Refused as error:
            await self._fail(error, send)

    async def _fail(self, error: Refused, send: Send) -> None:
        if not self.started:
            raise error
        await send({"type": "http.response.body", "body": _sse(error.body())})

    async def _events(self, events: asyncio.Queue[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        """Events of all texts until each has ended."""
        left = self.asked.texts
        while left:
            event = raise_for(await events.get())
            if not self.tokens:
                self.service.first.add(time.monotonic() - self.began)
            self.tokens[event["choice"]] = event["tokens"]
            left -= event["reason"] is not None
            yield event

    async def _stream(self, events: AsyncIterator[dict[str, Any]], send: Send) -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in _STREAM.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self.started = True
        seen: set[int] = set()
        async for event in events:
            choice = self._choice(event["choice"], event["text"], event["logprobs"], event["reason"])
            if self.asked.chat:
                role = {} if event["choice"] in seen else {"role": "assistant"}
                choice["delta"] = {**role, "content": choice.pop("message")["content"]}
                seen.add(event["choice"])
            usage = {"usage": self._usage() if self.asked.running_usage else None} if self.asked.usage else {}
            chunk = {**self.head, "choices": [choice], **usage}
            await send({"type": "http.response.body", "body": _sse(chunk), "more_body": True})
        last = _sse({**self.head, "choices": [], "usage": self._usage()}) if self.asked.usage else b""
        await send({"type": "http.response.body", "body": last + b"data: [DONE]\n\n"})

    async def _whole(self, events: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
        texts = [""] * self.asked.texts
        reasons: list[str | None] = [None] * self.asked.texts
        entries: list[list[dict[str, Any]]] = [[] for _ in texts]
        async for event in events:
            place = event["choice"]
            texts[place] += event["text"]
            entries[place] += event["logprobs"]
            reasons[place] = event["reason"]
        parts = zip(texts, entries, reasons, strict=True)
        return {
            **self.head,
            "choices": [self._choice(n, *part) for n, part in enumerate(parts)],
            "usage": self._usage(),
        }

    def _choice(self, index: int, text: str, entries: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self.asked.work["logprobs"] is not None:
            logprobs = _chat_logprobs(entries) if self.asked.chat else _text_logprobs(entries)
        said = (
            {"message": {"role": "assistant", "content": text, "refusal": None}} if self.asked.chat else {"text": text}
        )
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self) -> dict[str, int]:
        made = sum(self.tokens.values())
        total = self.prompt_tokens + made
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": made, "total_tokens": total}


def _chat_logprobs(entries: list[dict[str, Any]]) -> dict[str, Any]:
    def shown(token: str, logprob: float) -> dict[str, Any]:
        # A part of a character has no text of its own.
        return {"token": token, "logprob": logprob, "bytes": None if "\ufffd" in token else list(token.encode())}

    content = [
        {**shown(entry["token"], entry["logprob"]), "top_logprobs": [shown(*pair) for pair in entry["top"]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [dict(reversed(entry["top"])) for entry in entries],  # of tokens with one text, the likelier
        "text_offset": [entry["offset"] for entry in entries],
    }


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, allow_nan=False).encode() + b"\n\n"


def _as_json(value: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(value, allow_nan=False), status, headers, "application/json")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


# --- routes -----------------------------------------------------------------------------------------------------------


def application(service: Service, *, hosts: frozenset[str] | None, key: str) -> ASGIApp:
    """`hosts`: names that the server answers to; None: all. `key`: what /v1 asks for; empty: nothing."""
    page = importlib.resources.files("flatout.serving") / "page"

    async def text(request: Request) -> Response:
        service.check_open()
        return Completion(service, read_request(await _body(request), chat="chat" in request.url.path))

    async def models(request: Request) -> Response:
        return _as_json({"object": "list", "data": [service.described()]})

    async def model(request: Request) -> Response:
        if request.path_params["id"] != service.model["model"]:
            raise Refused("there is no such model here", "model", "model_not_found", status=404)
        return _as_json(service.described())

    async def health(request: Request) -> Response:
        service.check_open()
        return _as_json({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(service.metrics(), media_type="text/plain; version=0.0.4")

    async def part(request: Request) -> Response:
        name, kind = _PARTS[request.url.path]
        return Response((page / name).read_bytes(), media_type=kind)

    routes = [
        Route("/v1/completions", text, methods=["POST"]),
        Route("/v1/chat/completions", text, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{id:path}", model),
        Route("/health", health),
        Route("/metrics", metrics),
        *(Route(path, part) for path in _PARTS),
    ]
    handlers = {Refused: _refuse, HTTPException: _refuse, Exception: _refuse}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), service, hosts, key)


async def _body(request: Request) -> bytes:
    """The body, within its limits. Some more is read of one that is too large, so that the client reads the answer."""
    parts, size = [], 0
    close = {"Connection": "close"}
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async with contextlib.aclosing(request.stream()) as stream:
                async for part in stream:
                    size += len(part)
                    if size <= MOST_BODY:
                        parts.append(part)
                    elif size > 4 * MOST_BODY:
                        break
    except TimeoutError:
        raise Refused(f"the body took more than {BODY_SECONDS:g} seconds", status=408, headers=close) from None
    except ClientDisconnect:
        raise Refused("the client has gone", headers=close) from None
    if size > MOST_BODY:
        raise Refused(f"the body has more than {MOST_BODY:,} bytes", None, "body_too_large", status=413, headers=close)
    return b"".join(parts)


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = Refused(f"{request.method} {request.url.path[:100]}: {error.detail}", status=error.status_code)
    if not isinstance(error, Refused):  # a mistake of ours, whose traceback is printed
        error = Refused("an error inside the server", status=500)
    return _as_json(error.body(), error.status, error.headers)


@final
class Guard:
    """Checks who asks, before anything of the request is read, and puts our headers on every answer."""

    def __init__(self, app: ASGIApp, service: Service, hosts: frozenset[str] | None, key: str) -> None:
        self.app, self.service, self.hosts = app, service, hosts
        self.key = hashlib.sha256(f"Bearer {key}".encode()).digest() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                if scope["path"].startswith("/v1"):
                    self.service.codes[message["status"]] += 1
                extra = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        try:
            self._check(scope)
        except Refused as error:
            await _as_json(error.body(), error.status, error.headers)(scope, receive, answer)
            return
        await self.app(scope, receive, answer)

    def _check(self, scope: Scope) -> None:
        request = Request(scope)
        host = request.headers.getlist("host")
        name = host[0].strip().lower() if len(host) == 1 else ""
        if self.hosts is not None and _without_port(name) not in self.hosts:
            raise Refused(f"this server answers to {', '.join(sorted(self.hosts))} only", status=403)
        origin = request.headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{name}", f"https://{name}"):
            raise Refused("pages of other servers may not ask this one", status=403)
        if self.key is not None and scope["path"].startswith("/v1"):
            given = hashlib.sha256(request.headers.get("authorization", "").encode("latin-1", "replace")).digest()
            if not hmac.compare_digest(given, self.key):
                message = "this server wants `Authorization: Bearer KEY`, with the key that it was started with"
                raise Refused(message, None, "invalid_api_key", status=401, headers={"WWW-Authenticate": "Bearer"})


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isascii() and port.isdigit() else host
