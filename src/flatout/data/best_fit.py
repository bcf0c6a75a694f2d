"""Whole documents fitted into windows of a fixed size, with as little padding as a simple rule can reach.

Idea: best fit decreasing. The largest piece goes first, and each goes into the fullest window that still has room for
it. Windows with the same room left are alike, and so are pieces of the same size: both are handled by classes, a whole
class at a time, and the work grows with the context and not with the number of documents.

What is fitted are pairs of a token and the one that follows it. A document of n tokens has n - 1 of them: its first
n - 1 tokens are inputs, its last n - 1 are targets, and no target comes from another document. One with more pairs than
fit into a window is cut into pieces of a full window each and a shorter last one; a cut repeats one token, as target of
the one piece and first input of the next.

Contract: deterministic. Every token but the first of a document is a target in exactly one window, and every token but
the last an input; a document of one token has no pair and is counted in `remainder`. Any two windows together hold more
than one window can, so that less than half is padding; the number of windows is that of the plain method.

Trap: short documents from all over the corpus meet in one window, so a window is many reads and not one. And a packing
is kept in memory, some 12 bytes a piece (about 50 while it is made), unlike the order of joined windows, which is
computed.
"""

import bisect
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

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
