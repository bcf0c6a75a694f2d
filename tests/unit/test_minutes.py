"""Choosing a size for a time: the law, the chooser on machines that are made up, and what becomes of a choice."""

import contextlib
import dataclasses
import itertools
import statistics
from pathlib import Path

import pytest
import torch

from flatout.config.load import LoadedConfig, load_config
from flatout.config.sizes import LADDER, Known, Shape
from flatout.device import Device
from flatout.errors import ResourceError
from flatout.resolve import opening
from flatout.resolve.opening import with_tokenizer
from flatout.resolve.sizing import applied, as_before, decide, fitted_to, on_device, sized
from flatout.tuning import minutes
from flatout.tuning.minutes import (
    SECONDS,
    WORDS,
    Budget,
    Prospect,
    SizeSpeed,
    choose,
    decision_for,
    effective_tokens,
    flops,
    law_for,
)

CPU = Device(torch_device=torch.device("cpu"), name="cpu", memory_bytes=None, capability=None)


def card(gigabytes: float) -> Device:
    return Device(
        torch_device=torch.device("cuda", 0), name="a card", memory_bytes=int(gigabytes * 1e9), capability=(8, 0)
    )


class Machine:
    """A machine that is made up: so many FLOP/s, so much memory, and a clock that measuring moves on."""

    def __init__(
        self, rate: float, budget: Budget, most: int = 10**12, measuring: float = 3.0, built: float = 0.0
    ) -> None:
        self.rate, self.budget, self.most, self.measuring, self.built = rate, budget, most, measuring, built
        self.now, self.asked = 0.0, list[Shape]()

    def measure(self, shape: Shape) -> SizeSpeed | None:
        self.now += self.measuring
        self.asked.append(shape)
        if shape.dense(self.budget.vocab) > self.most:
            return None
        return SizeSpeed(flops(shape, self.budget) / self.rate, 0.001, self.built)

    def choose(self, first: Shape) -> list[Prospect]:
        return choose(self.budget, LADDER, first, self.measure, lambda: self.now)


def test_more_parameters_tokens_and_steps_lower_the_loss_and_repeats_count_less() -> None:
    assert WORDS.loss(1e8, 1e9, 1e4) < WORDS.loss(1e7, 1e9, 1e4)
    assert WORDS.loss(1e8, 1e9, 1e4) < WORDS.loss(1e8, 1e8, 1e4)
    assert WORDS.loss(1e8, 1e9, 1e4) < WORDS.loss(1e8, 1e9, 100)
    assert effective_tokens(1e6, 2e6) == 1e6
    assert 1.7e6 < effective_tokens(2e6, 1e6) < 2e6, "a second reading is almost as good"
    assert effective_tokens(1e9, 1e6) < 4e6, "the thousandth is not"
    small, large = (WORDS.loss(n, effective_tokens(127e6, 12.7e6), 1939) for n in (16e6, 51e6))
    assert small - large == pytest.approx(3.769 - 3.567, abs=0.03), "measured on pretrain-mix"
    assert len({law_for(65), law_for(1024), law_for(50257)}) == 3


# Runs of `record` on enwik8: blocks, width, tokens, tokens of a step, loss; its other settings are its own. Rows of
# lab/time_to_loss.jsonl, but for 2.899, which is of lab/lab.jsonl.
MEASURED = (
    (4, 256, 8.0e6, 8192, 3.652), (8, 512, 8.0e6, 8192, 3.448), (12, 768, 8.0e6, 8192, 3.363),
    (24, 1024, 8.0e6, 8192, 3.404), (12, 768, 10.0e6, 12_288, 3.223), (8, 512, 26.0e6, 32_768, 2.899),
    (12, 768, 26.0e6, 32_768, 2.824), (24, 1024, 26.0e6, 32_768, 2.774), (8, 512, 52.2e6, 49_152, 2.776),
    (8, 512, 52.2e6, 32_768, 2.787), (4, 256, 79.8e6, 65_536, 2.926), (4, 256, 78.2e6, 49_152, 2.931),
    (4, 256, 82.3e6, 98_304, 2.929), (6, 384, 48.6e6, 49_152, 2.854), (6, 384, 51.4e6, 98_304, 2.850),
    (8, 512, 32.6e6, 49_152, 2.913), (8, 512, 34.3e6, 98_304, 2.920), (8, 512, 125.0e6, 49_152, 2.674),
    (8, 512, 129.7e6, 98_304, 2.655), (10, 640, 87.9e6, 49_152, 2.666), (10, 640, 90.2e6, 98_304, 2.657),
    (12, 768, 64.3e6, 98_304, 2.688),
)  # fmt: skip


