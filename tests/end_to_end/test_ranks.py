"""Several processes learn what one learns: the same data, the same losses, the same checkpoint, of every kind of data.

Pairs of two processes here; 1, 2, 3 and 4 of them, over 30 steps, are `slow`.
"""

import functools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import distributed as dist

import flatout
from flatout.checkpoints.checkpoint import list_checkpoints, read_checkpoint
from flatout.config.load import load_config
from flatout.engine import run as engine_run
from flatout.errors import UserError
from flatout.launch import launch
from flatout.model.gpt import GPT
from flatout.parallel.ranks import joined
from flatout.records import record_to_json
from tests.chat_models import write_chat_model
from tests.conftest import TINY
from tests.ranks import WORKERS

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

EVEN = ["train.batch_tokens=192", "speed.micro_batch=2", "eval.every=4", "output.folder=run"]  # 12 windows
KINDS: dict[str, dict[str, Any]] = {
    "shards": {"preset": "shakespeare-char", "words": ["optim.ema=0.8"]},
    "documents": {"preset": "shakespeare-char", "words": ["data.documents=apart", "data.packing=best_fit"]},
    "stream": {"preset": "shakespeare-char", "words": ["data.streaming=true", "data.tokenizer=bytes"]},
    "arrays": {"preset": "shakespeare-char", "words": ["model.vocab=32"], "arrays": True},
    "samples": {"preset": "lora", "words": ["lora.rank=0"]},
    "adapters": {"preset": "lora", "words": ["lora.rank=4"]},
}


def counting() -> Iterator[npt.NDArray[np.int64]]:
    """Arrays from Python, of many lengths."""
    rng = np.random.default_rng(0)
    for _ in range(400):
        yield (int(rng.integers(0, 32)) + np.arange(int(rng.integers(1, 60)))) % 32


