"""`flatout serve`: one text by every door, limits, errors, and how it ends."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import uvicorn
from safetensors.torch import load_file, save_file

import flatout
from flatout.config.load import load_config
from flatout.data.tokenizer import ByteTokenizer
from flatout.generation.engine import fitting_rows
from flatout.generation.pieces import TextPieces
from flatout.model.gpt import GPT
from flatout.serving import app, protocol
from flatout.serving.app import Service, application
from flatout.serving.link import EngineLink
from flatout.serving.worker import Decoder
from tests.called import call
from tests.chat_models import write_chat_model
from tests.conftest import TINY
from tests.end_to_end import chromium
from tests.end_to_end.serving import Server, joined, read_all

ROWS, QUEUE = 4, 40
PROMPT = "What is it"
HI = [{"role": "user", "content": "Hi there"}]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\n"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
# Presses Escape once text has come: from outside it would be too late on a fast machine.
ESCAPES = """
new MutationObserver((changes, observer) => {
  if ((document.querySelector('.busy .text')?.textContent.length ?? 0) <= 3) return;
  observer.disconnect();
  document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}));
}).observe(document.body, {subtree: true, childList: true, characterData: true}) ?? 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model with weights so large that greedy text wanders instead of repeating one token."""
    folder = write_chat_model(tmp_path_factory.mktemp("models") / "chatty")
    generator = torch.Generator().manual_seed(3)
    weights = load_file(folder / "model.safetensors")
    drawn = {name: x + 0.3 * torch.randn(x.shape, generator=generator) for name, x in weights.items()}
    save_file(drawn, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> flatout.LoadedModel:
    return flatout.load_model(folder, device="cpu")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """A chat model whose random weights write whole words, halves of characters and invalid bytes."""
    started = Server(folder, "--rows", str(ROWS), "--queue", str(QUEUE), "--seconds", "60")
    yield started
    code, errors = started.end()
    assert (code, errors) == (0, "stopped\n"), "nothing went wrong that nobody saw"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A run without a template that writes markup, behind a key."""
    place = tmp_path_factory.mktemp("guarded")
    (place / "markup.txt").write_text(HOSTILE * 200)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        words = ["model.context=1024", "train.batch_tokens=1024", "train.steps=100", "optim.learning_rate=1e-2"]
        config = load_config(
            "shakespeare-char", [*TINY, f"data.source={place}/markup.txt", *words, "output.name=markup"]
        )
        for _ in flatout.train(config):
            pass
        started = Server(place / "runs" / "markup", "--drain", "60", key="a-key")
    yield started
    started.end(signal.SIGKILL)


# --- text -------------------------------------------------------------------------------------------------------------


def test_one_text_by_every_door(server: Server, model: flatout.LoadedModel):
    expected = "".join(flatout.generate(model, PROMPT, tokens=40, temperature=0))
    assert server.ask(TEXT, prompt=PROMPT, **GREEDY)["choices"][0]["text"] == expected
    with server.stream(TEXT, prompt=PROMPT, **GREEDY) as events:
        assert joined(events) == expected
    ids = model.tokenizer.encode_prompt(PROMPT).tolist()  # pyright: ignore
    both = server.ask(TEXT, prompt=[ids, ids[:2]], **GREEDY)["choices"]
    assert [choice["index"] for choice in both] == [0, 1]
    assert both[0]["text"] == expected != both[1]["text"]
    said = "".join(flatout.chat(model, HI, tokens=40, temperature=0))
    answer = server.ask(CHAT, messages=HI, **GREEDY)["choices"][0]
    assert answer["message"] == {"role": "assistant", "content": said, "refusal": None}
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]}]
    with server.stream(CHAT, messages=parts, model="chatty", **GREEDY) as events:
        assert joined(events) == said