def test_the_law_is_near_what_was_measured_on_enwik8() -> None:
    errors = []
    for layers, width, tokens, batch, loss in MEASURED:
        budget = Budget(seconds=1, vocab=50257, unique=26_120_000, batch=batch, tables=True)
        found = budget.prospect(Shape(layers, width), SizeSpeed(1 / tokens, 0.0), measured=True)
        errors.append(found.loss - loss)
    assert max(map(abs, errors)) < 0.05
    assert statistics.fmean(error**2 for error in errors) ** 0.5 < 0.02


def test_tables_count_where_the_text_is_read_once() -> None:
    def loss(tokens: float, tables: bool) -> float:
        budget = Budget(seconds=1, vocab=50257, unique=26_000_000, batch=32_768, tables=tables)
        return budget.prospect(Shape(8, 512), SizeSpeed(1 / tokens, 0.0), measured=True).loss

    assert loss(26e6, True) < loss(26e6, False)
    assert loss(52e6, True) == loss(52e6, False)


@pytest.mark.parametrize(
    ("device", "words", "tables"),
    [
        (card(80), [], True),
        (card(8), [], False),
        (card(8), ["model.bigram_rows=640"], True),
        (card(80), ["model.bigram_rows=0"], False),
        (CPU, [], False),
    ],
)
def test_a_plan_knows_whether_there_will_be_tables(
    device: Device, words: list[str], tables: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Budget] = []

    def chosen(budget: Budget, *_: object) -> list[Prospect]:
        asked.append(budget)
        return []

    monkeypatch.setattr(minutes, "choose", chosen)
    loaded = load_config("record", ["train.minutes=2", "data.source=x", *words])
    with pytest.raises(ResourceError):
        minutes.plan(loaded, Known(vocab=50257, unique=26_000_000), device)
    assert asked[0].tables is tables


@pytest.mark.parametrize("seconds", [60, 36_000])
def test_a_small_text_gets_no_large_model(seconds: float) -> None:
    rows = Machine(4e14, Budget(seconds=seconds, vocab=50257, unique=300_000)).choose(Shape(8, 512))
    assert rows[0].shape.dense(50257) < 20 * 300_000


@pytest.mark.parametrize(("minutes", "good"), [(0.5, {"6x384"}), (2.0, {"60m", "10x640"})])
def test_minutes_choose_the_sizes_that_were_best_on_an_h200(minutes: float, good: set[str]) -> None:
    """With the speeds that sizes have there, in microseconds for each token."""
    token = {"4x192": 0.26, "15m": 0.345, "6x384": 0.54, "60m": 0.82, "10x640": 1.22, "124m": 1.73, "16x1024": 3.4}
    budget = Budget(seconds=60 * minutes, vocab=50257, unique=26_120_000, tables=True)
    shapes = [shape for shape in LADDER if shape.name in token]

    def measure(shape: Shape) -> SizeSpeed:
        return SizeSpeed(1e-6 * token[shape.name], 0.001)

    chosen = choose(budget, shapes, Shape(8, 512), measure, lambda: 0.0)
    assert chosen[0].measured
    assert chosen[0].shape.name in good


