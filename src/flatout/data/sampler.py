"""Which windows or documents a step reads, as a pure function of (seed, position): order, best fit, reshuffling.

`WindowOrder`: a keyed permutation of the windows of an epoch, another one for every epoch. There is no list to shuffle
or to save, so resuming at any step, at any world size, needs nothing but the step number. The permutation is a Feistel
network: a number is split into two halves, and each round exchanges them while adding a keyed hash of one to the other,
which is a bijection on a power of four. Results outside the range are put through again ("cycle walking"). It is the
same on every machine and with every numpy; positions stay below 2**62. A window is context + 1 tokens, since the last
input needs a target: at stride == context neighbours share one token, and every token but the first is a target once
per epoch.

`best_fit`: whole documents in windows of a fixed size, by best fit decreasing: the largest piece goes first, each into
the fullest window that has room for it. Windows with the same room, and pieces of the same size, are handled by
classes, so the work grows with the context and not with the number of documents. What is fitted are pairs of a token
and the one that follows it. A document of n tokens has n - 1 pairs; one with more than fit is cut into full windows and
a shorter last piece, and a cut repeats one token. Every token but the first of a document is a target in exactly one
window; a document of one token counts in `remainder`. Less than half is padding. A packing is kept in memory, some 12
bytes a piece (about 50 while it is made), and its windows are read from all over the corpus.

`Reshuffle`: documents are joined in another order in every epoch (`data.packing=reshuffle`), by a keyed permutation of
them. Windows then cut the text elsewhere in every epoch. A pure function of (documents, seed, epoch, window).
"""

import bisect
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from flatout.corpus.clean import mixed

Numbers = npt.NDArray[np.uint64]
_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
# One key to add in each round, as a column beside a row of epochs.
_ROUND_KEYS = np.array([[number * _GOLDEN & _MASK] for number in range(1, _ROUNDS + 1)], dtype=np.uint64)


def window_count(tokens: int, context: int, stride: int) -> int:
    """How many windows of context + 1 tokens start at a multiple of `stride` and fit, the last full one included."""
    if context < 1 or stride < 1 or tokens < 0:
        raise ValueError(f"no windows of context {context} and stride {stride} in {tokens} tokens")
    return 0 if tokens < context + 1 else (tokens - context - 1) // stride + 1


def remainder(tokens: int, context: int, stride: int) -> int:
    """How many tokens are in no window, neither as input nor as target: the tail, and gaps of a wider stride."""
    windows = window_count(tokens, context, stride)
    return tokens - (windows - 1) * min(stride, context + 1) - (context + 1) if windows else tokens


