"""A streamed source: the tokens that preparing would write, in batches that do not depend on when the reading began."""

import contextlib
import dataclasses
import gzip
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.config.schema import CleanConfig, DataConfig
from flatout.config.sections import SourceConfig
from flatout.corpus import readers, sources
from flatout.corpus.document import Document, InputFile, Problem, ReadOptions
from flatout.data import plan, stream, workers
from flatout.data.batch import Delivery, Schedule, Span
from flatout.data.pack import pack_corpus
from flatout.data.part import BEGINS, ENDS, PIECE, REJECTED, CorpusPart, PartHead, PartResult, run_part
from flatout.data.plan import Inputs, Position, parts_of_lap, request_of
from flatout.data.sampler import WindowOrder
from flatout.data.shards import open_dataset
from flatout.data.stream import StreamDataset, StreamLoader, TokenStream, open_stream
from flatout.data.tokenizer import ByteTokenizer
from flatout.data.workers import LoaderError, ProcessEngine
from flatout.errors import ConfigError, DataError
from flatout.world import World

END = 256  # of the tokenizer `bytes`
CONTEXT = 8


def words(seed: int) -> str:
    chance = random.Random(seed)
    return " ".join(chance.choice(["oak", "elm", "ash", "fir"]) for _ in range(chance.randrange(1, 30))) + f" {seed}"


