"""`flatout tune` from outside: what it finds, what it writes, and that it leaves nothing behind."""

import dataclasses
import errno
import gc
import io
import json
import os
import random
import shlex
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import flatout
from flatout import api
from flatout.cli import main
from flatout.config.load import LoadedConfig, load_config
from flatout.config.schema import RunConfig
from flatout.config.source import DEFAULT
from flatout.device import detect_device
from flatout.errors import ConfigError, HardwareError, ResourceError
from flatout.front import output
from flatout.front.commands import COMMANDS, parser_of
from flatout.front.configs import load
from flatout.host import THREAD_VARIABLES, CoreUse
from flatout.model.gpt import GPT
from flatout.observe import sheets
from flatout.records import NoticeRecord, StepRecord, TuneProgress, TuneResult, TuneRow
from flatout.resolve import case as engine_threads
from flatout.resolve import switches as engine_switches
from flatout.resolve.switches import resolve_speed
from flatout.tuning import probe, tuner
from flatout.tuning.search import Candidate, Trial

BATCH = "train.batch_tokens=192"  # 12 sequences of 16 tokens


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "TIMED_SECONDS", 0.005)


def run(loaded: LoadedConfig | RunConfig, **settings) -> tuple[list[TuneRow], TuneResult]:
    *rows, result = list(api.tune(loaded, **settings))
    assert isinstance(result, TuneResult)
    assert all(isinstance(row, TuneRow) for row in rows)
    return rows, result  # pyright: ignore[reportReturnType]


def switches() -> tuple:
    return (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
    )


@pytest.mark.usefixtures("bf16_products")
def test_it_finds_a_micro_batch_keeps_the_batch_and_leaves_nothing_behind(tiny, tmp_path: Path):
    torch.manual_seed(7)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1], switches()
    bystander = torch.nn.Linear(4, 4)
    weights = bystander.weight.detach().clone()
    before = torch.get_rng_state()
    heard: list[TuneProgress] = []
    rows, result = run(tiny(BATCH, "model.dropout=0.1", "speed.precision=bf16"), progress=heard.append)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert switches() == states[3]
    assert torch.equal(bystander.weight, weights)
    assert {path.name for path in tmp_path.iterdir()} <= {"data"}, "nothing is written but what preparing writes"
    assert all(row.micro_batch * row.accumulation == 12 for row in rows)
    assert rows[0].micro_batch == 12, "the largest comes first"
    assert all(row.status == "fits" and row.tokens_per_second and row.milliseconds for row in rows)
    assert result.confirmed
    assert result.tried == len(rows)
    assert result.batch_tokens == 192
    assert f"speed.micro_batch={result.chosen.micro_batch}" in result.words
    assert [progress.number for progress in heard] == sorted(progress.number for progress in heard)
    assert "micro-batch 12" in heard[1].text


def test_exhaustive_tries_every_divisor(tiny):
    rows, result = run(tiny(BATCH), exhaustive=True)
    assert [row.micro_batch for row in rows] == [1, 2, 3, 4, 6, 12]
    assert result.chosen.number in {row.number for row in rows}


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [({}, 120.0), ({"exhaustive": True}, 3600.0), ({"exhaustive": True, "seconds": 50.0}, 50.0)],
)
def test_the_time_there_is_is_known_from_the_first_line_on(tiny, settings: dict, seconds: float):
    heard: list[TuneProgress] = []
    run(tiny(BATCH, "speed.micro_batch=1"), progress=heard.append, **settings)
    assert {progress.budget for progress in heard} == {seconds}


def test_the_fragment_is_the_config_that_was_tuned(tiny, tmp_path: Path):
    loaded = tiny(BATCH, "speed.loss_chunk=4096", "train.seed=5", "optim.learning_rate=1e-2")
    _, result = run(loaded)
    path = tmp_path / "tuned.yaml"
    path.write_text(result.fragment, encoding="utf-8")
    assert "# Found by `flatout tune` on cpu" in result.fragment
    assert "tokens/s" in result.fragment
    assert "preset: shakespeare-char" in result.fragment
    tuned = load_config(path).config
    chosen = result.chosen
    expected = loaded.config.model_copy(
        update={
            "speed": loaded.config.speed.model_copy(
                update={
                    "micro_batch": chosen.micro_batch,
                    "accumulation": None,
                    "checkpointing": chosen.checkpointing,
                    "loss": chosen.loss,
                    "kernels": chosen.kernels,
                    "compile": chosen.compile,
                }
            ),
            "output": loaded.config.output.model_copy(update={"name": "tuned"}),
        }
    )
    assert tuned == expected
    again = load_config(str(path), ["train.steps=2", "eval.sample_tokens=0"])
    steps = [record for record in flatout.train(again) if isinstance(record, StepRecord)]
    assert {record.micro_batch for record in steps} == {chosen.micro_batch}
    by_words = load_config("shakespeare-char", ["speed.device=cpu", BATCH, "model.context=16", *result.words]).config
    assert by_words.speed.micro_batch == chosen.micro_batch


