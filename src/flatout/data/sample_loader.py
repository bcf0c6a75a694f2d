"""Samples to batches: which ones a step takes, and how they share rows.

Idea: step s takes the next `batch_samples` samples of its epoch's permutation. They are packed best-fit into as few
rows as hold them, and the rows are made as short as they can be without needing one more, so that little is padding;
or each has a row of its own. Row lengths come from a short list, so that shapes repeat and compilers have little to do.
For kernels that know no rows (`joined`), rows only say what goes into a micro-batch: `PackedRows` makes one of them.

Contract: batches depend on nothing but (samples, seed, settings, step), so resuming needs the step number only. Every
sample comes once per epoch; the last step of an epoch takes what is left and is not filled up. A sample is never cut:
rows have room for the longest. Targets are those tokens that are labelled, and never cross from one sample to another.

Trap: steps have different numbers of labelled tokens, so their mean loss must be over those of the whole step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from flatout.data.batch import Batch, BatchLoader, Delivery, Span
from flatout.data.best_fit import Packing, best_fit
from flatout.data.sampler import WindowOrder
from flatout.data.samples import Samples
from flatout.ops.documents import PackedRows, Room
from flatout.ops.reference import IGNORED
from flatout.world import World

MULTIPLE = 64
# Lengths between one power of two and the next. More of them pad less and repeat less often.
_LENGTHS_PER_OCTAVE = 8
_MOST_EPOCHS = 16  # that are looked through for the fullest step

# Shapes: B rows of the batch, T their length.


@final
@dataclass(frozen=True)
class SampleOrder:
    """Which samples each step takes."""

    samples: int
    batch_samples: int
    seed: int

    def __post_init__(self) -> None:
        if self.batch_samples < 1:
            raise ValueError(f"a batch has at least one sample, not {self.batch_samples}")

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch_samples)

    def indices(self, step: int) -> npt.NDArray[np.int64]:
        """The numbers of the samples of a step."""
        epoch, inside = divmod(step, self.steps_per_epoch)
        first = inside * self.batch_samples
        count = min(self.batch_samples, self.samples - first)
        return WindowOrder(self.samples, self.seed).indices(epoch * self.samples + first, count)


def row_lengths(most: int) -> list[int]:
    """The lengths that rows can have, rising: multiples of 64, some to each octave, up to what holds `most` tokens."""
    lengths = [MULTIPLE]
    while lengths[-1] < most:
        octave = 2 ** (lengths[-1].bit_length() - 1)
        lengths.append(lengths[-1] + max(MULTIPLE, octave // _LENGTHS_PER_OCTAVE))
    lengths[-1] = min(lengths[-1], -(-most // MULTIPLE) * MULTIPLE)
    return lengths


@final
@dataclass(frozen=True)
class LargestRows:
    """The most that a micro-batch of packed samples holds."""

    rows: int
    row_tokens: int
    labels: int

    def by_tokens(self) -> tuple[int, int]:
        return self.rows * self.row_tokens, self.labels

    def by_labels(self) -> tuple[int, int]:
        return self.labels, self.rows * self.row_tokens


def fullest_steps(samples: Samples, order: SampleOrder, steps: int | None = None) -> tuple[int, ...]:
    """Steps of which one has the largest micro-batch: those with the most tokens, with the longest samples and with the
    most labels. Of the first `steps` steps, as far as a few epochs go, or of an epoch."""
    epochs = min(_MOST_EPOCHS, -(-(steps or 1) // order.steps_per_epoch))
    firsts = np.arange(0, order.samples, order.batch_samples)
    labels = np.add.reduceat(samples.labelled, samples.offsets[:-1], dtype=np.int64)
    tokens_of, longest_of, labels_of = [], [], []
    for epoch in range(epochs):
        numbers = WindowOrder(order.samples, order.seed).indices(epoch * order.samples, order.samples)
        tokens_of.append(np.add.reduceat(samples.lengths[numbers], firsts))
        longest_of.append(np.maximum.reduceat(samples.lengths[numbers], firsts))
        labels_of.append(np.add.reduceat(labels[numbers], firsts))
    found: set[int] = set()
    for values in (tokens_of, longest_of, labels_of):
        most = np.concatenate(values)[: steps or None]
        found.update(np.argsort(-most, kind="stable")[:4].tolist())
    return tuple(sorted(found))


@final
@dataclass(frozen=True)
class Padding:
    """What the shapes of some steps cost."""

    steps: int
    shapes: int  # different ones of their micro-batches
    micro_batches: int  # the most that a step has
    tokens: int
    places: int  # tokens that a device works on, padding included

    @property
    def share(self) -> float:
        return 1.0 - self.tokens / self.places


@final
class SampleRows:
    """Lays samples out in rows, a batch of at most `batch_samples` at a time.

    `row_tokens` is how much a row may hold; a sample of n tokens takes n - 1, since its last one is a target only.
    `joined` is for kernels that know no rows.
    """

    def __init__(
        self, samples: Samples, *, batch_samples: int, row_tokens: int, packing: bool, joined: bool = False
    ) -> None:
        longest = int(samples.lengths.max()) - 1
        if longest > row_tokens:
            raise ValueError(f"a row of {row_tokens} tokens has no room for a sample of {longest + 1}")
        self.samples = samples
        self._batch_samples = batch_samples
        self._packing = packing
        # Who wants a row for each sample gets them with their padding.
        self._room = Room(min(batch_samples, len(samples)), longest, joined and packing)
        lengths = row_lengths(row_tokens)
        self._lengths = lengths[-1:] if self._room.joined else lengths

    def packed(self, numbers: npt.NDArray[np.int64]) -> PackedRows:
        """The rows of these samples."""
        samples, starts = self.samples, self.samples.offsets[numbers]
        sizes = samples.offsets[numbers + 1] - starts
        before = np.cumsum(sizes) - sizes
        places = np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))
        ids, labelled = samples.tokens[places].astype(np.int64), samples.labelled[places]
        rows = self._best_fit(sizes) if self._packing else self._one_each(sizes)
        layout = rows.layout(np.arange(rows.windows))
        sources = layout.sources(layout.starts)
        padding = sources < 0
        inputs = np.maximum(sources, 0)
        following = np.where(padding, 0, inputs + 1)
        tokens = np.where(padding, 0, ids[inputs])
        targets = np.where(padding | ~labelled[following], IGNORED, ids[following])
        return PackedRows(tokens, layout.documents, targets, self._room)

    def shared(self, numbers: npt.NDArray[np.int64]) -> PackedRows:
        """The rows of a process's share of some samples. One that has none gets a sample without a label, because it
        must take the step all the same."""
        if len(numbers):
            return self.packed(numbers)
        packed = self.packed(np.zeros(1, dtype=np.int64))
        unlabelled = np.full_like(packed.targets_BT, IGNORED)
        return PackedRows(packed.tokens_BT, packed.documents_BT, unlabelled, self._room, stands_in=True)

    def in_order(self, device: torch.device, world: World | None = None) -> Iterator[Batch]:
        """Every sample once, in order, every process its share of the batches: for evaluation."""
        count, size = len(self.samples), self._batch_samples
        for step in (world or World()).deal(-(-count // size)):
            packed = self.shared(np.arange(step * size, min((step + 1) * size, count)))
            yield Batch.of_rows(packed, step, device).on(device)

    def micro_batches(
        self, order: SampleOrder, steps: Iterable[int], micro_batch: int
    ) -> Iterator[tuple[int, LargestRows]]:
        """The micro-batches of some steps as the loader will make them: (step, what it holds)."""
        for step in steps:
            packed = self.packed(order.indices(step))
            for part in packed.cuts(micro_batch):
                targets = packed.part(part, torch.device("cpu"))[1]
                rows, length = targets.shape
                yield step, LargestRows(rows, length, int((targets != IGNORED).sum()))

    def largest(self, order: SampleOrder, micro_batch: int) -> LargestRows:
        """The largest micro-batch of the first epoch: its fullest steps are laid out as the loader will do it. Other
        epochs draw other steps, which differ by little."""
        steps = fullest_steps(self.samples, order)
        return max((one for _, one in self.micro_batches(order, steps, micro_batch)), key=LargestRows.by_tokens)

    def most_rows(self, order: SampleOrder, steps: Iterable[int]) -> int:
        """The most rows that one of these steps takes."""
        return max(len(self.packed(order.indices(step)).tokens_BT) for step in steps)

    def padding(self, order: SampleOrder, micro_batch: int, most_steps: int = 64) -> Padding:
        """How much of the first steps is padding."""
        steps, tokens, places, most, shapes = min(most_steps, order.steps_per_epoch), 0, 0, 0, set()
        for step in range(steps):
            packed = self.packed(order.indices(step))
            cuts = packed.cuts(micro_batch)
            tokens, places, most = tokens + packed.tokens, places + packed.places(micro_batch), max(most, len(cuts))
            for part in cuts:
                shapes.add(packed.part(part, torch.device("cpu"))[2].sizes)
        return Padding(steps, len(shapes), most, tokens, places)

    def _best_fit(self, sizes: npt.NDArray[np.int64]) -> Packing:
        """As few rows as best fit finds, and of the lengths with which it finds no more the shortest."""
        lengths = [length for length in self._lengths if length >= int(sizes.max()) - 1]
        packing = best_fit(sizes, lengths[-1])
        few = packing.windows
        low, high = 0, len(lengths) - 1
        while low < high:
            middle = (low + high) // 2
            tried = best_fit(sizes, lengths[middle])
            if tried.windows <= few:
                packing, high = tried, middle
            else:
                low = middle + 1
        return packing

    def _one_each(self, sizes: npt.NDArray[np.int64]) -> Packing:
        length = next(length for length in self._lengths if length >= int(sizes.max()) - 1)
        starts, pairs = np.cumsum(sizes) - sizes, (sizes - 1).astype(np.int32)
        return Packing(length, np.arange(len(sizes) + 1), starts, pairs, 0)


@final
class SampleLoader(BatchLoader):
    """Batches of samples. Parts of a micro-batch's rows are made ahead of time, others where they are needed."""

    def __init__(self, rows: SampleRows, order: SampleOrder, delivery: Delivery, span: Span) -> None:
        schedule = span.schedule
        if order.samples != len(rows.samples):
            raise ValueError(f"the order is over {order.samples} samples, and there are {len(rows.samples)}")
        if any(schedule.at(stage.first_step).windows != order.batch_samples for stage in schedule.stages):
            raise ValueError(f"every step takes {order.batch_samples} samples, whatever its stage")
        super().__init__(delivery, span, workers=delivery.workers)
        self._rows, self._order = rows, order

    def _made(self, step: int) -> Batch:
        reading = self.schedule.at(step)
        numbers = self._order.indices(reading.start // self._order.batch_samples)
        packed = self._rows.shared(numbers[self.delivery.world.share(len(numbers))])
        if self.delivery.micro_batch is not None:
            packed.prepare(self.delivery.micro_batch, pin=self.device.type == "cuda")
        return Batch.of_rows(packed, step, self.device, attention_window=reading.attention_window)