class Normed(torch.nn.Module):
    """Remembers what it has seen, which is something else in every rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, h_BTW: torch.Tensor) -> torch.Tensor:
        return self.norm(h_BTW.transpose(1, 2)).transpose(1, 2)


def normed(model: GPT) -> None:
    model.blocks[0].mlp = Normed(model.config.width)


def nadam(named: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(named.values(), lr=2e-3)


def run_here(folder: str, words: list[str], **asked: Any) -> list[dict[str, Any]]:
    """One run, as the rank that this process is; its records, or at the end what it raised."""
    build = engine_run.built_model
    os.chdir(folder)
    data: dict[str, Any] = {"data": counting} if asked.get("arrays") else {}
    data |= {"model": normed, "optimizer": nadam} if asked.get("given") else {}
    if asked.get("double"):
        engine_run.built_model = lambda *args, **how: build(*args, **how).double()
    rows: list[dict[str, Any]] = []
    try:
        config = load_config(asked.get("preset"), words)
        for record in flatout.train(config, resume=asked.get("resume"), **data):
            rows.append(json.loads(record_to_json(record)))  # noqa: PERF401 (an error may come between)
    except UserError as error:
        rows.append({"type": "error", "error": type(error).__name__, "message": str(error)})
    finally:
        engine_run.built_model = build
    return rows


def train(ranks: int, folder: Path, words: list[str], **asked: Any) -> list[list[dict[str, Any]]]:
    return WORKERS.run(ranks, functools.partial(run_here, str(folder), words, **asked))


def words_of(kind: str, corpus: Path, folder: Path, steps: int) -> list[str]:
    if KINDS[kind]["preset"] == "lora":
        folder.mkdir(parents=True)
        write_chat_model(folder / "base")
        # 11 rows and steps of 4: the last step of an epoch has three, unlike in length and in labels
        rows = [{"instruction": f"Say {n}. " * (n % 5 + 1), "output": "It is so. " * (n % 3 + 1)} for n in range(11)]
        (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        words = ["model.init_from=base", "chat.source=rows.json", "chat.batch_samples=4", "model.context=64"]
        words += ["train.epochs=null", "optim.learning_rate=1e-3", "eval.sample_tokens=4"]
        return [*words, "speed.device=cpu", "speed.micro_batch=1", f"train.steps={steps}", "output.folder=run"]
    folder.mkdir(parents=True)
    source = [] if KINDS[kind].get("arrays") else [f"data.source={corpus}"]
    if kind == "stream":
        (folder / "texts").mkdir()
        for number in range(60):
            (folder / "texts" / f"{number}.txt").write_text(f"{number} birds are in the tree. " * (number % 7 + 1))
        source = ["data.source=texts", "data.validation=0.2"]
    return [*TINY, *EVEN, *source, f"train.steps={steps}", "model.dropout=0"]


def trained(kind: str, ranks: int, corpus: Path, folder: Path, steps: int, **more: Any) -> Any:
    """Losses of steps and evaluations, the tokens read, and the last checkpoint, of the first rank."""
    words = [*words_of(kind, corpus, folder, steps), *KINDS[kind]["words"], *more.pop("words", [])]
    how = {key: value for key, value in KINDS[kind].items() if key != "words"}
    answers = train(ranks, folder, words, **how, **more)
    failed = [record for rank in answers for record in rank if "error" in record]
    assert not failed, failed
    every = [[row["loss"] for row in rank if row["type"] == "step"] for rank in answers]
    assert all(losses == every[0] for losses in every), "all ranks see the same losses"
    rows = answers[0]
    evaluated = [row["loss"] for row in rows if row["type"] == "eval"]
    tokens = [row["tokens"] for row in rows if row["type"] == "step"]
    saved = read_checkpoint(list_checkpoints(folder / "run" / "checkpoints")[-1][1])
    return every[0], evaluated, tokens, saved


def compare(kind: str, ranks: int, corpus: Path, folder: Path, steps: int, *, double: bool) -> None:
    more = {"double": True, "words": ["optim.clip=0"]} if double else {}
    one = trained(kind, 1, corpus, folder / "one", steps, **more)
    many = trained(kind, ranks, corpus, folder / "many", steps, **more)
    within = 1e-9 if double else 2e-5
    assert len(one[0]) == steps
    assert many[0] == pytest.approx(one[0], abs=within)
    assert many[1] == pytest.approx(one[1], abs=within)
    assert many[2] == one[2], "the same tokens"
    for name, tensor in one[3].model.items():
        torch.testing.assert_close(many[3].model[name], tensor, rtol=0, atol=1e-8 if double else 1e-3, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_learn_what_one_learns(kind: str, corpus: Path, tmp_path: Path):
    compare(kind, 2, corpus, tmp_path, 6, double=kind in ("shards", "samples"))


@pytest.mark.slow
@pytest.mark.parametrize("double", [True, False], ids=["float64", "fp32"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_processes_learns_what_one_learns(
    kind: str, ranks: int, double: bool, corpus: Path, tmp_path: Path
):
    if double and kind == "adapters":
        pytest.skip("adapters are kept in fp32")
    compare(kind, ranks, corpus, tmp_path, 30, double=double)


def test_a_run_goes_on_in_another_number_of_processes(corpus: Path, tmp_path: Path):
    rates = ["optim.schedule=constant", "optim.warmup=2"]
    whole, *_ = trained("shards", 1, corpus, tmp_path / "whole", 12, words=rates)
    words = [*words_of("shards", corpus, tmp_path / "parts", 12), *rates]
    losses: list[float] = []
    for ranks, steps in ((1, 4), (2, 8), (1, 12)):
        how = {"preset": "shakespeare-char", "resume": "auto"}
        first, *_ = train(ranks, tmp_path / "parts", [*words, f"train.steps={steps}"], **how)
        losses += [row["loss"] for row in first if row["type"] == "step"]
    assert losses == pytest.approx(whole, abs=2e-5)


def test_two_processes_resume_bit_for_bit_with_dropout(corpus: Path, tmp_path: Path):
    """Each process draws its own numbers, and goes on drawing where it was."""
    dropped = ["model.dropout=0.3", "checkpoint.every=3", "checkpoint.keep=9"]
    *_, whole = trained("shards", 2, corpus, tmp_path / "whole", 6, words=dropped)
    words = [*words_of("shards", corpus, tmp_path / "parts", 6), *KINDS["shards"]["words"], *dropped]
    train(2, tmp_path / "parts", words, preset="shakespeare-char")
    step_3 = str(tmp_path / "parts" / "run" / "checkpoints" / "step-00000003")
    train(2, tmp_path / "parts", words, preset="shakespeare-char", resume=step_3)
    again = read_checkpoint(tmp_path / "parts" / "run" / "checkpoints" / "step-00000006")
    for part in ("model", "optimizer", "run"):
        expected, found = getattr(whole, part), getattr(again, part)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), part
    assert not torch.equal(whole.run["random.cpu"], whole.run["random.cpu.1"])


def test_two_processes_with_a_model_and_an_optimizer_from_python_resume_bit_for_bit(corpus: Path, tmp_path: Path):
    more = ["checkpoint.every=3", "checkpoint.keep=9"]
    _, whole, _, expected = trained("shards", 2, corpus, tmp_path / "run", 6, words=more, given=True)
    shards = [*KINDS["shards"]["words"], f"data.source={corpus}"]
    words = [*TINY, *EVEN, *shards, "train.steps=6", "model.dropout=0", *more]
    step_3 = str(tmp_path / "run" / "run" / "checkpoints" / "step-00000003")
    first, _ = train(2, tmp_path / "run", words, preset="shakespeare-char", resume=step_3, given=True)
    assert [row["loss"] for row in first if row["type"] == "eval"] == whole[-2:]
    again = read_checkpoint(tmp_path / "run" / "run" / "checkpoints" / "step-00000006")
    for part in ("model", "optimizer", "run"):
        found = getattr(again, part)
        assert all(torch.equal(found[name], tensor) for name, tensor in getattr(expected, part).items()), part
    slices = [*words, "parallel.form=fsdp", "output.folder=slices"]
    sliced, _ = train(2, tmp_path / "run", slices, preset="shakespeare-char", given=True)
    assert "a model from Python (model=) is not sharded" in sliced[-1]["message"]


def test_only_the_first_process_writes_and_every_step_is_recorded_once(corpus: Path, tmp_path: Path):
    trained("shards", 2, corpus, tmp_path / "run", 6)
    rows = [json.loads(line) for line in (tmp_path / "run" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["type"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if row["type"] == "eval"] == [4, 6]
    assert not [row for row in rows if row["type"] == "notice"]


def test_a_refusal_is_that_of_one_process(corpus: Path, tmp_path: Path):
    """The other leaves without a word of its own, and nothing is written."""
    words = [*words_of("shards", corpus, tmp_path / "here", 4), "train.batch_tokens=208"]
    answers = train(2, tmp_path / "here", words, preset="shakespeare-char")
    assert [answer[0]["error"] for answer in answers] == ["UnevenError", "OtherProcessError"]
    assert "13 windows of 16 tokens, which 2 processes cannot share" in answers[0][0]["message"]
    assert not (tmp_path / "here" / "run").exists()


def test_an_error_of_all_processes_is_told_by_one_and_names_none(tmp_path: Path):
    answers = train(2, tmp_path, [*TINY, "data.source=nowhere.txt", "train.steps=3"], preset="shakespeare-char")
    assert [answer[0]["error"] for answer in answers] == ["DataError", "OtherProcessError"]
    assert answers[0][0]["message"].startswith("there is no source nowhere.txt")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_does_not_fit_is_told_of_by_one_process(corpus: Path, tmp_path: Path):
    words = [*words_of("shards", corpus, tmp_path / "here", 2), "speed.optimizer_state=8bit"]
    train(2, tmp_path / "here", words, preset="shakespeare-char")
    for wrong in (["model.width=16"], ["speed.optimizer_state=fp32", "parallel.form=fsdp"]):
        how = {"preset": "shakespeare-char", "resume": "auto"}
        answers = train(2, tmp_path / "here", [*words, "train.steps=4", *wrong], **how)
        assert [answer[-1]["error"] for answer in answers] == ["CheckpointError", "OtherProcessError"]


def _prepare_slowly(timeout: float, seconds: float) -> bool:
    """Two hosts, of which the second has to prepare its data itself."""
    rank = int(os.environ["RANK"])
    with mock.patch("socket.gethostname", return_value=f"host-{rank}"):
        with joined(launch(), "cpu", timeout=timeout) as world, world.fail_together(), world.rank0_first():
            time.sleep(rank * seconds)
        return world.first


def test_a_host_may_prepare_data_for_longer_than_others_wait_in_a_step():
    assert WORKERS.run(2, _prepare_slowly, 3.0, 4.5) == [True, False]


def test_a_rate_that_diverges_ends_all_processes(corpus: Path, tmp_path: Path):
    words = [*words_of("shards", corpus, tmp_path / "here", 40), "optim.learning_rate=100", "optim.clip=0"]
    answers = train(2, tmp_path / "here", [*words, "optim.warmup=0"], preset="shakespeare-char")
    assert [answer[-1]["error"] for answer in answers] == ["DivergedError", "OtherProcessError"]
    assert "resume from" in answers[0][-1]["message"]


def come_here(folder: str, words: list[str]) -> list[dict[str, Any]]:
    """Rank 1 does not come. The time to wait for it ends when the others are there, however long they take."""
    store_type = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    wait = store_type.wait

    def wait_for_others(store: Any, keys: list[str], *limit: Any) -> None:
        wait(store, [key for key in keys if not key.endswith("/1")], *limit)
        raise dist.DistStoreError("the time is over")

    with mock.patch.object(store_type, "wait", wait_for_others):
        return [] if os.environ["RANK"] == "1" else run_here(folder, words)


def test_ranks_that_do_not_come_are_named_by_one_of_those_that_do(corpus: Path, tmp_path: Path):
    words = words_of("shards", corpus, tmp_path / "run", 2)
    first, _, last = (rows[-1:] for rows in WORKERS.run(3, come_here, str(tmp_path), words))
    assert first[0]["message"].startswith("2 of 3 processes came within 60 s: rank 1 did not")
    assert [row["error"] for row in last] == ["OtherProcessError"]