def write_rows(path: Path, seeds: range) -> None:
    text = "".join(json.dumps({"text": words(seed)}) + "\n" for seed in seeds)
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that gives many parts: files that are cut, small ones that are joined, and one read in one go."""
    monkeypatch.setattr(plan, "PART_BYTES", 1500)
    monkeypatch.setattr(sources, "_WHOLE_BYTES", 500)
    folder = tmp_path / "source"
    folder.mkdir()
    write_rows(folder / "a.jsonl", range(40))
    (folder / "b.txt").write_text(words(50))
    (folder / "c.txt").write_text(words(51))
    write_rows(folder / "d.jsonl.gz", range(100, 160))
    write_rows(folder / "e.jsonl.gz", range(200, 202))
    write_rows(folder / "f.jsonl", range(300, 330))
    return folder


def settings(source: Path | str | list[Any], **more: Any) -> DataConfig:
    given = source if isinstance(source, list) else str(source)
    return DataConfig(source=given, tokenizer="bytes", split="document", streaming=True, **{"validation": 0.2, **more})


def row(opened: StreamDataset, count: int, position: Position | None = None) -> np.ndarray:
    """The first `count` tokens from a position on."""
    parts, found = [], 0
    with opened.train.open_workers() as pool:
        chunks = opened.train.chunks(position or Position(), pool)
        while found < count:
            parts.append(next(chunks).ids)
            found += len(parts[-1])
        chunks.close()
    return np.concatenate(parts)[:count]


def prepared(data: DataConfig, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    pack_corpus(request_of(data), folder, workers=0)
    dataset = open_dataset(folder)
    return dataset.train.read(0, dataset.train.tokens), dataset.val.read(0, dataset.val.tokens)


def loader_of(
    opened: StreamDataset, first: int, last: int, position: Position | None = None, batch: int = 4, **more: Any
) -> StreamLoader:
    at = None if position is None else position.to_json()
    span = Span(schedule=Schedule.constant(batch, CONTEXT), first_step=first, last_step=last, position=at)
    return StreamLoader(opened.train, Delivery(device=torch.device("cpu"), **more), span, seed=3)


def check_against_prepared(data: DataConfig, folder: Path) -> None:
    train, val = prepared(data, folder)
    opened = open_stream(data)
    assert np.array_equal(row(opened, 3 * len(train)), np.tile(train, 3))
    assert np.array_equal(opened.val.read(0, opened.val.tokens), val)
    info = opened.val
    assert info.text_bytes == open_dataset(folder).manifest.splits["val"].text_bytes


def test_the_row_is_what_prepare_writes_epoch_after_epoch(source: Path, tmp_path: Path):
    check_against_prepared(settings(source), tmp_path / "data")


def test_a_source_that_is_not_kept_in_memory_gives_the_same(source, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "_SMALL_SOURCE", 100)
    check_against_prepared(settings(source), tmp_path / "data")


def test_weights_take_documents_as_prepare_does(source: Path, tmp_path: Path):
    write_rows(tmp_path / "more.jsonl", range(500, 560))
    mixture = [
        SourceConfig(path=str(source), weight=0.4),
        SourceConfig(path=str(tmp_path / "more.jsonl"), weight=2.5),
    ]
    check_against_prepared(settings(mixture), tmp_path / "data")


@pytest.mark.parametrize("limit", [{"max_tokens": 700}, {"max_bytes": 701}], ids=str)
def test_a_text_without_documents_is_cut_as_prepare_cuts_it(tmp_path, monkeypatch, limit):
    for module, name in ((plan, "PIECE"), (readers, "PIECE"), (stream, "_SMALL_SOURCE")):
        monkeypatch.setattr(module, name, 128)
    (tmp_path / "text.txt").write_text("".join(words(seed) + "\n" for seed in range(40)))
    (tmp_path / "val.txt").write_text(words(50))
    check_against_prepared(
        settings(tmp_path / "text.txt", validation=str(tmp_path / "val.txt"), **limit), tmp_path / "d"
    )
    opened = open_dataset(tmp_path / "d")
    assert opened.train.tokens == limit.get("max_tokens", 702)


@pytest.mark.parametrize("kept", [2**22, 100], ids=["kept", "read again"])
@pytest.mark.parametrize("limit", [{"max_documents": 33}, {"max_tokens": 1500}, {"max_bytes": 2000}], ids=str)
def test_limits_take_documents_as_prepare_does(source, tmp_path, monkeypatch, limit, kept):
    monkeypatch.setattr(stream, "_SMALL_SOURCE", kept)
    write_rows(tmp_path / "more.jsonl", range(500, 560))
    mixture = [SourceConfig(path=str(source)), SourceConfig(path=str(tmp_path / "more.jsonl"), weight=2.5)]
    check_against_prepared(settings(mixture, **limit), tmp_path / "data")


def test_validation_may_have_a_source_of_its_own(source: Path, tmp_path: Path):
    write_rows(tmp_path / "val.jsonl", range(500, 530))
    check_against_prepared(settings(source, validation=str(tmp_path / "val.jsonl")), tmp_path / "data")


def test_validation_is_as_much_as_asked_for(source: Path, tmp_path: Path):
    _, val = prepared(settings(source), tmp_path / "data")
    told: list[Any] = []
    opened = open_stream(settings(source), val_tokens=100, progress=told.append)
    assert np.array_equal(opened.val.read(0, 101), val[:101])
    assert opened.val.tokens == 101  # a hundred targets
    assert opened.val.text_bytes == pytest.approx(101, abs=3)
    assert [step.tokens >= 101 for step in told] == [False] * (len(told) - 1) + [True], "no more is read than is used"
    assert told[-1].bytes < told[-1].total_bytes or told[-1].files < told[-1].total_files
    everything: list[Any] = []
    open_stream(settings(source), progress=everything.append)
    assert (everything[-1].files, everything[-1].tokens) == (6, len(val))
    assert everything[-1].documents == np.count_nonzero(val == END)
    with pytest.raises(IndexError):
        opened.val.read(100, 2)


def test_batches_are_the_shuffled_windows_of_blocks(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "BLOCK_WINDOWS", 10)
    opened = open_stream(settings(source))
    for batch in (4, 24):  # within blocks, and over several at once
        tokens = row(opened, 20 * batch * CONTEXT + 200)
        order = WindowOrder(10, 3)
        with loader_of(opened, 0, 15, batch=batch) as batches:
            every = list(batches)
            assert [found.step for found in every] == list(range(15))
            for step, found in enumerate(every):
                places = np.arange(step * batch, (step + 1) * batch)
                starts = (places // 10 * 10 + order.indices(step * batch, batch)) * CONTEXT
                assert np.array_equal(found.tokens, tokens[starts[:, None] + np.arange(CONTEXT)])
                assert np.array_equal(found.targets, tokens[starts[:, None] + np.arange(CONTEXT) + 1])


def test_every_window_of_a_block_comes_once(source: Path):
    opened = open_stream(settings(source))
    windows = stream.block_windows(CONTEXT)
    with loader_of(opened, 0, 2, batch=windows // 2) as batches:
        seen = np.concatenate([batch.tokens.numpy() for batch in batches])
    expected = row(opened, windows * CONTEXT).reshape(windows, CONTEXT)
    assert np.array_equal(seen[np.lexsort(seen.T)], expected[np.lexsort(expected.T)])
    assert not np.array_equal(seen, expected)


def test_long_windows_have_small_blocks():
    assert stream.block_windows(1024) == 4096
    assert stream.block_windows(32768) == 256
    assert stream.block_windows(2**24) == 1


def test_ranks_share_a_batch(source: Path):
    opened = open_stream(settings(source))
    whole = [batch.tokens.numpy() for batch in loader_of(opened, 2, 5)]
    shares = [[batch.tokens.numpy() for batch in loader_of(opened, 2, 5, world=World(rank, 2))] for rank in range(2)]
    for step in range(3):
        assert np.array_equal(np.concatenate([share[step] for share in shares]), whole[step])


# --- going on ---------------------------------------------------------------------------------------------------------


def check_resume(
    opened: StreamDataset, steps: int, batch: int, every: int = 1, reopen: Callable = lambda it: it
) -> set:
    """From every step on come the batches of the undisturbed run, the same places and no notices twice."""
    found, places, notices = [], [], []
    with loader_of(opened, 0, steps, batch=batch) as batches:
        for item in batches:
            found.append(item)
            places.append(Position(**batches.position()))
            notices.append(batches.notices())
    for cut in range(1, steps, every):
        position = Position(**json.loads(json.dumps(places[cut - 1].to_json())))
        with loader_of(reopen(opened), cut, min(cut + 12, steps), position, batch=batch) as batches:
            for step, item in enumerate(batches, cut):
                assert item.step == step
                assert np.array_equal(item.tokens, found[step].tokens), (cut, step)
                assert np.array_equal(item.targets, found[step].targets), (cut, step)
                assert Position(**batches.position()) == places[step], (cut, step)
                assert batches.notices() == notices[step], (cut, step)
    return {(place.epoch, place.lap, place.file, place.part) for place in places}


@pytest.mark.parametrize("kept", [0, 2**22], ids=["read again", "kept"])
def test_any_step_can_be_gone_on_from(source: Path, monkeypatch: pytest.MonkeyPatch, kept: int):
    monkeypatch.setattr(stream, "BLOCK_WINDOWS", 10)
    monkeypatch.setattr(stream, "_SMALL_SOURCE", kept)
    with (source / "f.jsonl").open("a") as file:
        file.write("no json\n" * 3)
    opened = open_stream(settings(source))
    tokens = len(row_of_epoch(opened))
    steps = 2 * tokens // (7 * CONTEXT) + 3
    places = check_resume(opened, steps, batch=7, every=13)
    assert {epoch for epoch, *_ in places} == {0, 1, 2}
    assert {file for _, _, file, _ in places} == {0, 4}, "counted from the file on that follows one read in one go"


def test_a_limited_stream_can_be_gone_on_from(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "BLOCK_WINDOWS", 10)
    monkeypatch.setattr(stream, "_SMALL_SOURCE", 0)
    write_rows(tmp_path / "more.jsonl", range(500, 560))
    mixture = [SourceConfig(path=str(source)), SourceConfig(path=str(tmp_path / "more.jsonl"), weight=2)]
    opened = open_stream(settings(mixture, max_documents=44))
    steps = len(row_of_epoch(opened)) // (7 * CONTEXT) + 3
    places = check_resume(opened, steps, batch=7, every=11)
    assert {lap for _, lap, *_ in places} == {0, 1, 2}


def test_places_after_a_resume_are_those_of_the_whole_reading(source: Path):
    write_rows(source / "e.jsonl.gz", range(200, 260))  # a second file that is read in one go
    parts_from = open_stream(settings(source)).train.parts
    places = [place for place, _ in parts_from(Position())]
    assert {place.file for place in places} == {0, 4, 5}
    for number, place in enumerate(places):
        assert [later for later, _ in parts_from(place)] == places[number:], "what a second resume begins with"


def row_of_epoch(opened: StreamDataset) -> np.ndarray:
    with opened.train.open_workers() as pool:
        chunks = opened.train.chunks(Position(), pool)
        return np.concatenate([chunk.ids for chunk in itertools.takewhile(lambda c: not c.position.epoch, chunks)])


def test_a_small_source_comes_whole_again_after_a_resume_in_its_first_file(source: Path):
    opened = open_stream(settings(source))
    whole = row_of_epoch(opened)
    with opened.train.open_workers() as pool, contextlib.closing(opened.train.chunks(Position(), pool)) as chunks:
        _, second = next(chunks), next(chunks)
    place = second.position
    assert (place.lap, place.file, place.part) == (0, 0, 1)
    expected = np.concatenate([whole[place.tokens :], whole, whole])
    assert np.array_equal(row(opened, len(expected), place), expected)


def test_a_mixture_can_be_gone_on_with(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "BLOCK_WINDOWS", 10)
    write_rows(tmp_path / "more.jsonl", range(500, 520))
    mixture = [str(source), SourceConfig(path=str(tmp_path / "more.jsonl"), weight=1.5)]
    opened = open_stream(settings(mixture))
    steps = 3 * len(row_of_epoch(opened)) // (2 * 16 * CONTEXT)
    places = check_resume(opened, steps, batch=16, every=5)
    assert {lap for _, lap, *_ in places} == {0, 1, 2}


def test_another_batch_size_goes_on_at_the_right_window(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "BLOCK_WINDOWS", 10)
    opened = open_stream(settings(source))
    with loader_of(opened, 0, 30, batch=8) as batches:
        for _ in batches:
            pass
        place = Position(**batches.position())
    for batch in (2, 6, 20):  # windows that lie before and after those of the checkpoint
        fresh = [item.tokens.numpy() for item in loader_of(opened, 0, 35, batch=batch)]
        again = [item.tokens.numpy() for item in loader_of(opened, 30, 35, place, batch=batch)]
        assert np.array_equal(np.stack(fresh[30:]), np.stack(again))


def test_what_came_before_is_neither_read_nor_tokenized(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "BLOCK_WINDOWS", 10)
    opened = open_stream(settings(source))
    with loader_of(opened, 0, 80, batch=10) as batches:
        for _ in batches:
            pass
        place = Position(**batches.position())
    assert (place.epoch, place.file) == (0, 4)
    names: list[str] = []

    def counted(recipe: Any, part: CorpusPart) -> PartResult:
        names.extend(part.file or each.file.name for each in part.slices)
        return run_part(recipe, part)

    def unread(*_: Any, **__: Any) -> Iterator[Any]:
        raise AssertionError("a file in one go is read again")

    monkeypatch.setitem(workers.TASKS, "tokens", counted)
    monkeypatch.setattr(plan, "read_slice", unread)
    with loader_of(opened, 80, 81, place, batch=10) as batches:
        next(batches)
    assert {Path(name).name for name in names} <= {"e.jsonl.gz", "f.jsonl"}


class FakeHub:
    """Stands for a hub dataset of many rows."""

    read = 0

    def __init__(self, path: str, options: Any, name: str) -> None:
        self._row = 0

    def __iter__(self) -> Iterator[Document | Problem]:
        while self._row < 120:
            self._row += 1
            FakeHub.read += 1
            yield Document(words(self._row), f"row {self._row}")

    def state_dict(self) -> dict[str, Any]:
        return {"row": self._row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._row = state["row"]


@pytest.mark.parametrize("limits", [(600, 10**6), (10**6, 7)], ids=["characters", "documents"])
def test_parts_of_a_hub_dataset_hold_every_row_once_from_any_part_on(monkeypatch: pytest.MonkeyPatch, limits):
    from flatout.corpus import arrow

    monkeypatch.setattr(arrow, "HubStream", FakeHub)
    characters, documents = limits
    monkeypatch.setattr(plan, "_HUB_CHARACTERS", characters)
    monkeypatch.setattr(plan, "_HUB_DOCUMENTS", documents)
    files = tuple(InputFile(f"hf:made/{name}", f"made/{name}", "hub", "none", 0) for name in ("up", "too"))
    parts = list(parts_of_lap(files, (ReadOptions(),), Position()))
    half = len(parts) // 2
    assert [(place.file, place.part) for place, _ in parts] == [divmod(number, half) for number in range(2 * half)]
    rows = [document for _, part in parts for document in part.documents]
    assert [row.place for row in rows] == 2 * [f"row {row}" for row in range(1, 121)]
    assert [part.file for _, part in parts] == ["made/up"] * half + ["made/too"] * half
    assert [part.files for _, part in parts] == ([0] * (half - 1) + [1]) * 2, "a file counts with its last part"
    for _, part in parts[: half - 1]:
        sizes = [len(document.text) for document in part.documents if isinstance(document, Document)]
        assert len(sizes) == documents or sum(sizes) >= characters > sum(sizes[:-1]), "full, and no more than that"
    for number, (place, _) in enumerate(parts):
        for start in (place, dataclasses.replace(place, hub=None)):  # without its state, the rows before are skipped
            found = parts_of_lap(files, (ReadOptions(),), start)
            assert [(at.file, at.part, part.documents) for at, part in found] == [
                (at.file, at.part, part.documents) for at, part in parts[number:]
            ]


def test_a_hub_dataset_goes_on_from_its_own_state(monkeypatch: pytest.MonkeyPatch):
    from flatout.corpus import arrow

    monkeypatch.setattr(arrow, "HubStream", FakeHub)
    monkeypatch.setattr(stream, "BLOCK_WINDOWS", 10)
    monkeypatch.setattr(plan, "_HUB_CHARACTERS", 600)
    monkeypatch.setattr(stream, "_SMALL_SOURCE", 0)
    opened = open_stream(settings("hf:made/up"), workers=0)
    epoch = len(row_of_epoch(opened))
    places = check_resume(opened, 2 * epoch // (5 * CONTEXT), batch=5, every=17)
    assert max(part for *_, part in places) > 5
    with loader_of(opened, 0, 90, batch=10) as batches:
        for _ in batches:
            pass
        place = Position(**batches.position())
    assert place.hub is not None
    before, FakeHub.read = FakeHub.read, 0
    assert before > 0
    chunk_row = row(opened, 50, place)
    assert len(chunk_row) == 50
    assert FakeHub.read < 60, "the rows before are not read again"


# --- what is in the way -----------------------------------------------------------------------------------------------


def result_of(rows: list[tuple[list[int], int, float, str | None]]) -> PartResult:
    """A part's result of pieces: (ids, flags, share of the hash, rule that rejects it)."""
    table = [(len(ids), len(ids), len(ids), int(share * 2**64), 0, flags) for ids, flags, share, _ in rows]
    ids = [number for piece, *_ in rows for number in piece]
    rejected = {number: rule for number, (*_, rule) in enumerate(rows) if rule}
    head = PartHead(0, 0, 0, len(ids), 0, len(rows), 0, {}, (), rejected)
    return PartResult(head, np.array(ids, dtype="<u2").tobytes(), np.array(table, dtype=PIECE), b"")


