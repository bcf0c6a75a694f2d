"""Verbs that measure or judge a preset with sizes have the settings that `flatout train` settles with its data."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flatout
from flatout.cli import main
from flatout.config.load import LoadedConfig, load_config
from flatout.config.schema import RunConfig
from flatout.diagnose import check_run
from flatout.engine.run import Run
from flatout.errors import DataError, UsageError
from flatout.records import RunInfo
from flatout.resolve.opening import DataSource
from flatout.resolve.plan import RunPlan
from flatout.tuning import many_gpus
from flatout.tuning.practice_data import practice_config

SIZE = "2x32"
RATES = ("muon_rate", "learning_rate", "embedding_rate", "head_rate", "weight_decay", "head_decay", "ema")
SPACE = "optim.head_rate: {choices: [0.003, 0.004]}\n"


@pytest.fixture
def words(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A text that is read ten times: the batch is smaller, all weights decay, and there are no tables."""
    monkeypatch.chdir(tmp_path)
    told = ["train.epochs=10", "model.context=64", "eval.tokens=512", "eval.sample_tokens=0", "speed.threads=1"]
    return [f"data.source={corpus}", "data.tokenizer=char", *told]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configs of all runs that a verb begins to build, and does not get."""
    seen: list[RunConfig] = []

    def refuse(plan: RunPlan, *_: Any, **__: Any) -> Any:
        seen.append(plan.settings.config)
        raise UsageError("seen", "enough")

    monkeypatch.setattr("flatout.tuning.measure.Run", refuse)
    return seen


def trained(preset: str, words: list[str]) -> RunConfig:
    """The config that a run has."""
    records: Iterator[Any] = flatout.train(load_config(preset, words, size=SIZE), stop=lambda: True)
    info = next(iter(records))
    assert isinstance(info, RunInfo)
    list(records)
    return flatout.stored_config(info.folder).config


def learned(config: RunConfig) -> dict[str, Any]:
    """What a size, the data and the device decide of what is learned."""
    rates = {name: getattr(config.optim, name) for name in RATES}
    batch = {"batch": config.train.batch_tokens, "reshuffle": config.data.packing == "reshuffle"}
    return rates | batch | config.model.model_dump()


@pytest.mark.parametrize("preset", ["modern", "record"])
def test_verbs_measure_what_train_would_train(
    preset: str, words: list[str], built: list[RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("space.yaml").write_text(SPACE, encoding="utf-8")
    named = [preset, "--size", SIZE, *words]
    for verb in (["bench", "--rungs", "sdpa"], ["tune"], ["tune", "lr"], ["estimate"], ["profile"]):
        before = len(built)
        main([*verb, *named])
        assert len(built) > before, f"{verb}: {capsys.readouterr().err}"
    assert not (tmp_path / "data").exists(), "none of them prepares data in the user's folder"
    searched = len(built)
    main(["tune", "search", "space.yaml", *named])
    assert len(built) > searched
    said = capsys.readouterr()
    assert "note: the data is read 10.0 times" in said.err
    run = trained(preset, words)
    assert run.model.value_tables == 0
    assert (run.model.bigram_rows > 0) == (preset == "record"), "tables of a few characters are small"
    assert run.optim.head_decay is not None
    assert run.train.batch_tokens < load_config(preset, words, size=SIZE).config.train.batch_tokens
    for config in built[:searched]:
        assert learned(config) == learned(run)
    for config in built[searched:]:
        assert learned(config) | {"head_rate": 0.0} == learned(run) | {"head_rate": 0.0}
        assert config.optim.head_rate in (0.003, 0.004), "the trial's"


MEASURING = ("bench --rungs sdpa", "tune", "tune lr", "tune search space.yaml", "estimate", "profile", "ablate")


@pytest.mark.parametrize(
    ("verb", "limit"),
    [
        *(
            (verb, "data.max_bytes=9000")
            for verb in (*MEASURING, "train", "prepare", "estimate --gpus 8", "doctor --quick")
        ),
        ("prepare", "data.max_documents=1"),
        ("prepare", "data.max_tokens=9000"),
    ],
)
def test_every_verb_takes_a_config_with_a_limit_on_its_text(
    verb: str, limit: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is measured has passed every check of its settings when it opens its data."""
    opened: list[RunConfig] = []

    def refuse(_source: DataSource, settings: LoadedConfig) -> Any:
        opened.append(settings.config)
        raise UsageError("seen", "enough")

    monkeypatch.setattr("flatout.resolve.opening.DataSource.open", refuse)
    Path("space.yaml").write_text("optim.learning_rate: {choices: [0.003, 0.004]}\n", encoding="utf-8")
    more = ["model.layers=1", "model.width=32", "model.heads=2", "train.batch_tokens=512", "train.epochs=null"]
    code = main([*verb.split(), "shakespeare-char", *words, *more, "train.steps=10", limit])
    said = capsys.readouterr()
    assert "is set, but" not in said.out + said.err
    if verb in (*MEASURING, "train"):
        assert opened, said.err
    else:
        assert code == 0, said.err + said.out