def test_a_character_comes_whole():
    said = "é€😀漢, and so on"
    pieces, tokenizer = TextPieces(ByteTokenizer()), ByteTokenizer()
    given = [pieces.add(id) for id in tokenizer.encode(said).tolist()]
    assert [piece for piece in given if piece] == list(said)
    broken = [pieces.add(id) for id in [0xE2] * 40]
    assert "".join(broken) + pieces.rest() == "\ufffd" * 40
    assert any(broken), "bytes that are no text are not kept for ever"
    mixed = tokenizer.encode(said).tolist()
    mixed = [*mixed, 0xE2, *mixed[:-1], *[0x9F] * 20, *mixed, 0xF0, 0x9F]
    single = "".join(map(pieces.add, mixed)) + pieces.rest()
    for size in (2, 3, 7, 50):
        parts = [mixed[place : place + size] for place in range(0, len(mixed), size)]
        assert "".join(pieces.add(*part) for part in parts) + pieces.rest() == single, "as many at once as one likes"


def test_any_text_is_a_prompt(server: Server):
    for text in ("", "\0", "\ud800", "😀 \u202e\r\n", "<|im_start|><|im_end|>", "a\u0301" * 20, "\ufeff{{ x }}{% y %}"):
        assert server.ask(TEXT, prompt=text, max_tokens=2)["choices"]
        assert server.ask(CHAT, messages=[{"role": "user", "content": text}], max_tokens=2)["choices"]
    said = [{"role": role, "content": "x"} for role in ("developer", "user", "assistant")]
    assert server.ask(CHAT, messages=said, max_tokens=2)["choices"]


