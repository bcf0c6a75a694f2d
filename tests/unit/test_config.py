"""Layers, sources, presets, overlays and the words of config errors."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from flatout.config import former
from flatout.config.catalogue import (
    DEFAULT_PRESET,
    ShippedKind,
    copy_preset,
    hardware_for,
    preset_names,
    preset_text,
    shipped_names,
    summary,
)
from flatout.config.facts import allowed_values, field_facts, section_paths, spot_at, value_at, with_whole_numbers
from flatout.config.load import (
    explain,
    load_config,
    load_stored,
    resolve_from_mapping,
    schema_json,
    show,
)
from flatout.config.model_section import GPT2, ModelConfig
from flatout.config.schema import CleanConfig, OptimConfig, RunConfig, at_last_stage, micro_batch_of
from flatout.config.sections import SourceConfig
from flatout.config.sizes import LONG, LONG_NAMES
from flatout.config.source import Source
from flatout.config.suggest import FIELD_ELSEWHERE_CALLED, WAY_ELSEWHERE_CALLED
from flatout.config.yaml_loader import has_control_character
from flatout.errors import ConfigError
from flatout.front.configs import on_hardware
from flatout.front.words import number_between
from flatout.model.count import estimate_memory, parameter_count
from flatout.model.execution import Execution
from flatout.resolve.sizing import fitted, fitted_to

PRESETS = shipped_names("preset")
CONFIGS = [name for name in preset_names() if name not in LONG]  # those of 32,768 tokens in each size
OVERLAYS = shipped_names("hardware")


def write(folder: Path, text: str, name: str = "my.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(target: str | Path | None = None, overrides: Sequence[str] = (), **named: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(target, overrides, **named)
    error = caught.value
    assert error.message.isprintable()
    assert error.hint.isprintable()
    assert error.hint
    return error


# The schema


def all_fields(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for name, field in model.model_fields.items():
        found.append((prefix + name, field.description or ""))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += all_fields(field.annotation, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize(
    ("target", "source", "name"),
    [
        (None, "texts/My notes.txt.gz", "My-notes"),
        (None, "books/", "books"),
        (None, "hf:allenai/c4:en", "allenai-c4-en"),
        (None, "shakespeare", "shakespeare"),
        (None, "-", "shakespeare"),
        (None, "[a.txt, b.txt]", "shakespeare"),
        ("gpt2-124m", "notes.txt", "gpt2-124m-notes"),
    ],
)
def test_a_run_on_ones_own_text_is_named_after_it(target: str | None, source: str, name: str) -> None:
    assert load_config(target, [f"data.source={source}"]).config.output.name == name
    assert load_config(target, [f"data.source={source}", "output.name=mine"]).config.output.name == "mine"


@pytest.mark.parametrize(("path", "description"), all_fields())
def test_every_field_has_one_sentence(path: str, description: str) -> None:
    assert description.endswith("."), path
    assert not re.search(r"[.!?]\s", description), path
    assert description.isprintable(), path


def test_every_leaf_says_what_it_allows() -> None:
    assert len(field_facts()) == len(all_fields()) - len(section_paths())
    for path in field_facts():
        assert "of type" not in allowed_values(spot_at(path.split(".")).described), path


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("data.source", "items are text that is not empty or {path, weight, format}, or null"),
        ("clean.languages", "whose items are a code of two or three small letters, such as en, or null"),
        ("data.format", "one of text, jsonl, json, csv, tsv, parquet, warc, smiles, tokens, or null"),
        ("data.streaming", "true or false"),
        ("data.field", "text that is not empty"),
        ("train.tokens", "a whole number at least 1 and at most 1,099,511,627,776, or null"),
    ],
)
def test_what_fields_allow_in_words(path: str, words: str) -> None:
    assert words in allowed_values(spot_at(path.split(".")).described)


def test_words_of_other_trainers_lead_to_real_fields() -> None:
    names = {path.rpartition(".")[2] for path in field_facts()}
    assert set(FIELD_ELSEWHERE_CALLED.values()) <= set(field_facts())
    assert not names & set(FIELD_ELSEWHERE_CALLED)
    for name, field in FIELD_ELSEWHERE_CALLED.items():
        assert refused(overrides=[f"{name}=1"]).hint == f"did you mean {field}? {field_facts()[field].description}"


# Layers and sources


def test_nothing_given_is_the_default_preset() -> None:
    loaded = load_config()
    assert loaded == load_config(DEFAULT_PRESET)
    assert loaded.config.output.name == DEFAULT_PRESET
    assert loaded.sources["output.name"].kind == "default"
    assert loaded.sources["model.layers"] == Source("preset", f"preset {DEFAULT_PRESET}")


def test_a_file_without_a_preset_says_whose_defaults_it_has(tmp_path: Path) -> None:
    plain = write(tmp_path, "train: {steps: 5}\n")
    (notice,) = load_config(plain).notices
    assert "names no preset" in notice
    assert "Flatout's own defaults" in notice
    assert load_config(write(tmp_path, "preset: gpt2-124m\ntrain: {steps: 5}\n")).notices == ()
    assert load_config(write(tmp_path, show(load_config().config))).notices == (), "nothing is left out"
    assert load_config().notices == ()


def test_ways_of_other_trainers_are_no_fields() -> None:
    names = {path.rpartition(".")[2] for path in field_facts()}
    assert not (names | set(FIELD_ELSEWHERE_CALLED)) & set(WAY_ELSEWHERE_CALLED)


def test_every_leaf_has_a_source() -> None:
    assert list(load_config().sources) == list(field_facts())


def test_each_layer_wins_over_those_below(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "# mine\npreset: gpt2-124m\nhardware: 8gb\n\ntrain:\n  seed: 7\noptim:\n  min_ratio: 0.5\n  clip: 2\n",
    )
    loaded = fitted(load_config(path, ["optim.clip=3"]))
    expected = {
        "optim.betas": ([0.9, 0.95], "preset", "preset gpt2-124m"),
        "speed.micro_batch": (8, "hardware", "hardware 8gb"),
        "train.seed": (7, "file", f"{path}:6"),
        "optim.min_ratio": (0.5, "file", f"{path}:8"),
        "optim.clip": (3.0, "override", "command line"),
        "model.norm": ("layernorm", "family", "family gpt2"),
        "eval.patience": (0, "default", "default"),
        "output.name": ("my", "default", "name of the config"),
    }
    for field, (value, kind, where) in expected.items():
        assert value_at(loaded.config, field) == value, field
        assert (loaded.sources[field].kind, loaded.sources[field].where) == (kind, where), field


def test_a_file_wins_over_hardware_and_the_argument_over_the_files_hardware(tmp_path: Path) -> None:
    path = write(tmp_path, "preset: gpt2-124m\nhardware: 4gb\nspeed: {micro_batch: 2}\n")
    loaded = load_config(path, hardware="8gb")
    assert loaded.hardware == "8gb"
    loaded = fitted(loaded)
    assert (loaded.config.speed.micro_batch, loaded.sources["speed.micro_batch"].kind) == (2, "file")
    assert loaded.hardware is None


def test_an_overlay_goes_by_the_model_at_hand() -> None:
    small = load_config("shakespeare-char")
    assert fitted_to(small, "16gb").config == small.config, "a small model is not cut to what a large one needs"
    sizes = {
        width: micro_batch_of(fitted_to(load_config("gpt2-124m", [f"model.width={width}"]), "16gb").config)[0]
        for width in (384, 768, 1536)
    }
    assert sizes[384] > sizes[768] > sizes[1536]
    long = fitted_to(load_config("small-32k"), "8gb").config
    assert (long.model.context, long.speed.micro_batch, long.speed.checkpointing) == (32768, 1, "full")
    tuned = load_config("tinyllama-lora")
    assert fitted_to(tuned, "8gb").config == tuned.config
    assert "hardware 8gb changes nothing in fine-tuning" in fitted_to(tuned, "8gb").notices[-1], (
        "a flag is never silent"
    )


def test_an_overlay_is_for_a_resumed_run_too() -> None:
    begun = load_config("gpt2-124m")
    stored = load_stored(begun.config.model_dump())
    moved = on_hardware(stored, "8gb").config
    assert moved == fitted_to(begun, "8gb").config != begun.config
    kept = load_stored(begun.config.model_dump(), ["speed.micro_batch=32"])
    assert on_hardware(kept, "8gb").config.speed.micro_batch == 32, "what was written stays"
    with pytest.raises(ConfigError, match="no hardware overlay 9gb"):
        on_hardware(stored, "9gb")


def test_a_file_without_a_preset_stands_on_the_schema(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, "train: {steps: 5}\n"))
    assert loaded.config.model.layers == RunConfig.model_validate({"train": {"steps": 5}}).model.layers
    assert {source.kind for source in loaded.sources.values()} == {"default", "family", "file"}


def test_an_empty_file_only_lacks_a_length(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    assert "give exactly one of steps, epochs, tokens" in refused(path).message
    assert load_config(path, ["train.steps=5"]).config.train.steps == 5


def test_an_empty_section_is_no_values(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "model:\n  # width: 5\ntrain: {steps: 5}\n")).config.train.steps == 5


@pytest.mark.parametrize("as_text", [True, False])
def test_targets_that_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_text: bool) -> None:
    write(tmp_path, "train: {steps: 5}", "short.yml")
    write(tmp_path, "train: {steps: 6}", "no-ending")
    monkeypatch.chdir(tmp_path)
    for name, steps in (("short.yml", 5), ("./no-ending", 6), ("no-ending", 6)):
        assert load_config(name if as_text else Path(name)).config.train.steps == steps


def test_a_presets_name_wins_over_a_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "train: {steps: 5}", "gpt2-124m")
    monkeypatch.chdir(tmp_path)
    assert load_config("gpt2-124m").config.train.steps is None
    assert load_config("./gpt2-124m").config.train.steps == 5


def test_a_run_that_trains_all_weights_is_not_called_after_lora() -> None:
    names = {preset: load_config(preset, ["lora.rank=0"]).config.output.name for preset in ("lora", "tinyllama-lora")}
    assert names == {"lora": "finetune", "tinyllama-lora": "tinyllama-finetune"}
    assert load_config("lora").config.output.name == "lora"


@pytest.mark.parametrize(
    ("file", "name"),
    [("my run (2).yaml", "my-run-2-"), ("_x.yaml", "x"), ("é.yaml", "run"), ("a" * 150 + ".yaml", "a" * 100)],
)
def test_run_names_come_from_files(tmp_path: Path, file: str, name: str) -> None:
    path = write(tmp_path, "train: {steps: 5}", file)
    assert load_config(path).config.output.name == name
    assert load_config(path, ["lora.rank=0"]).config.output.name == name
    assert load_config(path, ["output.name=other"]).config.output.name == "other"


# One choice among several fields


@pytest.mark.parametrize("given_field", ["steps=7", "epochs=7", "tokens=7"])
@pytest.mark.parametrize("preset", ["shakespeare-char", "gpt2-124m"])
def test_a_length_in_a_higher_layer_replaces_any_below(preset: str, given_field: str) -> None:
    loaded = load_config(preset, [f"train.{given_field}"])
    train = loaded.config.train.model_dump(include={"steps", "epochs", "tokens"}, exclude_none=True)
    assert train == {given_field.partition("=")[0]: 7}


def test_a_replaced_length_says_who_replaced_it(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, f"preset: {DEFAULT_PRESET}\ntrain:\n  tokens: 1e6\n"))
    assert loaded.config.train.tokens == 1_000_000
    assert loaded.sources["train.steps"] == Source("file", f"{tmp_path / 'my.yaml'}:3 (train.tokens)")


def test_two_lengths_in_one_layer_are_refused(tmp_path: Path) -> None:
    assert "steps and tokens" in refused(overrides=["train.steps=5", "train.tokens=5"]).message
    error = refused(write(tmp_path, "train: {steps: 5, epochs: 1}"))
    assert "steps and epochs" in error.message
    assert "my.yaml:1" in error.message


def test_null_alone_replaces_nothing() -> None:
    assert load_config(overrides=["train.tokens=null"]).config.train.steps is not None
    assert "not none" in refused(overrides=["train.steps=null"]).message


def test_accumulation_and_micro_batch_replace_each_other() -> None:
    speed = load_config("gpt2-124m", ["speed.accumulation=16"]).config.speed
    assert (speed.accumulation, speed.micro_batch) == (16, None)
    both = load_config("gpt2-124m", ["speed.accumulation=16", "speed.micro_batch=32"]).config.speed
    assert (both.accumulation, both.micro_batch) == (16, 32)


# Overrides


def test_overrides_are_yaml_scalars() -> None:
    config = load_config(
        overrides=[
            "optim.learning_rate=1e-4",
            "train.tokens=1e9",
            "data.source=null",
            "model.bias=true",
            "speed.compile=off",
            "speed.fused_optimizer=true",
            "eval.sample_prompt=ROMEO: what #light",
            'output.name="12"',
            " eval.every = 1_000 ",
        ]
    ).config
    assert (config.optim.learning_rate, config.train.tokens, config.data.source) == (1e-4, 10**9, None)
    assert (config.model.bias, config.speed.compile, config.speed.fused_optimizer) == (True, "off", "on")
    assert (config.eval.sample_prompt, config.output.name, config.eval.every) == ("ROMEO: what #light", "12", 1000)
    assert type(config.train.tokens) is int


def test_the_last_of_two_equal_overrides_wins() -> None:
    assert load_config(overrides=["train.seed=1", "train.seed=2"]).config.train.seed == 2


def test_overrides_may_be_lists_where_the_field_takes_them() -> None:
    def source(text: str) -> object:
        loaded = load_config(overrides=[f"data.source={text}"])
        return next(row.value for row in explain(loaded) if row.path == "data.source")

    assert source("[a.txt,b.txt]") == ["a.txt", "b.txt"]
    assert source(" [ -, hf:owner/name, C:\\text, 'a, b', \"12\" ] ") == [
        "-",
        "hf:owner/name",
        "C:\\text",
        "a, b",
        "12",
    ]
    assert source("[{path: a, weight: 2.0}, b]") == [{"path": "a", "weight": 2.0, "format": None}, "b"]
    assert source("[{path: a, format: csv}]") == [{"path": "a", "weight": 1.0, "format": "csv"}]
    assert source("a.txt,b.txt") == "a.txt,b.txt"
    assert source('"[a]"') == "[a]"
    assert load_config(overrides=["clean.languages=[en, no]"]).config.clean.languages == ["en", "no"]


def test_numbers_inside_lists_are_those_the_item_wants() -> None:
    class Item(BaseModel):
        count: int | None = None
        share: float = 0.0

    annotation = str | list[int | Item] | None
    value = [1e3, 0.5, {"count": 1e6, "share": 2, "other": 1.0}, "1.0"]
    result = with_whole_numbers(annotation, value)
    assert result == [1000, 0.5, {"count": 10**6, "share": 2, "other": 1.0}, "1.0"]
    assert [type(item) for item in result[:2]] == [int, float]
    assert type(result[2]["count"]) is int
    assert type(result[2]["other"]) is float
    weight = load_config(overrides=["data.source=[{path: a, weight: 2}]"]).config.data.source[0].weight  # type: ignore[index]
    assert type(weight) is float


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        (
            "[a, {path: b, weight: -1}]",
            "data.source[1].weight is -1, but it must be above 0",
            "Allowed: a number above 0",
        ),
        ("[a, {path: b, weight: x}]", "data.source[1].weight is 'x', but it must be a number", "How often each"),
        ("[a, {path: b, weight: '2'}]", "data.source[1].weight is '2', but it must be a number", "Remove the quotes"),
        (
            "[{path: b, wieght: 1}]",
            "data.source[0].wieght is not a known key",
            "the keys of an item are path",
        ),
        ("[{pth: b}]", "data.source[0].pth is not a known key", "keys of an item"),
        ("[{path: b, text_column: c}]", "data.source[0].text_column is not", "the keys of an item are path"),
        (
            "[{path: b, document_start: c}]",
            "data.source[0].document_start is not",
            "the keys of an item are path",
        ),
        (
            "[{path: b, proportion: 1}]",
            "data.source[0].proportion is not",
            "the keys of an item are path",
        ),
        ("[a.txt: 2]", "data.source[0].a.txt is not a known key", "the keys of an item are path"),
        ("[{weight: 2}]", "data.source[0].path is missing", "Allowed: text that is not empty."),
        ("[{path: b, format: jsnl}]", "data.source[0].format is 'jsnl', but it must be one of text", "mean jsonl?"),
        ("[a, 5, {path: b, weight: -1}]", "data.source[1] is 5, but it must be text or a mapping", "double quotes"),
        ("[null]", "data.source[0] is null, but it must be text or a mapping", "Allowed: text, or a list"),
        ("[[a]]", "data.source[0] is ['a'], but it must be text or a mapping", "{path, weight, format"),
        ("{path: a}", "data.source is {'path': 'a'}, but it must be text or a list", "brackets around it"),
        ("[a", "data.source: not valid YAML: expected ',' or ']'", "quotes, brackets"),
        ("[a] # b", "data.source: '[a] # b' goes on after its end", "its own ]"),
        ("[{path: a, path: b}]", "data.source: the key 'path' is written twice", "keep one"),
    ],
)
def test_refused_lists(override: str, message: str, hint: str) -> None:
    error = refused(overrides=[f"data.source={override}"])
    assert error.message.startswith(f"command line: {message}")
    assert hint in error.hint


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("", "'' is not of the form section.field=value", "train.steps=100"),
        ("=5", "'=5' is not of the form", "train.steps=100"),
        ("train.step", "'train.step' is not of the form", "train.steps=100"),
        ("model.widht=5", "model.widht is not a known key", "did you mean model.width?"),
        ("modle.width=5", "modle.width is not a known key", "did you mean model.width?"),
        ("width=5", "width is not a known key", "did you mean model.width?"),
        ("optim.learning-rate=5", "optim.learning-rate is not a known key", "did you mean optim.learning_rate?"),
        ("n_layer=5", "n_layer is not a known key", "did you mean model.layers?"),
        ("data.text_column=a", "data.text_column is not a known key", "did you mean data.field?"),
        ("sample_packing=true", "sample_packing is not a known key", "did you mean data.packing?"),
        ("clean.languages=en", "clean.languages is 'en', but it must be a list", "Put brackets around it"),
        ("clean.languages=[en, EN]", "clean.languages[1] is 'EN', but it must be a code of two", "such as [en, de]"),
        ("data.field=''", "data.field is '', but it must not be empty", "Allowed: text that is not empty"),
        ("data.folder=''", "data.folder is '', but it must not be empty", "null means data/SOURCE-TOKENIZER"),
        ("output.folder=''", "output.folder is '', but it must not be empty", "null means runs/NAME"),
        ("data.tokenizer=[a]", "data.tokenizer: '[a]' is not a single value", "quotes"),
        ("data.format=jsnl", "data.format is 'jsnl', but it must be one of text, jsonl", "Did you mean jsonl?"),
        ("remove_unused_columns=false", "remove_unused_columns is not a known key", ""),
        ("chat.group_by_length=false", "chat.group_by_length is not a known key", ""),
        ("model.qqqqqq=5", "model.qqqqqq is not a known key", "the keys of model are family, layers"),
        ("model=5", "model is a section, not a value", "family, layers, width"),
        ("preset=5", "preset cannot be set by an override", "gpt2-124m"),
        ("model.layers=", "model.layers: no value after =", "null"),
        ("model.layers=[1]", "model.layers: '[1]' is not a single value", "quotes"),
        ("model.layers=six", "model.layers is 'six', but it must be a whole number", "blocks. Allowed: a whole number"),
        ("model.layers='6'", "model.layers is '6', but", "Remove the quotes"),
        ("model.layers=1.5", "model.layers is 1.5, but it must be a whole number", "at most 1000"),
        ("model.layers=0", "model.layers is 0, but it must be at least 1", "at least 1 and at most 1000."),
        ("model.layers=1e99", "but it must be at most 1000", "at most 1000."),
        ("model.dropout=1", "model.dropout is 1, but it must be below 1", "at least 0 and below 1."),
        ("optim.clip=.nan", "optim.clip is nan, but it must be a finite number", "gradient norm"),
        ("optim.clip=.inf", "optim.clip is inf, but it must be a finite number", "gradient norm"),
        ("model.bias=yes", "model.bias is 'yes', but it must be true or false", "Allowed: true or false."),
        ("model.bias=null", "model.bias is null, but it must be true or false", "Allowed: true or false."),
        ("model.norm=rmsnrom", "it must be one of rmsnorm, layernorm, plain-rmsnorm", "Did you mean rmsnorm?"),
        ("output.name=12", "output.name is 12, but it must be text", "double quotes"),
        ("output.name=a b", "output.name is 'a b', but it must be up to 100 letters, digits", "Name of the run"),
        ("train.tokens=1.5", "train.tokens is 1.5, but it must be a whole number", "or null."),
        (f"train.seed={'9' * 6000}", "it must be a whole number", "Seed"),
    ],
)
def test_refused_overrides(override: str, message: str, hint: str) -> None:
    error = refused(overrides=[override])
    assert error.message.startswith("command line: ")
    assert message in error.message
    assert hint in error.hint


# Errors of files


@pytest.mark.parametrize(
    ("text", "line", "message", "hint"),
    [
        ("train:\n  steps: 5\n  stepz: 6\n", 3, "train.stepz is not a known key", "did you mean train.steps?"),
        ("trian:\n  steps: 5\n", 1, "trian is not a known key", "did you mean train?"),
        ("train:\n  steps: 5\nhardwear: 8gb\n", 3, "hardwear is not a known key", "did you mean hardware?"),
        ("learning_rate: 1\n", 1, "learning_rate is not a known key", "did you mean optim.learning_rate?"),
        ("zzz: 1\n", 1, "zzz is not a known key", "parallel, preset, hardware"),
        ("model:\n  preset: 5\n", 2, "model.preset is not a known key", ""),
        ("\ntrain.steps: 5\n", 2, "train.steps is written with a dot", "write `train:` and indent `steps:`"),
        ("train: 5\n", 1, "train is 5, but it is a section", "write `train:` alone"),
        ("train: [steps]\n", 1, "train is ['steps'], but it is a section", "write `train:` alone"),
        (
            "train:\n  steps:\n    a: 1\n",
            2,
            "train.steps is {'a': 1}, but it must be a whole number",
            "optimizer steps",
        ),
        ("train:\n  steps: 0\n", 2, "train.steps is 0, but it must be at least 1", "optimizer steps"),
        ("preset: gpt2-142m\n", 1, "there is no preset gpt2-142m", "did you mean gpt2-124m"),
        ("preset: 5\n", 1, "preset is 5, but it must be a name", "gpt2-124m"),
        ("hardware: 9gb\n", 1, "there is no hardware overlay 9gb", "the overlays are 4gb, 8gb"),
        ("hardware: auto\n", 1, "there is no hardware overlay auto", "80gb; auto is taken on the command line only"),
        ("data:\n  source: 5\n", 2, "data.source is 5, but it must be text", "double quotes"),
        ("model: {layers: 1}\nmodel: {}\n", 2, "'model' is written twice", "one"),
        (
            "data:\n  source:\n    - a\n    - path: b\n      weight: 0\n",
            5,
            "data.source[1].weight is 0, but it must be above 0",
            "How often",
        ),
        ("data:\n  source:\n    - a\n    - [b]\n", 4, "data.source[1] is ['b'], but it must be text", "Allowed"),
        (
            "data:\n  source:\n    - {pth: a}\n",
            3,
            "data.source[0].pth is not a known key",
            "the keys of an item are path",
        ),
        ("data:\n  source:\n    - weight: 1\n", 3, "data.source[0].path is missing", "Allowed: text that is"),
        ("clean:\n  languages:\n  - en\n  - 5\n", 4, "clean.languages[1] is 5, but it must be text", "quotes"),
    ],
)
def test_refused_files(tmp_path: Path, text: str, line: int, message: str, hint: str) -> None:
    path = write(tmp_path, text)
    error = refused(path)
    assert error.message.startswith(f"{path}:{line}: ")
    assert message in error.message
    assert hint in error.hint


def test_a_conflict_names_both_sides(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {steps: 5}\nmodel:\n  width: 100\n")
    error = refused(path, ["model.heads=7"])
    assert error.message == (
        f"model: width 100 is not a multiple of heads 7 (model.width from {path}:3, model.heads from command line)"
    )
    assert error.hint == "set model.width=98, or model.heads to a divisor of 100"


def test_a_conflict_with_a_preset_names_it() -> None:
    error = refused("gpt2-124m", ["model.norm=rmsnorm"])
    assert "family gpt2 fixes norm to layernorm" in error.message
    assert "model.family from preset gpt2-124m" in error.message


def test_a_mistake_in_the_file_is_forgiven_where_a_higher_layer_replaces_it(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {steps: 0}")
    refused(path)
    assert load_config(path, ["train.steps=5"]).config.train.steps == 5


def test_unknown_targets() -> None:
    error = refused("gpt2-142m")
    assert "there is no preset gpt2-142m" in error.message
    assert "did you mean gpt2-124m" in error.hint
    assert "`flatout config presets`" in error.hint
    assert "`flatout config presets`" in refused("").hint
    assert "no such file" in refused("nowhere/x.yaml").message
    assert "did you mean 24gb" in refused(hardware="25gb").hint
    refused("a\x1b[31m")
    refused("a\0b")
    refused("x" * 5000)


def test_preset_names_cannot_leave_their_folder(tmp_path: Path) -> None:
    refused(write(tmp_path, "preset: hardware/8gb\n"))
    refused(write(tmp_path, "preset: ../presets/gpt2-124m\n"))
    with pytest.raises(ConfigError):
        preset_text("../schema")


# Stored configs, showing and explaining


@pytest.mark.parametrize("preset", PRESETS)
def test_shown_configs_load_back(tmp_path: Path, preset: str) -> None:
    config = load_config(preset).config
    loaded = load_config(write(tmp_path, show(config)))
    assert loaded.config == config
    assert {source.kind for source in loaded.sources.values()} == {"file"}
    assert resolve_from_mapping(config.model_dump()) == config


@settings(deadline=None)
@given(st.text(), st.text(), st.floats(1e-300, 100.0))
@example("true", "1e3", 1e-8)
@example("\u2028", "a\n\tb\ud7ff😀\ufeff", 3.0)
def test_any_valid_values_survive_showing(
    tmp_path_factory: pytest.TempPathFactory, a: str, b: str, rate: float
) -> None:
    values = load_config().config.model_dump()
    values["eval"]["sample_prompt"], values["data"]["source"], values["optim"]["learning_rate"] = a, b, rate
    if has_control_character(a) or has_control_character(b):
        with pytest.raises(ConfigError, match="control characters"):
            resolve_from_mapping(values)
        return
    config = resolve_from_mapping(values)
    path = write(tmp_path_factory.mktemp("shown"), show(config))
    assert load_config(path).config == config


mixtures = st.lists(
    st.text(min_size=1)
    | st.fixed_dictionaries(
        {"path": st.text(min_size=1)},
        optional={
            "weight": st.floats(1e-9, 1000.0) | st.integers(1, 1000),
            "format": st.none() | st.just("csv"),
        },
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(mixtures, st.none() | st.lists(st.sampled_from(["en", "de", "no"]), min_size=1, max_size=3))
@example(["true", "a: b", {"path": "- [x]", "weight": 2}], ["no"])
def test_lists_survive_showing_and_storing(
    tmp_path_factory: pytest.TempPathFactory, source: list[Any], languages: list[str] | None
) -> None:
    values = load_config().config.model_dump()
    values["data"]["source"], values["clean"]["languages"] = source, languages
    texts = [text for item in source for text in ([item] if isinstance(item, str) else item.values())]
    if any(isinstance(text, str) and has_control_character(text) for text in texts):
        with pytest.raises(ConfigError, match=r"data\.source\[\d\].* control characters"):
            resolve_from_mapping(values)
        return
    config = resolve_from_mapping(values)
    assert load_config(write(tmp_path_factory.mktemp("shown"), show(config))).config == config
    assert resolve_from_mapping(config.model_dump()) == config
    assert load_stored(config.model_dump()).config == config
    line = next(line for line in show(config).splitlines() if line.startswith("  source: "))
    assert (
        load_config(overrides=["data." + line.strip().replace(": ", "=", 1)]).config.data.source == config.data.source
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "not a mapping"),
        ({}, "train is missing"),
        ({"train": {"steps": 5, "stepz": 5}}, "train.stepz is not a known key"),
        ({"train": {"steps": 5}, "adapters": {}}, "adapters is not a known key"),
        ({"train": {"steps": 5}, 1: {}}, "1 is not a known key"),
        ({"train": {"steps": 5, 2: 3}}, "train.2 is not a known key"),
        ({"train": 5}, "train is 5, but it must be a section"),
        ({"train": {"steps": "5"}}, "train.steps is '5', but it must be a whole number"),
        ({"train": {"steps": 10**5000}}, "train.steps is a number of more than 100 digits"),
        ({"train": {"steps": 5}, "data": {"source": "a\0b"}}, "may not hold control characters"),
        ({"train": {"steps": 5}, "data": {"source": ["a", {3: 4}]}}, "data.source[1].3 is not a known key"),
        ({"train": {"steps": 5}, "data": {"source": [{"path": "a\0b"}]}}, "data.source[0].path is 'a\\x00b', but"),
    ],
)
def test_stored_configs_that_are_damaged(values: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_from_mapping(values)
    assert caught.value.message.startswith("stored config: ")
    assert words in caught.value.message
    assert caught.value.hint


def test_explain_has_a_row_for_every_field() -> None:
    rows = explain(load_config(overrides=["train.seed=5"]))
    assert [row.path for row in rows] == list(field_facts())
    row = next(row for row in rows if row.path == "train.seed")
    assert (row.value, row.source, row.description) == (5, "command line", field_facts()["train.seed"].description)


def test_explain_lists_the_words_of_a_choice() -> None:
    said = {row.path: row.description for row in explain(load_config())}
    assert said["speed.precision"].endswith(" One of auto, fp32, tf32, bf16, fp16.")
    assert said["speed.fp8"].endswith(" Any of qkv, out, up, down, head.")
    assert said["train.steps"] == field_facts()["train.steps"].description


def test_no_pattern_is_shown_to_a_user() -> None:
    for path in field_facts():
        assert "^" not in allowed_values(spot_at(path.split(".")).described), path
    assert refused(overrides=["speed.device=tpu"]).message.endswith("it must be auto, cpu, mps, cuda or cuda:N")


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (["train.batch_tokens=100", "model.context=32"], "set train.batch_tokens=96, or model.context to a divisor of"),
        (["model.context=16", "train.batch_tokens=192", "speed.accumulation=7"], "to a divisor of 12;"),
        (
            ["model.context=16", "train.batch_tokens=192", "speed.accumulation=3", "speed.micro_batch=3"],
            "micro_batch=4",
        ),
        (["model.context=32", "train.batch_stages=[64, 100]"], "set it to 96"),
        (["model.context=32", "train.length_stages=[7, 32]"], "set it to 8, or to another divisor of 32"),
        (["model.heads=7", "model.width=105"], "set model.width=112, or model.positions=learned"),
        (["model.head_size=15"], "set model.head_size=16, or model.positions=learned"),
        (["model.rope_scaling=llama3", "model.rope_low=4.0"], "model.rope_low lower or model.rope_high higher"),
        (["model.rope_scaling=linear", "model.positions=learned"], "or leave model.rope_scaling out"),
        (["model.family=gpt2", "model.head_size=16"], "leave model.head_size out, or set model.family=gpt"),
        (["model.family=gpt2", "model.norm_eps=1e-6"], "leave model.norm_eps out, or set model.family=gpt"),
        (
            ["train.minutes=1", "optim.schedule=wsd", "train.batch_stages=[4096, 8192]"],
            "in train.steps or train.tokens, or leave the stages out",
        ),
        (["train.steps=1", "train.epochs=1"], "keep one of train.steps, train.epochs, train.tokens and train.minutes"),
    ],
)
def test_the_hint_of_a_conflict_says_what_would_do(overrides: list[str], hint: str) -> None:
    assert hint in refused(overrides=overrides).hint


def test_a_head_size_makes_the_width_free() -> None:
    model = load_config(overrides=["model.width=100", "model.heads=7", "model.head_size=12"]).config.model
    assert (model.size, model.queries) == (12, 84)
    plain = load_config(overrides=["model.width=96", "model.heads=4", "model.bias=true"]).config.model
    assert (plain.size, plain.queries, plain.has_qkv_bias) == (24, 96, True)
    assert not load_config(overrides=["model.bias=true", "model.qkv_bias=false"]).config.model.has_qkv_bias


def test_limits_of_options_are_written_out() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="from 1 to 1,099,511,627,776"):
        number_between(int, 1, 2**40)("0")
    with pytest.raises(argparse.ArgumentTypeError, match=r"from 0\.1 to 10,000"):
        number_between(float, 0.1, 10_000)("0")


def test_schema_describes_files() -> None:
    schema = schema_json()
    assert schema["properties"]["preset"]["enum"] == preset_names()
    assert schema["properties"]["hardware"]["enum"] == OVERLAYS
    assert set(section_paths()) <= set(schema["properties"])
    assert "required" not in schema
    text = json.dumps(schema)
    for name in re.findall(r'"\$ref": "([^"]*)"', text):
        assert name.removeprefix("#/$defs/") in schema["$defs"], name


def test_schema_is_a_json_schema_and_agrees_with_the_loader() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema_json())
    check = jsonschema.Draft202012Validator(schema_json()).is_valid
    assert check(load_config(overrides=["data.source=[{path: a, weight: 2}, b]"]).config.model_dump())
    assert check({"preset": "gpt2-124m", "clean": {"languages": ["en"]}, "data": {"source": ["a", {"path": "b"}]}})
    assert not check({"data": {"source": [{"path": "b", "weight": -1}]}})
    assert not check({"data": {"source": [{"weight": 1}]}})


# Presets and overlays


def test_cleaning_is_switched_off_by_one_word() -> None:
    assert load_config("common-crawl").config.clean != CleanConfig()
    assert load_config("common-crawl", ["clean=off"]).config.clean == CleanConfig()
    later = load_config("common-crawl", ["clean=off", "clean.drop=[short]"]).config.clean
    assert later == CleanConfig(drop=["short"])
    with pytest.raises(ConfigError, match="clean is a section") as error:
        load_config("common-crawl", ["clean=on"])
    assert "clean=off" in (error.value.hint or "")


def test_the_shipped_names() -> None:
    assert PRESETS == [
        "32k",
        "32k-eigenstate",
        "32k-hybrid",
        "common-crawl",
        "gpt-124m",
        "gpt2-124m",
        "gpt2-350m",
        "lora",
        "modern",
        "record",
        "shakespeare",
        "shakespeare-bpe",
        "shakespeare-char",
        "shakespeare-eigenstate",
        "tinyllama-lora",
    ]
    assert OVERLAYS == ["4gb", "8gb", "12gb", "16gb", "24gb", "48gb", "80gb"]


@pytest.mark.parametrize(
    ("kind", "name"), [*(("preset", name) for name in PRESETS), *(("hardware", name) for name in OVERLAYS)]
)
def test_summaries_are_one_sentence(kind: ShippedKind, name: str) -> None:
    sentence = summary(kind, name)
    assert sentence.endswith(".")
    assert len(sentence) > 20
    assert not re.search(r"[.!?]\s", sentence)


def test_every_rate_is_lowered_with_the_others() -> None:
    """By `optim.rates`: what a diverged run, an alert and the range test go by."""
    named = [name for name in OptimConfig.model_fields if name.endswith("_rate")]
    optim = OptimConfig(optimizer="muon", **dict.fromkeys(named, 0.5))
    assert optim.rates == dict.fromkeys(named, 0.5)
    assert optim.scaled_rates(0.1) == {f"optim.{name}": pytest.approx(0.05) for name in named}
    assert next(iter(optim.rates)) == "muon_rate"
    assert "muon_rate" not in OptimConfig(**dict.fromkeys(named, 0.5)).rates


def test_a_run_without_its_stages_reads_as_many_tokens_in_steps_like_the_last_ones() -> None:
    stages = [f"train.{name}_stages={value}" for name, value in STAGES.items()]
    words = ["model.pattern=AW", "model.context=1024", "train.tokens=null", *stages]
    config = load_config("shakespeare-char", [*words, "train.epochs=null", "train.steps=300"]).config
    plain = at_last_stage(config)
    assert not plain.train.staged
    assert (plain.train.batch_tokens, plain.train.steps) == (16384, 200), "200 steps of 8,192 and 100 of 16,384"
    assert micro_batch_of(plain)[0] == micro_batch_of(config)[0] == 8
    assert at_last_stage(plain) == plain


STAGES = {"batch": "[8192, 16384]", "length": "[512, 1024]", "window": "[128, 256]"}


def test_rate_and_warm_up_where_nobody_says_otherwise() -> None:
    optim = load_config({"train": {"steps": 1}}).config.optim
    assert (optim.learning_rate, optim.warmup) == (1e-3, 100)


@pytest.mark.parametrize("preset", CONFIGS)
def test_presets_load(preset: str) -> None:
    loaded = load_config(preset)
    assert preset_text(preset).startswith("# summary: ")
    # copy_preset adds an output section of its own.
    assert "output:" not in preset_text(preset)
    assert loaded.config.output.name == preset


@pytest.mark.parametrize("preset", LONG_NAMES)
def test_long_presets_have_the_parameters_that_they_state(preset: str) -> None:
    config, text = load_config(preset).config, preset_text(preset)
    count = parameter_count(config.model, 50257)
    assert f"{count:,}" in text
    assert f"{LONG_NAMES[preset][1]} ({round(count / 1e6)}M" in text.partition("\n")[0]
    kinds = {"hybrid": {"E", "A"}, "eigenstate": {"E"}}.get(preset.rpartition("-")[2], {"A"})
    assert set(config.model.kinds) == kinds
    assert config.model.context == 32768
    how = Execution(kernels="triton", scan="triton", residual="bf16", loss="fused", pad_vocab=64)
    size = {"micro_batch": micro_batch_of(config)[0], "half": True, "compiled": False, "execution": how}
    assert estimate_memory(config.model, 50257, **size).total < 0.75 * 80e9


@pytest.mark.grid
@pytest.mark.parametrize("preset", CONFIGS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_only_make_a_run_fit(preset: str, overlay: str) -> None:
    plain, with_overlay = load_config(preset), fitted(load_config(preset, hardware=overlay))
    assert with_overlay == fitted_to(plain, overlay)
    assert micro_batch_of(with_overlay.config)[0] <= micro_batch_of(plain.config)[0]
    size, count = micro_batch_of(with_overlay.config)
    chat = plain.config.chat
    if chat.source is not None:
        assert size * count == chat.batch_samples
    else:
        assert size * count * plain.config.model.context == plain.config.train.batch_tokens
    changed = {path for path in field_facts() if value_at(plain.config, path) != value_at(with_overlay.config, path)}
    assert changed <= {"speed.micro_batch", "speed.accumulation", "speed.checkpointing"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_gpt2_124m_fits_each_overlay_with_margin(overlay: str) -> None:
    config = fitted_to(load_config("gpt2-124m"), overlay).config
    size = micro_batch_of(config)[0]
    how = Execution(
        kernels="triton", residual="bf16", loss="fused", pad_vocab=64, checkpointing=config.speed.checkpointing
    )

    def need(size: int) -> int:
        form = {"half": True, "compiled": False, "execution": how, "graphs": True}
        return estimate_memory(config.model, 50257, micro_batch=size, **form).total

    have = int(overlay.removesuffix("gb")) * 1e9
    assert need(size) < 0.9 * have
    assert size == micro_batch_of(load_config("gpt2-124m").config)[0] or need(2 * size) > 0.8 * have, (
        "nothing is given away"
    )


@pytest.mark.parametrize(
    ("gibibytes", "overlay"),
    [
        *[(0, "4gb"), (2, "4gb"), (3.8, "4gb"), (6, "4gb"), (7.6, "8gb"), (10, "8gb"), (11.7, "12gb"), (14.6, "16gb")],
        *[
            (20, "16gb"),
            (22.1, "24gb"),
            (31.4, "24gb"),
            (39.4, "24gb"),
            (44.4, "48gb"),
            (79.1, "80gb"),
            (139.8, "80gb"),
        ],
    ],
)
def test_overlay_for_a_card(gibibytes: float, overlay: str) -> None:
    assert hardware_for(int(gibibytes * 2**30)) == overlay


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("name", ["mine.yaml", ""])
def test_copied_presets_load_to_the_same_config(tmp_path: Path, preset: str, name: str) -> None:
    path = copy_preset(preset, tmp_path / name)
    assert path == tmp_path / (name or f"{preset}.yaml")
    assert path.read_text(encoding="utf-8").startswith(preset_text(preset))
    copied, shipped = load_config(path).config, load_config(preset).config
    assert copied.output.name == path.stem, "runs of the copy are not the preset's"
    assert copied.model_copy(update={"output": shipped.output}) == shipped


def test_copying_never_overwrites(tmp_path: Path) -> None:
    path = write(tmp_path, "mine")
    with pytest.raises(ConfigError, match="already exists"):
        copy_preset(DEFAULT_PRESET, path)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot be written"):
        copy_preset(DEFAULT_PRESET, tmp_path / "none" / "x.yaml")
    with pytest.raises(ConfigError, match="there is no preset nope"):
        copy_preset("nope", tmp_path / "new.yaml")
    assert not (tmp_path / "new.yaml").exists()


def test_config_needs_no_torch() -> None:
    code = "import sys, flatout.config.load; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_another_family_brings_its_own_architecture():
    loaded = load_config("shakespeare-char", ["model.family=gpt2"])
    assert (loaded.config.model.norm, loaded.config.model.mlp) == ("layernorm", "gelu")
    assert loaded.sources["model.mlp"].kind == "family"
    with pytest.raises(ConfigError, match="fixes mlp to gelu"):
        load_config("shakespeare-char", ["model.family=gpt2", "model.mlp=relu2"])


def test_a_family_differs_from_the_other_in_the_fields_that_it_decides_alone():
    gpt, gpt2 = ModelConfig(), ModelConfig(family="gpt2")
    differing = {name for name in ModelConfig.model_fields if getattr(gpt, name) != getattr(gpt2, name)}
    assert differing == {"family", "norm", "positions", "mlp", "bias", "qk_norm"}
    assert {name: getattr(gpt2, name) for name in GPT2} == GPT2


# --- settings of earlier versions -------------------------------------------------------------------------------------


def test_what_is_no_setting_any_more_is_refused_with_the_way_of_today(tmp_path: Path):
    assert not [path for path in former.FORMER if path in field_facts()], "a setting and none at once"
    config = tmp_path / "old.yaml"
    for path, one in former.FORMER.items():
        section, _, name = path.partition(".")
        config.write_text(f"{section}:\n  {name}: 12345.5\n", encoding="utf-8")
        for words in ((config,), ("shakespeare", [f"{path}=12345.5"])):
            with pytest.raises(ConfigError, match=f"{path} is no setting any more") as caught:
                load_config(*words)
            assert caught.value.hint == one.way


@pytest.mark.parametrize(
    ("section", "former_values", "values"),
    [
        ("optim", "{warmup_steps: 7, warmup: null}", {"warmup": 7}),
        ("optim", "{warmup_steps: 7}", {"warmup": 7}),
        ("optim", "{warmup: 0.5}", {"warmup": 0.5}),
        ("optim", "{normuon: true, optimizer: muon, cautious: true, eps: 1e-10}", {"optimizer": "normuon"}),
        ("optim", "{normuon: false, optimizer: muon, cautious: false, eps: 1e-8}", {"optimizer": "muon"}),
        ("optim", "{beta1: 0.8, beta2: 0.99, momentum: 0.95}", {"betas": [0.8, 0.99]}),
        ("data", "{val_source: null, val_fraction: 0.2, shard_tokens: 5}", {"validation": 0.2}),
        ("data", "{val_source: a.txt, val_fraction: 0.2}", {"validation": "a.txt"}),
        ("chat", "{format: auto, fields: [prompt=q]}", {"fields": ["prompt=q"]}),
        ("chat", "{format: text, too_long: truncate}", {"fields": ["text=text"]}),
        ("chat", "{format: alpaca, fields: [output=a]}", {"fields": ["output=a", "instruction=instruction"]}),
        ("data", "{packing: concat, reshuffle: true}", {"packing": "reshuffle"}),
        ("data", "{packing: best_fit, reshuffle: false}", {"packing": "best_fit"}),
        ("data", "{source: [{path: a, field: null, document_start: null}]}", {"source": [SourceConfig(path="a")]}),
        ("model", "{norm: rmsnorm, norm_weights: false}", {"norm": "plain-rmsnorm"}),
        ("model", "{norm: layernorm, norm_weights: true}", {"norm": "layernorm"}),
        ("model", "{qk_norm: true, qk_scale: 1.2}", {"qk_norm": 1.2}),
        ("model", "{qk_norm: true, qk_scale: 1.0, embedding_std: 0.3}", {"qk_norm": True}),
        ("checkpoint", "{best: false, minutes: 0.0, every: 7}", {"every": 7}),
        (
            "clean",
            "{min_characters: 0, exact_duplicates: true, near_duplicates: 0.8, repetition: false, quality: true}",
            {"drop": ["exact_duplicates", "near_duplicates", "quality"]},
        ),
    ],
)
def test_the_stored_config_of_an_earlier_run_is_read(
    tmp_path: Path, section: str, former_values: str, values: dict[str, Any]
):
    config = tmp_path / "config.yaml"
    config.write_text(f"train: {{steps: 1}}\n{section}: {former_values}\n", encoding="utf-8")
    config.with_name("metrics.jsonl").touch()
    found = getattr(load_config(config).config, section)
    assert {name: getattr(found, name) for name in values} == values


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.modulation", 0.3),
        ("model.norm_weights", False),
        ("clean.near_duplicates", 0.7),
        ("chat.format", "openai"),
        ("optim.cautious", True),
        ("optim.eps", 1e-6),
        ("optim.momentum", 0.9),
    ],
)
def test_a_stored_value_that_no_run_has_today_is_refused(path: str, value: object):
    section, name = path.split(".")
    with pytest.raises(ConfigError, match=f"{path} is no setting any more"):
        resolve_from_mapping({"train": {"steps": 1}, section: {name: value}})