SMALL = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=16", "train.batch_tokens=64"]
GIVEN = ["data.field=[text,content]", "data.max_documents=90", "data.validation=0.25", "clean.drop=[exact_duplicates]"]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Words for rows that were prepared with settings which these words leave out."""
    monkeypatch.chdir(tmp_path)
    content = "".join(f'{{"content": "number {number} said this"}}\n' for number in range(100))
    Path("rows.jsonl").write_text(content, encoding="utf-8")
    short = ["train.steps=2", "eval.tokens=64", "eval.sample_tokens=0", "speed.threads=1"]
    words = ["shakespeare-char", "data.source=rows.jsonl", "data.tokenizer=bytes", *SMALL, *short]
    assert main(["prepare", *words, *GIVEN, "data.unknown_characters=drop"]) == 0
    capsys.readouterr()
    return words


@pytest.mark.parametrize("verb", ["train", "prepare", "doctor --quick", *MEASURING])
def test_every_verb_uses_data_as_it_was_prepared(
    verb: str, rows: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[RunConfig] = []

    def refuse(_source: DataSource, settings: LoadedConfig) -> Any:
        opened.append(settings.config)
        raise UsageError("seen", "enough")

    monkeypatch.setattr("flatout.resolve.opening.DataSource.open", refuse)
    Path("space.yaml").write_text("optim.learning_rate: {choices: [0.003, 0.004]}\n", encoding="utf-8")
    before = Path("data/rows-bytes/manifest.json").read_bytes()
    code = main([*verb.split(), *rows])
    said = capsys.readouterr()
    if verb == "prepare":
        assert code == 0, said.err + said.out
    else:
        assert opened, said.err
    assert "data.unknown_characters" not in said.out + said.err, "the tokenizer does not read it"
    for config in opened:
        data = config.data
        if data.source is not None:
            assert (data.field, data.max_documents, data.validation) == (["text", "content"], 90, 0.25)
            assert config.clean.drop == ["exact_duplicates"]
        else:
            assert data.folder == "data/rows-bytes", "the shards are measured on as they are"
    assert Path("data/rows-bytes/manifest.json").read_bytes() == before


def test_prepare_in_python_logs_what_it_takes_over(rows: list[str], caplog: pytest.LogCaptureFixture) -> None:
    loaded = flatout.load_config(rows[0], rows[1:])
    assert flatout.prepare(loaded) == Path("data/rows-bytes")
    assert "was prepared with" in caplog.text
    for use in (flatout.prepare, lambda config: list(flatout.train(config))):
        with pytest.raises(DataError, match="was prepared with"):  # a plain config says what every setting is
            use(loaded.config)


def test_what_a_user_writes_against_how_data_was_prepared_is_refused(
    rows: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Both values are named, and the setting in the hint makes the error go away."""
    for word, stored, asked in (
        ("data.field=content", "field ['text', 'content']", "'content'"),
        ("data.max_documents=80", "max_documents 90", "80"),
        ("clean.drop=[quality]", "clean.drop ['exact_duplicates']", "['quality']"),
    ):
        assert main(["train", *rows, word]) == 3
        said = capsys.readouterr().err
        assert f"error: data/rows-bytes was prepared with {stored}, the config says {asked}\n" in said
        assert "--overwrite" not in said
        hint = shlex.split(said.split(" out or set ")[1].split(" to use it as it is")[0])
        assert main(["train", *rows, *hint, f"output.name=against-{re.sub(r'[^a-z0-9]', '', asked)}"]) == 0
        note = capsys.readouterr().out.split("note: data/rows-bytes was prepared with ")[1].split("\n")[0]
        assert note.endswith(", which is used here, too")
        assert hint[0].split("=")[0] not in note, "it was written now"


