"""Arrays from a program: joined in order or shuffled by number, checked, held out, and gone on from any position."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch

from flatout.config.schema import DataConfig
from flatout.data.array_data import ArrayData, Arrays, open_arrays
from flatout.data.batch import Delivery, Schedule, Span, Stage
from flatout.errors import DataError, UserError

SCHEDULE = Schedule.constant(3, 8)
CPU = torch.device("cpu")


def documents(count: int = 60, seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50, length) for length in rng.integers(0, 40, count)]


def opened(train: Any, val: Any = None, **more: Any) -> ArrayData:
    data, given = DataConfig(tokenizer="char", validation=0.1), {"vocab": 50, "seed": 3, "val_tokens": 40, **more}
    return open_arrays(Arrays(train, val), SCHEDULE, data, **given)


def batches(data: ArrayData, first: int, last: int, position: Any = None, workers: int = 0, schedule=SCHEDULE):
    delivery = Delivery(device=CPU, workers=workers)
    found = []
    span = Span(schedule=schedule, first_step=first, last_step=last, position=position)
    with data.batches(delivery, span) as loader:
        for batch in loader:
            saved = json.loads(json.dumps(loader.position()))
            found.append((batch.tokens, batch.targets, saved, loader.notices()))
    return found


def row_of(found) -> np.ndarray:
    return torch.cat([tokens.flatten() for tokens, *_ in found]).numpy()


class Iterable:
    """Read again from its beginning each time."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self.arrays = arrays

    def __iter__(self):
        return iter(self.arrays)


