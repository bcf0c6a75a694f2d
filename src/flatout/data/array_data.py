"""Token arrays or texts that a program hands over as the data of a run: an iterable, a function, or a torch Dataset.

Idea: arrays are documents of any length; a text becomes one by the tokenizer, with its end-of-text id where there is
one. They are joined as they come, without anything between them, and windows
follow each other in that row. What has a length and items by number (a list, a map-style Dataset) is shuffled anew for
every epoch by the run's seed; any other iterable is read in its own order, and again from its beginning when it ends.

Contract: a position is the array that the next step begins in and the offset in it, so batches after a resume are the
same if the program hands over the same arrays. Arrays before it are skipped by their number, or drawn and dropped; an
iterable with `state_dict` and `load_state_dict` is put back to where it was instead. A resume compares the array at its
position with the one that was there, so a generator that was read before is noticed.
Without validation arrays of their own, the first ones are held out and never trained on.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import numpy as np
import torch

from flatout.config.schema import DataConfig
from flatout.config.sizes import learned_vocab
from flatout.data.batch import Batch, BatchLoader, DataFacts, Delivery, Raw, Schedule, Span, TrainingData, as_signed
from flatout.data.sampler import WindowOrder
from flatout.data.shards import HeldTokens
from flatout.data.stream import epoch_notices
from flatout.data.tokenizer import Ids, IdTokenizer, Tokenizer, load_tokenizer, token_dtype
from flatout.errors import ConfigError, DataError
from flatout.files import canonical_json
from flatout.finding import Check, Finding

VAL_TOKENS = 2**16  # held out where eval.tokens does not say
PLACE = "the arrays given to train"
AT_ONCE = 1024  # arrays whose order is computed together
MOST_EMPTY = 100_000  # arrays in a row
COMPARED = 4096  # tokens of an array, and its length: a hash of them comes with every step
ROW_NAMES = ("input_ids", "text")  # columns of a row that are read, the first that is there
READ_BEFORE = "give the function that makes a generator, not a generator that was read before"


@dataclass(frozen=True)
class Arrays:
    """What `train` was given: arrays to train on, and some to evaluate on or None."""

    train: Any
    val: Any = None

    @property
    def once(self) -> bool:
        """Whether they can be read only once: an iterator."""
        return hasattr(self.train, "__next__")


@final
@dataclass(frozen=True)
class ArrayPosition:
    """Where the next token comes from: the epoch, its array by number, the offset in it, and the iterable's state."""

    epoch: int = 0
    array: int = 0
    offset: int = 0
    tokens: int = 0  # that came before
    state: str | None = None  # JSON, from before the array was drawn
    digest: str | None = None  # of the array


def open_arrays(
    arrays: Arrays, schedule: Schedule, data: DataConfig, *, vocab: int | None, seed: int, val_tokens: int | None
) -> "ArrayData":
    """Reads the validation arrays. The vocabulary is that of a tokenizer, or without one `vocab` numbers."""
    tokenizer = data.tokenizer
    unknown = tokenizer == "char" or learned_vocab(tokenizer) is not None
    if unknown and vocab is None:
        raise ConfigError(
            "the arrays given to train need a vocabulary",
            "set data.tokenizer to bytes, gpt2 or a tokenizer.json, or model.vocab to the number of ids",
        )
    known = IdTokenizer(vocab) if unknown and vocab is not None else load_tokenizer(tokenizer)
    source = ArraySource(arrays.train, known, seed)
    wanted = (VAL_TOKENS if val_tokens is None else val_tokens) + 1
    if arrays.val is not None:
        held, _ = ArraySource(arrays.val, known, seed).first(wanted)
    else:
        held, source.held = source.first(wanted, None if source.items is None else data.val_fraction)
    if len(held) < 2 and arrays.val is None:
        raise DataError("the data given to train holds no two tokens", f"give arrays with more tokens; {READ_BEFORE}")
    if len(held) < 2:
        raise DataError("the validation arrays hold no two tokens", "give arrays with more tokens as val=")
    return ArrayData(source, HeldTokens(held, PLACE), known, schedule)