def test_a_long_document_is_chosen_piece_by_piece(source: Path):
    tokens = TokenStream(request_of(settings(source)), Inputs((), (), {}), ByteTokenizer(), 0)
    first = result_of([([1, END], BEGINS | ENDS, 0.9, None), ([2, 2], BEGINS, 0.9, None), ([3], 0, 0.9, None)])
    ids, joins, rejected = tokens.train_ids(Position(), first)
    assert (ids.tolist(), joins, rejected) == ([1, END, 2, 2, 3], True, False)
    going_on = Position(joins=True)
    ids, joins, _ = tokens.train_ids(going_on, result_of([([4], 0, 0.9, None), ([5, END], ENDS, 0.9, None)]))
    assert (ids.tolist(), joins) == ([4, 5, END], False)
    # A piece that goes to validation ends what came before it.
    ids, joins, _ = tokens.train_ids(going_on, result_of([([4], 0, 0.1, None), ([5, END], ENDS, 0.9, None)]))
    assert (ids.tolist(), joins) == ([END, 5, END], False)
    middle = result_of([([4], 0, 0.9, None), ([5], 0, 0.1, None), ([6], 0, 0.9, None)])
    ids, joins, _ = tokens.train_ids(going_on, middle)
    assert (ids.tolist(), joins) == ([4, END, 6], True)
    first = ([1, 1, END], BEGINS | ENDS, 0.1, None)
    after = result_of([first, ([4], BEGINS, 0.9, None), ([5], 0, 0.1, None), ([6, END], ENDS, 0.9, None)])
    ids, joins, _ = tokens.train_ids(Position(), after)
    assert (ids.tolist(), joins) == ([4, END, 6, END], False)
    ids, joins, _ = tokens.train_ids(going_on, result_of([]))
    assert (ids.tolist(), joins) == ([], True)