class Stateful(Iterable):
    """Goes on from its state; counts what was drawn."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        super().__init__(arrays)
        self.at = self.drawn = 0

    def __iter__(self):
        while self.at < len(self.arrays):
            self.at, self.drawn = self.at + 1, self.drawn + 1
            yield self.arrays[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Numbered(torch.utils.data.Dataset):
    def __init__(self, arrays: list[np.ndarray]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.arrays[index])


def kinds() -> dict[str, Any]:
    return {
        "iterable": lambda: Iterable(documents()),
        "function": lambda: lambda: (row.tolist() for row in documents()),
        "state": lambda: Stateful(documents()),
        "dataset": lambda: Numbered(documents()),
        "list": lambda: [torch.from_numpy(row) for row in documents()],
    }


def test_iterables_are_joined_in_their_order_and_read_again():
    row = np.concatenate(documents())
    found = batches(opened(Iterable(documents()), [np.arange(50)]), 0, 3 * len(row) // 24)
    assert np.array_equal(row_of(found), np.tile(row, 3)[: len(row_of(found))])
    for tokens, targets, *_ in found:
        assert torch.equal(tokens.flatten()[1:], targets.flatten()[:-1])
    told = [notice for *_, notices in found for notice in notices]
    assert told[0] == f"the source has been read once, {len(row):,} training tokens, and is read again"


def test_what_is_numbered_is_shuffled_anew_in_every_epoch():
    arrays = [np.full(8, number) for number in range(30)]
    found = row_of(batches(opened(Numbered(arrays), [np.arange(50)]), 0, 20)).reshape(2, 30, 8)[:, :, 0]
    assert sorted(found[0].tolist()) == sorted(found[1].tolist()) == list(range(30))
    assert found[0].tolist() != found[1].tolist() != list(range(30))


def test_every_epoch_has_each_array_once_that_is_not_held_out():
    data = opened(Numbered([np.full(8, number) for number in range(35)]))
    assert data.source.held == 3
    found = row_of(batches(data, 0, 32)).reshape(3, 32, 8)[:, :, 0]
    for epoch in found.tolist():
        assert sorted(epoch) == list(range(3, 35))


@pytest.mark.grid
@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("val", [None, [np.arange(50)]], ids=["held out", "own"])
def test_every_step_can_be_gone_on_from(kind: str, val: Any):
    make = kinds()[kind]
    whole = batches(opened(make(), val), 0, 70, workers=1)
    for cut in (1, 2, 17, 43, 69):
        again = batches(opened(make(), val), cut, 70, whole[cut - 1][2])
        for one, other in zip(whole[cut:], again, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
            assert one[2] == other[2]
    skipped = batches(opened(make(), val), 17, 20)
    assert torch.equal(skipped[0][0], whole[17][0])


def test_a_state_is_put_back_instead_of_skipping():
    whole = batches(opened(Stateful(documents()), [np.arange(50)]), 0, 30)
    source = Stateful(documents())
    batches(opened(source, [np.arange(50)]), 29, 30, whole[28][2])
    assert source.drawn < 5


def test_an_iterator_is_read_once_and_its_end_is_an_error():
    data = opened((row for row in documents()), None)
    first = batches(data, 0, 5)
    again = opened((row for row in documents()), None)
    assert torch.equal(batches(again, 3, 5, first[2][2])[0][0], first[3][0])
    with pytest.raises(DataError, match="read beyond where the run goes on"):
        batches(data, 0, 5)
    with pytest.raises(DataError, match="ended after 60 arrays") as caught:
        batches(opened((row for row in documents()), [np.arange(50)]), 0, 10_000)
    assert "function" in caught.value.hint


def test_validation_arrays_are_held_out_and_known_again():
    data = opened(Iterable(documents()))
    held = data.source.held
    row = np.concatenate(documents())
    assert np.array_equal(data.val.read(0, data.val.tokens), row[:41])
    assert np.array_equal(row_of(batches(data, 0, 4)), np.concatenate(documents()[held:])[: 4 * 24])
    assert [one for one in data.notices(Delivery(device=CPU)) if f"first {held} arrays" in one.found]
    assert sum(int((batch.targets >= 0).sum()) for batch in data.evaluation(2, Delivery(device=CPU))) == 40
    assert opened(Iterable(documents())).facts.fingerprint == data.facts.fingerprint
    assert opened(Iterable(documents(seed=2))).facts.fingerprint != data.facts.fingerprint
    assert opened(documents(100)).source.held <= 10


def test_stages_cut_windows_here_too():
    stages = Schedule((Stage(0, 4, 4), Stage(2, 2, 8, attention_window=5)), 8)
    found = batches(opened(Iterable(documents()), [np.arange(50)]), 0, 4, schedule=stages)
    assert [tuple(tokens.shape) for tokens, *_ in found] == [(4, 4), (4, 4), (2, 8), (2, 8)]
    assert np.array_equal(row_of(found), np.concatenate(documents())[:64])


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ([np.array([1, 50])], "token id 50, and the vocabulary has 50"),
        ([np.array([3, -1])], "token id -1"),
        ([np.array([1.0, 2.0])], "has type float64"),
        ([np.ones((2, 2), int)], "has 2 dimensions"),
        ([[[1], [2, 3]]], "has 2 dimensions"),
        ([{"ids": [1]}], "item 0 of the data has ids"),
        (["text"], "item 0 of the data is a text, and there is no tokenizer"),
        ("text", "a str was given"),
        (7, "a int was given"),
        ([[], []], "holds no two tokens"),
        ({0: [1, 2]}, "a dict was given"),
        (np.array([1, 2]), "is of type int64"),
        (lambda: itertools.repeat([]), "arrays in a row are empty"),
        (lambda: 3, "the function given to train as data returned a int"),
    ],
)
def test_what_are_no_arrays_of_ids_is_refused(train: Any, words: str):
    with pytest.raises(DataError, match=words) as caught:
        opened(train)
    assert caught.value.hint


def test_rows_and_texts_are_read_as_arrays():
    rows = [{"input_ids": ids, "text": "not this"} for ids in documents()]
    expected = row_of(batches(opened(documents()), 0, 3))
    assert np.array_equal(row_of(batches(opened(rows), 0, 3)), expected)
    texts = ["ab", "", "c"] * 20
    data = open_arrays(Arrays(texts, None), SCHEDULE, DataConfig(tokenizer="bytes"), vocab=None, seed=3, val_tokens=3)
    found = row_of(batches(data, 0, 3)).tolist()
    assert set(found) == {ord("a"), ord("b"), ord("c"), 256}, "each text has its end"
    assert all(after == ord("b") for before, after in itertools.pairwise(found) if before == ord("a"))


def test_too_little_is_refused():
    with pytest.raises(DataError, match="no tokens besides the 1 arrays held out"):
        batches(opened(Iterable([np.arange(45)])), 0, 1)
    with pytest.raises(UserError, match="need a vocabulary"):
        opened(documents(), vocab=None)
