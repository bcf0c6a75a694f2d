"""Sizes of presets: rules that derive settings, and who wins over them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from flatout.config.load import load_config, with_values
from flatout.config.sizes import (
    FRESH_EPOCHS,
    LONG_NAMES,
    SIZED,
    Known,
    Shape,
    batch_of,
    derive,
    rule_inputs,
    shape_of,
    size_names,
    usual_vocab,
)
from flatout.config.source import Source
from flatout.data.tokenizer import ByteTokenizer, Gpt2Tokenizer
from flatout.errors import ConfigError
from flatout.model.count import parameter_count
from flatout.resolve.sizing import fitted
from flatout.tuning.changes import config_text

GPT2 = 50257
MINUTES = ["train.minutes=5", "optim.schedule=wsd", "optim.decay_fraction=0.6"]
# The presets of 32,768 tokens as they were when each had a file of its own, by itself and with two overlays: what they
# have in common, and how each of them differs.
PINNED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("long_presets.json").read_text(encoding="utf-8")
)


def test_vocabularies_that_are_assumed_are_those_of_the_tokenizers() -> None:
    for tokenizer in (Gpt2Tokenizer, ByteTokenizer):
        assert usual_vocab(tokenizer.kind) == tokenizer.vocab
    assert usual_vocab("bpe-1024") == 1024


def test_sizes_are_counted_without_embedding_tables() -> None:
    counts = {name: round(shape_of(name, "").dense(GPT2) / 1e6) for name in size_names()}
    assert counts == {"15m": 16, "60m": 51, "124m": 124, "350m": 353, "760m": 757, "1.3b": 1311}


@pytest.mark.parametrize("preset", SIZED)
@pytest.mark.parametrize("size", [*size_names(), "4x128", "2x64"])
def test_each_size_is_a_valid_config_whose_values_say_where_they_come_from(preset: str, size: str) -> None:
    loaded = load_config(preset, size=size)
    shape, model = shape_of(size, ""), loaded.config.model
    assert (model.layers, model.width, model.width % model.heads) == (shape.layers, shape.width, 0)
    assert loaded.config.train.tokens == 20 * shape.dense(GPT2)
    for path in ("model.layers", "model.width", "model.heads", "train.batch_tokens", "optim.learning_rate"):
        assert (loaded.sources[path].kind, loaded.sources[path].where) == ("size", f"size {shape.name}")


def test_heads_of_128_from_a_width_of_512_on() -> None:
    sizes = {name: shape_of(name, "").width // shape_of(name, "").heads for name in ("15m", "60m", "1.3b", "4x128")}
    assert sizes == {"15m": 64, "60m": 128, "1.3b": 128, "4x128": 32}


def test_the_batch_follows_the_tokens_of_the_run() -> None:
    assert batch_of(26_000_000, 1024) == 32768, "the lab's best at 60m"
    assert batch_of(52_000_000, 1024) == 49152
    assert batch_of(26_000_000, 1024, ranks=3) == 33 * 1024, "which three processes can share"
    batches = [batch_of(int(tokens), 256) for tokens in (1e5, 1e6, 1e7, 1e8, 1e9, 1e10)]
    assert all(before < after for before, after in itertools.pairwise(batches))
    assert all(batch % 256 == 0 for batch in batches)


def test_what_the_user_wrote_wins_and_the_rest_follows_it() -> None:
    usual, small = load_config("modern").config, load_config("modern", ["train.batch_tokens=8192"]).config
    assert small.train.batch_tokens == 8192
    assert small.optim.learning_rate < usual.optim.learning_rate, "a smaller batch has smaller rates"
    short = load_config("modern", ["train.tokens=26_000_000"]).config
    assert (short.train.tokens, short.train.batch_tokens) == (26_000_000, 32768)
    steps = load_config("modern", ["train.steps=800"]).config
    assert (steps.train.steps, steps.train.tokens, steps.train.batch_tokens) == (800, None, 32768)


# Rates of matrices and of what AdamW trains, and the decay, by the rules of lab/recipe.md: 0.02, 0.02 and 0.1 for the
# lab's 26M tokens at a width of 512 in steps of 32,768.
@pytest.mark.parametrize(
    ("shape", "written", "muon", "adam", "decay"),
    [
        (Shape(8, 512), {"train.tokens": 26_000_000}, 0.02, 0.02, 0.1),
        (Shape(8, 512), {"train.tokens": 26_000_000, "train.batch_tokens": 8192}, 0.01, 0.01, 0.05),
        (Shape(8, 512), {"train.tokens": 26_000_000, "train.batch_tokens": 131_072}, 0.02, 0.02, 0.1),
        (Shape(8, 512), {"train.tokens": 1_000_000}, 0.02, 0.02, 0.1),
        (Shape(8, 512), {"train.tokens": 260_000_000}, 0.024, 0.024, 0.012),
        (Shape(8, 512), {"train.tokens": 260_000_000, "train.batch_tokens": 1_048_576}, 0.024, 0.024, 0.012),
        (Shape(16, 1024), {"train.tokens": 26_000_000}, 0.02, 0.0141, 0.1),
        (Shape(4, 256), {"train.tokens": 26_000_000}, 0.02, 0.0283, 0.1),
        (Shape(4, 128), {"train.tokens": 26_000_000}, 0.02, 0.0283, 0.1),
    ],
    ids=["lab", "smaller batch", "larger batch", "short", "long", "long in large steps", "wide", "narrow", "narrower"],
)
def test_rates_and_decay_follow_batch_length_and_width(
    shape: Shape, written: dict[str, int], muon: float, adam: float, decay: float
) -> None:
    found = derive("modern", shape, written, Known(vocab=GPT2)).size
    assert (found["optim.muon_rate"], found["optim.learning_rate"], found["optim.weight_decay"]) == (muon, adam, decay)
    others = {"embedding": 15, "head": 0.4, "table": 5}  # times the rate of the rest
    for name, times in others.items():
        assert found[f"optim.{name}_rate"] == pytest.approx(times * adam, rel=0.01), name


@pytest.mark.parametrize("group", ["embedding", "head", "table"])
def test_a_rate_of_null_is_the_learning_rate(group: str) -> None:
    """What text that is read often makes a group forget in a step, decay times rate, depends on no rate."""
    known, written = Known(vocab=257, unique=10_000_000), {"train.epochs": 10}
    usual = derive("record", Shape(4, 256), rule_inputs(written), known)
    null = derive("record", Shape(4, 256), rule_inputs({**written, f"optim.{group}_rate": None}), known)
    forgotten = usual.repeated[f"optim.{group}_decay"] * usual.size[f"optim.{group}_rate"]
    now = null.repeated[f"optim.{group}_decay"] * null.size["optim.learning_rate"]
    assert now == pytest.approx(forgotten, rel=0.01)


def test_short_runs_have_fewer_steps_where_a_batch_would_be_tiny() -> None:
    batches = {tokens: batch_of(tokens, 256) for tokens in (100_000, 250_000, 500_000, 1_000_000, 2_000_000)}
    assert list(batches.values()) == [256, 512, 1024, 1024, 2048]
    assert batch_of(500_000, 1024) == 1024, "one window"
    assert batch_of(8_000_000, 1024) == 8192


def test_data_that_is_read_more_than_twice_and_a_half_is_regularised() -> None:
    shape = Shape(8, 512)

    def repeated(epochs: float) -> bool:
        return bool(derive("record", shape, {"train.epochs": epochs}, Known(vocab=GPT2, unique=10_000_000)).repeated)

    assert not repeated(FRESH_EPOCHS)
    assert repeated(FRESH_EPOCHS + 0.1)


def test_what_is_read_often_is_forgotten_within_an_epoch_at_every_rate_and_batch() -> None:
    known = Known(vocab=GPT2, unique=10_000_000)
    for shape, words in ((Shape(4, 256), {}), (Shape(8, 512), {"train.batch_tokens": 16384, "optim.head_rate": 1e-3})):
        found = derive("modern", shape, {"train.epochs": 10, **words}, known)
        values = {**found.size, **words}
        for decay, rate in (("weight", "muon"), ("embedding", "embedding"), ("head", "head")):
            each = found.repeated[f"optim.{decay}_decay"] * values[f"optim.{rate}_rate"]
            forgotten = min(3.0, 2 * (shape.dense(GPT2) / 10_000_000) ** 0.5)
            assert each * 10_000_000 / values["train.batch_tokens"] == pytest.approx(forgotten, rel=0.01)
    rare = {"train.epochs": 1000, "optim.head_rate": 1e-3}
    small = derive("modern", Shape(24, 2048), rare, Known(vocab=GPT2, unique=10_000)).repeated
    assert small["optim.head_decay"] == 10, "no config has more"


def test_decay_of_repeated_data_goes_by_the_rate_that_a_group_has() -> None:
    known, rates = Known(vocab=GPT2, unique=10_000_000), {"optim.learning_rate": 4e-3, "optim.embedding_rate": None}
    written = rule_inputs({"train.epochs": 10, "optim.optimizer": "adamw", **rates})
    found = derive("modern", Shape(8, 512), written, known).repeated
    assert found["optim.weight_decay"] == found["optim.embedding_decay"] > found["optim.head_decay"]


def test_bigrams_of_a_small_vocabulary_forget_faster_than_the_rest() -> None:
    known = Known(vocab=1024, unique=109_000)

    def forgotten(rate: float | None) -> float:
        written = {"train.epochs": 10.0, **({} if rate is None else {"optim.table_rate": rate})}
        found = derive("record", Shape(2, 64), written, known)
        values = {**found.size, **found.repeated}
        assert values["model.bigram_rows"] == 20_480
        assert values["model.value_tables"] == 0
        return values["optim.table_decay"] * (rate or values["optim.table_rate"])

    assert forgotten(None) == pytest.approx(0.12, rel=0.01)
    assert forgotten(0.1) == pytest.approx(0.12, rel=0.01), "whatever the rate"
    large = derive("record", Shape(2, 64), {"train.epochs": 10}, Known(vocab=GPT2, unique=109_000)).repeated
    assert large["model.bigram_rows"] == 0
    assert "optim.table_decay" not in large


def test_an_embedding_that_is_the_head_moves_like_a_head() -> None:
    def settings(*words: str) -> float:
        rate = load_config("record", ["data.source=x", *words], size="60m").config.optim.embedding_rate
        assert rate is not None
        return rate

    assert settings("model.tied=false") == settings()
    assert settings() > 5 * settings("model.tied=true") > 0
    assert settings("model.tied=true", "optim.embedding_rate=0.2") == 0.2


def test_text_that_is_read_again_comes_in_another_order_and_tables_decay() -> None:
    known, shape = Known(vocab=GPT2, unique=10_000_000), Shape(8, 512)

    def settings(preset: str, epochs: float) -> tuple[object, object]:
        size = derive(preset, shape, {"train.epochs": epochs}, known).size
        return size.get("data.packing"), size.get("optim.table_decay")

    assert settings("record", 1.0) == settings("modern", 1.0) == (None, None)
    assert settings("record", 2.0) == ("reshuffle", 0.03)
    assert settings("modern", 2.0) == ("reshuffle", None)


def test_a_run_without_a_length_reads_the_data_twice_at_most() -> None:
    derived = derive("modern", Shape(8, 512), {}, Known(vocab=GPT2, unique=10_000_000))
    assert derived.size["train.tokens"] == 20_000_000
    assert derived.epochs == 2.0


def test_a_file_names_a_size(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("preset: record\nsize: 60m\n", encoding="utf-8")
    for target in (path, {"preset": "record", "size": "60m"}):
        assert load_config(target).config.model.width == 512
        assert load_config(target, size="15m").config.model.width == 256


@pytest.mark.parametrize(
    ("preset", "size", "message"),
    [
        ("gpt2-124m", "124m", "size '124m' is for the presets modern and record, not for the preset gpt2-124m"),
        ("modern", "7b", "there is no size '7b'"),
        ("modern", "auto", "there is no size 'auto'"),
        ("modern", "4x100", "there is no size '4x100'"),
        ("modern", "small", "there is no size 'small'"),
        (
            "gpt2-124m",
            "small",
            "size 'small' is for the presets 32k, 32k-hybrid and 32k-eigenstate, not for the preset",
        ),
        ("32k", "124m", "the preset 32k has no size '124m'"),
        ("32k", "", "the preset 32k has no size ''"),
        ("small-32k", "medium", "the preset small-32k has no size 'medium'"),
    ],
)
def test_other_sizes_are_refused_by_name(preset: str, size: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(preset, size=size)
    assert message in error.value.message


@pytest.mark.grid
@pytest.mark.parametrize("name", [name for name in PINNED if name and " " not in name])
@pytest.mark.parametrize("overlay", ["", "16gb", "80gb"])
def test_presets_of_32k_tokens_are_what_they_were(name: str, overlay: str) -> None:
    expected = PINNED[""] | PINNED[name] | (PINNED[f"{name} {overlay}"] if overlay else {})
    config = fitted(load_config(name, hardware=overlay or None)).config
    assert parameter_count(config.model, GPT2) == expected.pop("parameters")
    found = {
        f"{section}.{key}": value for section, values in config.model_dump().items() for key, value in values.items()
    }
    # Settings that were added or removed since are none of a size.
    assert {path: found[path] for path in expected if path in found} == {
        path: value for path, value in expected.items() if path in found
    }


@pytest.mark.parametrize("name", LONG_NAMES)
def test_a_preset_and_a_size_are_one_config_whichever_way_they_are_named(name: str, tmp_path: Path) -> None:
    preset, size = LONG_NAMES[name]
    loaded = load_config(preset, size=size)
    assert loaded == load_config(name) == load_config(name, size=size.upper())
    assert loaded == load_config({"preset": preset, "size": size}) == load_config({"preset": name})
    assert loaded.size is None, "nothing waits for the data"
    assert loaded.sources["model.width"].where == f"size {size}"
    assert loaded.sources["model.context"].where == f"preset {preset}"
    path = tmp_path / "mine.yaml"
    for text in (f"preset: {name}", f"preset: {preset}\nsize: {size}"):
        path.write_text(f"{text}\noutput:\n  name: {name}\n", encoding="utf-8")
        assert load_config(path).config == loaded.config


def test_the_smallest_is_the_default_size_of_long_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config("32k-hybrid") == load_config("small-32k-hybrid")
    assert load_config("32k", MINUTES).size is None, "minutes choose no size"
    path = tmp_path / "mine.yaml"
    path.write_text("preset: 32k\nsize: medium\n", encoding="utf-8")
    assert load_config(path, size="large").config.model.width == 1280
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small-32k").mkdir()
    assert load_config("small-32k").config.model.width == 768, "a preset's name wins over a folder's"


def test_what_is_tuned_on_a_long_preset_names_its_size(tmp_path: Path) -> None:
    loaded = load_config("medium-32k-eigenstate", MINUTES)
    settled = with_values(loaded, {"train.steps": 7}, Source("size", "5 minutes"))
    path = tmp_path / "tuned.yaml"
    path.write_text(config_text(settled, {"speed.micro_batch": 1}, ", by hand."), encoding="utf-8")
    assert "preset: 32k-eigenstate\nsize: medium\n" in path.read_text(encoding="utf-8")
    tuned = load_config(path).config
    assert (tuned.model, tuned.optim, tuned.speed.micro_batch) == (loaded.config.model, loaded.config.optim, 1)


def test_settings_of_a_long_preset_give_way_to_what_is_written() -> None:
    loaded = load_config("32k", ["speed.accumulation=8", "model.width=640"], size="large").config
    assert (loaded.speed.micro_batch, loaded.speed.accumulation) == (None, 8)
    assert (loaded.model.width, loaded.model.heads, loaded.model.layers) == (640, 10, 20)
