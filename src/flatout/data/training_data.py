"""What a run asks of its data, whatever kind it is: shards, a stream, samples, or arrays that a program hands over.

Setup and loop know this protocol and no kind: what comes first, batches from a position, an evaluation set, facts,
notices, and what a checkpoint keeps. A kind lives in a module of its own and is opened by `resolve/opening.py`.
"""

import abc
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.batch import Batch, BatchLoader, Delivery, Span
from flatout.data.loader import evaluation_batches
from flatout.data.positions import Schedule
from flatout.data.sample_loader import LargestRows
from flatout.data.shards import Tokens, TokenShards
from flatout.data.tokenizer import Tokenizer
from flatout.errors import DataError, UsageError
from flatout.finding import Finding

_DOCUMENTS = 4096  # whose first tokens are looked at; a mean over so many is as good as one over all


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What is known of the data before the first step."""

    fingerprint: str
    place: str | Path  # where it comes from, in messages
    train_tokens: int | None  # None where nobody has counted them
    windows: int | None = None  # positions of an epoch; None where its end is not known
    corpus_bytes: int | None = None  # of the training tokens, where they are all there
    attended: float | None = None  # the mean length inside which a token attends, where that is not the context
    # Of samples, of which a step takes a fixed number of any length:
    step_tokens: float | None = None  # a mean
    batch_samples: int | None = None
    epoch_samples: int | None = None  # the last step of an epoch takes what is left
    steps_per_epoch: int | None = None
    samples: dict[str, Any] | None = None  # as `RunInfo` has them


class TrainingData(abc.ABC):
    """The questions, with the answers of plain text: all of it is learned, and it is generated without an end."""

    facts: DataFacts
    schedule: Schedule  # the table of positions that the config asks for
    tokenizer: Tokenizer
    val: Tokens
    apart: bool = False  # a document does not see the one before it
    stops: tuple[int, ...] = ()  # tokens that end a generated text

    @abc.abstractmethod
    def batches(self, delivery: Delivery, span: Span) -> BatchLoader:
        """The batches of some steps."""

    @abc.abstractmethod
    def notices(self, delivery: Delivery) -> Iterable[Finding]:
        """What to say before the first step."""

    def last_notices(self, position: dict[str, Any] | None) -> Iterable[str]:
        """What to say after the last step, at the position where it ended."""
        return ()

    def split(self, name: str) -> Tokens:
        """The tokens of a split: train, where it can be read from its beginning, or val."""
        if name != "val":
            raise UsageError(
                f"of {self.facts.place} only validation text is held",
                "measure on --split val, or name prepared shards with --data",
            )
        return self.val

    def evaluation(
        self, batch_size: int, delivery: Delivery, tokens: int | None = None, split: str = "val"
    ) -> Iterator[Batch]:
        """A split at full length, or as much of its beginning as has `tokens` tokens."""
        shape = {"context": self.schedule.longest, "batch_size": batch_size, "device": delivery.device}
        how = {"most_tokens": tokens, "apart": self.apart, "world": delivery.world}
        return evaluation_batches(self.split(split), **shape, **how)

    @functools.cached_property
    def tokens_per_byte(self) -> float | None:
        return tokens_per_byte(self.val, self.tokenizer, apart=self.apart)

    def largest(self, delivery: Delivery) -> LargestRows | None:
        """The largest micro-batch; None where all are whole windows."""
        return None

    def prompt(self, text: str) -> list[int]:
        """What a sample goes on from, `text` where the data has nothing of its own."""
        try:
            prompt = self.tokenizer.encode(text).tolist()
        except DataError:  # a prompt the vocabulary cannot spell must not end the run
            prompt = []
        return prompt or self.val.read(0, 1).tolist()

    def preview(self) -> tuple[tuple[str, bool], ...]:
        """Pieces of text, and whether each is learned, to look at before training; nothing where all of it is."""
        return ()

    def saved(self) -> dict[str, Any]:
        """What a checkpoint carries of the data besides fingerprint, tokenizer and position."""
        return {}


def tokens_per_byte(shards: Tokens, tokenizer: Tokenizer, *, apart: bool) -> float | None:
    """Tokens that are predicted for each byte that they stand for, over a whole split; None where bytes are not known.

    Joined, that is every token but the first, which is not worth a word. With documents `apart`, the first token of a
    document has no context to be predicted from: it has no part in the loss, so neither it nor its bytes count. What
    such tokens hold in bytes is read from documents all over the split. The end of a text is a token without bytes, and
    predicted like any other.
    """
    tokens, size = shards.tokens, float(shards.text_bytes)
    if apart and size:
        assert isinstance(shards, TokenShards), "checked by the config"
        starts = shards.document_starts()
        some = starts[:: -(-len(starts) // _DOCUMENTS)].astype(np.int64)
        first = shards.read_ranges(some, np.ones_like(some))
        tokens -= len(starts)
        size -= len(starts) * sum(_bytes_of(int(id), tokenizer) for id in first) / len(first)
    return tokens / size if size > 0 else None


def _bytes_of(id: int, tokenizer: Tokenizer) -> int:
    """Bytes of text that a token stands for. One that ends inside of a character decodes to a mark of three bytes, in
    the place of one byte or more that it has: that counts as one."""
    if id == tokenizer.end_of_text:
        return 0
    return len(tokenizer.decode([id]).replace("\ufffd", "?").encode("utf-8"))
