"""The documents of a split joined in another order in every epoch (`data.packing=reshuffle`).

Idea: a keyed permutation of the documents, another one for each epoch, says in which order they are joined. A window of
an epoch is then some whole documents and parts of two, which `pieces` finds by sums of lengths. Windows cut the text
elsewhere in every epoch, and documents meet others.

Contract: a pure function of (documents, seed, epoch, window), so a resume needs the step number alone. Every epoch has
as many windows as the documents in their own order.
"""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from flatout.data.best_fit import Places, runs
from flatout.data.sampler import WindowOrder

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