def small_device(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    real = GPT.forward

    def forward(self: GPT, tokens_BT, *more):
        if tokens_BT.shape[0] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, tokens_BT, *more)

    monkeypatch.setattr(GPT, "forward", forward)


def test_running_out_of_memory_is_an_answer(tiny, monkeypatch: pytest.MonkeyPatch):
    small_device(monkeypatch, 3)
    rows, result = run(tiny(BATCH))
    failed = [row.micro_batch for row in rows if row.status == "out_of_memory"]
    assert failed == [12, 6, 4]
    assert all(row.tokens_per_second is None and "out of memory" in row.reason for row in rows[:3])
    assert result.chosen.micro_batch <= 3
    rows, result = run(tiny(BATCH), exhaustive=True)
    assert [row.micro_batch for row in rows] == [1, 2, 3, 4], "what is larger than a failure is not tried"


def test_a_choice_that_fails_in_whole_steps_is_not_the_choice(tiny, monkeypatch: pytest.MonkeyPatch):
    real, failed = probe.Probe.confirm, []

    def confirm(self, candidate, seconds):
        if not failed:
            failed.append(candidate)
            return "out of device memory"
        return real(self, candidate, seconds)

    monkeypatch.setattr(probe.Probe, "confirm", confirm)
    _, result = run(tiny(BATCH))
    assert result.chosen.micro_batch != failed[0].micro_batch


def test_where_nothing_fits_there_is_an_error_with_a_way_out(tiny, monkeypatch: pytest.MonkeyPatch):
    small_device(monkeypatch, 0)
    with pytest.raises(ResourceError, match="nothing that was tried fits cpu") as caught:
        run(tiny(BATCH))
    assert caught.value.hint


def test_time_runs_out_with_the_best_so_far(tiny):
    rows, result = run(tiny(BATCH), seconds=0.001)
    assert len(rows) == 1
    assert "seconds were over" in result.ended
    assert result.chosen.number == 1


def test_a_cap_needs_a_card(tiny):
    with pytest.raises(HardwareError, match="CUDA device only"):
        run(tiny(BATCH), memory=4.0)


def test_it_needs_no_prepared_data(tiny, tmp_path: Path):
    _, result = run(tiny(BATCH, "data.source=null", "data.folder=nowhere", "data.tokenizer=bytes"))
    assert "random tokens" in result.data
    assert not (tmp_path / "nowhere").exists()


def test_what_was_written_is_kept(tiny):
    rows, result = run(tiny(BATCH, "speed.micro_batch=4", "speed.checkpointing=full", "speed.loss=chunked"))
    assert {(row.checkpointing, row.loss) for row in rows} == {("full", "chunked")}
    assert max(row.micro_batch for row in rows) == 4
    assert "kept as written: micro_batch at most 4, checkpointing full, loss chunked" in result.ended


@pytest.mark.parametrize("word", ["speed.kernels=triton", "speed.optimizer_offload=true", "speed.cuda_graphs=on"])
def test_what_the_device_lacks_is_refused_as_in_training(tiny, word: str):
    loaded = tiny(BATCH, word)
    with pytest.raises(HardwareError) as tuning:
        run(loaded)
    with pytest.raises(HardwareError) as training:
        list(flatout.train(loaded))
    assert (tuning.value.message, tuning.value.hint) == (training.value.message, training.value.hint)


def test_accumulation_is_not_for_the_user_to_choose(tiny):
    with pytest.raises(ConfigError, match="tune chooses micro-batch and accumulation") as caught:
        run(tiny(BATCH, "speed.accumulation=2"))
    assert "leave it out" in caught.value.hint
    run(tiny(BATCH, "speed.accumulation=null"), seconds=0.001)