def test_a_long_document_is_dropped_from_the_piece_on_that_is_rejected(source: Path):
    tokens = TokenStream(request_of(settings(source)), Inputs((), (), {}), ByteTokenizer(), 0)
    rows = [([1], BEGINS, 0.9, None), ([], REJECTED, 0.9, "bad"), ([3], 0, 0.9, None)]
    ids, joins, rejected = tokens.train_ids(Position(), result_of(rows))
    assert (ids.tolist(), joins, rejected) == ([1, END], False, True)
    after = [([4, END], ENDS, 0.9, None), ([5, END], BEGINS | ENDS, 0.9, None)]
    after += [([6], BEGINS, 0.9, None), ([7, END], ENDS, 0.9, None)]  # another long one, which nothing is wrong with
    ids, joins, rejected = tokens.train_ids(Position(rejected=True), result_of(after))
    assert (ids.tolist(), joins, rejected) == ([5, END, 6, 7, END], False, False)


def test_problems_are_told_once_the_first_in_full_then_as_a_count(source: Path):
    with (source / "a.jsonl").open("a") as file:
        file.write("{broken\n" * 230)
    opened = open_stream(settings(source))
    news: list[str] = []
    with loader_of(opened, 0, 20, batch=2000) as batches:
        for _ in batches:
            news += batches.notices()
        assert batches.position()["problems"] == 230
    told = [line for line in news if "a.jsonl" in line]
    assert [line.split(":")[0] for line in told[:5]] == ["left out"] * 5
    assert "a.jsonl, byte " in told[0]
    assert [line.split(";")[0] for line in told[5:]] == [
        "10 problems in the source so far",
        "100 problems in the source so far",
    ]
    again = [line for line in news if "read again" in line]
    assert again[0].startswith("the source has been read once, ")
    assert 3 <= len(again) < 10
    assert len(news) == len(told) + len(again)


