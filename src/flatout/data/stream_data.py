"""A stream as the data of a run: nobody knows its length, and its position is saved with every checkpoint."""

from collections.abc import Iterable
from typing import Any, final

from flatout.data.batch import BatchLoader, Delivery, Span
from flatout.data.positions import Schedule
from flatout.data.stream import TOLD_PROBLEMS, StreamDataset
from flatout.data.stream_loader import StreamLoader
from flatout.data.stream_parts import Position
from flatout.data.training_data import DataFacts, TrainingData


@final
class StreamData(TrainingData):
    """A source that is trained on as it is read."""

    def __init__(self, dataset: StreamDataset, schedule: Schedule, *, seed: int, val_tokens: int | None) -> None:
        self.dataset, self.schedule, self.seed, self.val_tokens = dataset, schedule, seed, val_tokens
        self.val, self.tokenizer = dataset.val, dataset.tokenizer
        place = dataset.train.folder
        self.facts = DataFacts(fingerprint=dataset.manifest.fingerprint, place=place, train_tokens=None)

    def batches(
        self, schedule: Schedule, delivery: Delivery, span: Span, position: dict[str, Any] | None
    ) -> BatchLoader:
        start = None if position is None else Position(**position)
        return StreamLoader(self.dataset.train, schedule, delivery, span, seed=self.seed, position=start)

    def notices(self, delivery: Delivery) -> Iterable[str]:
        return self.dataset.notices

    def last_notices(self, position: dict[str, Any] | None) -> Iterable[str]:
        if position is not None and position["problems"] > TOLD_PROBLEMS:
            yield f"{position['problems']:,} problems in the source in all"