def test_a_config_made_in_python_is_free_where_nothing_was_set(tiny):
    values = tiny(BATCH).config.model_dump()
    values["speed"] = {"device": "cpu", "checkpointing": "full"}
    rows, result = run(RunConfig.model_validate(values), seconds=0.001)
    assert rows[0].checkpointing == "full"
    assert result.ended.endswith("kept as written: checkpointing full")


# --- a card that is not here ------------------------------------------------------------------------------------------


class FakeCard(probe.Probe):
    """Answers as a card with `capacity` bytes would; `fixed` is what a step needs at any size."""

    def __init__(self, loaded: LoadedConfig, *, capacity: int, fixed: int) -> None:
        super().__init__(loaded, loaded.config.data.model_dump(), None)
        name = "a card"
        card = torch.device("cuda", 0)
        self.device = dataclasses.replace(self.device, torch_device=card, name=name, memory_bytes=capacity)
        self.fixed = fixed
        self.opened: list[str] = []
        self.confirmed: list[int] = []
        self.whole: dict[int, float] = {}  # by micro-batch, the speed of whole steps over what shorter ones promise

    def open(self, candidate: Candidate) -> None:
        self.opened.append(candidate.compile)

    def resolve(self, settings):  # the tests' config is for a CPU; a card would take our kernels
        speed = resolve_speed(settings.config, detect_device("cpu"), 0, lambda _: DEFAULT)
        return dataclasses.replace(speed, kernels="triton", loss="fused", compile="off")

    def capacity(self) -> int | None:
        return self.device.memory_bytes

    def estimate(self, candidate: Candidate) -> int:
        kept = {"none": 100, "selective": 70, "full": 20}[candidate.checkpointing]
        fixed = self.fixed // 3 if candidate.optimizer_offload else self.fixed
        return fixed + kept * candidate.micro_batch + (500 if candidate.loss == "plain" else 0)

    def attempt(self, candidate: Candidate):
        peak = self.estimate(candidate)
        if peak > (self.device.memory_bytes or 0):
            return Trial(candidate=candidate, status="out_of_memory", reason="out of memory"), None, False
        size, cost = candidate.micro_batch, {"none": 1.0, "selective": 0.97, "full": 0.75}[candidate.checkpointing]
        cost *= 1.0 if candidate.loss == "fused" or candidate.compile != "off" else 0.9
        rate = 1e5 * cost * size / (size + 2)
        timing = probe.Timing(192 / rate, peak)
        return Trial(candidate=candidate, status="fits", tokens_per_second=rate, peak_bytes=peak), timing, False

    def confirm(self, candidate: Candidate, seconds: float):
        assert seconds > 0
        self.confirmed.append(candidate.micro_batch)
        timing = self.attempt(candidate)[1]
        factor = self.whole.get(candidate.micro_batch, 1.0)
        return None if timing is None else dataclasses.replace(timing, seconds=timing.seconds / factor)


def run_on(card: FakeCard, loaded: LoadedConfig, **settings) -> tuple[list[TuneRow], TuneResult]:
    tuning = tuner._Tuning(loaded, card, "made up", settings.get("seconds"), lambda _: None)
    *rows, result = list(tuning.run(settings.get("thorough", False)))
    assert isinstance(result, TuneResult)
    return rows, result  # pyright: ignore[reportReturnType]


def test_with_room_nothing_is_recomputed(tiny):
    loaded = tiny(BATCH)
    rows, result = run_on(FakeCard(loaded, capacity=10_000, fixed=1000), loaded)
    assert (result.chosen.micro_batch, result.chosen.checkpointing, result.chosen.loss) == (12, "none", "fused")
    assert {row.loss for row in rows} == {"fused", "chunked", "plain"}, "losses are compared"
    assert not any(row.optimizer_offload for row in rows)


def test_a_margin_stays_free(tiny):
    loaded = tiny(BATCH)
    rows, result = run_on(FakeCard(loaded, capacity=2360, fixed=1000), loaded)  # 12 x 100 fits, but only just
    assert [row.status for row in rows if row.micro_batch == 12 and row.checkpointing == "none"] == ["over"]
    assert (result.chosen.peak_bytes or 0) <= 0.92 * 2360