def test_building_kernels_for_the_first_size_is_not_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slower(Machine):
        """Every size is slower than the last one made it seem, so that there is always a better one."""

        def measure(self, shape: Shape) -> SizeSpeed | None:
            self.rate /= 8
            return super().measure(shape)

    budget = Budget(seconds=3600, vocab=50257)
    for measuring, built, sizes in ((30.0, 0.0, 1), (30.0, 27.0, 2), (7.0, 0.0, 2), (4.0, 0.0, 3)):
        machine = Slower(4e14, budget, measuring=measuring, built=built)
        machine.choose(Shape(24, 1024))
        assert len(machine.asked) == sizes, (measuring, built)
    loaded = load_config("record", ["data.source=x", "train.minutes=1"], size="2x64")
    monkeypatch.setattr(minutes, "borrowed_run", contextlib.nullcontext)
    monkeypatch.setattr(minutes, "_step_seconds", lambda _run, sequences: (7.0, 0.01 * sequences))
    speed = minutes.measured_speed(loaded, Shape(2, 64), Known(vocab=1024), CPU)
    assert speed is not None
    assert speed.built == 7.0


def test_a_faster_machine_and_more_time_choose_larger_models() -> None:
    chosen = []
    for rate, seconds in ((1e10, 90), (1e11, 90), (1e13, 600), (4e14, 30), (4e14, 3600), (4e14, 10 * 3600)):
        machine = Machine(rate, Budget(seconds=seconds, vocab=50257))
        chosen.append(machine.choose(Shape(8, 512))[0].shape.dense(50257))
        assert len(machine.asked) <= 3
        assert machine.now <= SECONDS
    assert chosen == sorted(chosen)
    assert chosen[0] < 10e6
    assert chosen[-1] > 200e6


def test_what_does_not_fit_is_not_chosen() -> None:
    budget = Budget(seconds=36000, vocab=50257)
    machine = Machine(4e14, budget, most=200_000_000)
    rows = machine.choose(Shape(8, 512))
    assert rows[0].shape.dense(50257) <= 200_000_000
    assert Machine(4e14, budget, most=0).choose(Shape(8, 512)) == []


def test_a_slow_machine_is_measured_once() -> None:
    machine = Machine(1e9, Budget(seconds=90, vocab=66), measuring=15.0)
    rows = machine.choose(Shape(3, 96))
    assert machine.asked == [Shape(3, 96)]
    assert rows[0].measured or rows[0].loss <= min(row.loss for row in rows)


def test_a_batch_that_the_user_wrote_stays() -> None:
    machine = Machine(1e12, Budget(seconds=90, vocab=50257, batch=8192, context=1024))
    assert {row.batch for row in machine.choose(Shape(4, 256))} == {8192}


def test_a_choice_becomes_settings_with_their_source(tmp_path: Path) -> None:
    loaded = load_config("record", ["train.minutes=1", "data.source=shakespeare", "eval.sample_tokens=5"])
    assert loaded.size is not None
    assert loaded.size.name == "auto"
    known = Known(vocab=50257, unique=26_000_000)
    rows = Machine(4e14, Budget(seconds=120, vocab=50257, unique=26_000_000)).choose(Shape(8, 512))
    decision = decision_for(loaded, rows[0], rows, known, card(80))
    settled = applied(loaded, decision.as_dict())
    train = settled.config.train
    assert (train.minutes, train.steps) == (1.0, rows[0].steps)
    assert train.batch_tokens == rows[0].batch
    assert settled.config.model.width == rows[0].shape.width
    assert settled.config.eval.sample_tokens == 5, "the user's"
    assert settled.sources["train.steps"].where == "1 minute"
    assert settled.sources["model.width"].where == f"size {rows[0].shape.name}"
    assert settled.size is None
    told = settled.notices
    assert told[0].startswith(f"1 minute on a card: size {rows[0].shape.name}, about {rows[0].steps:,} steps of ")
    assert any("measured" in line and "loss about" in line for line in told[1:])
    again = as_before(loaded, settled.config.model_dump())
    assert again.config == settled.config, "a resume decides nothing anew"