def test_problems_of_a_source_that_an_epoch_reads_twice_are_told_once(source: Path):
    with (source / "a.jsonl").open("a") as file:
        file.write("{broken\n" * 3)
    opened = open_stream(settings([SourceConfig(path=str(source), weight=2)]))
    news: list[str] = []
    with loader_of(opened, 0, 20, batch=2000) as batches:
        for _ in batches:
            news += batches.notices()
        assert batches.position()["problems"] == 3
    assert len([line for line in news if "left out" in line]) == 3


def test_problems_of_files_and_of_validation_text_are_told_at_the_start(source: Path, tmp_path: Path):
    (source / "lost.jsonl").symlink_to("nowhere.jsonl")
    write_rows(tmp_path / "val.jsonl", range(9))
    with (tmp_path / "val.jsonl").open("a") as file:
        file.write("{broken\n" * 8)
    [one] = open_stream(settings(source)).notices
    assert "lost.jsonl" in one
    first, *others, last = open_stream(settings(source, validation=str(tmp_path / "val.jsonl"))).notices
    assert first == one
    assert ["val.jsonl, line" in notice for notice in others] == [True] * 5
    assert last == "3 more problems in the source"


def test_what_is_not_as_in_a_prepared_dataset_is_told(source: Path):
    data = settings([str(source / "a.jsonl"), str(source / "f.jsonl")]).model_copy(update={"split": "contiguous"})
    one, other = open_stream(data).notices
    assert "one after the other" in one
    assert "data.split is document" in other


