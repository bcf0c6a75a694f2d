"""Samples as the data of a run: how they are ordered, share rows, and are shown to people."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

from flatout.data.batch import Batch, BatchLoader, Delivery, Span
from flatout.data.chat_template import ChatTemplate
from flatout.data.make_samples import ADVICE, count_told
from flatout.data.masking import preview
from flatout.data.positions import Schedule
from flatout.data.sample_loader import LargestRows, SampleLoader, SampleOrder, SampleRows
from flatout.data.samples import Samples, SampleSet
from flatout.data.shards import HeldTokens, Tokens
from flatout.data.tokenizer import Tokenizer
from flatout.data.training_data import DataFacts, TrainingData
from flatout.errors import many
from flatout.finding import Check, Finding

_COUNTS = (
    "rows_not_used", "truncated", "labels_cut", "dropped_labels_cut", "dropped_unlabelled",
    "turns_without_end_token", "turns_unlabelled", "special_in_content", *ADVICE,
)  # fmt: skip


_CUT = ("truncated", "dropped_labels_cut")
_MUCH = 20  # one in so many that is cut is worth a warning
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
        yield Check("data", "samples").told(
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
                yield Check("data", name.replace("_", " ")).told(
                    "warn" if lost else "note",
                    f"samples: {count_told(name, counts[name])}{f'; {ADVICE[name]}' if name in ADVICE else ''}",
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
        """Who talks to the model later must speak as it was taught."""
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