def test_a_mistyped_folder_is_not_filled_with_a_presets_text(
    rows: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in (["train"], ["prepare"], ["doctor", "--quick"]):
        assert main([*verb, "data.folder=data/rows-byte"]) == 3
        said = " ".join("".join(capsys.readouterr()).split())
        assert "there is no dataset data/rows-byte" in said
        assert "id you mean data.folder=data/rows-bytes?" in said
        assert "data.source=shakespeare makes one" in said
    assert not Path("data/rows-byte").exists()
    assert main(["prepare", *rows, "data.folder=data/rows-byte", "data.field=content"]) == 0, "its text is named"


def test_doctor_and_plan_judge_what_train_would_train(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[RunConfig] = []
    resolve, plan = check_run.resolve, many_gpus.plan

    def resolves(*rest: Any, **how: Any) -> Any:
        found = resolve(*rest, **how)
        seen.append(found.settings.config)
        return found

    def plans(loaded: LoadedConfig, *rest: Any, **how: Any) -> Any:
        seen.append(loaded.config)
        return plan(loaded, *rest, **how)

    monkeypatch.setattr(check_run, "resolve", resolves)
    monkeypatch.setattr("flatout.front.measuring.plan_on_many", plans)
    named = ["record", "--size", SIZE, *words]
    assert main(["estimate", "--gpus", "1..8", *named]) == 0
    assert "settled as for text that is read once, because its tokens are not counted" in capsys.readouterr().err
    assert seen.pop().model.value_tables == 1
    assert not list(tmp_path.iterdir())
    main(["doctor", "--quick", *named])
    assert "tokens to train on; a run counts them first" in capsys.readouterr().out
    assert seen.pop().optim.head_decay is not None
    run = trained("record", words)
    assert main(["estimate", "--gpus", "1..8", *named]) == 0
    said = capsys.readouterr()
    assert "note: the data is read 10.0 times" in said.err
    assert "the vocabulary is not known" not in said.out
    main(["doctor", "--quick", *named])
    shown = capsys.readouterr().out
    assert "the data is read 10.0 times" in shown
    assert "a run counts them first" not in shown
    assert [learned(config) for config in seen] == 2 * [learned(run)]


def test_what_is_measured_without_the_data_says_so(tmp_path: Path) -> None:
    loaded = load_config("record", ["data.source=nowhere", "speed.device=cpu"], size=SIZE)
    practice, described = practice_config(loaded, tmp_path)
    assert described.endswith("; size 2x32 is settled as for text that is read once")
    assert practice.config.train.batch_tokens == loaded.config.train.batch_tokens
    assert (loaded.config.model.value_tables, practice.config.model.value_tables) == (1, 0), "the device is known"
    plain, described = practice_config(load_config("gpt-124m", ["data.source=nowhere"]), tmp_path / "other")
    assert "settled" not in described
    assert plain.config.train == load_config("gpt-124m", ["data.source=nowhere"]).config.train


def test_stages_come_after_the_size(words: list[str], tmp_path: Path) -> None:
    said: list[str] = []
    loaded = load_config("modern", [*words, "train.batch_stages=[64,256]"], size=SIZE)
    practice, _ = practice_config(loaded, tmp_path / "scratch", said.append)
    assert practice.config.train.batch_tokens == 256
    assert practice.config.optim.head_decay is not None
    assert said[-1] == "stages: steps are measured as in the last one, with 256 tokens each"


def test_a_file_of_tune_trains_with_what_was_measured(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[RunConfig] = []

    def kept(plan: RunPlan, *rest: Any, **how: Any) -> Any:
        seen.append(plan.settings.config)
        return Run(plan, *rest, **how)

    monkeypatch.setattr("flatout.tuning.measure.Run", kept)
    assert main(["tune", "--seconds", "1", "--out", "found.yaml", "modern", "--size", SIZE, *words]) == 0
    text = Path("found.yaml").read_text(encoding="utf-8")
    assert "size: 2x32" in text
    assert "head_decay" not in text, "what follows from the data does so again"
    found = load_config("found.yaml")
    records = list(flatout.train(found, stop=lambda: True))
    assert isinstance(records[0], RunInfo)
    assert learned(flatout.stored_config(records[0].folder).config) == learned(seen[0])