def test_moments_move_to_the_host_where_nothing_else_helps(tiny):
    loaded = tiny(BATCH)
    rows, result = run_on(FakeCard(loaded, capacity=1000, fixed=1200), loaded)
    assert all(row.optimizer_offload for row in rows)
    assert "speed.optimizer_offload=true" in result.words
    assert "optimizer_offload: true" in result.fragment
    with pytest.raises(ResourceError, match="nothing that was tried fits a card"):
        run_on(FakeCard(loaded, capacity=300, fixed=1200), loaded)
    narrow = tiny(BATCH, "speed.optimizer_state=8bit")
    with pytest.raises(ResourceError):
        run_on(FakeCard(narrow, capacity=1000, fixed=1200), narrow)


def test_on_a_card_too_what_was_written_is_kept(tiny):
    written = {"checkpointing": "selective", "loss": "plain", "loss_chunk": 4096, "optimizer_offload": "false"}
    loaded = tiny(BATCH, *(f"speed.{name}={value}" for name, value in written.items()))
    rows, result = run_on(FakeCard(loaded, capacity=10_000, fixed=1000), loaded)
    assert {(row.checkpointing, row.loss, row.loss_chunk) for row in rows} == {("selective", "plain", 4096)}
    assert "loss_chunk: 4096" in result.fragment
    with pytest.raises(ResourceError):  # nothing fits, and the moments stay where they were told to
        run_on(FakeCard(loaded, capacity=1000, fixed=1200), loaded)


def one_way(tiny) -> LoadedConfig:
    return tiny(BATCH, "speed.checkpointing=none", "speed.loss=fused")


def test_a_choice_that_whole_steps_do_not_bear_out_gives_way(tiny):
    loaded = one_way(tiny)
    card = FakeCard(loaded, capacity=10_000, fixed=1000)
    card.whole = {12: 0.6}
    rows, result = run_on(card, loaded, thorough=True)
    assert card.confirmed == [12, 6], "and 4 promises less than 6 has shown"
    assert result.chosen.micro_batch == 6
    assert result.confirmed
    promised = {row.micro_batch: row.tokens_per_second or 0 for row in rows}
    assert result.chosen.tokens_per_second == pytest.approx(promised[6])
    assert f"micro-batch 12, checkpointing none, loss fused, kernels triton: {0.6 * promised[12]:,.0f}" in result.ended
    assert f"{promised[6]:,.0f} tokens/s" in result.fragment
    card.confirmed.clear()
    card.whole = {12: 0.6, 6: 0.5, 4: 0.5}
    _, result = run_on(card, loaded, thorough=True)
    assert card.confirmed == [12, 6, 4], "three at most"
    assert result.chosen.micro_batch == 12, "the best of those that were confirmed"


def test_a_clear_choice_is_confirmed_alone(tiny):
    loaded = one_way(tiny)
    card = FakeCard(loaded, capacity=10_000, fixed=1000)
    card.whole = {12: 1.0}
    _, result = run_on(card, loaded)
    assert card.confirmed == [12], "6 promises a seventh less"
    assert "whole steps with" not in result.ended


def test_without_time_only_the_choice_is_confirmed(tiny):
    loaded = one_way(tiny)
    card = FakeCard(loaded, capacity=10_000, fixed=1000)
    card.whole = {12: 0.6}
    _, result = run_on(card, loaded, seconds=1e-6)
    assert card.confirmed == [12]
    assert result.chosen.micro_batch == 12


