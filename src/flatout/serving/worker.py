"""The process that decodes. It reads requests from its standard input and writes events to its standard output.

Every message is a line of JSON. A thread reads requests and turns their prompts into tokens, so a long prompt does not
keep the device waiting; the main thread steps the engine and turns tokens into text. A text's events are joined, at
most 20 a second. The process ends with its input, so it never outlives the server.
"""

import dataclasses
import json
import logging
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
_LOOK = 0.02  # seconds between two looks at what was decoded, so that the next step is launched in time


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A request whose prompts are tokens."""

    id: str
    prompts: list[list[int]]
    asked: dict[str, Any]


class Text:
    """One text of a request: tokens in, events out."""

    def __init__(self, id: str, choice: int, request: TextRequest, stops: list[str], loaded: LoadedModel) -> None:
        self.id, self.choice, self.request, self.stops = id, choice, request, stops
        self.tokenizer, self.pieces = loaded.tokenizer, TextPieces(loaded.tokenizer)
        self.read = 0  # tokens
        self.held = ""  # text that may still become a stop string, or waits for the next event
        self.given = 0  # characters
        self.entries: list[dict[str, Any]] = []  # log-probabilities that wait with it
        self.reason: str | None = None
        self.sent_at = 0.0

    def take(self) -> None:
        """Reads the tokens that are new."""
        request = self.request
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
    def __init__(
        self, loaded: LoadedModel, rows: int | None, invariant: bool, send: Callable[[dict[str, Any]], None]
    ) -> None:
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
            self._report()
            while not self.inbox.empty() or not self.engine.busy:
                if (item := self.inbox.get()) is None:
                    return
                self._take(item)
            with out_of_memory():
                self.engine.step()
            now = time.monotonic()
            if now < looked + _LOOK and self.engine.busy:
                continue
            looked = now
            for texts in list(self.texts.values()):
                for text in texts:
                    self._advance(text, now)
                if all(text.reason for text in texts):
                    self._forget(texts[0].id)

    def _take(self, item: Prepared | str) -> None:
        if isinstance(item, str):
            for text in self.texts.get(item, []):
                self.engine.cancel(text.request)
            self._forget(item)
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
                texts.append(Text(item.id, len(texts), self.engine.add(request), asked["stop"], self.loaded))

    def _advance(self, text: Text, now: float) -> None:
        if text.reason is not None:
            return
        before = text.read
        text.take()
        self.tokens += text.read - before
        if text.reason is not None and not text.request.ended:
            self.engine.cancel(text.request)
        if text.reason == "broken":
            self.send({"id": text.id, "failed": no_probabilities().message})
        elif (text.reason or now - text.sent_at >= EVERY) and (event := text.event()):
            text.sent_at = now
            self.send(event)

    def _forget(self, id: str) -> None:
        self.texts.pop(id, None)

    def _report(self) -> None:
        """The numbers for /metrics, when they have changed."""
        stats = {
            "running": len(self.engine.live),
            "waiting": len(self.engine.waiting),
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.tokens,
        }
        now = time.monotonic()
        if stats != self.stats and (now - self.stats_at >= EVERY or not self.engine.busy):
            self.stats, self.stats_at = stats, now
            self.send({"stats": stats})


def main() -> int:
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not be read as a message
    lock = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        line = json.dumps(message, allow_nan=False).encode() + b"\n"
        with lock:
            while line:
                line = line[output.write(line) :]

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