@final
@dataclass(frozen=True)
class WindowOrder:
    """The order in which windows are read: a new permutation of all of them in every epoch."""

    windows: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.windows <= 2**62:
            raise ValueError(f"an order needs 1 to 2**62 windows, not {self.windows}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"a seed is between 0 and 2**64 - 1, not {self.seed}")

    def indices(self, position: int, count: int) -> npt.NDArray[np.int64]:
        """The windows for positions `position` to `position + count - 1`, across epochs where need be."""
        if position < 0 or count < 0 or position + count > 2**62:
            raise ValueError(f"no positions {position} to {position + count}")
        positions = np.arange(position, position + count, dtype=np.uint64)
        epochs, values = np.divmod(positions, np.uint64(self.windows))
        # The hashes that every round begins with depend on the epoch alone. A batch that spans many short epochs is as
        # fast as any other: each of its positions looks its own up.
        first, last = position // self.windows, max(position, position + count - 1) // self.windows
        keys = mixed(np.arange(first, last + 1, dtype=np.uint64) ^ mixed(np.array([self.seed ^ _GOLDEN], np.uint64)))
        # Mixing the key by itself first keeps nearby keys from meeting nearby values in the same hash.
        rounds = mixed(keys + _ROUND_KEYS)
        which = epochs - np.uint64(first)
        # Below three bits the network has too few round functions: some orders of a few windows came up 1.3 times as
        # often as others. From three bits on, all orders of 2 to 6 windows pass a chi-square test.
        half_bits = max(3, ((self.windows - 1).bit_length() + 1) // 2)
        values = _permuted(values, rounds, which, half_bits)
        outside = np.flatnonzero(values >= np.uint64(self.windows))
        while outside.size:
            again = _permuted(values[outside], rounds, which[outside], half_bits)
            values[outside] = again
            outside = outside[again >= np.uint64(self.windows)]
        return values.astype(np.int64)


def _permuted(values: Numbers, rounds: Numbers, which: Numbers, half_bits: int) -> Numbers:
    """A bijection on 0 .. 4**half_bits - 1, another one for every column of `rounds`."""
    shift, mask = np.array(half_bits, dtype=np.uint64), np.array(2**half_bits - 1, dtype=np.uint64)
    left, right = values >> shift, values & mask
    for keys in rounds:
        left, right = right, left ^ (mixed(keys[which] ^ right) & mask)
    return left << shift | right


Places = npt.NDArray[np.int64]


@final
@dataclass(frozen=True, eq=False)
class Packing:
    """Which pieces of documents each window holds: window w has pieces `first[w]` to `first[w + 1] - 1`.

    Piece p begins at token `starts[p]` of the stream and has `sizes[p]` pairs, hence one token more than that.
    """

    capacity: int
    first: Places
    starts: Places
    sizes: npt.NDArray[np.int32]
    remainder: int

    @property
    def windows(self) -> int:
        return len(self.first) - 1

    @property
    def pairs(self) -> int:
        """Labelled tokens in an epoch."""
        return int(self.sizes.sum(dtype=np.int64))

    @property
    def padding(self) -> float:
        """Share of all positions that hold no token."""
        return 1.0 - self.pairs / (self.windows * self.capacity) if self.windows else 0.0

    def layout(self, windows: Places) -> "RowLayout":
        """The pieces of these windows, laid out as the rows of a batch."""
        first, counts = self.first[windows], self.first[windows + 1] - self.first[windows]
        rows = np.repeat(np.arange(len(windows)), counts)
        number_in_row = np.arange(len(rows)) - np.repeat(_before(counts), counts)
        pieces = np.repeat(first, counts) + number_in_row
        sizes = self.sizes[pieces].astype(np.int64)
        before = _before(sizes)
        before_row = before[_before(counts)][rows]
        cells = runs(rows * self.capacity + before - before_row, sizes)
        documents = np.full((len(windows), self.capacity), -1, dtype=np.int32)
        documents.reshape(-1)[cells] = np.repeat(number_in_row, sizes)
        return RowLayout(self.starts[pieces], sizes, cells, documents)


@final
@dataclass(frozen=True, eq=False)
class RowLayout:
    """Pieces as rows of a batch: `cells` are the positions they fill in the flattened rows, a pair each.

    `documents` [B, T] is the number of the document in its row for each position, and -1 where there is none.
    """

    starts: Places
    sizes: Places
    cells: Places
    documents: npt.NDArray[np.int32]

    def sources(self, bases: Places) -> Places:
        """[B, T]: for each position the token that is its input, if piece p lies at `bases[p]`; -1 for padding."""
        result = np.full(self.documents.shape, -1, dtype=np.int64)
        result.reshape(-1)[self.cells] = runs(bases, self.sizes)
        return result


def best_fit(lengths: npt.NDArray[np.integer], capacity: int) -> Packing:
    """Pack documents of `lengths` tokens, which follow each other in the stream, into windows of `capacity` inputs."""
    if capacity < 1 or capacity >= 2**31 or (len(lengths) and int(lengths.min()) < 0):
        raise ValueError(f"no windows of {capacity} tokens for these documents")
    starts, sizes = _pieces(np.asarray(lengths, dtype=np.int64), capacity)
    windows, count = _fitted(sizes, capacity)
    # Pieces are in the order of the stream here, and a stable sort leaves them so within each window.
    order = np.argsort(windows, kind="stable")
    first = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(windows, minlength=count), out=first[1:])
    return Packing(capacity, first, starts[order], sizes[order], int(np.count_nonzero(lengths == 1)))


def _pieces(lengths: Places, capacity: int) -> tuple[Places, npt.NDArray[np.int32]]:
    """Where each piece begins in the stream, and its pairs: documents in order, long ones cut."""
    pairs = np.maximum(lengths - 1, 0)
    counts = -(-pairs // capacity)
    sizes = np.full(int(counts.sum()), capacity, dtype=np.int32)
    ends = np.cumsum(counts)
    cut = counts > 0
    sizes[ends[cut] - 1] = (pairs - (counts - 1) * capacity)[cut]
    number_in_document = np.arange(len(sizes)) - np.repeat(ends - counts, counts)
    return np.repeat(_before(lengths), counts) + number_in_document * capacity, sizes


def _fitted(sizes: npt.NDArray[np.int32], capacity: int) -> tuple[npt.NDArray[np.int32], int]:
    """The window of each piece, and the number of windows."""
    # numpy sorts 16-bit keys in linear time.
    keys = (capacity - sizes).astype(np.uint16 if capacity <= 2**16 else np.uint32)
    order = np.argsort(keys, kind="stable")
    windows = np.empty(len(sizes), dtype=np.int32)
    open_windows = _OpenWindows(capacity)
    done = 0
    counts = np.bincount(sizes)
    for size in np.flatnonzero(counts)[::-1].tolist():  # from the largest to the smallest
        last = done + int(counts[size])
        while done < last:
            room = open_windows.best(size)
            each = room // size
            # A window stays the best one until it cannot take another piece of this size: less room is a better fit.
            taken = open_windows.take(room, max(1, (last - done) // each))
            each = min(each, last - done)
            placed = len(taken) * each
            windows[order[done : done + placed]] = np.repeat(taken, each)
            open_windows.put(taken, room - each * size)
            done += placed
    return windows, open_windows.count


@final
class _OpenWindows:
    """Windows by the room that is left in them; as many new ones as are asked for."""

    def __init__(self, capacity: int) -> None:
        self.count = 0
        self._capacity = capacity
        self._rooms: list[int] = []  # rising; those with windows in `_by_room`
        self._by_room: dict[int, list[npt.NDArray[np.int32]]] = {}

    def best(self, size: int) -> int:
        """The least room that is enough."""
        place = bisect.bisect_left(self._rooms, size)
        return self._rooms[place] if place < len(self._rooms) else self._capacity

    def take(self, room: int, most: int) -> npt.NDArray[np.int32]:
        """Some windows with exactly this room, at least one and at most `most`."""
        if room not in self._by_room:
            self.count += most
            return np.arange(self.count - most, self.count, dtype=np.int32)
        groups = self._by_room[room]
        group = groups.pop()
        if len(group) > most:
            groups.append(group[most:])
        elif not groups:
            del self._by_room[room]
            self._rooms.pop(bisect.bisect_left(self._rooms, room))
        return group[:most]

    def put(self, windows: npt.NDArray[np.int32], room: int) -> None:
        if room and room not in self._by_room:
            bisect.insort(self._rooms, room)
        if room:
            self._by_room.setdefault(room, []).append(windows)


def _before(counts: npt.NDArray[np.int64]) -> Places:
    """The sum of all counts before each."""
    return np.cumsum(counts) - counts


def runs(firsts: Places, lengths: npt.NDArray[np.int64]) -> Places:
    """firsts[0], firsts[0] + 1, ..., a run of lengths[0] of them, then the next run."""
    return np.repeat(firsts - _before(lengths), lengths) + np.arange(int(lengths.sum()))


_OTHER = 0xD0C5  # the order of documents must not be that of windows


@final
@dataclass(frozen=True, eq=False)
class Pieces:
    """What windows of one length are made of: ranges of the split, `counts` of them for each window, in its order."""

    starts: Places
    lengths: Places
    counts: Places

    def documents(self) -> npt.NDArray[np.int32]:
        """[B, W]: the number of the document within its window, for each token."""
        numbers = runs(np.zeros_like(self.counts), self.counts)
        return np.repeat(numbers, self.lengths).astype(np.int32).reshape(len(self.counts), -1)


@final
class Reshuffle:
    """The documents that begin at `starts`, the last of which ends with the split."""

    def __init__(self, starts: npt.NDArray[np.uint64], tokens: int, seed: int) -> None:
        self._starts = starts.astype(np.int64)
        self._lengths = np.diff(self._starts, append=tokens)
        self._order = WindowOrder(len(starts), seed ^ _OTHER)
        self._one_at_a_time = threading.Lock()  # several threads make batches, and need the same epoch
        # A batch may reach into the next epoch while another thread is still in this one.
        self._joined: Callable[[int], tuple[Places, Places]] = functools.lru_cache(2)(self._join)

    @property
    def documents(self) -> int:
        return len(self._starts)

    def _join(self, epoch: int) -> tuple[Places, Places]:
        """The documents in the order of an epoch, and where each of them ends in its text."""
        order = self._order.indices(epoch * self.documents, self.documents)
        return order, np.cumsum(self._lengths[order])

    def pieces(self, epochs: Places, begins: Places, length: int) -> Pieces:
        """The windows of `length` tokens that begin at `begins` in the text of their epoch; epochs do not fall."""
        found = [self._pieces(int(epoch), begins[epochs == epoch], length) for epoch in np.unique(epochs)]
        return Pieces(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def _pieces(self, epoch: int, begins: Places, length: int) -> tuple[Places, Places, Places]:
        with self._one_at_a_time:
            order, ends = self._joined(epoch)
        first = np.searchsorted(ends, begins, side="right")
        counts = np.searchsorted(ends, begins + length - 1, side="right") - first + 1
        places = runs(first, counts)
        documents = order[places]
        joined = ends[places] - self._lengths[documents]
        begin = np.maximum(joined, np.repeat(begins, counts))
        end = np.minimum(ends[places], np.repeat(begins + length, counts))
        return self._starts[documents] + begin - joined, end - begin, counts