@final
class ArraySource:
    """The arrays of an object from Python, checked, from any position on and without end."""

    def __init__(self, custom: Any, tokenizer: Tokenizer, seed: int) -> None:
        self._custom: Any = custom
        indexed = hasattr(custom, "__len__") and hasattr(custom, "__getitem__")
        indexed = indexed and not isinstance(custom, torch.utils.data.IterableDataset)  # which has both and no items
        self._called = not indexed and not hasattr(custom, "__iter__")
        if isinstance(custom, Mapping | str | bytes) or (self._called and not callable(custom)):
            raise DataError(
                f"a {type(custom).__name__} was given to train as data",
                "give an iterable of token arrays or texts, a function that returns an iterator, or a torch Dataset; a "
                "single text goes into a list",
            )
        self.tokenizer, self.vocab, self.dtype = tokenizer, tokenizer.vocab, token_dtype(tokenizer.vocab)
        self.seed = seed
        self.held = 0  # arrays at the beginning that are not trained on
        self.items: int | None = len(self._custom) if indexed else None
        self.notices: list[str] = []
        self._once = not indexed and not self._called and iter(self._custom) is custom
        self._drawn = 0  # of an iterator that can be read once
        self._begin: str | None = None  # the state of an iterable before anything was drawn

    def first(self, tokens: int, share: float | None = None) -> tuple[Ids, int]:
        """The first arrays that hold `tokens` tokens, or a share of all, joined and cut; and their number."""
        most = None if share is None or self.items is None else max(1, int(share * self.items))
        found, count = [np.empty(0, self.dtype)], 0
        for number, _, ids in self._drawn_from(ArrayPosition()):
            found.append(ids)
            count += len(ids)
            if count >= tokens or number + 1 == most:
                break
        return np.concatenate(found)[:tokens], len(found) - 1

    def arrays(self, start: ArrayPosition) -> Generator[tuple[ArrayPosition, Ids]]:
        """Each array from `start` on, with its position, epoch after epoch."""
        epoch, first, tokens = start.epoch, max(start.array, self.held), start.tokens - start.offset
        state = start.state
        while True:
            before = tokens
            for number, earlier, ids in self._epoch(ArrayPosition(epoch, first, state=state)):
                yield ArrayPosition(epoch, number, 0, tokens, earlier), ids
                tokens += len(ids)
            if self._drawn or (first == self.held and tokens == before):
                raise self._ended()
            epoch, first, state = epoch + 1, self.held, None
            self.notices += epoch_notices(epoch, tokens)

    def _epoch(self, start: ArrayPosition) -> Iterator[tuple[int, str | None, Ids]]:
        if self.items is None:
            yield from self._drawn_from(start)
        elif self.items > self.held:
            order = WindowOrder(self.items - self.held, self.seed)
            for begin in range(start.array, self.items, AT_ONCE):
                numbers = range(begin, min(begin + AT_ONCE, self.items))
                indices = self.held + order.indices(start.epoch * order.windows + begin - self.held, len(numbers))
                for number, index in zip(numbers, indices.tolist(), strict=True):
                    yield number, None, self._checked(self._custom[index], index)

    def _drawn_from(self, start: ArrayPosition) -> Iterator[tuple[int, str | None, Ids]]:
        """(number, state before it, array) in the order of the object itself."""
        made: Any = self._custom() if self._called else self._custom
        number, state_of = self._drawn, _state_of(made)
        if state_of is not None:
            self._begin = self._begin or state_of()
            made.load_state_dict(json.loads(start.state or self._begin))
            number = start.array if start.state else 0
        elif number > start.array:
            raise DataError(
                "an iterator can be read once, and it was read beyond where the run goes on",
                "give train an iterable that can be read again, or a function that returns a new iterator",
            )
        if self._called and not hasattr(made, "__iter__"):
            raise DataError(
                f"the function given to train as data returned a {type(made).__name__}",
                "return an iterator over token arrays or texts",
            )
        items = iter(made) if self.items is None else (made[index] for index in range(self.items))
        state, empty = None if state_of is None else state_of(), 0
        for item in items:
            if self._once and state_of is None:
                self._drawn = number + 1
            if number >= start.array:
                ids = self._checked(item, number)
                empty = 0 if len(ids) else empty + 1
                if empty == MOST_EMPTY:
                    raise DataError(f"{empty:,} arrays in a row are empty", "give arrays with tokens")
                yield number, state, ids
            number, state = number + 1, None if state_of is None else state_of()

    def _checked(self, item: Any, number: int) -> Ids:
        if isinstance(item, Mapping):
            item = self._named(item, number)
        if isinstance(item, str):
            return self._encoded(item, number)
        try:
            array = np.asarray(item.detach().cpu() if isinstance(item, torch.Tensor) else item)
        except ValueError:  # rows of different lengths
            array = np.empty((0, 0))
        if array.ndim != 1:
            found = f"has {array.ndim} dimensions" if array.ndim else f"is of type {type(item).__name__}"
            raise DataError(
                f"array {number} of the data {found}",
                "give one-dimensional arrays of token ids (numpy, torch or lists); a single one goes into a list",
            )
        if not array.size:
            return np.empty(0, dtype=self.dtype)
        if not np.issubdtype(array.dtype, np.integer):
            raise DataError(f"array {number} of the data has type {array.dtype}", "give token ids as integers")
        low, high = int(array.min()), int(array.max())
        if low < 0:
            raise DataError(
                f"array {number} of the data holds token id {low}",
                "leave out padding and masked labels; ids begin at 0",
            )
        if high >= self.vocab:
            raise DataError(
                f"array {number} of the data holds token id {high}, and the vocabulary has {self.vocab} ids from 0 on",
                "set model.vocab, or data.tokenizer to the tokenizer that made the ids",
            )
        return array.astype(self.dtype)

    def _named(self, row: Mapping[Any, Any], number: int) -> Any:
        """What a row of named columns holds to train on."""
        name = next((name for name in ROW_NAMES if name in row), None)
        if name is None:
            names = ", ".join(str(key) for key in row)[:80]
            raise DataError(f"item {number} of the data has {names}", f"give rows with {' or '.join(ROW_NAMES)}")
        return row[name]

    def _encoded(self, text: str, number: int) -> Ids:
        if isinstance(self.tokenizer, IdTokenizer):
            raise DataError(
                f"item {number} of the data is a text, and there is no tokenizer for it",
                "set data.tokenizer to bytes, gpt2 or a tokenizer.json, or give token ids",
            )
        end = self.tokenizer.end_of_text
        ids = self.tokenizer.encode(text).astype(self.dtype)
        return ids if end is None else np.append(ids, np.array(end, self.dtype))

    def _ended(self) -> DataError:
        if self._drawn:
            return DataError(
                f"the iterator given to train ended after {self._drawn:,} arrays, before the last step",
                "give an iterable that can be read again, a function that returns a new iterator, or lower train.steps",
            )
        kept = f" besides the {self.held:,} arrays held out for validation" if self.held else ""
        return DataError(f"the data given to train has no tokens{kept}", "give more, give val=, or lower eval.tokens")