def test_ranks_share_the_tokens_of_a_size_that_was_timed_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_config("record", ["data.source=x", "train.minutes=5", "train.batch_tokens=65536"], size="15m")
    monkeypatch.setattr(minutes, "measured_speed", lambda *_: SizeSpeed(1e-6, 0.0, 0.0))
    one, four = (
        minutes.plan(loaded, Known(vocab=1024, ranks=ranks), CPU).as_dict()["values"]["train.steps"][0]
        for ranks in (1, 4)
    )
    assert four == pytest.approx(4 * one, rel=0.02)


@pytest.mark.parametrize("word", ["speed.accumulation=2", "speed.micro_batch=99"])
def test_a_processor_keeps_the_micro_batch_that_the_user_wrote(word: str) -> None:
    loaded = load_config("record", ["data.source=x", "train.batch_tokens=65536", word], size="15m")
    assert on_device(loaded, CPU).config.speed == loaded.config.speed
    unwritten = load_config("record", ["data.source=x", "train.batch_tokens=65536"], size="15m")
    assert on_device(unwritten, CPU).config.speed != unwritten.config.speed


def test_a_resume_keeps_the_plan_of_minutes_and_takes_another_length() -> None:
    words = ["data.source=shakespeare"]
    for preset in ("shakespeare", "record"):  # with steps of its own, and without
        loaded = load_config(preset, [*words, "train.minutes=2"])
        stored = load_config(preset, [*words, "train.minutes=2", "train.steps=123"]).config
        assert as_before(loaded, stored.model_dump()).config.train == stored.train
    longer = load_config("record", [*words, "train.tokens=1000000", "speed.accumulation=1"])
    for told in ("train.steps=500", "train.epochs=1", "train.minutes=3"):
        stored = load_config("record", [*words, told, "speed.micro_batch=1"]).config
        again = as_before(longer, stored.model_dump()).config
        lengths = (again.train.steps, again.train.epochs, again.train.tokens, again.train.minutes)
        assert lengths == (None, None, 1_000_000, None)
        assert (again.speed.micro_batch, again.speed.accumulation) == (None, 1)


def test_fine_tuning_with_a_sized_preset_looks_for_no_text() -> None:
    words = ["chat.source=rows.jsonl", "model.init_from=base", "train.epochs=1"]
    loaded = load_config("modern", words)
    assert sized(loaded, Known(vocab=66), CPU) is loaded


def test_tables_are_left_out_on_small_devices_and_repeated_data_is_regularised() -> None:
    shape, known = Shape(8, 512), Known(vocab=50257, unique=100_000_000)

    def sized(device: Device, unique: int = 100_000_000, **words: str) -> LoadedConfig:
        config = load_config("record", ["data.source=shakespeare", *words.values()], size="60m")
        return applied(config, decide(config, shape, dataclasses.replace(known, unique=unique), device).as_dict())

    large, small = sized(card(80)), sized(card(8))
    assert large.config.model.value_tables == 2
    assert large.config.model.bigram_rows == 0, "two epochs"
    once = sized(card(80), words="train.epochs=1")
    assert once.config.model.bigram_rows > 0
    assert (once.config.optim.table_rate, large.config.optim.table_rate) == (0.36, 0.12)
    assert (small.config.model.value_tables, small.config.model.bigram_rows) == (0, 0)
    assert "small for embedding tables" in small.notices[-1]
    assert sized(card(8), words="model.value_tables=1").config.model.value_tables == 1, "the user's"
    repeated = sized(card(80), 10_000_000, words="train.epochs=10")
    assert (repeated.config.model.mlp, repeated.config.model.value_tables) == ("swiglu", 0)
    assert repeated.config.optim.head_decay is not None
    assert repeated.sources["optim.head_decay"].where == "10.0 epochs"
    assert "read 10.0 times" in repeated.notices[-1]
    assert large.config.optim.head_decay is None


