"""A stream as the data of a run: cut into blocks of tokens by a thread, shuffled within each, made to batches.

Idea: windows of context + 1 tokens lie at stride context in the row of training tokens, and `block_windows` of them in
a row are a block. Position p of the run lies in block p // windows, and reads the window of it that `WindowOrder` gives
for p, with the block's number as its epoch. A block has the token after its last window's inputs as well, which is the
first one of the next block.

Contract: batches depend on nothing but (stream, schedule, seed, step, rank), whenever the reading began.
After `close` no thread and no worker runs. What goes wrong in the background is raised in the loop.
"""

import contextlib
import queue
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from flatout.data.batch import BatchLoader, DataFacts, Delivery, Raw, Schedule, Span, TrainingData, as_signed
from flatout.data.plan import Position
from flatout.data.sampler import WindowOrder
from flatout.data.stream import TOLD_PROBLEMS, StreamDataset, TokenStream
from flatout.data.tokenizer import Ids
from flatout.data.workers import LoaderError, told
from flatout.errors import many
from flatout.finding import Check, Finding

BLOCK_WINDOWS = 4096
BLOCK_TOKENS = 2**23
_BLOCKS_AHEAD = 2


def block_windows(context: int) -> int:
    """How many windows are shuffled among each other."""
    return max(1, min(BLOCK_WINDOWS, BLOCK_TOKENS // context))


@final
@dataclass(frozen=True)
class StreamBlock:
    """The tokens of a block's windows and one more; where it begins, and where the next one does."""

    number: int
    ids: Ids
    position: Position
    following: Position
    notices: tuple[str, ...]


@final
class StreamLoader(BatchLoader):
    """Batches of a stream, in the order of steps. A one-pass iterator and a context manager, like the other loaders.

    Without a position of its first step the source is read from its beginning.
    """

    def __init__(self, stream: TokenStream, delivery: Delivery, span: Span, *, seed: int) -> None:
        super().__init__(delivery, span, workers=0)
        context = self.schedule.longest
        self._order = WindowOrder(block_windows(context), seed)
        self._held: dict[int, StreamBlock] = {}
        self._positions: dict[int, Position] = {}
        first, inside = divmod(self.schedule.at(self._next_step).start, self._order.windows)
        # The notices of a block are given when it is taken up, which was before a step that begins inside of it.
        self._old = first if inside else -1
        self._ahead: _Ahead | None = None
        if self._next_step < self._last_step:
            begin = Position(**span.position or {})
            self._ahead = _Ahead(stream, begin, first, self._order.windows, context, delivery.patience)

    def position(self) -> dict[str, Any]:
        return self._positions[self._block_of(self._next_step)].to_json()

    def notices(self) -> list[str]:
        return [*super().notices(), *([] if self._ahead is None else self._ahead.notices())]

    def close(self) -> None:
        super().close()
        self._held.clear()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _made(self, step: int) -> Raw:
        reading = self.reading(step)
        blocks = np.arange(reading.start, reading.start + reading.windows) // self._order.windows
        while int(blocks[-1]) not in self._held:
            assert self._ahead is not None
            self._take(self._ahead.next())
        ids = self._gather(self._order.indices(reading.start, reading.windows), blocks)
        next_block = self._block_of(step + 1)
        for kept in (self._held, self._positions):  # no later step asks for the blocks before
            for number in [number for number in kept if number < next_block]:
                del kept[number]
        return Raw(step, reading, as_signed(ids)).pinned(self.device)

    def _take(self, block: StreamBlock) -> None:
        self._held[block.number] = block
        self._positions[block.number] = block.position
        self._positions[block.number + 1] = block.following
        if block.number > self._old:
            self._notices += block.notices

    def _gather(self, windows: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> Ids:
        context = self.schedule.longest
        ids = np.empty((len(windows), context + 1), dtype=self._held[int(blocks[0])].ids.dtype)
        for number in range(int(blocks[0]), int(blocks[-1]) + 1):
            # Row i is window i: a view with overlapping rows.
            rows = np.lib.stride_tricks.sliding_window_view(self._held[number].ids, context + 1)[::context]
            ids[blocks == number] = rows[windows[blocks == number]]
        return ids

    def _block_of(self, step: int) -> int:
        """The block that a step begins in."""
        return self.schedule.at(step).start // self._order.windows


@final
class _Ahead:
    """A thread that makes blocks, a few ahead of whoever takes them."""

    def __init__(
        self, stream: TokenStream, position: Position, first: int, windows: int, context: int, patience: float
    ) -> None:
        if position.tokens > first * windows * context:  # it belongs to a later step
            position = Position()
        self._stream = stream
        self._least = context + 1
        self._size = windows * context
        self._patience = patience
        self._moved = time.monotonic()  # when the last part of the source came in
        self._hangs = False  # nobody waits for it any more
        self._closed = threading.Event()
        self._ready: queue.Queue[StreamBlock | BaseException] = queue.Queue(_BLOCKS_AHEAD)
        self._workers = stream.open_workers()
        # A daemon, since reading from a hub may hang: the end of the process does not wait for that.
        self._thread = threading.Thread(
            target=self._fill, args=(position, first), name="flatout-stream-blocks", daemon=True
        )
        self._thread.start()

    def next(self) -> StreamBlock:
        """The next block, waiting for it as long as parts of it come in."""
        began = time.monotonic()
        while True:
            left = max(began, self._moved) + self._patience - time.monotonic()
            try:
                item = self._ready.get(timeout=max(left, 0.01))
                break
            except queue.Empty:
                if left <= 0:
                    self._hangs = True
                    raise self._stuck() from None
        if isinstance(item, BaseException):
            raise item
        return item

    def _stuck(self) -> LoaderError:
        frame = sys._current_frames().get(self._thread.ident or 0)
        where = "the thread has ended" if frame is None else told(traceback.extract_stack(frame))
        return LoaderError(
            f"the stream has given nothing for {self._patience:g} s, at {where}",
            "check the disk or network that data.source is on",
        )

    def notices(self) -> list[str]:
        return self._workers.taken_notices()

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(queue.Empty):
            while True:  # makes room, so that the thread does not wait any more
                self._ready.get_nowait()
        self._workers.close(wait=not self._hangs)
        self._thread.join(timeout=0 if self._hangs else 10)

    def _fill(self, position: Position, first: int) -> None:
        try:
            with contextlib.closing(self._blocks(position, first)) as blocks:
                for block in blocks:
                    if not self._offer(block):
                        return
        except BaseException as error:  # noqa: BLE001 - whatever it is, the loop must hear of it
            self._offer(error)

    def _offer(self, item: StreamBlock | BaseException) -> bool:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=0.1)
                return True
        return False

    def _blocks(self, position: Position, number: int) -> Generator[StreamBlock]:
        size, marks, marked = self._size, dict[int, Position](), number
        notices: defaultdict[int, list[str]] = defaultdict(list)
        row = np.empty(size + 1, dtype=self._stream.dtype)
        at, filled = number * size, 0  # the next token to take, and how many are in the row
        with contextlib.closing(self._stream.chunks(position, self._workers, least=self._least)) as chunks:
            for chunk in chunks:
                self._moved = time.monotonic()
                begin, end = chunk.position.tokens, chunk.position.tokens + len(chunk.ids)
                notices[begin // size] += chunk.notices
                # A block begins in the first part that has its first token or comes after it, be it without tokens.
                while end > marked * size or begin >= marked * size:
                    marks[marked] = chunk.position
                    marked += 1
                while at < end:
                    taken = chunk.ids[at - begin : at - begin + size + 1 - filled]
                    row[filled : filled + len(taken)] = taken
                    at, filled = at + len(taken), filled + len(taken)
                    if filled < size + 1:
                        break
                    yield StreamBlock(number, row, marks.pop(number), marks[number + 1], tuple(notices.pop(number, ())))
                    fresh = np.empty_like(row)
                    fresh[0] = row[-1]
                    row, filled, number = fresh, 1, number + 1


@final
class StreamData(TrainingData):
    """A source that is trained on as it is read."""

    def __init__(self, dataset: StreamDataset, schedule: Schedule, *, seed: int) -> None:
        self.dataset, self.schedule, self.seed = dataset, schedule, seed
        self.val, self.tokenizer = dataset.val, dataset.tokenizer
        place = dataset.train.folder
        self.facts = DataFacts(fingerprint=dataset.train.fingerprint, place=place, train_tokens=None)

    def batches(self, delivery: Delivery, span: Span) -> BatchLoader:
        return StreamLoader(self.dataset.train, delivery, span, seed=self.seed)

    def notices(self, delivery: Delivery) -> Iterable[Finding]:
        return [Check("data", "stream").note(notice) for notice in self.dataset.notices]

    def last_notices(self, position: dict[str, Any] | None) -> Iterable[str]:
        if position is not None and position["problems"] > TOLD_PROBLEMS:
            yield f"{many(position['problems'], 'problem')} in the source in all"
