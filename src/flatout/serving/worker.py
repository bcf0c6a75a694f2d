"""The process that decodes. It reads requests from its standard input and writes events to its standard output.

Every message is a line of JSON. A thread reads requests and turns their prompts into tokens, so a long prompt does not
keep the device waiting; the main thread steps the engine and turns tokens into text, all tokens of an event at once.
A stream's events are joined, at most 20 a second; other texts have one at their beginning and one at their end. The
process ends with its input, so it never outlives the server.
"""

import copy
import dataclasses
import gc
import json
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from flatout.data.chat_template import TemplateRefusal
from flatout.data.library_tokenizers import ModelTokenizer
from flatout.device import out_of_memory
from flatout.errors import UsageError, UserError
from flatout.front.models import LoadedModel, load_model, template_of
from flatout.front.texts import chat_prompt
from flatout.generation.engine import Engine, TextRequest, fitting_rows, no_probabilities
from flatout.generation.pieces import TextPieces
from flatout.generation.sampling import Sampling
from flatout.model.gpt import GPT
from flatout.serving.fields import Refused

EVERY = 0.05  # seconds between two events of a text
_LOOK = 0.002  # seconds between two looks at what was decoded
_AT_ONCE = 4  # texts that a look turns into events at least; few, so that the next step is launched in time


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A request whose prompts are tokens."""

    id: str
    prompts: list[list[int]]
    asked: dict[str, Any]


class Text:
    """One text of a request: tokens in, events out."""

    def __init__(self, id: str, choice: int, request: TextRequest, asked: dict[str, Any], loaded: LoadedModel) -> None:
        self.id, self.choice, self.request = id, choice, request
        self.streams: bool = asked["stream"]
        self.stops: list[str] = asked["stop"]
        # A whole text is read at its end, unless a stop string may end it, or its entries would be many at once.
        self.every = EVERY if self.streams or self.stops or request.logprobs is not None else math.inf
        self.tokenizer, self.pieces = loaded.tokenizer, TextPieces(loaded.tokenizer)
        self.read = 0  # tokens
        self.held = ""  # text that may still become a stop string, or waits for the next event
        self.given = 0  # characters
        self.entries: list[dict[str, Any]] = []  # log-probabilities that wait with it
        self.reason: str | None = None
        self.due = 0.0  # when it is looked at again, unless it ends

    def take(self) -> None:
        """Reads the tokens that are new: all at once, or one by one where it matters which of them a place is in."""
        request = self.request
        tokens = request.made[self.read :]
        if request.logprobs is None and tokens:
            before = copy.copy(self.pieces) if self.stops else self.pieces
            piece = self.pieces.add(*(tokens[:-1] if tokens[-1] in request.stops else tokens))
            if any(stop in self.held + piece for stop in self.stops):
                self.pieces = before
            else:
                self.held, self.read = self.held + piece, len(request.made)
        while self.reason is None and self.read < len(request.made):
            token = request.made[self.read]
            self.read += 1
            if token in request.stops:
                break
            if request.logprobs is not None:
                self.entries.append(self._entry(token))
            self._add(self.pieces.add(token))
        if self.reason is None and request.ended:
            self._add(self.pieces.rest())
            self.reason = self.reason or request.ended

    def _add(self, piece: str) -> None:
        self.held += piece
        if piece and (places := [place for stop in self.stops if (place := self.held.find(stop)) >= 0]):
            self.held, self.reason = self.held[: min(places)], "stop"

    def event(self) -> dict[str, Any] | None:
        """What is new since the last event; None if that is nothing."""
        ready = len(self.held) if self.reason else len(self.held) - self._held_back()
        text, self.held = self.held[:ready], self.held[ready:]
        self.given += len(text)
        whole = self.reason not in (None, "stop")
        count = sum(whole or entry["offset"] < self.given for entry in self.entries)
        entries, self.entries = self.entries[:count], self.entries[count:]
        if not (text or entries or self.reason):
            return None
        event = {"id": self.id, "choice": self.choice, "text": text, "tokens": self.read, "logprobs": entries}
        return {**event, "reason": self.reason}

    def _held_back(self) -> int:
        """Characters at the end that may begin a stop string."""
        sizes = (size for stop in self.stops for size in range(len(stop) - 1, 0, -1) if self.held.endswith(stop[:size]))
        return max(sizes, default=0)

    def _entry(self, token: int) -> dict[str, Any]:
        own, likeliest = self.request.probabilities[self.read - 1]
        top = [[self._shown(id), max(value, -9999.0)] for id, value in likeliest.items()]
        offset = self.given + len(self.held)
        return {"token": self._shown(token), "logprob": max(own, -9999.0), "top": top, "offset": offset}

    def _shown(self, id: int) -> str:
        return self.tokenizer.decode([id]) if id < self.tokenizer.vocab else ""


class Decoder:
    def __init__(self, loaded: LoadedModel, rows: int | None, invariant: bool, send: Callable[..., None]) -> None:
        """`send` gets messages, as many as there are."""
        if loaded.from_python or not isinstance(loaded.model, GPT):
            raise UsageError(
                f"{loaded.origin} is a model from Python, which has no cache to decode with", "serve another"
            )
        self.loaded, self.model, self.send = loaded, loaded.model, send
        self.template = template_of(loaded)
        with out_of_memory():
            self.rows = rows or fitting_rows(loaded.model, loaded.device)
            how = {"penalties": True, "kernels": loaded.kernels, "invariant": invariant, "scope": loaded.scope}
            self.engine = Engine(loaded.model, rows=self.rows, vocab=loaded.tokenizer.vocab, **how)
            if loaded.kernels:
                self.warm_up()
        # a request, the id of one to cancel, or the end of the input
        self.inbox: queue.SimpleQueue[Prepared | str | None] = queue.SimpleQueue()
        self.texts: dict[str, list[Text]] = {}
        self.prompt_tokens = self.tokens = 0
        self.stats: dict[str, int] = {}
        self.stats_at = 0.0

    def warm_up(self) -> None:
        """Compiles and records the passes for every number of rows, before a request waits for one of them."""
        for rows in {min(self.rows, 1 << bit) for bit in range(self.rows.bit_length() + 1)}:
            for _ in range(rows):
                self.engine.add(TextRequest(ids=[0], count=2, sampling=Sampling()))
            while self.engine.busy:
                self.engine.step()

    def describe(self) -> dict[str, Any]:
        folder = self.loaded.origin.resolve()
        name = folder.parents[1].name if folder.parent.name == "checkpoints" else folder.name
        chat = self.template is not None or self.loaded.taught
        return {"model": name, "context": self.engine.room, "rows": self.rows, "chat": chat}

    # --- requests to tokens (the reader's thread) ---------------------------------------------------------------------

    def receive(self, message: dict[str, Any]) -> None:
        id = message["id"]
        if message["do"] == "cancel":
            self.inbox.put(id)
            return
        try:
            prompts = self._prompts(message["work"])
        except Refused as error:
            self.send({"id": id, "refused": [error.message, error.param, error.code]})
            return
        except Exception:  # one prompt must not end the others
            logging.getLogger(__name__).exception("a prompt could not be read")
            self.send({"id": id, "failed": "an error inside the server"})
            return
        self.send({"id": id, "prompt_tokens": sum(map(len, prompts))})
        self.inbox.put(Prepared(id, prompts, message["work"]))

    def _prompts(self, work: dict[str, Any]) -> list[list[int]]:
        messages = work["messages"]
        name = "prompt" if messages is None else "messages"
        try:
            if messages is None:
                prompts = [self._ids(prompt) for prompt in work["prompts"]]
            else:
                prompts = [self.loaded.tokenizer.encode(self._conversation(messages)).tolist()]
        except UserError as error:
            raise Refused(f"{error.message}; {error.hint}", name) from error
        except TemplateRefusal as error:
            raise Refused(f"the chat template refuses the conversation: {error}", name) from error
        vocab = min(self.loaded.tokenizer.vocab, self.model.vocab)
        for ids in prompts:
            if not ids:
                raise Refused("the prompt is empty", name)
            if max(ids) >= vocab:
                raise Refused(f"token id {max(ids)} is not in the model's vocabulary of {vocab:,}", name)
            if len(ids) > self.engine.room:
                found, room = f"{len(ids):,} tokens", f"{self.engine.room:,}"
                message = f"the prompt has {found}, and the model's context is {room}; shorten it"
                raise Refused(message, name, "context_length_exceeded")
        return prompts

    def _conversation(self, messages: list[dict[str, str]]) -> str:
        if self.template is not None:
            return self.template.render(messages, add_generation_prompt=True)
        if not self.loaded.taught:
            raise Refused("the model has no chat template; use /v1/completions", "messages", "no_chat_template")
        return chat_prompt(self.loaded, messages[-1]["content"])

    def _ids(self, prompt: str | list[int]) -> list[int]:
        tokenizer = self.loaded.tokenizer
        if not isinstance(prompt, str):
            return prompt
        encode = tokenizer.encode_prompt if isinstance(tokenizer, ModelTokenizer) else tokenizer.encode
        ids = encode(prompt).tolist()
        return [tokenizer.end_of_text] if not ids and tokenizer.end_of_text is not None else ids

    # --- tokens to text (the main thread) -----------------------------------------------------------------------------

    def run(self) -> None:
        looked = 0.0
        while True:
            while not self.inbox.empty() or not self.engine.busy:
                if (item := self.inbox.get()) is None:
                    return
                self._take(item)
            with out_of_memory():
                self.engine.step()
            if (now := time.monotonic()) >= looked + _LOOK or not self.engine.busy:
                self._look(now, now - looked)
                looked = now

    def _look(self, now: float, passed: float) -> None:
        """Sends what is due. While the engine is busy, what is due at once is spread over several looks."""
        due = [
            text
            for texts in self.texts.values()
            for text in texts
            if text.request.ended or (text.due <= now and len(text.request.made) > text.read)
        ]
        if self.engine.busy:
            due.sort(key=lambda text: text.due)
            del due[_AT_ONCE + int(len(due) * passed / EVERY) :]
        messages = [self._advance(text, now) for text in due]
        messages.append(self._report(now))
        if messages := [message for message in messages if message is not None]:
            self.send(*messages)

    def _take(self, item: Prepared | str) -> None:
        if isinstance(item, str):
            for text in self.texts.pop(item, []):
                self.tokens += len(text.request.made) - text.read
                self.engine.cancel(text.request)
            return
        asked = item.asked
        sampling = Sampling(**asked["sampling"])
        ends: Collection[int] = {*asked["stop_ids"], *(() if asked["ignore_eos"] else self.loaded.stops)}
        self.prompt_tokens += sum(map(len, item.prompts))
        texts = self.texts[item.id] = []
        for ids in item.prompts:
            for number in range(asked["n"]):
                request = TextRequest(
                    ids=ids,
                    count=min(asked["count"] or self.engine.room, self.engine.room),
                    sampling=dataclasses.replace(sampling, seed=sampling.seed + number),
                    stops=ends,
                    slides=False,
                    logprobs=asked["logprobs"],
                )
                texts.append(Text(item.id, len(texts), self.engine.add(request), asked, self.loaded))

    def _advance(self, text: Text, now: float) -> dict[str, Any] | None:
        before = text.read
        text.take()
        self.tokens += text.read - before
        if text.reason is not None and not text.request.ended:
            self.engine.cancel(text.request)
        event = text.event() if text.reason or text.streams or not text.given else None
        text.due = now + (text.every if text.given else EVERY)
        if text.reason is not None:
            self.texts[text.id].remove(text)
            if not self.texts[text.id]:
                del self.texts[text.id]
        return {"id": text.id, "failed": no_probabilities().message} if text.reason == "broken" else event

    def _report(self, now: float) -> dict[str, Any] | None:
        """The numbers for /metrics, when they have changed."""
        if now - self.stats_at < EVERY and self.engine.busy:
            return None
        stats = {
            "running": len(self.engine.live),
            "waiting": len(self.engine.waiting),
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.tokens,
        }
        if stats == self.stats:
            return None
        self.stats, self.stats_at = stats, now
        return {"stats": stats}


def main() -> int:
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not be read as a message
    lock = threading.Lock()

    def send(*messages: dict[str, Any]) -> None:
        lines = "".join(f"{json.dumps(message, allow_nan=False)}\n" for message in messages).encode()
        with lock:
            while lines:
                lines = lines[output.write(lines) :]

    asked = json.loads(sys.stdin.buffer.readline())
    try:
        model = None if asked["model"] is None else Path(asked["model"])
        loaded = load_model(model, **asked["which"])
        decoder = Decoder(loaded, asked["rows"], asked["invariant"], send)
    except UserError as error:
        send({"failed": [error.message, error.hint, error.exit_code]})
        return error.exit_code

    def read() -> None:
        try:
            for line in sys.stdin.buffer:
                decoder.receive(json.loads(line))
        finally:
            decoder.inbox.put(None)

    gc.freeze()  # or else all of torch's objects are visited again and again, for a tenth of a second each time
    sys.setswitchinterval(0.0005)  # the main thread gets on while a prompt is read
    threading.Thread(target=read, daemon=True).start()
    send({"ready": decoder.describe()})
    try:
        decoder.run()
    except UserError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