@pytest.mark.parametrize("text", ["", '{"text": ""}\n{"other": "field"}\n'], ids=["empty", "no text"])
def test_a_source_without_text_is_an_error_and_no_endless_loop(tmp_path: Path, text: str):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError, match="no validation text"):
        open_stream(settings(tmp_path / "a.jsonl"))
    write_rows(tmp_path / "val.jsonl", range(9))
    opened = open_stream(settings(tmp_path / "a.jsonl", validation=str(tmp_path / "val.jsonl")))
    with loader_of(opened, 0, 3) as batches, pytest.raises(DataError, match="gives 0 training tokens"):
        next(batches)


def test_a_source_smaller_than_a_window_is_an_error(tmp_path: Path):
    (tmp_path / "a.txt").write_text("short")
    write_rows(tmp_path / "val.jsonl", range(9))
    opened = open_stream(settings(tmp_path / "a.txt", validation=str(tmp_path / "val.jsonl")))
    with loader_of(opened, 0, 3) as batches, pytest.raises(DataError, match="6 training tokens, and a window needs 9"):
        next(batches)
    (tmp_path / "a.txt").write_text("just one")
    assert len(list(loader_of(open_stream(opened_settings(tmp_path)), 0, 3))) == 3


def opened_settings(folder: Path) -> DataConfig:
    return settings(folder / "a.txt", validation=str(folder / "val.jsonl"))


