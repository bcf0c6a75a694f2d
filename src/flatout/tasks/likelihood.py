"""Log-likelihoods of continuations, in batches by length.

A pair is a context and a continuation. Whether a continuation is greedy means that the model would write it itself at
temperature 0. The rules are those of lm-evaluation-harness, so that figures compare: spaces at the end of a context
belong to the continuation, both are tokenized together, an empty context is the model's first token, and of a pair that
is longer than the model's context the beginning is left out.

Shape legend: B batch, T positions, W width, V vocabulary, L scored positions.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.data.library_tokenizers import ModelTokenizer
from flatout.data.tokenizer import Tokenizer
from flatout.device import free_memory, is_out_of_memory
from flatout.errors import DataError
from flatout.generation.engine import no_probabilities
from flatout.model.gpt import GPT
from flatout.model.protocol import LanguageModel

_TOKENS = {"cuda": 16_384}  # of a batch, with what fills its rows up
_LOGITS = 2**26  # at once

Ids = list[int]
Answer = tuple[float, bool]  # log-likelihood, and whether it is greedy


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that is asked. `scope`: the arithmetic of every pass."""

    model: LanguageModel
    tokenizer: Tokenizer
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    stops: tuple[int, ...] = ()
    kernels: bool = False  # those for decoding

    @property
    def first(self) -> int | None:
        """The token that stands before a text without a context."""
        tokenizer, begin = self.tokenizer, None
        if isinstance(tokenizer, ModelTokenizer):
            begin = tokenizer.token_id(tokenizer.special.get("bos_token", ""))
        return tokenizer.end_of_text if begin is None else begin

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of texts that no template wrote."""
        different = list(dict.fromkeys(texts))  # choices share their context
        ids = [one.tolist() for one in self.tokenizer.encode_batch(different)]
        if isinstance(self.tokenizer, ModelTokenizer) and (begin := self.tokenizer.begin_of_text) is not None:
            ids = [one if one[:1] == [begin] else [begin, *one] for one in ids]
        found = dict(zip(different, ids, strict=True))
        return [found[text] for text in texts]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[Ids, Ids]]:
        """The ids of contexts and of their continuations, which have at least one."""
        contexts = [context.rstrip() for context, _ in pairs]
        whole = self.encode([context + continuation for context, continuation in pairs])
        found = []
        for ids, before in zip(whole, self.encode(contexts), strict=True):
            cut = min(len(before), len(ids) - 1)
            if cut <= 0 and self.first is not None and ids[:1] != [self.first]:
                ids, cut = [self.first, *ids], 1
            cut = max(cut, 1)
            if len(ids) <= cut:
                raise DataError("a continuation has no token to be predicted", "give it some text")
            found.append((ids[:cut], ids[cut:]))
        return found


def windows(ids: Sequence[int], size: int, stride: int) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """A long text as pairs of `size` tokens, each `stride` further; every token but the first is scored once.

    With a stride of the size, a token more comes before each pair. The last one reaches back as far as all others.
    """
    done = 1
    for begin in range(0, len(ids) - 1, stride):
        end = min(begin + size, len(ids))
        if end > done:
            yield ids[min(max(0, end - size), done - 1) : done], ids[done:end]
            done = end


@torch.inference_mode()
def log_likelihoods(
    subject: Subject, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], seen: Callable[[int], None] = lambda _: None
) -> list[Answer]:
    """The log-likelihood of every pair's continuation, and whether it is greedy; `seen` counts pairs that are done.

    It is NaN where the model's logits are not finite.
    """
    model = subject.model
    context, device = model.config.context, next(model.parameters()).device
    rows: dict[tuple[int, ...], list[int]] = {}  # by what the model reads: choices of one token share it
    for number, (before, after) in enumerate(pairs):
        rows.setdefault(tuple([*before, *after][-context - 1 : -1]), []).append(number)
    left = sorted(rows, key=len, reverse=True)  # the longest first: memory runs out at once or never
    answers: list[Answer] = [(0.0, True)] * len(pairs)
    budget, was_training = _TOKENS.get(device.type, 4096), model.training
    model.eval()
    try:
        while left:
            batch = left[: max(1, budget // len(left[0]))]
            asked = [
                (row, pairs[number][1][-context:], number) for row, ids in enumerate(batch) for number in rows[ids]
            ]
            try:
                with subject.scope():
                    found = _scored(model, batch, [(row, after) for row, after, _ in asked], device)
            except RuntimeError as error:
                if not is_out_of_memory(error) or len(batch) == 1:
                    raise
                budget //= 2
                free_memory(device)
                continue
            for (_, _, number), answer in zip(asked, found, strict=True):
                answers[number] = answer
            left = left[len(batch) :]
            seen(len(asked))
    finally:
        model.train(was_training)
    return answers


def known(answers: list[Answer]) -> list[Answer]:
    """The answers, where the model has given some."""
    if any(math.isnan(value) for value, _ in answers):
        raise no_probabilities()
    return answers


def _scored(
    model: LanguageModel,
    batch: Sequence[Sequence[int]],
    asked: Sequence[tuple[int, Sequence[int]]],
    device: torch.device,
) -> list[Answer]:
    """The answers about rows of tokens; each is asked about the targets of its last positions."""
    longest = len(batch[0])
    tokens_BT = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in batch], device=device)
    ends = [row * longest + len(batch[row]) for row, _ in asked]
    places = [torch.arange(end - len(after), end) for end, (_, after) in zip(ends, asked, strict=True)]
    places_L = torch.cat(places).to(device)
    targets_L = torch.tensor([id for _, after in asked for id in after], device=device)
    # With a cache, models use torch's operations, which take any shape without being compiled or tuned for it.
    if isinstance(model, GPT):
        cache = model.empty_cache(len(batch), longest) if model.cacheable else None
        x_LW, head = model.hidden(tokens_BT, cache).flatten(0, 1), model.head_logits
    else:
        x_LW, head = model.logits(tokens_BT).flatten(0, 1), Tensor.float
    logs, greedy = [], []
    most = max(1, _LOGITS // model.vocab)
    for some_L, wanted_L in zip(places_L.split(most), targets_L.split(most), strict=True):
        logits_LV = head(x_LW[some_L][None])[0].float()
        own_L = logits_LV.gather(1, wanted_L[:, None])[:, 0]
        logs += (own_L - logits_LV.logsumexp(dim=1)).tolist()
        greedy += (logits_LV.argmax(dim=1) == wanted_L).tolist()
    found, begin = [], 0
    for _, after in asked:
        end = begin + len(after)
        found.append((math.fsum(logs[begin:end]), all(greedy[begin:end])))
        begin = end
    return found