def _state_of(made: Any) -> Callable[[], str] | None:
    """A function that returns the state of an iterable as JSON; None where it has no such state."""
    if not (hasattr(made, "state_dict") and hasattr(made, "load_state_dict")):
        return None
    try:
        json.dumps(made.state_dict())
    except (TypeError, ValueError):
        return None
    return lambda: json.dumps(made.state_dict())


@final
class _Row:
    """The joined tokens of arrays from a position on."""

    def __init__(self, source: ArraySource, start: ArrayPosition) -> None:
        self._arrays = source.arrays(start)
        self._offset, self._digest = start.offset, start.digest
        self._pieces: deque[tuple[ArrayPosition, Ids]] = deque()
        self._length = -start.offset  # tokens from here on that have been drawn

    def take(self, count: int) -> Ids:
        """The next `count` tokens and the one after them, which is the first of the next call."""
        while self._length <= count:
            self._pieces.append(next(self._arrays))
            if self._digest not in (None, _digest(self._pieces[-1][1])):
                number = self._pieces[-1][0].array
                raise DataError(f"array {number} of the data is not the one that the run read there", READ_BEFORE)
            self._digest = None
            self._length += len(self._pieces[-1][1])
        offset, missing, parts = self._offset, count + 1, []
        for _, ids in self._pieces:  # cut first: an array may be far longer than a step
            parts.append(ids[offset : offset + missing])
            offset, missing = 0, missing - len(parts[-1])
        row = np.concatenate(parts)
        self._offset, self._length = self._offset + count, self._length - count
        while self._offset >= len(self._pieces[0][1]):
            self._offset -= len(self._pieces.popleft()[1])
        return row

    def position(self) -> ArrayPosition:
        start, ids = self._pieces[0]
        return replace(start, offset=self._offset, tokens=start.tokens + self._offset, digest=_digest(ids))