def test_a_seed_gives_its_text_with_and_without_neighbours(server: Server, model: flatout.LoadedModel):
    asked = {
        "prompt": PROMPT,
        "seed": 5,
        "max_tokens": 40,
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
    }
    alone = server.ask(TEXT, **asked)["choices"][0]["text"]
    assert alone == server.ask(TEXT, **asked, model="chatty")["choices"][0]["text"]
    texts: list[str] = []
    threads = [
        threading.Thread(
            target=lambda seed=seed: texts.append(server.ask(TEXT, **asked | {"seed": seed})["choices"][0]["text"])
        )
        for seed in (1, 5, 2, 5, 3, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts.count(alone) == 2
    assert len(set(texts)) == 5
    drawn = server.ask(TEXT, prompt=PROMPT, max_tokens=40)["choices"][0]["text"]
    assert drawn != server.ask(TEXT, prompt=PROMPT, max_tokens=40)["choices"][0]["text"], "no seed, another text"
    again = {"prompt": PROMPT, "seed": 5, "max_tokens": 40, "temperature": 0.9}
    assert server.ask(TEXT, **again)["choices"][0]["text"] == "".join(
        flatout.generate(model, PROMPT, tokens=40, temperature=0.9, seed=5)
    )
    assert server.ask(TEXT, **again, repetition_penalty=3.0)["choices"][0]["text"] != drawn


def test_stop_strings_end_a_text_wherever_tokens_end(server: Server):
    whole = server.ask(TEXT, prompt=PROMPT, **GREEDY)["choices"][0]["text"]
    for first, size in itertools.product((3, 9, 16), (1, 2, 5)):
        stop = [whole[first : first + size], "never there"]
        expected = whole[: whole.index(stop[0])]
        (choice,) = server.ask(TEXT, prompt=PROMPT, stop=stop, **GREEDY)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
        with server.stream(TEXT, prompt=PROMPT, stop=stop, **GREEDY) as events:
            assert joined(events) == expected
    almost = [whole[-1] + "more", whole[5:8] + "\0"]
    assert server.ask(TEXT, prompt=PROMPT, stop=almost, **GREEDY)["choices"][0]["text"] == whole, (
        "held back, then given"
    )


def test_stop_tokens(server: Server, model: flatout.LoadedModel):
    logprobs = server.ask(TEXT, prompt=PROMPT, logprobs=0, **GREEDY)["choices"][0]["logprobs"]
    ids = [id for id in range(model.tokenizer.vocab) if model.tokenizer.decode([id]) == logprobs["tokens"][6]]
    answer = server.ask(TEXT, prompt=PROMPT, stop_token_ids=ids, **GREEDY)
    at = logprobs["tokens"].index(logprobs["tokens"][6])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == at + 1


def test_several_texts_with_probabilities(server: Server, model: flatout.LoadedModel):
    asked = {"messages": HI, "max_completion_tokens": 12, "seed": 7}
    answer = server.ask(CHAT, **asked, n=3, logprobs=True, top_logprobs=4)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [server.ask(CHAT, **asked | {"seed": 7 + n})["choices"][0]["message"]["content"] for n in range(3)]
    assert answer["usage"]["completion_tokens"] == 36
    ids = model.tokenizer.encode(flatout.chat_prompt(model, HI[0]["content"])).tolist()
    expected = model(ids)[-1].log_softmax(-1)
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert len(content) == 12
        top = content[0]["top_logprobs"]
        assert [one["logprob"] for one in top] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-4)
        assert top[0]["bytes"] is None or bytes(top[0]["bytes"]).decode() == top[0]["token"]
    plain = server.ask(TEXT, prompt=PROMPT, logprobs=2, **GREEDY)["choices"][0]
    assert all(max(top, key=lambda token: top[token]) == own for own, top in zip(
        plain["logprobs"]["tokens"], plain["logprobs"]["top_logprobs"], strict=True
    ))  # fmt: skip
    offsets = plain["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    tokens = [" ", *plain["logprobs"]["tokens"]]
    for before, token, offset in zip(tokens, tokens[1:], offsets, strict=False):
        assert plain["text"].startswith(token, offset) or "\ufffd" in before + token, (
            "whole characters have their place"
        )
    cut = server.ask(TEXT, prompt=PROMPT, logprobs=2, stop=plain["text"][6:9], **GREEDY)["choices"][0]
    assert max(cut["logprobs"]["text_offset"]) < len(cut["text"])
    with server.stream(TEXT, prompt=PROMPT, logprobs=2, **GREEDY) as events:
        streamed = [choice["logprobs"] for event in events for choice in event["choices"]]
    for name, values in plain["logprobs"].items():
        found = [value for part in streamed for value in part[name]]
        right = found == pytest.approx(values, abs=1e-4) if name == "token_logprobs" else len(found) == len(values)
        assert right, "rounding apart: the beginning of the prompt was not read again"


def test_usage(server: Server, model: flatout.LoadedModel):
    prompt = len(model.tokenizer.encode_prompt(PROMPT))  # pyright: ignore
    expected = {"prompt_tokens": 2 * prompt, "completion_tokens": 40, "total_tokens": 2 * prompt + 40}
    asked = {"prompt": [PROMPT, PROMPT], "max_tokens": 10, "n": 2, "ignore_eos": True}
    assert server.ask(TEXT, **asked)["usage"] == expected
    with server.stream(TEXT, **asked, stream_options={"include_usage": True}) as events:
        *before, last = list(events)
    assert (last["choices"], last["usage"]) == ([], expected)
    assert all(event["usage"] is None for event in before)
    assert {choice["index"] for event in before for choice in event["choices"]} == {0, 1, 2, 3}
    with server.stream(TEXT, **asked) as events:
        assert not any("usage" in event for event in events)


def test_a_full_context_ends_a_text(server: Server, model: flatout.LoadedModel):
    ids = [5] * 250
    answer = server.ask(TEXT, prompt=ids, max_tokens=100, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 256 - 250 + 1
    status, _, raw = server.request("POST", TEXT, {"prompt": [5] * 257})
    error = json.loads(raw)["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "257 tokens" in error["message"]
    assert "256" in error["message"]


# --- errors -----------------------------------------------------------------------------------------------------------

RIGHT: dict[str, dict[str, Any]] = {TEXT: {"prompt": "a"}, CHAT: {"messages": HI}}
BAD_VALUES: dict[str, list[Any]] = {
    "n": [0, -1, 129, 1.5, "2", True, [], 10**30],
    "max_tokens": [0, -5, 2.5, "x", False],
    "max_completion_tokens": [0],
    "temperature": [-0.1, 101, "hot", True, [0], float("nan"), float("inf")],
    "top_p": [-0.1, 1.1, "x", {}],
    "top_k": [-2, 0.5, "x"],
    "min_p": [-1, 2, "x"],
    "repetition_penalty": [0, -1, "x"],
    "seed": [1.5, "x", 2**63, -(2**64)],
    "stop": ["", [""], [1], ["a"] * 5, {}, 3, ["x" * 201]],
    "stop_token_ids": [["a"], [-1], 3, [True]],
    "stream": ["yes", 1],
    "stream_options": [[], {"other": True}, {"include_usage": 1}],
    "ignore_eos": ["yes"],
    "model": [3, "gpt-4", ["chatty"]],
    "logprobs": [-1, 21, "x", 1.5],
    "top_logprobs": [2, 21, "x"],  # without logprobs
    "tools": [[{"type": "function"}]],
    "functions": [[{}]],
    "tool_choice": ["required", {"type": "function"}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema"}, "json"],
    "logit_bias": [{"5": 100}],
    "frequency_penalty": [0.5],
    "presence_penalty": [-1],
    "echo": [True],
    "suffix": ["x"],
    "best_of": [2],
    "reasoning_effort": ["low"],
    "nonsense": [1],
}
BAD_PROMPTS: list[Any] = [
    [],
    [[]],
    [1, "a"],
    [[1], [2, "x"]],
    3,
    {},
    [True],
    [-1],
    [10**9],
    ["a", 3],
    ["a"] * 129,
    [[10**30]],
]
BAD_MESSAGES: list[Any] = [
    *([], "Hi", {}, [3], [{}], [{"role": "user"}], [{"role": "tool", "content": "x"}], [{"role": 3, "content": "x"}]),
    [{"role": "user", "content": 3}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
    [{"role": "user", "content": "x", "other": 1}],
]


def bad_requests() -> Iterator[tuple[str, Any]]:
    """Paths and bodies that are wrong."""
    for path, right in RIGHT.items():
        for name, values in BAD_VALUES.items():
            for value in values:
                yield path, {**right, name: value}
        for raw in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "a"', b"1" * 10_000):
            yield path, raw
    yield from ((TEXT, {"prompt": prompt}) for prompt in [*BAD_PROMPTS, None])
    yield from ((CHAT, {"messages": messages}) for messages in [*BAD_MESSAGES, None])


def check_error(status: int, raw: bytes, what: object) -> None:
    assert 400 <= status < 500, (what, status, raw)
    error = json.loads(raw)["error"]
    assert error.keys() == {"message", "type", "param", "code"}, what
    assert error["message"], what


def test_wrong_requests_are_refused_in_words(server: Server):
    with contextlib.closing(server.connect()) as connection:  # one for all: an error does not end it
        for path, body in bad_requests():
            if path == TEXT and isinstance(body, dict) and body.keys() & {"max_completion_tokens", "top_logprobs"}:
                assert body.keys() - {"prompt"} <= {"max_completion_tokens", "top_logprobs"}
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, raw)
            answer = connection.getresponse()
            check_error(answer.status, answer.read(), (path, body))
    assert server.metrics()["flatout_texts_open"] == 0


def test_fields_that_change_nothing_are_ignored(server: Server):
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "tools": [], "logit_bias": {}, "n": None}
    harmless |= {
        "response_format": {"type": "text"},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "tool_choice": "none",
    }
    assert server.ask(CHAT, messages=HI, **GREEDY, **harmless)["choices"]


def test_other_paths_and_methods(server: Server):
    for method, path, expected in (
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/other", 404),
        ("PUT", TEXT, 405),
        ("GET", TEXT, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/chat.js/..%2f..%2fapp.py", 404),
    ):
        status, _, raw = server.request(method, path)
        assert status == expected
        check_error(status, raw, path)
    status, _, raw = server.request("GET", "/v1/models")
    (model,) = json.loads(raw)["data"]
    assert (model["id"], model["context"], model["chat"]) == ("chatty", 256, True)
    assert json.loads(server.request("GET", "/v1/models/chatty")[2]) == model
    assert server.request("GET", "/health")[0] == 200


def test_foreign_names_and_foreign_pages_are_refused(server: Server):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost:1:2"):
        status, _, raw = server.request("GET", "/v1/models", headers={"Host": host})
        check_error(status, raw, host)
    for host in ("localhost", "LOCALHOST:1", f"127.0.0.1:{server.port}", "[::1]:3"):
        assert server.request("GET", "/health", headers={"Host": host})[0] == 200
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        status, headers, raw = server.request("POST", TEXT, RIGHT[TEXT], {"Origin": origin})
        check_error(status, raw, origin)
        assert not any("access-control" in name for name in headers), "no CORS"
    own = {"Origin": f"http://127.0.0.1:{server.port}"}
    assert server.request("POST", TEXT, RIGHT[TEXT], own)[0] == 200
    assert server.request("OPTIONS", TEXT)[0] == 405


def test_a_body_that_is_too_large(server: Server):
    status, headers, raw = server.request("POST", TEXT, {"prompt": "x" * 2_200_000})
    assert (status, headers["connection"]) == (413, "close")
    check_error(status, raw, "large")


def test_broken_http(server: Server):
    for sent in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"):
        head, _, body = server.raw(sent).partition(b"\r\n\r\n")
        check_error(int(head.split()[1]), body, sent)
    long = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000
    assert server.raw(long).startswith(b"HTTP/1.1 400")
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    assert b" 400 " in server.raw(chunked).partition(b"\r\n")[0]


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_client_that_goes_frees_its_rows(server: Server):
    for stream in (True, False):
        before = server.metrics()
        body = json.dumps({"prompt": "a", "n": ROWS, "max_tokens": 250, "ignore_eos": True, "stream": stream}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(head.encode() + body)
            server.wait("flatout_texts_running", ROWS)
        server.wait("flatout_texts_running", 0)
        server.wait("flatout_texts_open", 0)
        after = server.metrics()
        assert after["flatout_cancelled_total"] == before["flatout_cancelled_total"] + 1
        assert after["flatout_generated_tokens_total"] - before["flatout_generated_tokens_total"] < ROWS * 200


def test_a_full_queue_refuses(server: Server):
    asked = {"prompt": "a", "n": ROWS + QUEUE, "max_tokens": 200, "ignore_eos": True}
    with server.stream(TEXT, **asked) as events:
        next(events)
        server.wait("flatout_texts_waiting", QUEUE)
        status, headers, raw = server.request("POST", TEXT, RIGHT[TEXT])
        check_error(status, raw, "queue")
        assert (status, json.loads(raw)["error"]["code"]) == (429, "queue_full")
        assert int(headers["retry-after"]) > 0
    server.wait("flatout_texts_open", 0)
    status, _, raw = server.request("POST", TEXT, {"prompt": "a", "n": ROWS + QUEUE + 1})
    assert status == 400, "that would never fit"


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, Service]]:
    """The port of the HTTP side alone, with short times and no model behind it."""
    for module, name in ((protocol, "HEAD_SECONDS"), (app, "BODY_SECONDS")):
        monkeypatch.setattr(module, name, 0.3)
    monkeypatch.setattr(EngineLink, "_send", lambda link, message: None)
    model = {"model": "m", "context": 8, "rows": 1, "chat": False}
    service = Service(EngineLink(), model, queue=1, seconds=0.3)
    made: uvicorn.Server = protocol.server_of(application(service, hosts=frozenset(["localhost"]), key=""), [].append)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: made.run([listener]))
    thread.start()
    yield listener.getsockname()[1], service
    made.should_exit = True
    thread.join()


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n"


def test_slow_clients_are_closed(front: tuple[int, Service]):
    """Nothing at all, a byte at a time, half a body."""
    port, _ = front
    for sent, answer in ((b"", b""), (b"GET / HTTP", b""), (HEAD + b'{"prom', b" 408 ")):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            for place in range(0, len(sent), 40):
                connection.sendall(sent[place : place + 40])
            first = read_all(connection).partition(b"\r\n")[0]
            assert answer in first
            assert bool(answer) == bool(first)
    with socket.create_connection(("127.0.0.1", port), timeout=0.05) as connection:
        for _ in range(600):  # a byte now and then does not help
            connection.sendall(b"G")
            with contextlib.suppress(TimeoutError):
                assert connection.recv(1) == b""
                return
    raise AssertionError("still open after 30 s")


def test_a_request_that_takes_too_long(front: tuple[int, Service]):
    port, service = front
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(HEAD + b'{"prompt": "a"}')
        assert b" 408 " in connection.recv(1000).partition(b"\r\n")[0]
    assert service.texts == 0
    assert not service.link.jobs


def test_rows_are_as_many_as_fit(model: flatout.LoadedModel, monkeypatch: pytest.MonkeyPatch):
    assert isinstance(model.model, GPT)
    row = 2 * 2 * 2 * 256 * 8 * 4  # layers, keys and values, groups, positions, head size, bytes
    for free, rows in ((0, 1), (row, 1), (4 * 3 * row, 3), (2**40, 8)):
        monkeypatch.setattr("flatout.generation.engine.host_memory", lambda free=free: (max(free, 1), None))
        assert fitting_rows(model.model, model.device) == rows


def test_a_warm_up_leaves_the_engine_ready(model: flatout.LoadedModel):
    sent: list[dict[str, Any]] = []
    decoder = Decoder(model, 3, False, sent.append)
    decoder.warm_up()
    assert not decoder.engine.busy
    assert decoder.describe() == {"model": "chatty", "context": 256, "rows": 3, "chat": True}
    assert not sent
    decoder.engine.close()


# --- the process ------------------------------------------------------------------------------------------------------


def test_without_its_packages_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flatout.serving.server.find_spec", lambda name: None)
    outcome = call(["serve", str(folder)])
    assert outcome.code == 2
    assert "flatout[serve]" in outcome.errors


def test_other_machines_need_a_key(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FLATOUT_API_KEY", raising=False)
    for host in ("0.0.0.0", "::", "192.168.1.1", "example.org"):
        outcome = call(["serve", str(folder), "--host", host])
        assert outcome.code == 2
        assert [line.partition(":")[0] for line in outcome.errors.splitlines()] == ["error", "hint"]
        assert "FLATOUT_API_KEY" in outcome.errors


def test_mistakes_are_told_as_elsewhere(tmp_path: Path, server: Server):
    (tmp_path / "empty").mkdir()
    for words, code in (
        (["serve", "nowhere"], 2),
        (["serve", str(tmp_path / "empty"), "--port", "0"], 2),
        (["serve", str(tmp_path), "--port", str(server.port)], 5),
    ):
        outcome = call(words)
        assert outcome.code == code or outcome.code == 3, outcome
        assert [line.partition(":")[0] for line in outcome.errors.splitlines()] == ["error", "hint"]


def test_the_server_needs_no_torch():
    modules = "flatout.serving.server, flatout.serving.protocol, flatout.serving.app"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"


def test_the_key_is_wanted(guarded: Server):
    for wrong in ("Bearer a-ke", "Bearer a-key2", "a-key", "", "Basic a-key", "Bearer \xe9"):
        for path in ("/v1/models", "/v1/nothing"):
            status, headers, raw = guarded.request("GET", path, headers={"Authorization": wrong})
            check_error(status, raw, wrong)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert guarded.request("GET", "/v1/models")[0] == 200
    for path in ("/", "/health", "/metrics"):
        assert guarded.request("GET", path, headers={"Authorization": ""})[0] == 200


def test_the_page_in_a_browser(guarded: Server, tmp_path: Path):
    """It asks for the key, shows markup as text, stops, tries again, and fits a phone."""
    program = chromium.find()
    if program is None:
        pytest.skip("no Chromium on this machine")
    browser = chromium.Browser(program, tmp_path)
    try:
        browser.open(guarded.url, width=390, height=800)
        browser.wait("!document.getElementById('key-field').hidden")
        browser.run("document.getElementById('key').focus()")
        browser.send("Input.insertText", text="a-key")
        browser.key("Enter", text="\r")
        browser.run("document.getElementById('key').blur()")
        browser.wait("document.getElementById('model').textContent === 'markup'")
        browser.events.clear()
        browser.run(
            "document.getElementById('max_tokens').value = 80; document.getElementById('temperature').value = 0"
        )
        browser.run("document.getElementById('text').focus()")
        browser.send("Input.insertText", text=HOSTILE.strip())
        browser.key("Enter", text="\r")
        done = "document.querySelectorAll('article').length === 2 && !document.querySelector('.busy')"
        browser.wait(done)
        said = "document.querySelector('article.model .text').textContent"
        asked = {"prompt": HOSTILE.strip(), "max_tokens": 80, "temperature": 0}
        assert browser.run(said) == guarded.ask(TEXT, **asked)["choices"][0]["text"]
        assert "<img src=x onerror=alert(1)>" in browser.run(said)
        assert browser.run("document.querySelectorAll('main img, main script').length") == 0
        assert "tokens/s" in browser.run("document.querySelector('.facts').textContent")
        assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        browser.run("document.getElementById('max_tokens').value = 900")
        browser.run(ESCAPES)
        browser.run("document.querySelector('.facts button').click()")
        browser.wait(done)
        assert browser.run("document.querySelector('.facts').textContent").endswith("stoppedRetry")
        guarded.wait("flatout_texts_open", 0)
        browser.run("document.getElementById('new').click()")
        assert browser.run("document.querySelectorAll('article').length") == 0
        assert browser.complaints() == []
        assert all(url.startswith(guarded.url) for url in browser.requests())
    finally:
        browser.close()


def test_a_model_without_a_template_does_not_chat(guarded: Server):
    status, _, raw = guarded.request("POST", CHAT, {"messages": HI})
    check_error(status, raw, "chat")
    assert "/v1/completions" in json.loads(raw)["error"]["message"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the process by /proc")
def test_the_end_of_the_engine_ends_the_server(guarded: Server):
    with guarded.stream(TEXT, prompt="<", max_tokens=900, ignore_eos=True) as events:
        next(events)
        os.kill(guarded.pids()[1], signal.SIGKILL)
        seen: list[dict[str, Any]] = []
        with pytest.raises(AssertionError, match=r"without \[DONE\]"):
            seen.extend(events)
        assert "has ended" in seen[-1]["error"]["message"]
    assert guarded.process.wait(60) == 5
    errors = guarded.end()[1]
    assert [line.partition(":")[0] for line in errors.splitlines()] == ["error", "hint"]


# --- campaigns --------------------------------------------------------------------------------------------------------


def resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def processor_seconds() -> tuple[float, float]:
    """Time that the hypervisor gave to others, and all time, of all cores."""
    values = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return values[7], sum(values)


def campaign(server: Server, clients: int, seconds: float) -> tuple[list[float], list[list[int]]]:
    """Times to the first token of clients that ask again and again, and the memory of both processes over time."""
    firsts: list[float] = []
    memory: list[list[int]] = []
    until = time.monotonic() + seconds

    async def ask(client: openai.AsyncOpenAI, number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < until:
            long = chance.randint(1, 60)
            began = time.monotonic()
            messages: Any = [{"role": "user", "content": "Hi there " * chance.randint(1, 8)}]
            stream = await client.chat.completions.create(
                model="chatty", messages=messages, max_tokens=long, seed=number, stream=True
            )
            reasons: list[str | None] = []
            async for chunk in stream:
                if not reasons:
                    firsts.append(time.monotonic() - began)
                reasons += [choice.finish_reason for choice in chunk.choices]
            assert reasons[-1] in ("stop", "length")

    async def watch() -> None:
        while time.monotonic() < until:
            memory.append([resident(pid) for pid in server.pids()])
            await asyncio.sleep(seconds / 20)

    async def everybody() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}v1", api_key="none", max_retries=0, timeout=300) as client:
            await asyncio.gather(watch(), *(ask(client, number) for number in range(clients)))

    asyncio.run(everybody())
    return firsts, memory


def test_many_clients_of_the_openai_package(server: Server):
    firsts, memory = campaign(server, clients=20, seconds=3)
    assert len(firsts) > 20
    assert all(after - before < 2**25 for before, after in zip(memory[0], memory[-1], strict=True))
    server.wait("flatout_texts_open", 0)


@pytest.mark.slow
def test_two_hundred_clients_for_five_minutes(folder: Path):
    server = Server(folder, "--rows", "16", "--queue", "400")
    before = processor_seconds()
    try:
        firsts, memory = campaign(server, clients=200, seconds=300)
    finally:
        ended = server.end()
    stolen, whole = (after - earlier for after, earlier in zip(processor_seconds(), before, strict=True))
    firsts = firsts[200:]  # at first all come at once
    middle, late = statistics.median(firsts), statistics.quantiles(firsts, n=100)[98]
    print(f"{len(firsts)} requests, first token after {middle:.2f} s, 99%: {late:.2f} s")
    print(f"memory {memory[4]}, {memory[-1]}")
    assert all(after < 1.05 * before + 2**23 for before, after in zip(memory[4], memory[-1], strict=True))
    assert ended == (0, "stopped\n")
    if stolen > 0.1 * whole:
        pytest.skip(f"other machines on this host took {stolen / whole:.0%} of the time, so delays say nothing")
    assert late <= 3 * middle


@pytest.mark.slow
def test_two_thousand_malformed_requests(server: Server):
    """None hangs, none crashes the server, all are the client's mistake."""
    chance = random.Random(4)
    wrong = list(bad_requests())
    for number in range(2000):
        path, body = chance.choice(wrong)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = number % 4
        if kind == 1:  # cut off: no JSON any more
            raw = json.dumps(RIGHT[path]).encode()[: chance.randint(0, 10)]
        elif kind == 2:  # other bytes
            raw = bytes(chance.choices(range(256), k=chance.randint(1, 300)))
        elif kind == 3:  # a head that is none
            head = bytes(chance.choices([*range(33, 127), 32, 13, 10, 0, 255], k=chance.randint(1, 200)))
            answer = server.raw(head.replace(b"\n", b"") + b"\r\n\r\n" + raw, seconds=30)
            assert answer == b"" or 400 <= int(answer.split()[1]) < 500, (head, answer)
            continue
        status, _, answer = server.request("POST", path, raw)
        check_error(status, answer, raw)
    assert server.metrics()["flatout_texts_open"] == 0
    assert server.ask(TEXT, prompt=PROMPT, **GREEDY)["choices"]


def test_a_signal_lets_live_requests_finish(server: Server):
    asked = {"prompt": PROMPT, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    whole = server.ask(TEXT, **asked)["choices"][0]["text"]
    with server.stream(TEXT, **asked) as events:
        first = joined(iter([next(events)]))
        server.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + 30
        while (answer := server.request("POST", TEXT, asked | {"max_tokens": 1}))[0] != 503:
            assert time.monotonic() < until
        assert json.loads(answer[2])["error"]["code"] == "shutting_down"
        assert first + joined(events) == whole
    assert server.end() == (0, "stopped\n")