def test_a_source_that_changes_is_noticed(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "_SMALL_SOURCE", 0)
    opened = open_stream(settings(source))
    os.utime(source / "a.jsonl", ns=(1, 1))
    with loader_of(opened, 0, 3) as batches, pytest.raises(DataError, match="changed while it was read"):
        next(batches)


@pytest.mark.parametrize(
    ("data", "clean", "message"),
    [
        ({"tokenizer": "char"}, {}, "tokenizer `char`"),
        ({}, {"drop": ["exact_duplicates"]}, r"clean\.drop"),
        ({}, {"drop": ["near_duplicates"]}, r"clean\.drop=\[near_duplicates\]"),
    ],
)
def test_what_needs_the_whole_corpus_is_refused(source, data, clean, message):
    given = {"source": str(source), "tokenizer": "bytes", "streaming": True, **data}
    with pytest.raises(ConfigError, match=message):
        open_stream(DataConfig.model_validate(given), CleanConfig.model_validate(clean))


def test_the_fingerprint_is_of_what_is_learned_from(source: Path):
    one = open_stream(settings(source)).train.fingerprint
    assert open_stream(settings(source, document_start="oak")).train.fingerprint != one
    assert open_stream(settings(source), CleanConfig(drop=["repetition"])).train.fingerprint != one
    with (source / "b.txt").open("a") as file:
        file.write(" more")
    assert open_stream(settings(source)).train.fingerprint != one


# --- threads and processes --------------------------------------------------------------------------------------------


def children() -> set[str]:
    own = str(os.getpid())
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == own and fields[0] != "Z":
            found.add(folder.name)
    return found


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flatout-")]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes where Linux lists them")
def test_worker_processes_give_the_same_and_are_gone_after_close(source: Path):
    before = children()
    inline = open_stream(settings(source), workers=0)
    expected = [batch.tokens.numpy() for batch in loader_of(inline, 0, 4, batch=4000)]
    opened = open_stream(settings(source), workers=2)
    assert children() == before
    with loader_of(opened, 0, 4, batch=4000) as batches:
        found = next(batches).tokens.numpy()
        assert len(children()) == len(before) + 2
        found = [found, *(batch.tokens.numpy() for batch in batches)]
    assert np.array_equal(np.stack(found), np.stack(expected))
    assert (children(), running()) == (before, [])


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes where Linux lists them")
def test_a_worker_that_dies_is_replaced_once_and_then_told_in_the_loop(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "_SMALL_SOURCE", 0)
    monkeypatch.setattr(stream, "BLOCK_WINDOWS", 10)
    before = children()
    opened = open_stream(settings(source), workers=1)
    with loader_of(opened, 0, 10**6) as batches:
        next(batches)
        [worker] = children() - before
        os.kill(int(worker), 9)
        while (children() - before) in (set(), {worker}):  # batches go on, by another
            next(batches)
        assert any("ended with code -9" in notice and "it was replaced" in notice for notice in batches.notices())
        assert batches.notices() == []
        [worker] = children() - before
        os.kill(int(worker), 9)
        with pytest.raises(LoaderError, match="a worker process ended with code -9") as caught:
            for _ in batches:
                pass
        assert "--resume" in caught.value.hint
        assert list(batches) == []
    assert running() == []


