"""Text of many requests at once: rows of a cache, one pass for all live rows, and results one step late.

Every live request has a row; live rows come first. A step gives each of them one token. On CUDA the whole step is one
recorded graph, from the last token to the next, one for every power of two of rows. The host does not wait for a
token: it reads those of a step while the next one runs, so a request that ends has one token more computed than it
gets.

Contract: a request's text depends on its prompt and its sampling only, in fp32 not on the requests beside it. With
temperature 0 it is that of `uncached_tokens`. When the context is full, a request goes on from its second half
(`slides`), or ends. Of a prompt longer than the context, the last `context` tokens are used. The global random state
is not used, and the model's mode is put back by `close`.

A row keeps the tokens of the request that had it. A prompt that begins with them, such as a chat's next turn, reads
only what is new.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Generator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.device import Device, cpu_threads
from flatout.errors import CheckpointError
from flatout.generation.sampling import Rules, Sampling, choose
from flatout.host import host_memory
from flatout.model.cache import Cache, LayerCache, swap_rows
from flatout.model.gpt import GPT
from flatout.model.operations import product_type
from flatout.model.protocol import LanguageModel

_SHARE = {"cuda": 0.6}  # of free memory for the cache
_MOST_ROWS = {"cuda": 64}
MOST_LOGPROBS = 20
MOST_PROMPT_TOKENS = 16_384  # of a pass over several prompts
_FEW_TOKENS = 4096  # a pass over them takes a GPU no longer than the host needs to launch it
_WORTH_A_PASS = 1024  # tokens that are known already, of a prompt that could be read with others
_EVEN = 64  # prompts are filled up to a multiple of this on a GPU
_PASS_STEPS = 2  # steps that every live row waits for a pass over prompts, at least
SMALL = 10**7  # parameters; below it, threads wait for each other longer than they compute
LISTED = 10**8  # parameters times tokens of a prompt; up to it, its calls are kept: they take longer than computing


@dataclasses.dataclass(eq=False, kw_only=True)
class TextRequest:
    """A prompt, what to do with it, and what has come of it."""

    ids: Sequence[int]
    count: int  # tokens at most
    sampling: Sampling
    stops: Collection[int] = ()
    slides: bool = True  # goes on when the context is full
    logprobs: int | None = None  # of the token and of this many likeliest ones
    made: list[int] = dataclasses.field(default_factory=list)
    # of each token: its own, and those of the likeliest
    probabilities: list[tuple[float, dict[int, float]]] = dataclasses.field(default_factory=list)
    ended: str | None = None  # stop, length, cancelled, broken
    sent: int = 0  # tokens that were asked of the device


@dataclasses.dataclass(frozen=True)
class _Result:
    """Tokens of one step on their way to the host."""

    found: list[Tensor]  # tokens; and their log-probabilities, the likeliest ones' and the ids of those
    requests: list[TextRequest]
    done: torch.cuda.Event | None  # None where they are there


@dataclasses.dataclass(eq=False)
class _Row:
    """A live request in a row of the cache."""

    request: TextRequest
    start: int  # place of the row's first token in the request's text
    filled: int  # positions


class Engine:
    def __init__(
        self,
        model: GPT,
        *,
        rows: int = 1,
        room: int | None = None,
        vocab: int | None = None,
        penalties: bool = False,
        kernels: bool = False,
        invariant: bool = False,
        scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """`room`: positions of a row, at most the context. `vocab`: ids below it are sampled.

        `kernels`: those for decoding, in recorded graphs, if they know the model. `invariant`: every pass has all rows
        and every prompt is read alone and whole, so that a text is the same to the bit, whatever runs beside it.
        `scope`: the arithmetic of every pass.
        """
        self.invariant = invariant
        kernels = kernels and not model.config.beyond_kernels
        self.model, self.kernels, self.scope, self.vocab = model, kernels, scope, vocab
        self.device = model.embedding.weight.device
        self.was_training = model.training
        if self.was_training:
            model.eval()
        with torch.inference_mode(), scope():
            self.cache = model.empty_cache(rows, room)
            self.tokens_B1 = torch.zeros(rows, 1, dtype=torch.int64, device=self.device)
            self.rules = Rules.room(rows, self.device, (vocab or model.vocab) if penalties else None)
            wide = product_type(model.embedding.weight) == model.embedding.weight.dtype == torch.float32
        self.cache.kernels = kernels
        weights = list(model.parameters())
        # neither sharded nor in 4 bits, and no head in 8
        whole = all(type(weight) is nn.Parameter for weight in weights) and model.head.int8 is None
        known = wide and whole and not model.config.beyond_kernels
        self.in_numpy = self.device.type == "cpu" and known and not (invariant or kernels)
        size = sum(weight.numel() for weight in weights)
        self.threads = 1 if self.device.type == "cpu" and size < SMALL else None  # of torch; None: as they are
        self.draws = self.device.type == "cuda" and find_spec("triton") is not None
        self.rows, self.room = rows, self.cache.room
        self.live: list[_Row] = []
        self.waiting: collections.deque[TextRequest] = collections.deque()
        self.kept: list[list[int]] = [[] for _ in range(rows)]  # tokens in the cache, of rows that are not live
        self.results: collections.deque[_Result] = collections.deque()
        self.spare: list[tuple[Tensor, torch.cuda.Event]] = []  # where the tokens of a step go on the host
        self.missed = 0  # tokens that free rows could have made for prompts that wait
        self.views: dict[int, tuple[Cache, Rules, Tensor]] = {}  # of the first rows
        self.graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}
        layers = self.cache.layers
        self.rewinds = all(isinstance(layer, LayerCache) and layer.places == self.room for layer in layers)
        # Short prompts in NumPy: tokens, the last one's place, the calls and what they make, by length
        self.listed = min(self.room, LISTED // size) if self.in_numpy and self.rewinds else 0
        self.desk = model.empty_cache(1, self.room) if self.listed and rows > 1 else self.cache.rows(0, 1, level=True)
        self.prompts: dict[int, tuple[Tensor, Tensor, list[Callable[[], Any]], Tensor]] = {}

    def close(self) -> None:
        """Puts the model's mode back and frees what was made for decoding."""
        self.graphs.clear()
        self.model.copies.keep_only(())
        if self.was_training:
            self.model.train()

    def add(self, request: TextRequest) -> TextRequest:
        if not request.ids:
            raise ValueError("the prompt needs at least one token")
        if request.count > 0:
            self.waiting.append(request)
        else:
            request.ended = "length"
        return request

    def cancel(self, request: TextRequest) -> None:
        """Ends a request, whose row is free for others from the next step on."""
        request.ended = request.ended or "cancelled"
        if request in self.waiting:
            self.waiting.remove(request)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.live or self.results)

    @torch.inference_mode()
    def step(self) -> None:
        """Gives every live request one token more, and reads the tokens of the step before."""
        threads = cpu_threads(self.threads or torch.get_num_threads())
        with self.scope(), threads, np.errstate(all="ignore"):  # weights that are not finite are reported by `_read`
            for row in [row for row in self.live if row.request.ended or row.request.sent >= row.request.count]:
                self._release(row)
            if self._admits():
                while self.waiting and len(self.live) < self.rows:
                    self._admit()
            for row in [row for row in self.live if row.filled >= self.room]:
                self._go_on(row)
            # On a CPU nothing runs beside the host, and first tokens need not wait for the second ones.
            later = self.device.type == "cuda"
            launched = (later or not self.results) and any(row.request.sent < row.request.count for row in self.live)
            if launched:
                self._launch()
        while len(self.results) > (launched and later):
            self._read()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _admits(self) -> bool:
        """Whether prompts are read now. All that get a row are sorted by length, so that few passes suit them.

        A pass stops all live rows. On a GPU it is put off until free rows have missed as many tokens, so that prompts
        whose rows become free one after the other are read together.
        """
        count = min(len(self.waiting), self.rows - len(self.live))
        self.missed += count
        if not count or (self.kernels and not self.invariant and self.missed < _PASS_STEPS * len(self.live)):
            return False
        self.missed = 0
        first = sorted((self.waiting.popleft() for _ in range(count)), key=lambda request: len(request.ids))
        self.waiting.extendleft(reversed(first))
        return True

    def _admit(self) -> None:
        """Reads the next prompts into rows, as many as suit one pass; their first tokens come with them."""
        texts: list[list[int]] = []
        shared = 0
        while self.waiting and len(self.live) < self.rows and not shared:
            request, place = self.waiting[0], len(self.live)
            start = max(0, len(request.ids) - self.room)
            ids = list(request.ids[start:])
            found, known = max(
                ((row, self._shared(self.kept[row], ids)) for row in range(place, self.rows)), key=lambda pair: pair[1]
            )
            several = bool(texts) or len(self.waiting) > 1 < self.rows - place
            if self.kernels and self.rewinds and several and known < _WORTH_A_PASS:
                found, known = place, 0
            if texts and (known or not self._suits(ids, texts)):
                break
            self.waiting.popleft()
            self._swap(place, found)
            self.live.append(_Row(request, start, 0))
            texts.append(ids)
            shared = known
        self._begin(self.live[-len(texts) :], texts, shared)

    def _suits(self, ids: list[int], texts: list[list[int]]) -> bool:
        """Whether a prompt joins a pass: rows are filled up to the longest, and what fills them must stay unseen."""
        lengths = [len(ids), *map(len, texts)]
        unseen = (self.rewinds or len(set(lengths)) == 1) and not self.invariant and not self.listed
        tokens, even = len(lengths) * max(lengths), max(lengths) <= 2 * min(lengths)
        return unseen and (tokens <= MOST_PROMPT_TOKENS if even else self.kernels and tokens <= _FEW_TOKENS)

    def _shared(self, kept: list[int], ids: list[int]) -> int:
        """How many first tokens of `ids` need not be read again; at least one is, whose logits are needed."""
        most = 0 if self.invariant else min(len(kept), len(ids) - 1)
        same = next((place for place in range(most) if kept[place] != ids[place]), most)
        return same if self.rewinds or same == len(kept) else 0

    def _begin(self, rows: list[_Row], texts: list[list[int]], shared: int = 0) -> None:
        """Reads texts into live rows side by side; of a single one, the tokens after the `shared` first."""
        first, count, longest = self.live.index(rows[0]), len(rows), max(map(len, texts))
        if self.kernels and self.rewinds:  # few different lengths: the library keeps what it learns of each
            longest = min(self.room, shared + -(-(longest - shared) // _EVEN) * _EVEN)
        part = self.cache.rows(first, count, level=True)
        if longest - shared <= self.listed:
            logits_BV = self._by_list(part, texts[0], shared)
        else:
            part.clear()
            part.start_at(shared, texts[0][shared - 1] if shared else 0)
            filled = [ids[shared:] + [0] * (longest - len(ids)) for ids in texts]
            tokens_BT = torch.tensor(filled).to(self.device, non_blocking=True)
            ends_B = torch.tensor([len(ids) - shared - 1 for ids in texts]).to(self.device, non_blocking=True)
            logits_BV = self.model.logits(tokens_BT, part, last=ends_B)[:, -1, : self.vocab]
            part.end_at(ends_B + shared + 1, tokens_BT.gather(1, ends_B[:, None]))
        for place, (row, ids) in enumerate(zip(rows, texts, strict=True), first):
            row.filled = len(ids)
            request = row.request
            self.rules.assign(place, request.sampling, len(request.made), [*request.ids, *request.made])
        tokens_B = self.tokens_B1[first : first + count, 0]
        choose(logits_BV, self.rules.rows(first, count), tokens_B, kernels=self.draws)
        self._send(rows, tokens_B, logits_BV)

    def _by_list(self, part: Cache, ids: list[int], shared: int) -> Tensor:
        """Reads a text into a row by a list of calls, on a row of the list's own.

        There are lists for some lengths only. What fills a text up stays unseen.
        """
        length = 1 << (len(ids) - shared - 1).bit_length()
        length = min(length * 3 // 4 if len(ids) - shared <= length * 3 // 4 else length, self.room)
        shared = min(shared, self.room - length)
        self.desk.start_at(shared, ids[shared - 1] if shared else 0)
        caches = (part, self.desk) if self.rows > 1 else ()
        arrays = ([x.numpy() for layer in cache.layers for x in layer.tensors()] for cache in caches)
        pairs = list(zip(*arrays, strict=True))
        for own_BGSD, x_BGSD in pairs:
            x_BGSD[:, :, :shared] = own_BGSD[:, :, :shared]
        known = self.prompts.get(length)
        if known is None:
            tokens_BT, ends_B = torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        else:
            tokens_BT, ends_B = known[:2]
        tokens_BT.numpy()[0, : len(ids) - shared] = ids[shared:]
        ends_B.fill_(len(ids) - shared - 1)
        if known is None:
            self.desk.calls = []
            logits_BV = self.model.logits(tokens_BT, self.desk, last=ends_B)[:, -1, : self.vocab]
            known = self.prompts[length] = tokens_BT, ends_B, self.desk.calls, logits_BV
        else:
            for call in known[2]:
                call()
        for own_BGSD, x_BGSD in pairs:
            own_BGSD[:, :, shared : len(ids)] = x_BGSD[:, :, shared : len(ids)]
        part.length_B.fill_(len(ids))
        part.last_B1.fill_(ids[-1])
        return known[3]

    def _go_on(self, row: _Row) -> None:
        """A row that is full: from the second half of its text, or not at all."""
        while self.results:
            self._read()
        request = row.request
        if request.ended or not request.slides:
            request.ended = request.ended or "length"
            self._release(row)
            return
        text = [*request.ids, *request.made]
        row.start = len(text) - max(1, self.room // 2)
        self._begin([row], [text[row.start :]])

    def _release(self, row: _Row) -> None:
        """Frees the row; the last live one takes its place."""
        place, last = self.live.index(row), len(self.live) - 1
        text = [*row.request.ids, *row.request.made]
        self._swap(place, last)
        self.live[place] = self.live[last]
        self.live.pop()
        self.kept[last] = text[row.start : row.start + row.filled]

    def _swap(self, one: int, other: int) -> None:
        if one != other:
            self.kept[one], self.kept[other] = self.kept[other], self.kept[one]
            swap_rows([*self.cache.tensors(), self.tokens_B1, *self.rules.tensors()], one, other)

    # --- passes -------------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        count = rows = len(self.live)
        if self.invariant:
            rows = self.rows
        elif self.kernels:
            rows = min(self.rows, 1 << (count - 1).bit_length())
        if self.kernels and self.device.type == "cuda" and rows not in self.graphs:
            self.graphs[rows] = self._recorded(rows)
        if rows in self.graphs:
            replay, logits_BV = self.graphs[rows]
            replay()
        else:
            logits_BV = self._pass(rows)
            if self.in_numpy:
                calls, how = self.views[rows][0].calls, self.views[rows][1:]
                self.graphs[rows] = functools.partial(_again, calls, logits_BV, *how), logits_BV
        for other in range(count, rows):  # a pass moves on in rows that are not live, too
            self.kept[other] = self.kept[other] if self.rewinds else []
        for row in self.live:
            row.filled += 1
        self._send(self.live, self.tokens_B1[:count, 0], logits_BV[:count])

    def _pass(self, count: int) -> Tensor:
        """One token more in the first rows, in `tokens_B1`; returns the logits it was drawn from."""
        if count not in self.views:
            self.views[count] = (
                self.cache.rows(0, count, level=False),
                self.rules.rows(0, count),
                self.tokens_B1[:count],
            )
        part, rules, tokens_B1 = self.views[count]
        part.calls = [] if self.in_numpy else None
        if count == 1 and not self.kernels:  # the host knows the length: attention reads no more than that
            part.level, part.most = True, self.live[0].filled
        elif self.kernels or self.invariant:
            part.length_B.clamp_(max=self.room - 1)  # of rows that are not live
        else:
            part.most = max(row.filled for row in self.live)
        tokens_BT = tokens_B1 if self.in_numpy else tokens_B1.clamp(min=0)
        logits_BV = self.model.logits(tokens_BT, part, last=True)[:, -1, : self.vocab]
        choose(logits_BV, rules, tokens_B1[:, 0], kernels=self.draws)
        return logits_BV

    def _recorded(self, rows: int) -> tuple[Callable[[], None], Tensor]:
        """A recorded pass. The trial run before it compiles the kernels; what it writes is put back."""
        changed = [self.tokens_B1, self.rules.whole_B3, self.cache.length_B, self.cache.last_B1]
        changed += [x for layer in self.cache.layers if not isinstance(layer, LayerCache) for x in layer.tensors()]
        changed += [] if self.rules.seen_BV is None else [self.rules.seen_BV]
        before = [x.clone() for x in changed]
        self._pass(rows)
        for x, kept in zip(changed, before, strict=True):
            x.copy_(kept)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits_BV = self._pass(rows)
        return graph.replay, logits_BV

    # --- results ------------------------------------------------------------------------------------------------------

    def _send(self, rows: Sequence[_Row], tokens_B: Tensor, logits_BV: Tensor) -> None:
        """Sends the tokens of these rows to the host, without waiting for them."""
        requests, wanted = [row.request for row in rows], False
        for request in requests:
            request.sent += 1
            wanted = wanted or request.logprobs is not None
        found = [tokens_B]
        if wanted:
            # Whole lines of memory: else torch's order of additions depends on a row's number.
            vocab = logits_BV.shape[1]
            log_BV = torch.log_softmax(F.pad(logits_BV.float(), (0, -vocab % 64), value=-torch.inf), dim=-1)
            likeliest = log_BV.topk(min(MOST_LOGPROBS, vocab), dim=-1)
            found += [log_BV.gather(1, tokens_B.clamp(min=0)[:, None]), *likeliest]
        if self.device.type != "cuda":
            self.results.append(_Result(found, requests, None))  # read before the next pass
            return
        if not self.spare:
            self.spare.append((torch.empty(self.rows, dtype=torch.int64, pin_memory=True), torch.cuda.Event()))
        place_B, done = self.spare.pop()
        there = [place_B[: len(rows)], *(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in found[1:])]
        for target, x in zip(there, found, strict=True):
            target.copy_(x, non_blocking=True)
        done.record()
        self.results.append(_Result([place_B, *there[1:]], requests, done))

    def _read(self) -> None:
        """Takes the oldest tokens that were sent."""
        result = self.results.popleft()
        if result.done is not None:
            result.done.synchronize()
            self.spare.append((result.found[0], result.done))
        tokens, *more = [x.tolist() for x in result.found]
        for place, (request, token) in enumerate(zip(result.requests, tokens, strict=False)):
            if request.ended:
                continue
            if token < 0:
                request.ended = "broken"
                continue
            request.made.append(token)
            if request.logprobs is not None:
                (own,), values, ids = (part[place] for part in more)
                likeliest = dict(zip(ids[: request.logprobs], values[: request.logprobs], strict=True))
                request.probabilities.append((own, likeliest))
            if token in request.stops:
                request.ended = "stop"
            elif len(request.made) >= request.count:
                request.ended = "length"


def _again(calls: Sequence[Callable[[], Any]], logits_BV: Tensor, rules: Rules, tokens_B1: Tensor) -> None:
    """The same pass as before, in NumPy."""
    for call in calls:
        call()
    choose(logits_BV, rules, tokens_B1[:, 0])


def fitting_rows(model: GPT, device: Device) -> int:
    """How many rows of a cache fit into a share of the free memory."""
    row = sum(x.numel() * x.element_size() for layer in model.empty_cache(1).layers for x in layer.tensors())
    free = torch.cuda.mem_get_info(device.torch_device)[0] if device.kind == "cuda" else host_memory()[0]
    fit = int(_SHARE.get(device.kind, 0.25) * (free or 2**30)) // row
    return max(1, min(fit, _MOST_ROWS.get(device.kind, 8)))


def no_probabilities() -> CheckpointError:
    return CheckpointError(
        "the model gives no probabilities: its logits are not finite",
        "its weights are infinite, NaN or too large: name another checkpoint",
    )


def generate_tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    count: int,
    sampling: Sampling,
    stops: Collection[int] = (),
    vocab: int | None = None,
    kernels: bool = False,
    cached: bool = True,
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Generator[int]:
    """Yields up to `count` token ids after `prompt`; stops after a token in `stops`. Restores the model's mode.

    Models that are no decoder of ours have no cache.
    """
    if not (cached and isinstance(model, GPT) and model.cacheable):
        yield from uncached_tokens(model, prompt, count=count, sampling=sampling, stops=stops, vocab=vocab)
        return
    room = min(model.config.context, len(prompt) + count)
    penalties = sampling.repetition_penalty != 1.0
    engine = Engine(model, room=room, vocab=vocab, kernels=kernels, penalties=penalties, scope=scope)
    try:
        request = engine.add(TextRequest(ids=list(prompt), count=count, sampling=sampling, stops=stops))
        given = 0
        while engine.busy:
            engine.step()
            yield from request.made[given:]
            given = len(request.made)
        if request.ended == "broken":
            raise no_probabilities()
    finally:
        engine.close()


def uncached_tokens(
    model: LanguageModel,
    prompt: Sequence[int],
    *,
    count: int,
    sampling: Sampling,
    stops: Collection[int] = (),
    vocab: int | None = None,
) -> Generator[int]:
    """As `generate_tokens`, with a pass over the whole text for every token: the reference of the engine."""
    if not prompt:
        raise ValueError("the prompt needs at least one token")
    device = next(model.parameters()).device
    context, text = model.config.context, list(prompt)
    start = max(0, len(text) - context)
    token_B = torch.zeros(1, dtype=torch.int64, device=device)
    rules = Rules.room(1, device, (vocab or model.vocab) if sampling.repetition_penalty != 1.0 else None)
    rules.assign(0, sampling, 0, text)
    was_training = model.training
    model.eval()
    try:
        for _ in range(count):
            if len(text) - start > context:  # full: continue with the second half
                start = len(text) - max(1, context // 2)
            with torch.inference_mode():
                logits_BTV = model.logits(torch.tensor([text[start:]], device=device), last=True)
                choose(logits_BTV[:, -1, :vocab], rules, token_B)
            token = int(token_B)
            if token < 0:
                raise no_probabilities()
            text.append(token)
            yield token
            if token in stops:
                return
    finally:
        model.train(was_training)