def _digest(ids: Ids) -> str:
    return hashlib.sha256(ids[:COMPARED].astype("<u4").tobytes() + len(ids).to_bytes(8, "little")).hexdigest()


@final
class ArrayLoader(BatchLoader):
    """Batches of arrays, read ahead by one thread if threads are allowed."""

    read_once = True

    def __init__(self, source: ArraySource, delivery: Delivery, span: Span) -> None:
        super().__init__(delivery, span, workers=min(delivery.workers, 1))
        self._source, position = source, span.position
        self._row = _Row(source, ArrayPosition() if position is None else ArrayPosition(**position))
        self._skipped = self.schedule.at(span.first_step).start if position is None else 0
        self._position = position
        self._after: dict[int, tuple[ArrayPosition, list[str]]] = {}  # by step: position and notices

    def __next__(self) -> Batch:
        batch = super().__next__()
        position, notices = self._after.pop(batch.step)
        self._position = asdict(position)
        self._notices += notices
        return batch

    def position(self) -> dict[str, Any] | None:
        return self._position

    def _made(self, step: int) -> Raw:
        context, reading = self.schedule.longest, self.schedule.at(step)
        share = self.delivery.world.share(reading.windows)
        while self._skipped:  # a later step without a position: what came before it is read and dropped
            self._row.take(context)
            self._skipped -= 1
        row = self._row.take(reading.windows * context)
        # Every process reads all of the row: the arrays come one after the other.
        ids = np.lib.stride_tricks.sliding_window_view(row, context + 1)[::context][share].copy()
        notices, self._source.notices = self._source.notices, []
        self._after[step] = self._row.position(), notices
        return Raw(step, self.reading(step), as_signed(ids)).pinned(self.device)


@final
class ArrayData(TrainingData):
    """Arrays from a program, with the validation tokens that were read of them."""

    def __init__(self, source: ArraySource, val: HeldTokens, tokenizer: Tokenizer, schedule: Schedule) -> None:
        self.source, self.val, self.tokenizer, self.schedule = source, val, tokenizer, schedule
        digest = hashlib.sha256(val.read(0, val.tokens).tobytes()).hexdigest()
        described = {"format": "flatout-arrays", "tokenizer": tokenizer.fingerprint, "validation": digest}
        fingerprint = hashlib.sha256(canonical_json(described)).hexdigest()
        self.facts = DataFacts(fingerprint=fingerprint, place=PLACE, train_tokens=None)

    def batches(self, delivery: Delivery, span: Span) -> BatchLoader:
        return ArrayLoader(self.source, delivery, span)

    def notices(self, delivery: Delivery) -> Iterable[Finding]:
        if self.source.held:
            held, tokens = self.source.held, self.val.tokens
            text = f"the first {held:,} arrays, {tokens:,} tokens, are held out for validation (val= gives others)"
            yield Check("data", "validation").note(text)
