"""Samples as the data of a run: which ones a step takes, how they share rows, and how they are shown to people.

Step s takes the next `batch_samples` samples of its epoch's permutation. They are packed best-fit into as few rows as
hold them, and the rows are made as short as they can be without needing one more; or each has a row of its own. Row
lengths come from a short list, so that shapes repeat and compilers have little to do. For kernels that know no rows
(`joined`), rows only say what goes into a micro-batch: `PackedRows` makes one of them.

Contract: batches depend on nothing but (samples, seed, settings, step). Every sample comes once per epoch; the last
step of an epoch takes what is left. A sample is never cut: rows have room for the longest. Targets are those tokens
that are labelled, and never cross from one sample to another.

Trap: steps have different numbers of labelled tokens, so their mean loss must be over those of the whole step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from flatout.data.batch import Batch, BatchLoader, DataFacts, Delivery, LargestRows, Schedule, Span, TrainingData
from flatout.data.chat_template import ChatTemplate
from flatout.data.masking import ADVICE, count_text, preview
from flatout.data.sampler import Packing, WindowOrder, best_fit
from flatout.data.samples import Samples, SampleSet
from flatout.data.shards import HeldTokens, Tokens
from flatout.data.tokenizer import Tokenizer
from flatout.errors import many
from flatout.finding import Check, Finding
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
        # Without packing, rows keep their padding.
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


_COUNTS = (
    "rows_not_used", "truncated", "labels_cut", "dropped_labels_cut", "dropped_unlabelled",
    "turns_without_end_token", "turns_unlabelled", "special_in_content", *ADVICE,
)  # fmt: skip
_CUT = ("truncated", "dropped_labels_cut")
_MUCH = 20  # a warning if more than one in this many is cut
_FEW_LABELS = 0.01


@final
@dataclass(kw_only=True, eq=False)
class SampleData(TrainingData):
    """The samples of a run; `batch_samples` is how many a step was asked to take, `described` their model."""

    sample_set: SampleSet
    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    described: dict[str, Any] = field(default_factory=dict)
    stops: tuple[int, ...] = ()  # tokens that end an answer
    row_tokens: int
    packing: bool
    batch_samples: int
    seed: int
    limit: str = "model.context"  # the setting by which samples are cut
    accumulation: int | None = None  # micro-batches of a step, as speed.accumulation asks for
    opening_notices: tuple[Finding, ...] = ()

    @property
    def train(self) -> Samples:
        return self.sample_set.train

    @property
    def val_samples(self) -> Samples:
        assert self.sample_set.val is not None, "a run holds some out"
        return self.sample_set.val

    def __post_init__(self) -> None:
        samples, folder = self.train, self.sample_set.folder
        held, tokens = self.val_samples, len(samples.tokens)
        self.val = HeldTokens(held.tokens, folder)
        # A step has each sample once at most.
        self.order = order = SampleOrder(len(samples), min(self.batch_samples, len(samples)), self.seed)
        self.schedule = Schedule.constant(order.batch_samples, self.row_tokens)
        lengths = samples.lengths.astype(float)
        self.facts = DataFacts(
            fingerprint=self.sample_set.fingerprint,
            place=folder,
            train_tokens=tokens,
            windows=order.steps_per_epoch * order.batch_samples,
            # A token attends inside its own sample: the mean length that a token finds itself in, not that of a row.
            attended=float((lengths**2).sum() / lengths.sum()),
            step_tokens=tokens / order.steps_per_epoch,
            batch_samples=order.batch_samples,
            epoch_samples=order.samples,
            steps_per_epoch=order.steps_per_epoch,
            samples=self._facts_for_reports(),
        )

    def rows(self, delivery: Delivery) -> SampleRows:
        """How samples share rows: for attention that goes by bounds, and for our kernels, there need be none."""
        return self._rows(self.train, self.order.batch_samples, delivery)

    def _rows(self, samples: Samples, batch_samples: int, delivery: Delivery) -> SampleRows:
        how = {"row_tokens": self.row_tokens, "packing": self.packing, "joined": delivery.joined}
        return SampleRows(samples, batch_samples=batch_samples, **how)

    def batches(self, delivery: Delivery, span: Span) -> BatchLoader:
        return SampleLoader(self.rows(delivery), self.order, delivery, span)

    def split(self, name: str) -> Tokens:
        return HeldTokens(self.train.tokens, self.facts.place, split=name) if name == "train" else self.val

    def evaluation(
        self, batch_size: int, delivery: Delivery, tokens: int | None = None, split: str = "val"
    ) -> Iterator[Batch]:
        some = first_samples(self.train if split == "train" else self.val_samples, tokens)
        return self._rows(some, batch_size, delivery).in_order(delivery.device, delivery.world)

    def largest(self, delivery: Delivery) -> LargestRows:
        return self.rows(delivery).largest(self.order, delivery.micro_batch or self.order.batch_samples)

    def notices(self, delivery: Delivery) -> Iterator[Finding]:
        facts, made = self.train.facts(), self.sample_set.made
        if self.order.batch_samples < self.batch_samples:
            yield Check("config", "batch").warn(
                f"chat.batch_samples is {self.batch_samples:,} and there are {self.order.samples:,} samples to train "
                "on, so every step takes all of them once, and is an epoch",
                "Lower chat.batch_samples for more steps in an epoch.",
            )
        yield from self.opening_notices
        few = facts["labelled_share"] < _FEW_LABELS
        yield Check("data", "samples").finding(
            "warn" if few else "note",
            f"samples: {facts['samples']:,} to train on and {len(self.val_samples):,} held out; "
            f"{facts['labelled_share']:.1%} of {facts['tokens']:,} tokens are learned",
            "Most of a step is spent on prompts. Look at chat.train_on and the rows." if few else "",
        )
        made = f"made now, since {made}" if made else "used again"
        yield Check("data", "folder").note(f"samples: {made}, in {self.sample_set.folder}")
        yield from self._counted()
        padding = self.rows(delivery).padding(self.order, delivery.micro_batch or self.order.batch_samples)
        yield Check("data", "padding").note(
            f"samples: {padding.share:.1%} of what the device works on is padding, in {many(padding.shapes, 'shape')} "
            f"(counted over {many(padding.steps, 'step')})"
        )
        if self.accumulation is not None and padding.micro_batches < self.accumulation:
            most = "one micro-batch" if padding.micro_batches == 1 else f"{padding.micro_batches} micro-batches at most"
            yield Check("config", "accumulation").warn(
                f"speed.accumulation is {self.accumulation}, but a step has {most}: its samples share rows, of which a "
                f"micro-batch takes up to {delivery.micro_batch}; set speed.micro_batch to fewer rows, or "
                "chat.packing=false"
            )

    def _counted(self) -> Iterator[Finding]:
        """What happened to rows on the way; a warning where text was lost."""
        counts = self.sample_set.manifest["counts"]
        for name in _COUNTS:
            if counts.get(name):
                lost = name == "rows_not_used" or name.endswith("_left_out")
                lost = lost or (name in _CUT and _MUCH * counts[name] > len(self.train))
                longest = f"The longest has {counts.get('longest', 0):,} tokens; raise {self.limit} to keep all of it."
                yield Check("data", name.replace("_", " ")).finding(
                    "warn" if lost else "note",
                    f"samples: {count_text(name, counts[name])}{f'; {ADVICE[name]}' if name in ADVICE else ''}",
                    longest if name in _CUT else "",
                )

    def preview(self) -> tuple[tuple[str, bool], ...]:
        """The first sample in pieces that are learned or not, as people should see it before they train on it."""
        return preview(*self.train.sample(0), self.tokenizer)

    def prompt(self, text: str) -> list[int]:
        """The first held-out sample up to its first label: something to answer, as the model will be asked."""
        ids, labelled = self.val_samples.sample(0)
        first = int(labelled.argmax()) if labelled.any() else len(ids)
        return ids[: max(1, first)].tolist()

    def saved(self) -> dict[str, Any]:
        """The template, the tokens that end an answer, and how the model was described: chat must use the same."""
        template = {} if self.template is None else {"template": self.template.to_json()}
        return {**template, "stops": list(self.stops), "described": self.described}

    def _facts_for_reports(self) -> dict[str, Any]:
        manifest = self.sample_set.manifest
        readings = manifest.get("reading") or [{}]
        return {
            "files": len(manifest["key"]["source"]),
            "rows": manifest["counts"].get("rows", 0),
            "rows_not_used": manifest["counts"].get("rows_not_used", 0),
            "train": len(self.train),
            "val": len(self.val_samples),
            "labelled": self.train.labels,
            "format": readings[0].get("format"),
            "template": None if self.template is None else self.template.name,
        }


def first_samples(samples: Samples, most_tokens: int | None) -> Samples:
    """As many from the start as `most_tokens` hold, and at least one."""
    if most_tokens is None or most_tokens >= len(samples.tokens):
        return samples
    count = max(1, int((samples.offsets <= most_tokens).sum()) - 1)
    end = int(samples.offsets[count])
    return Samples(samples.tokens[:end], samples.labelled[:end], samples.offsets[: count + 1])
