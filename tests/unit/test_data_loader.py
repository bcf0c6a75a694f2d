"""Loaders: the same batches from host and device, any workers, any shards, any rank; and prompt, clean endings."""

import itertools
import queue
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.data import shard_data as module
from flatout.data.batch import PREFETCH, Batch, Delivery, Schedule, Span, evaluation_batches
from flatout.data.sampler import WindowOrder, window_count
from flatout.data.shard_data import DeviceLoader, HostLoader, Windows, windows_of
from flatout.data.shards import TokenShards
from flatout.data.tokenizer import ByteTokenizer, CharTokenizer
from flatout.data.workers import LoaderError, Threads
from flatout.errors import DataError, ResourceError
from flatout.ops.documents import PackedRows
from flatout.ops.reference import IGNORED
from flatout.world import World
from tests.handmade import write_dataset

SHAPE: dict[str, Any] = {"sequences": 6, "context": 16, "stride": 16, "device": "cpu"}
CPU = torch.device("cpu")


def prepare(folder: Path, text: str, tokenizer: str = "bytes", shard_tokens: int = 10**8) -> Path:
    made = CharTokenizer("".join(sorted(set(text)))) if tokenizer == "char" else ByteTokenizer()
    border = int(len(text) * 0.8)
    splits = ([made.encode(text[:border])], [made.encode(text[border:])])
    return write_dataset(folder / f"data-{shard_tokens}", *splits, made, shard_tokens)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    text = " ".join(str(number * number) for number in range(500))
    return TokenShards(prepare(tmp_path_factory.mktemp("loader"), text), "train")


def parts(shards: TokenShards, first: int, last: int, changes: dict[str, Any]) -> tuple[Windows, Any, Any]:
    """What loaders are made of."""
    arguments = SHAPE | changes
    shape = {name: value for name, value in arguments.items() if name in ("context", "stride", "best_fit", "apart")}
    how = {name: arguments[name] for name in ("workers", "world", "patience") if name in arguments}
    schedule = Schedule.constant(arguments["sequences"], arguments["context"])
    delivery = Delivery(device=torch.device(arguments["device"]), **how)
    return windows_of(shards, seed=9, **shape), delivery, Span(schedule=schedule, first_step=first, last_step=last)


def host(shards: TokenShards, first: int, last: int, workers: int = 0, **changes: Any) -> HostLoader:
    return HostLoader(*parts(shards, first, last, {**changes, "workers": workers}))


def device(shards: TokenShards, first: int, last: int, **changes: Any) -> DeviceLoader:
    return DeviceLoader(*parts(shards, first, last, changes))


def assert_same(left: list[Batch], right: list[Batch]) -> None:
    assert [batch.step for batch in left] == [batch.step for batch in right]
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.targets, other.targets)


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flatout-loader")]


@pytest.mark.parametrize(("context", "stride"), [(16, 16), (16, 5), (7, 11), (1, 1)])
def test_batches_are_the_windows_of_the_order(train: TokenShards, context: int, stride: int) -> None:
    stream = train.read(0, train.tokens).astype(np.int64)
    order = WindowOrder(window_count(train.tokens, context, stride), 9)
    for batch in host(train, 3, 6, context=context, stride=stride):
        assert batch.tokens.shape == batch.targets.shape == (6, context)
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        assert batch.tokens.is_contiguous()
        assert batch.targets.is_contiguous()
        for row, window in enumerate(order.indices(batch.step * 6, 6)):
            start = int(window) * stride
            assert batch.tokens[row].tolist() == stream[start : start + context].tolist()
            assert batch.targets[row].tolist() == stream[start + 1 : start + context + 1].tolist()


@pytest.mark.parametrize("stride", [16, 3])
def test_host_and_device_and_any_workers_give_the_same_batches(train: TokenShards, stride: int) -> None:
    reference = list(host(train, 0, 40, stride=stride))
    assert [batch.step for batch in reference] == list(range(40))
    for workers in (1, 2, 7):
        assert_same(list(host(train, 0, 40, workers, stride=stride)), reference)
    assert_same(list(device(train, 0, 40, stride=stride)), reference)
    assert loader_threads() == []


