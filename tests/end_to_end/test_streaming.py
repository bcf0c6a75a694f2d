"""Training straight from a source: it learns, goes on bit for bit after an interruption, and prepares nothing."""

import io
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flatout
from flatout.checkpoints.checkpoint import read_checkpoint
from flatout.config.load import LoadedConfig
from flatout.data import plan, stream
from flatout.errors import CheckpointError, ConfigError, DataError, UsageError
from flatout.observe.sinks import read_metrics
from flatout.observe.terminal import TerminalReader
from flatout.records import EndRecord, EpochRecord, EvalRecord, NoticeRecord, RunInfo, SampleRecord, StepRecord
from flatout.tuning.practice_data import practice_data
from tests.end_to_end.test_resume import stop_after

STEPS = 28
RUN = [
    "data.tokenizer=bytes", "data.streaming=true", "data.validation=0.2", "model.dropout=0.1",
    f"train.steps={STEPS}", "eval.every=7", "checkpoint.keep=3", "optim.learning_rate=3e-3",
]  # fmt: skip
Tiny = Callable[..., LoadedConfig]


def document(chance: random.Random) -> str:
    return " ".join(
        f"the {chance.choice(['old', 'red', 'sly'])} {chance.choice(['fox', 'cow'])} ran."
        for _ in range(chance.randrange(2, 9))
    )


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a few parts each; an epoch of them is about four blocks and sixteen steps."""
    monkeypatch.setattr(plan, "PART_BYTES", 700)
    monkeypatch.setattr(stream, "BLOCK_WINDOWS", 14)
    monkeypatch.setattr(stream, "_SMALL_SOURCE", 0)
    chance = random.Random(1)
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("a", "b"):
        rows = [json.dumps({"text": document(chance)}) + "\n" for _ in range(6)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    (folder / "c.txt").write_text(document(chance))
    return folder


def of(records: list, kind: type) -> list:
    return [record for record in records if isinstance(record, kind)]


def final(folder: str):
    return read_checkpoint(Path(folder) / "checkpoints" / f"step-{STEPS:08d}")


def told(folder: str) -> list[tuple]:
    """All that a run says that is not a time or a path."""
    kept = ("type", "step", "loss", "grad_norm", "learning_rate", "bits_per_byte", "message", "text")
    rows = read_metrics(Path(folder) / "metrics.jsonl")
    rows = [row for row in rows if row["type"] in ("step", "eval", "sample", "notice")]
    return sorted((tuple(str(row.get(name)) for name in kept) for row in rows), key=lambda row: (int(row[1]), row))


def check_same_run(mine: str, reference: str) -> None:
    a, b = final(mine), final(reference)
    for name in ("model", "optimizer", "run"):
        ours, theirs = getattr(a, name), getattr(b, name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
    places = [{**checkpoint.state["stream"], "hub": None} for checkpoint in (a, b)]  # one place has many spellings
    assert places[0] == places[1]
    rows, others = told(mine), told(reference)
    # A notice of the start comes at every start.
    assert [row for row in rows if row[0] != "notice"] == [row for row in others if row[0] != "notice"]
    assert news_of(rows) == news_of(others)


def news_of(rows: list[tuple]) -> list[tuple]:
    """Notices but for those of a start and of an end, which an interrupted run has more of."""
    return [row for row in rows if row[0] == "notice" and "data.split" not in row[6] and "in all" not in row[6]]


def interrupt_and_resume(tiny: Tiny, words: list[str], steps: list[int]) -> None:
    list(flatout.train(tiny(*RUN, *words, "output.folder=whole")))
    for step in steps:
        config = tiny(*RUN, *words, f"output.folder=cut-{step}")
        *_, end = flatout.train(config, stop=stop_after(step))
        assert isinstance(end, EndRecord)
        assert (end.reason, end.step) == ("interrupted", step)
        *_, end = flatout.train(config, resume="auto")
        assert isinstance(end, EndRecord)
        assert end.reason == "finished"
        check_same_run(f"cut-{step}", "whole")


def test_a_model_learns_from_a_stream(tiny: Tiny, source: Path, tmp_path: Path):
    records = list(flatout.train(tiny(*RUN, f"data.source={source}", "output.folder=run")))
    losses = [record.loss for record in of(records, StepRecord)]
    assert len(losses) == STEPS
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])
    evaluations = of(records, EvalRecord)
    assert [record.step for record in evaluations] == [7, 14, 21, 28]
    assert evaluations[-1].loss < evaluations[0].loss
    assert evaluations[-1].bits_per_byte == pytest.approx(evaluations[-1].loss / 0.6931, rel=0.05)  # of bytes
    assert of(records, SampleRecord)
    [info] = of(records, RunInfo)
    assert (info.train_tokens, info.windows) == (None, None)
    assert info.val_tokens > 100
    assert not of(records, EpochRecord)
    assert {record.epoch for record in of(records, StepRecord)} == {None}
    notices = [record.message for record in of(records, NoticeRecord)]
    assert any("the source has been read once" in message for message in notices)
    assert not (tmp_path / "data").exists(), "nothing is prepared"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "source"]


def test_an_interrupted_stream_goes_on_bit_for_bit(tiny: Tiny, source: Path):
    with (source / "b.jsonl").open("a") as file:
        file.write("no json\n" * 7)
    # Inside a block, at the border of one, and in the second and third epoch.
    interrupt_and_resume(tiny, [f"data.source={source}"], [7, 18, 27])
    state = final("whole").state["stream"]
    assert state["epoch"] >= 2
    assert state["problems"] == 7
    messages = [row[6] for row in told("whole") if row[0] == "notice"]
    assert sum("left out" in message for message in messages) == 5
    assert "7 problems in the source in all" in messages


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_hub_dataset_is_streamed_and_goes_on(tiny: Tiny, tmp_path: Path, source: Path, monkeypatch, kind: str):
    pytest.importorskip("datasets")
    monkeypatch.setattr(plan, "_HUB_CHARACTERS", 500)
    monkeypatch.setattr(stream, "_worker_count", lambda inputs: 0)
    folder = tmp_path / "hub"
    folder.mkdir()
    chance = random.Random(2)
    texts = [document(chance) for _ in range(24)]
    for number in range(3):
        rows = [{"text": text, "id": index} for index, text in enumerate(texts[number::3])]
        if kind == "jsonl":
            (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{number}.parquet", row_group_size=4)
    interrupt_and_resume(tiny, [f"data.source=hf:{folder}"], [9 if kind == "jsonl" else 25])
    assert final("whole").state["stream"]["epoch"] >= 1
    losses = [float(row[2]) for row in told("whole") if row[0] == "step"]
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])


def test_worker_processes_change_nothing(tiny: Tiny, source: Path, monkeypatch: pytest.MonkeyPatch):
    words = [*RUN, f"data.source={source}"]
    list(flatout.train(tiny(*words, "output.folder=inline")))
    monkeypatch.setattr(stream, "_worker_count", lambda inputs: 2)
    list(flatout.train(tiny(*words, "output.folder=workers")))
    check_same_run("workers", "inline")


def test_another_source_is_refused(tiny: Tiny, source: Path):
    config = tiny(*RUN, f"data.source={source}", "output.folder=mine")
    list(flatout.train(config, stop=stop_after(3)))
    with (source / "c.txt").open("a") as file:
        file.write("more")
    with pytest.raises(CheckpointError, match="trained on other data than that of"):
        list(flatout.train(config, resume="auto"))


def test_what_a_stream_cannot_do_is_refused_before_anything_is_written(tiny: Tiny, source: Path, tmp_path: Path):
    words = [*RUN, f"data.source={source}"]
    with pytest.raises(ConfigError, match=r"eval\.every is in epochs"):
        list(flatout.train(tiny(*words, "eval.every=1 epoch")))
    with pytest.raises(ConfigError, match="tokenizer `char`"):
        list(flatout.train(tiny(*words, "data.tokenizer=char")))
    with pytest.raises(ConfigError, match=r"train\.steps, train\.tokens or train\.minutes"):
        tiny(*words, "train.steps=null", "train.epochs=1")
    assert not (tmp_path / "runs").exists()


def test_no_training_text_ends_the_run_with_an_error(tiny: Tiny, source: Path, tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    words = [f"data.source={tmp_path / 'empty.jsonl'}", f"data.validation={source}"]
    with pytest.raises(DataError, match="gives 0 training tokens"):
        list(flatout.train(tiny(*RUN, *words)))


def test_the_banner_says_that_the_text_is_streamed(tiny: Tiny, source: Path):
    stream = io.StringIO()
    reader = TerminalReader(10, stream)
    for record in flatout.train(tiny(*RUN, f"data.source={source}", "train.steps=2", "output.folder=run")):
        reader.show(record)
    reader.close()
    shown = stream.getvalue()
    assert "data: streamed training text and " in shown
    assert "epochs" not in shown
    assert "loader host (the text is streamed)" in shown
    assert "step 2/2" in shown


def test_a_streamed_run_can_be_measured_on_its_own_validation_text(tiny: Tiny, source: Path):
    records = list(flatout.train(tiny(*RUN, f"data.source={source}", "output.folder=run")))
    last = of(records, EvalRecord)[-1]
    result = flatout.evaluate(f"run/checkpoints/step-{STEPS:08d}")
    assert (result.loss, result.tokens) == (pytest.approx(last.loss, rel=1e-5), last.tokens)
    assert result.bits_per_byte == pytest.approx(last.bits_per_byte, rel=1e-5)
    with pytest.raises(UsageError, match="only validation text"):
        flatout.evaluate("run", split="train")
    (source / "c.txt").write_text("another text")
    with pytest.raises(DataError, match="no longer what"):
        flatout.evaluate("run")


def test_a_stream_is_measured_on_its_own_text(tiny: Tiny, source: Path, tmp_path: Path):
    """A range test reads it as a run does. What times steps prepares a small file of it, and has random tokens else."""
    assert flatout.tune_lr(tiny(*RUN, f"data.source={source}"), steps=20).data == str(source)
    data, described = practice_data(tiny(*RUN, f"data.source={source / 'a.jsonl'}"), tmp_path / "scratch")
    assert (described, data.streaming) == (str(source / "a.jsonl"), False)
    _, described = practice_data(tiny(*RUN, f"data.source={source}"), tmp_path / "other")
    assert described.startswith("random tokens")
