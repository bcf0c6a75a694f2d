"""Documents joined in another order in every epoch: whole, once each, the same by every way to the device."""

from typing import Any

import numpy as np
import pytest
import torch

import flatout
from flatout.config.load import load_config
from flatout.data.batch import Delivery, Schedule, Span, Stage
from flatout.data.sampler import Reshuffle
from flatout.data.shard_data import DeviceLoader, HostLoader, places_of, windows_of
from flatout.data.shards import TokenShards
from flatout.errors import ConfigError
from flatout.world import World
from tests.conftest import TINY
from tests.handmade import write_dataset
from tests.set_up import set_up

CPU = torch.device("cpu")
LENGTHS = (1, 5, 40, 3, 17, 2, 64, 9, 1, 30)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    """Documents of which every token is known by its id, in several shards."""
    ends = np.cumsum(LENGTHS)
    documents = [bytes(range(end - length, end)) for end, length in zip(ends, LENGTHS, strict=True)]
    return TokenShards(
        write_dataset(tmp_path_factory.mktemp("documents") / "data", documents, shard_tokens=50), "train"
    )


def loaded(train: TokenShards, kind: type, steps: tuple[int, int], schedule: Schedule, **how: Any) -> list:
    apart, world = how.pop("apart", False), how.pop("world", World())
    windows = windows_of(train, context=8, stride=8, seed=5, apart=apart, reshuffle=True)
    delivery = Delivery(device=CPU, world=world, **how)
    with kind(windows, delivery, Span(schedule=schedule, first_step=steps[0], last_step=steps[1])) as loader:
        return list(loader)


def epoch_of(train: TokenShards, epoch: int) -> list[int]:
    """The text of an epoch, by its windows in their own order."""
    windows = windows_of(train, context=8, stride=8, seed=5, reshuffle=True)
    table = Schedule.constant(windows.order.windows, 8)
    (batch,) = loaded(train, HostLoader, (epoch, epoch + 1), table)
    rows = torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1)
    text: list[int] = []
    for number in np.argsort(windows.numbers(table.at(epoch))):
        text += rows[number].tolist()[1 if text else 0 :]
    return text


def test_an_epoch_has_every_document_once_and_whole_in_an_order_of_its_own(train: TokenShards):
    texts = [epoch_of(train, epoch) for epoch in range(3)]
    starts = {int(start): length for start, length in zip(train.document_starts(), LENGTHS, strict=True)}
    for text in texts:
        assert len(text) == 8 * ((sum(LENGTHS) - 1) // 8) + 1
        place, seen = 0, set()
        while place < len(text):
            first = text[place]
            length = min(starts[first], len(text) - place)
            assert text[place : place + length] == list(range(first, first + length))
            seen.add(first)
            place += length
        assert len(seen) >= len(LENGTHS) - 8  # the last window is incomplete, and left out
    assert len({tuple(text) for text in texts}) == 3


@pytest.mark.parametrize("apart", [False, True])
def test_batches_are_the_same_by_every_way(train: TokenShards, apart: bool):
    table = Schedule((Stage(0, 4, 8), Stage(3, 8, 4)), 8)  # eight epochs in 40 steps, some steps across two
    whole = loaded(train, HostLoader, (0, 40), table, apart=apart)
    others = [loaded(train, HostLoader, (0, 40), table, apart=apart, workers=3)]
    others += [[*whole[:17], *loaded(train, HostLoader, (17, 40), table, apart=apart)]]
    others += [] if apart else [loaded(train, DeviceLoader, (0, 40), table)]
    for other in others:
        for one, same in zip(whole, other, strict=True):
            assert torch.equal(one.tokens, same.tokens)
            assert torch.equal(one.targets, same.targets)
    halves = [loaded(train, HostLoader, (0, 40), table, apart=apart, world=World(rank, 2)) for rank in range(2)]
    for one, left, right in zip(whole, *halves, strict=True):
        assert torch.equal(one.tokens, torch.cat([left.tokens, right.tokens]))
    if apart:  # a token is followed by the next of its document, or by nothing
        for batch in whole:
            following = batch.targets != -100
            assert torch.equal(batch.targets[following], batch.tokens[following] + 1)


@pytest.mark.parametrize("seed", range(3))
def test_pieces_are_those_of_the_joined_text(seed: int):
    chance = np.random.default_rng(seed)
    lengths = chance.integers(1, 30, size=50)
    starts = np.cumsum(lengths) - lengths
    made = Reshuffle(starts.astype(np.uint64), int(lengths.sum()), seed)
    epochs = np.sort(chance.integers(0, 4, size=12))
    begins = chance.integers(0, lengths.sum() - 33, size=12)
    pieces = made.pieces(epochs, begins, 33)
    found = places_of(pieces, CPU)
    for epoch, begin, places, documents in zip(epochs, begins, found, pieces.documents(), strict=True):
        order, _ = made._join(int(epoch))
        assert sorted(order.tolist()) == list(range(50))
        text = np.concatenate([np.arange(starts[number], starts[number] + lengths[number]) for number in order])
        owner = np.concatenate([np.full(lengths[number], place) for place, number in enumerate(order)])
        assert places.tolist() == text[begin : begin + 33].tolist()
        assert documents.tolist() == (owner[begin : begin + 33] - owner[begin]).tolist()


def test_a_run_asks_for_it_and_goes_on_from_any_step(tiny):
    words = ["data.document_start=the", "data.tokenizer=bytes", "train.batch_tokens=1024", "train.steps=6"]
    run, plain = (set_up(tiny(*words, f"data.packing={how}")) for how in ("reshuffle", "concat"))
    with run.batches(0) as whole, run.batches(4) as rest, plain.batches(0) as others:
        read, later, other = ([batch.tokens for batch in loader] for loader in (whole, rest, others))
    assert all(torch.equal(one, same) for one, same in zip(read[4:], later, strict=True))
    assert not any(torch.equal(one, another) for one, another in zip(read, other, strict=True))


def test_where_it_means_nothing_it_is_refused_or_told(tiny):
    with pytest.raises(ConfigError, match=r"data.streaming goes with data.packing concat"):
        tiny("data.packing=reshuffle", "data.streaming=true", "train.steps=2")
    with pytest.raises(ConfigError, match="joins arrays as they come"):
        list(flatout.train(load_config(None, [*TINY, "data.packing=reshuffle"]), data=np.arange(4000) % 9))
    notices = set_up(tiny("data.packing=reshuffle")).notices
    assert any("data.packing=reshuffle: the training text is one document" in notice for notice in notices)