def test_starting_at_a_step_continues_exactly(train: TokenShards) -> None:
    reference = list(host(train, 0, 30))
    assert_same(list(host(train, 17, 30, workers=2)), reference[17:])
    assert_same(list(device(train, 17, 30)), reference[17:])
    assert list(host(train, 5, 5)) == list(device(train, 5, 5)) == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_share_each_batch_in_order(train: TokenShards, world_size: int) -> None:
    reference = list(host(train, 0, 5))
    for build in (host, device):
        ranks = [list(build(train, 0, 5, world=World(rank, world_size))) for rank in range(world_size)]
        for step, whole in enumerate(reference):
            assert torch.equal(torch.cat([batches[step].tokens for batches in ranks]), whole.tokens)
            assert torch.equal(torch.cat([batches[step].targets for batches in ranks]), whole.targets)


@pytest.mark.parametrize("shard_tokens", [10, 17, 333])
def test_shards_of_any_size_give_the_same_batches(train: TokenShards, tmp_path: Path, shard_tokens: int) -> None:
    text = " ".join(str(number * number) for number in range(500))
    many = TokenShards(prepare(tmp_path, text, shard_tokens=shard_tokens), "train")
    reference = list(host(train, 0, 20))
    assert_same(list(host(many, 0, 20, workers=2)), reference)
    assert_same(list(device(many, 0, 20)), reference)


@pytest.mark.parametrize("vocab", [65_536, 70_000])
def test_large_ids_survive_the_narrow_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab: int) -> None:
    monkeypatch.setattr(module, "_COPY_TOKENS", 1000)
    text = "".join(chr(0x10000 + number) for number in range(vocab - 1))  # and an id for the end of a text
    folder = prepare(tmp_path, text, "char")
    shards = TokenShards(folder, "train")
    assert shards.dtype.itemsize == (2 if vocab == 65_536 else 4)
    for build in (host, device):
        for batch in build(shards, 0, 4, context=512, stride=512):
            # Neighbouring ids differ by one here, whatever their size.
            assert torch.equal(batch.tokens + 1, batch.targets)
            assert int(batch.tokens.min()) >= 0
    largest = max(int(batch.targets.max()) for batch in device(shards, 0, 18, context=512, stride=512))
    assert largest > 52_000


def test_an_epoch_holds_every_target_once(train: TokenShards) -> None:
    windows = window_count(train.tokens, 16, 16)
    batches = list(host(train, 0, 1, sequences=windows))
    stream = train.read(1, windows * 16).astype(np.int64)
    assert sorted(batches[0].targets.flatten().tolist()) == sorted(stream.tolist())


# Documents, joined and packed


@pytest.fixture(scope="module")
def documents() -> list[list[int]]:
    """Documents of 1 to 60 tokens, in which every pair of neighbours occurs nowhere else but across a border."""
    generator = np.random.default_rng(4)
    lengths = [1, 60, *generator.integers(1, 40, 120).tolist(), 17, 16, 1]
    firsts = np.cumsum([0, *lengths])
    return [list(range(first, first + length)) for first, length in zip(firsts, lengths, strict=False)]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> TokenShards:
    tokenizer = CharTokenizer("".join(chr(0x10000 + number) for number in range(66_000)))
    folder = tmp_path_factory.mktemp("documents") / "data"
    return TokenShards(write_dataset(folder, documents, documents[:1], tokenizer, 101), "train")