def test_the_table_shows_what_was_confirmed(tiny):
    loaded = one_way(tiny)
    card = FakeCard(loaded, capacity=10_000, fixed=1000)
    card.whole = {12: 0.9, 6: 0.7, 4: 0.7}
    rows, result = run_on(card, loaded)
    stream = io.StringIO()
    sheets.print_sheet(tuner.sheet_of(rows, result), stream)
    *lines, sentence = stream.getvalue().splitlines()
    starred = next(line for line in lines if line.startswith("*"))
    promised = max(row.tokens_per_second or 0 for row in rows)
    assert f" {promised:,.0f}   100.0% " in starred, "figures of one kind in one column"
    assert starred.rstrip().endswith(f"whole steps: {0.9 * promised:,.0f}")
    assert sentence.startswith("chose micro-batch 12 x 1")
    assert f"{0.9 * promised:,.0f} tokens/s (of whole steps; the table's are put together" in sentence
    assert sentence == sentence.rstrip(), "one line, however long"


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def words(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return ["tune", "model.layers=1", "model.width=32", "model.heads=2", "model.context=16", "train.batch_tokens=64",
            "speed.device=cpu", f"data.source={corpus}", "train.steps=2", "eval.sample_tokens=0"]  # fmt: skip


def test_the_verb_shows_the_table_and_writes_the_file(words, capsys: pytest.CaptureFixture[str]):
    assert main([*words, "--out", "tuned.yaml"]) == 0
    shown = capsys.readouterr()
    assert "tokens/s" in shown.out
    assert "chose micro-batch" in shown.out
    assert "flatout train tuned.yaml" in shown.out
    assert "trial 1" in shown.err
    assert main(["train", "tuned.yaml"]) == 0


def test_json_lines_and_nothing_else(words, capsys: pytest.CaptureFixture[str]):
    assert main([*words, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["type"] for row in rows] == ["tune"] * (len(rows) - 1) + ["tuned"]
    assert rows[-1]["chosen"]["micro_batch"] in {row["micro_batch"] for row in rows[:-1]}


def test_without_a_file_the_fragment_is_printed(words, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "# Found by `flatout tune`" in out
    assert "train with: flatout train" in out


def test_a_file_of_somebody_else_is_not_written_over(words, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.yaml").write_text("preset: gpt2-124m\n", encoding="utf-8")
    for out, message in (
        ("mine.yaml", "is already there"),
        ("x.txt", "a .yaml file"),
        ("no/x.yaml", "does not exist"),
    ):
        assert main([*words, "--out", out]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.err.count("\n") == 2, "an error and a hint, before anything is measured"
    assert (tmp_path / "mine.yaml").read_text(encoding="utf-8") == "preset: gpt2-124m\n"


def printed_words(out: str) -> list[str]:
    line = next(line for line in out.splitlines() if line.startswith("train with: "))
    words = shlex.split(line.removeprefix("train with: "))
    assert words[:2] == ["flatout", "train"]
    return words[2:]


def test_the_printed_command_runs(words, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.yaml").write_text("preset: shakespeare-char\nspeed: {accumulation: 2}\n", encoding="utf-8")
    mine = ["speed.accumulation=null", "speed.micro_batch=4", "speed.micro_batch=2", "speed.loss=auto",
            "eval.sample_prompt=to be"]  # fmt: skip
    assert main(["tune", "mine.yaml", *words[1:], *mine, "--hardware", "8gb"]) == 0
    printed = printed_words(capsys.readouterr().out)
    paths = [word.partition("=")[0] for word in printed if "=" in word]
    assert len(paths) == len(set(paths))
    loaded = load(parser_of(COMMANDS["train"]).parse(printed))
    assert loaded.config.speed.micro_batch in (1, 2)
    assert loaded.config.speed.accumulation is None
    assert loaded.config.eval.sample_prompt == "to be"
    assert main(["train", *printed]) == 0


def test_a_place_that_cannot_be_written_is_told_at_once(
    words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "mkstemp", full)
    assert main([*words, "--out", "tuned.yaml"]) == 5
    captured = capsys.readouterr()
    assert "could not write tuned.yaml" in captured.err
    assert captured.err.count("\n") == 2, "nothing was measured"
    assert not list(tmp_path.glob("*.yaml"))


def test_what_cannot_be_written_in_the_end_is_shown(
    words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(output, "write_whole", full)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main([*words, "--out", "tuned.yaml"]) == 5
    captured = capsys.readouterr()
    assert "tokens/s" in captured.out
    assert "\nspeed:\n" in captured.err
    assert "could not write tuned.yaml: No space left on device" in captured.err
    assert {path.name for path in tmp_path.iterdir()} - set(before) <= {"data"}, "no empty file is left"


SIGNALS = [(signal.SIGTERM, "terminated", 143), (signal.SIGINT, "interrupted", 130)]


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
@pytest.mark.parametrize(("number", "word", "code"), SIGNALS)
def test_a_signal_shows_what_was_tried(
    words,
    number: int,
    word: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    real, before = api.tune, signal.getsignal(signal.SIGTERM)

    def stopped(*more, **settings):
        for record in real(*more, **settings):
            yield record
            os.kill(os.getpid(), number)

    monkeypatch.setattr(flatout, "tune", stopped)
    assert main([*words, "--out", "tuned.yaml"]) == code
    captured = capsys.readouterr()
    assert "tokens/s" in captured.out
    assert "chose" not in captured.out
    assert captured.err.endswith(f"{word}; nothing was written\n")
    assert not (tmp_path / "tuned.yaml").exists()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("_ctrl_c")
@pytest.mark.parametrize(("number", "word", "code"), SIGNALS)
def test_a_signal_between_the_choice_and_the_file_writes_nothing(
    words, number: int, word: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    real = api.tune

    def stopped(*more, **settings):
        yield from real(*more, **settings)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(flatout, "tune", stopped)
    assert main([*words, "--out", "tuned.yaml"]) == code
    captured = capsys.readouterr()
    assert "tokens/s" in captured.out
    assert captured.err.endswith(f"{word}; nothing was written\n")
    assert not (tmp_path / "tuned.yaml").exists()


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpt2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadedConfig]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "TIMED_SECONDS", 0.2)
    torch.cuda.empty_cache()
    return lambda *more: load_config("gpt2-124m", ["train.batch_tokens=131072", *more])


@pytest.mark.gpu
@pytest.mark.parametrize("memory", [4.0, 8.0])
def test_under_a_cap_the_choice_fits_and_trains(gpt2, memory: float):
    gc.collect()
    state, fraction = torch.cuda.get_rng_state(), torch.cuda.get_per_process_memory_fraction()
    before = torch.cuda.memory_allocated()
    rows, result = run(gpt2(), memory=memory)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.get_per_process_memory_fraction() == fraction
    assert torch.cuda.memory_allocated() - before < 2**28, "nothing is left on the card but workspaces of libraries"
    assert result.capacity_bytes == pytest.approx(memory * 2**30)
    assert (result.chosen.peak_bytes or 0) <= 0.93 * memory * 2**30
    assert "memory_limit" not in result.fragment
    assert len(rows) < 20
    words = ["data.source=shakespeare", "train.steps=5", "eval.tokens=8192", "eval.sample_tokens=0", *result.words]
    records = list(flatout.train(gpt2(*words, f"speed.memory_limit={memory}")))
    # Recordings keep their memory to themselves: under a small cap an evaluation may have to take fewer at once.
    said = [r.message for r in records if isinstance(r, NoticeRecord) and "out of memory" in r.message]
    assert not [message for message in said if "evaluating" not in message]
    assert {r.micro_batch for r in records if isinstance(r, StepRecord)} == {result.chosen.micro_batch}


@pytest.mark.gpu
def test_quick_is_near_exhaustive_on_the_device(gpt2):
    loaded = gpt2("model.layers=4", "train.batch_tokens=65536")
    _, fast = run(loaded, memory=6.0)
    rows, _ = run(loaded, memory=6.0, exhaustive=True, seconds=300)
    best = max(row.tokens_per_second or 0 for row in rows if row.status == "fits")
    assert (fast.chosen.tokens_per_second or 0) > 0.93 * best, "0.95 asked for, and noise"


def test_cores_that_others_used_are_told(tiny, monkeypatch):
    monkeypatch.setattr(tuner, "core_use", lambda *_: CoreUse(busy=2.0, others=1.2, waiting=0.4))
    _, result = run(tiny(BATCH, "speed.threads=1"))
    assert result.note.startswith("others used 1.2 of ")
    monkeypatch.setattr(tuner, "core_use", lambda *_: CoreUse(busy=1.1, others=0.1, waiting=0.0))
    _, result = run(tiny(BATCH, "speed.threads=1"))
    assert result.note == ""


def test_on_a_cpu_numbers_of_threads_are_tried(tiny, monkeypatch):
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for module in (tuner, engine_switches, engine_threads):
        monkeypatch.setattr(module, "whole_cores", lambda: 2)
    rows, result = run(tiny(BATCH))
    assert {row.threads for row in rows} == {1, 2}
    assert f"speed.threads={result.chosen.threads}" in result.words
    rows, result = run(tiny(BATCH, "speed.threads=1"))
    assert {row.threads for row in rows} == {1}
    assert "threads 1" in result.ended
    engine_threads.try_threads.cache_clear()