@pytest.mark.parametrize(("epochs", "values"), [(1, 1), (2, 1), (10, 0)])
def test_a_small_vocabulary_has_its_tables_on_every_device(epochs: float, values: int) -> None:
    config = load_config("record", ["data.source=shakespeare", f"train.epochs={epochs}"], size="2x64")
    for device in (CPU, card(8), card(80)):
        found = applied(config, decide(config, Shape(2, 64), Known(vocab=1024, unique=400_000), device).as_dict())
        assert (found.config.model.bigram_rows, found.config.model.value_tables) == (20 * 1024, values)
        assert not any("small for embedding tables" in notice for notice in found.notices)
    characters = decide(config, Shape(2, 64), Known(vocab=64, unique=400_000), CPU).values["model.bigram_rows"]
    assert characters[0] == 64 * 64, "no more than there are pairs"


def test_a_size_is_measured_with_the_settings_of_text_that_is_not_repeated() -> None:
    loaded = load_config("record", ["data.source=shakespeare", "train.minutes=2"])
    trial = minutes.trial_of(loaded, Shape(3, 96), Known(vocab=66, unique=1_000_000), CPU)
    assert (trial.config.model.mlp, trial.config.optim.ema) == ("relu2", 0.0)


@pytest.mark.parametrize(
    ("device", "words", "tokenizer"),
    [
        (CPU, [], "bpe-1024"),
        (CPU, ["data.tokenizer=char"], "char"),
        (CPU, ["data.folder=prepared"], "gpt2"),
        (CPU, ["data.folder=new"], "bpe-1024"),
        (CPU, ["train.minutes=null"], "gpt2"),
        (card(8), [], "gpt2"),
    ],
)
def test_on_a_cpu_a_run_of_minutes_has_a_small_vocabulary(
    device: Device, words: list[str], tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "has_dataset", lambda folder: folder.name == "prepared")
    words = ["data.source=shakespeare", "train.minutes=2", *words]
    for size in ({}, {"size": "2x64"}):
        found = with_tokenizer(load_config("record", words, **size), device)
        assert found.config.data.tokenizer == tokenizer
        assert (tokenizer == "bpe-1024") == any("bpe-1024" in notice for notice in found.notices)


def test_the_ladder_rises_and_goes_down_to_models_for_characters() -> None:
    counts = [shape.dense(66) for shape in LADDER]
    assert all(before < after for before, after in itertools.pairwise(counts))
    assert counts[0] < 300_000


def test_a_card_is_offered_the_sizes_that_fit_it() -> None:
    loaded, known = load_config("record", ["train.minutes=2", "data.source=shakespeare"]), Known(vocab=50257)
    offered = {}
    for gigabytes in (8, 80):
        shapes, first = minutes.shapes_for(loaded, known, card(gigabytes))
        assert first in shapes
        offered[gigabytes] = [shape.dense(50257) for shape in shapes]
        trial = minutes.trial_of(loaded, shapes[-1], known, card(gigabytes))
        fitted = fitted_to(trial, f"{gigabytes}gb").config
        assert fitted.speed.micro_batch is not None
        assert (fitted.model.value_tables > 0) == (gigabytes == 80)
    assert max(offered[8]) < max(offered[80])
    assert max(offered[8]) >= 50e6
    assert max(offered[80]) > 1e9
    only, first = minutes.shapes_for(load_config("gpt-124m", ["optim.schedule=wsd"]), known, card(8))
    assert only == [Shape(12, 768)] == [first], "the model of a config without sizes is its own"


def test_a_sized_run_on_a_card_has_the_micro_batch_of_its_overlay() -> None:
    loaded = load_config("modern", ["data.source=shakespeare", "train.tokens=2e9"], size="350m")
    decision = decide(loaded, Shape(24, 1024), Known(vocab=50257, unique=3 * 10**9), card(8))
    settled = on_device(applied(loaded, decision.as_dict()), card(8))
    assert settled.sources["speed.micro_batch"].where == "hardware 8gb"
    assert settled.config.train.batch_tokens == loaded.config.train.batch_tokens
    here = on_device(applied(loaded, decision.as_dict()), CPU)
    assert here.config.speed.micro_batch == 8