def test_packed_windows_hold_every_pair_of_every_document_once(many: TokenShards, documents: list[list[int]]) -> None:
    windows = windows_of(many, context=16, stride=16, seed=9, best_fit=True).order.windows
    [joined] = host(many, 0, 1, best_fit=True, sequences=windows)
    [batch] = host(many, 0, 1, best_fit=True, sequences=windows, apart=True)
    assert_same([joined], [batch])
    assert joined.packed is None
    assert batch.packed is not None
    documents_BT = torch.from_numpy(batch.packed.documents_BT)
    assert documents_BT.dtype == torch.int32
    assert batch.tokens.shape == batch.targets.shape == documents_BT.shape == (windows, 16)
    real = batch.targets != IGNORED
    # Each id occurs once in the stream, so that a pair names its place.
    found = sorted(zip(batch.tokens[real].tolist(), batch.targets[real].tolist(), strict=True))
    assert found == [(a, a + 1) for document in documents for a in document[:-1]]
    assert torch.equal(documents_BT >= 0, real)
    assert bool((batch.tokens[~real] == 0).all())
    owner = {token: number for number, document in enumerate(documents) for token in document}
    for tokens, numbers in zip(batch.tokens.tolist(), documents_BT.tolist(), strict=True):
        used = [number for number in numbers if number >= 0]
        assert numbers == used + [-1] * (16 - len(used))
        owners = [owner[token] for token in tokens[: len(used)]]
        first_seen = list(dict.fromkeys(owners))
        assert used == [first_seen.index(one) for one in owners]


def test_packed_batches_are_the_same_from_host_and_device_and_any_workers(many: TokenShards) -> None:
    reference = list(host(many, 0, 30, best_fit=True))
    for workers in (1, 3):
        assert_same(list(host(many, 0, 30, workers, best_fit=True)), reference)
    assert_same(list(device(many, 0, 30, best_fit=True)), reference)
    assert_same(list(host(many, 11, 30, best_fit=True)), reference[11:])
    for build in (host, device):
        ranks = [list(build(many, 0, 5, best_fit=True, world=World(rank, 3))) for rank in range(3)]
        for step in range(5):
            assert torch.equal(torch.cat([batches[step].tokens for batches in ranks]), reference[step].tokens)


@pytest.mark.parametrize(("context", "stride"), [(16, 16), (16, 5), (1, 1), (200, 50)])
def test_documents_of_joined_windows_are_numbered_where_they_stay_apart(
    many: TokenShards, documents: list[list[int]], context: int, stride: int
) -> None:
    owner = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
    shape: dict[str, Any] = {"context": context, "stride": stride}
    plain = list(host(many, 0, 8, **shape))
    assert {batch.packed for batch in plain} == {None}
    for batch, same in zip(host(many, 0, 8, apart=True, **shape), plain, strict=True):
        assert torch.equal(batch.tokens, same.tokens)
        assert batch.packed is not None
        for tokens, numbers in zip(batch.tokens.numpy(), batch.packed.documents_BT, strict=True):
            assert np.array_equal(numbers, owner[tokens] - owner[tokens[0]])
        crossing = torch.from_numpy(owner[batch.tokens] != owner[same.targets])
        assert torch.equal(batch.targets, same.targets.masked_fill(crossing, IGNORED))


def test_documents_without_a_pair_of_tokens_are_not_packed(tmp_path: Path) -> None:
    single = TokenShards(write_dataset(tmp_path / "data", [b"a", b"b", b"c"]), "train")
    with pytest.raises(DataError, match="has two tokens") as caught:
        windows_of(single, context=16, stride=16, seed=0, best_fit=True)
    assert "concat" in caught.value.hint


def test_documents_that_do_not_follow_each_other_are_not_packed(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "data", [b"abc", b"defg", b"hi"])
    for starts, how in itertools.product(([1, 3, 7], [0, 7, 3], [0, 3, 9]), ({"best_fit": True}, {"apart": True})):
        (folder / "train.offsets.bin").write_bytes(np.array(starts, dtype="<u8").tobytes())
        with pytest.raises(DataError, match=r"train\.offsets\.bin is damaged"):
            windows_of(TokenShards(folder, "train"), context=16, stride=16, seed=0, **how)


# Ends and errors


def test_stopping_early_stops_the_threads_at_once(train: TokenShards) -> None:
    with host(train, 0, 10**9, workers=3) as batches:
        assert next(batches).step == 0
        assert len(loader_threads()) > 0
    assert loader_threads() == []
    assert list(batches) == []
    batches.close()
    with device(train, 0, 10**9) as resident:
        assert next(resident).step == 0
    assert list(resident) == []