class Clock:
    """A second passes whenever somebody looks while the source hangs, and none before, however busy the machine is."""

    def __init__(self, hangs: Callable[[], bool]) -> None:
        self.now, self.hangs = 0.0, hangs

    def monotonic(self) -> float:
        self.now += self.hangs()
        return self.now


def reads_from_a_worker() -> bool:
    [reader] = [thread.ident for thread in threading.enumerate() if thread.name == "flatout-stream-blocks_0"]
    stack = traceback.extract_stack(sys._current_frames()[reader or 0])
    return any(frame.name == "in_order" for frame in stack)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes where Linux lists them")
def test_a_worker_that_hangs_is_told_in_the_loop_in_time(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "_SMALL_SOURCE", 0)
    monkeypatch.setattr(stream, "BLOCK_WINDOWS", 10)
    stopped = threading.Event()
    monkeypatch.setattr(stream, "time", Clock(lambda: stopped.is_set() and reads_from_a_worker()))
    before = children()
    opened = open_stream(settings(source), workers=1)
    with loader_of(opened, 0, 10**6, patience=0.1) as batches:
        next(batches)
        [worker] = children() - before
        os.kill(int(worker), signal.SIGSTOP)
        stopped.set()
        with pytest.raises(LoaderError, match=r"has given nothing for 0.1 s, at .*workers\.py"):
            list(batches)
    assert children() == before
    while running():
        time.sleep(0.01)


def test_a_read_that_hangs_in_this_process_is_told_and_not_waited_for(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "_SMALL_SOURCE", 0)
    monkeypatch.setattr(stream, "BLOCK_WINDOWS", 10)
    hangs, over, run = threading.Event(), threading.Event(), workers.TASKS["tokens"]
    monkeypatch.setattr(stream, "time", Clock(hangs.is_set))
    opened = open_stream(settings(source), workers=0)

    def hanging(recipe: Any, part: CorpusPart) -> Any:
        if part.number == 3:
            hangs.set()
            over.wait()
        return run(recipe, part)

    monkeypatch.setitem(workers.TASKS, "tokens", hanging)
    with loader_of(opened, 0, 10**6, patience=0.1) as batches, pytest.raises(LoaderError, match="has given nothing"):
        list(batches)
    over.set()
    while running():
        time.sleep(0.01)


def test_closing_does_not_wait_for_the_source(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "_SMALL_SOURCE", 0)
    monkeypatch.setattr(stream, "BLOCK_WINDOWS", 10)
    opened = open_stream(settings(source))
    batches = loader_of(opened, 0, 10**6)
    next(batches)
    batches.close()
    batches.close()
    assert running() == []
    assert list(batches) == []
    assert list(loader_of(opened, 5, 5)) == []


def test_an_error_in_a_worker_is_raised_in_the_loop(source: Path, monkeypatch: pytest.MonkeyPatch):
    opened = open_stream(settings(source))

    def fail(recipe: Any, part: CorpusPart) -> PartResult:
        raise DataError("no such field", "name another")

    monkeypatch.setitem(workers.TASKS, "tokens", fail)
    with loader_of(opened, 0, 3) as batches, pytest.raises(DataError, match="no such field"):
        next(batches)
    assert running() == []


def test_a_slow_part_keeps_the_others_in_order_and_few(monkeypatch: pytest.MonkeyPatch):
    go, taken = threading.Event(), []

    def slow(recipe: Any, part: CorpusPart) -> Any:
        if part.number == 0:
            go.wait()
        elif part.number == 5:
            go.set()
        return part.number

    def parts() -> Iterator[tuple[Position, CorpusPart]]:
        for number in range(50):
            taken.append(number)
            yield Position(part=number), CorpusPart(number, 0)

    class Threaded:
        def call(self, task: str, recipe: Any, part: CorpusPart) -> Any:
            return slow(recipe, part)

        def kill(self) -> None:
            pass

    monkeypatch.setattr(workers, "Worker", Threaded)
    with ProcessEngine(3) as pool:
        results = pool.in_order("tokens", None, parts())  # type: ignore[arg-type]
        assert next(results)[1] == 0
        assert len(taken) == 6
        assert [result for *_, result in results] == list(range(1, 50))