def test_reading_ahead_is_bounded(train: TokenShards, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    gather = TokenShards.gather
    monkeypatch.setattr(TokenShards, "gather", lambda self, *args: (reads.append(1), gather(self, *args))[1])
    with host(train, 0, 1000, workers=2) as batches:
        next(batches)
        time.sleep(0.1)
        assert len(reads) <= PREFETCH
        next(batches)
        time.sleep(0.1)
        assert len(reads) <= PREFETCH + 1


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_order_is_kept_when_workers_finish_out_of_order(
    train: TokenShards, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    reference = list(host(train, 0, 12))
    gather = TokenShards.gather
    delays = iter([0.03, 0.0, 0.02, 0.0, 0.0, 0.03] * 2)
    monkeypatch.setattr(TokenShards, "gather", lambda self, *args: (time.sleep(next(delays)), gather(self, *args))[1])
    assert_same(list(host(train, 0, 12, workers)), reference)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_worker_raises_is_raised_in_the_loop(
    train: TokenShards, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    gather = TokenShards.gather
    calls = iter(range(100))

    def failing(self: TokenShards, *arguments: Any) -> Any:
        if next(calls) >= 2:
            raise OSError("the disk went away")
        return gather(self, *arguments)

    monkeypatch.setattr(TokenShards, "gather", failing)
    seen = []
    with host(train, 0, 10, workers) as batches, pytest.raises(OSError, match="the disk went away"):
        seen.extend(batch.step for batch in batches)
    # With several workers the failing read may belong to any of the first steps, but never to one already delivered.
    assert seen == list(range(len(seen)))
    assert len(seen) <= 3
    assert loader_threads() == []


def test_threads_that_cannot_read_are_replaced_once(train: TokenShards, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, gather, calls = list(host(train, 0, 10)), TokenShards.gather, iter(range(100))

    def failing(self: TokenShards, *arguments: Any) -> Any:
        if next(calls) == 2:
            raise OSError("the disk went away")
        return gather(self, *arguments)

    monkeypatch.setattr(TokenShards, "gather", failing)
    with host(train, 0, 10, 2) as batches:
        assert_same(list(batches), reference)
        (notice,) = batches.notices()
    assert "OSError('the disk went away')" in notice
    assert "failing" in notice
    assert notice.endswith("it was replaced")
    assert loader_threads() == []


def test_threads_that_hang_are_named_and_replaced_once(train: TokenShards, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, gather, calls, over = list(host(train, 0, 10)), TokenShards.gather, iter(range(100)), threading.Event()
    hanging = {3}

    def slow(self: TokenShards, *arguments: Any) -> Any:
        if next(calls) in hanging:
            over.wait()
        return gather(self, *arguments)

    monkeypatch.setattr(TokenShards, "gather", slow)
    try:
        with host(train, 0, 10, 1, patience=0.2) as batches:
            assert_same(list(batches), reference)
            (notice,) = batches.notices()
        assert "has made no batch for 0.2 s in step 4" in notice
        assert " slow" in notice, "the function that hangs"
        calls, hanging = iter(range(100)), {3, 7}
        with host(train, 0, 10, 1, patience=0.2) as batches, pytest.raises(LoaderError, match="has made no batch"):
            list(batches)
    finally:
        over.set()


def test_closing_does_not_wait_for_a_job_that_a_thread_takes_first() -> None:
    class Late(queue.SimpleQueue[Any]):
        """What `empty` says is no longer true when the caller reads it."""

        def empty(self) -> bool:
            return False

    threads = Threads(0, "test", lambda: None)
    threads._jobs = Late()
    left = threads.submit(lambda step: step, 1)
    closing = threading.Thread(target=threads.close, kwargs={"wait": True}, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert left.cancelled()


def test_a_split_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    shards = TokenShards(prepare(tmp_path, "x" * 20), "train")
    assert shards.tokens == 16
    with pytest.raises(DataError) as caught:
        windows_of(shards, context=16, stride=16, seed=0)
    assert "16 tokens" in caught.value.message
    assert "17" in caught.value.message
    assert "model.context" in caught.value.hint
    assert len(list(host(shards, 0, 2, context=15))) == 2


def test_arguments_that_contradict_each_other_are_refused(train: TokenShards) -> None:
    for world in (World(2, 2), World(0, 4)):
        with pytest.raises(ValueError, match="no share"):
            next(device(train, 0, 1, world=world))
    with pytest.raises(ValueError, match="0 sequences of 16 tokens"):
        device(train, 0, 1, sequences=0)
    with pytest.raises(ValueError, match="workers"):
        host(train, 0, 1, workers=-1)


def test_a_split_too_large_for_the_device_is_a_resource_error(
    train: TokenShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(ResourceError) as caught:
        device(train, 0, 1)
    assert "speed.loader=host" in caught.value.hint


# Evaluation


@pytest.mark.grid
@pytest.mark.parametrize("batch_size", [1, 3, 50])
@pytest.mark.parametrize("context", [1, 7, 16, 5000])
@pytest.mark.parametrize("most_tokens", [None, 1, 40, 112, 10**9])
def test_evaluation_covers_every_target_once(
    train: TokenShards, batch_size: int, context: int, most_tokens: int | None
) -> None:
    stream = train.read(0, train.tokens).astype(np.int64)
    count = min(train.tokens - 1, most_tokens or 10**9)
    arguments: dict[str, Any] = {"context": context, "batch_size": batch_size, "device": CPU}
    batches = list(evaluation_batches(train, most_tokens=most_tokens, **arguments))
    assert len(batches) == -(-count // (batch_size * context))
    tokens = torch.cat([batch.tokens.flatten() for batch in batches])
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    assert {batch.tokens.shape for batch in batches} == {(batch_size, context)}
    assert tokens[:count].tolist() == stream[:count].tolist()
    assert targets[:count].tolist() == stream[1 : count + 1].tolist()
    assert bool((targets[count:] == IGNORED).all())
    assert bool((tokens[count:] == 0).all())
    assert_same(batches, list(evaluation_batches(train, most_tokens=most_tokens, **arguments)))


def test_evaluation_refuses_a_split_without_a_target_at_once(tmp_path: Path) -> None:
    val = TokenShards(write_dataset(tmp_path / "data", [b"abcdefghi"], [b"j"]), "val")
    assert val.tokens == 1
    with pytest.raises(DataError, match="has 1 tokens"):
        evaluation_batches(val, context=8, batch_size=2, device=CPU)
    with pytest.raises(ValueError, match="no batches"):
        evaluation_batches(val, context=8, batch_size=2, device=CPU, most_tokens=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_batches_on_a_gpu_equal_those_on_the_cpu(train: TokenShards, name: str) -> None:
    reference = list(host(train, 0, 20))
    for batches in (
        host(train, 0, 20, 2, device=name),
        host(train, 0, 20, device=name),
        device(train, 0, 20, device=name),
    ):
        arrived = list(batches)
        assert {batch.tokens.device.type for batch in arrived} == {"cuda"}
        assert_same([Batch(batch.tokens.cpu(), batch.targets.cpu(), batch.step) for batch in arrived], reference)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_packed_batches_on_a_gpu_equal_those_on_the_cpu(many: TokenShards) -> None:
    reference = list(host(many, 0, 20, best_fit=True))
    for build in (host, device):
        for arrived, same in zip(build(many, 0, 20, best_fit=True, device="cuda"), reference, strict=True):
            moved = Batch(arrived.tokens.cpu(), arrived.targets.cpu(), arrived.step)
            assert_same([moved], [same])


def test_packed_rows_wait_in_pinned_memory_for_a_gpu(monkeypatch):
    """From other memory a copy would hold the loop up until the device has done all its work."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.shape) or tensor)
    rows, documents = np.zeros((2, 4), dtype=np.int64), np.zeros((2, 4), dtype=np.int32)
    for device, count in [("cpu", 0), ("cuda", 2)]:
        batch = Batch.of_rows(PackedRows(rows, documents, rows), 3, torch.device(device))
        assert (batch.step, len(pinned)) == (3, count)
