"""`flatout ablate` from outside: real runs, a table, rows, a picture; stopped, and gone on with."""

import json
import signal
from pathlib import Path

import pytest

from flatout import api
from flatout.cli import main
from flatout.front.output import Terminated
from flatout.records import EvalRecord
from flatout.tuning import measure
from tests.conftest import TINY


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting garbage before and after every run takes longer than these runs do."""
    monkeypatch.setattr("flatout.tuning.measure.free_memory", lambda **_: None)


def words_for(tiny, *more: str) -> list[str]:
    return ["ablate", *TINY, f"data.source={tiny().config.data.source}", "train.steps=8", *more]


def test_runs_rows_table_and_picture(tiny, tmp_path: Path, capsys):
    words = words_for(tiny, "--fields", "model.qk_norm,optim.learning_rate=1e-5", "--out", "kept")
    assert main(words) == 0
    shown = capsys.readouterr()
    assert shown.err.count("seed 1337: loss") == 3
    assert "optim.learning_rate  0.004   1e-05" in shown.out
    assert "keep 0.004 (1e-05 +0." in next(
        line for line in shown.out.splitlines() if line.startswith("optim.learning_rate ")
    )
    assert "wrote kept/ablate.jsonl and kept/ablate.png" in shown.out
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"ablate.jsonl", "ablate.png"}
    rows = [json.loads(line) for line in (tmp_path / "kept" / "ablate.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    # A run of the ablation is the run that `flatout train` makes.
    loaded = tiny("train.steps=8", "train.seed=1338", "model.qk_norm=false")
    last = [record for record in api.train(loaded) if isinstance(record, EvalRecord)][-1]
    assert [row["loss"] for row in rows if row["seed"] == 1338 and row["field"] == "model.qk_norm"] == [last.loss]
    assert main(words) == 0
    assert capsys.readouterr().err == "", "nothing was left to train"


def test_a_signal_keeps_what_has_ended(tiny, tmp_path: Path, capsys, monkeypatch):
    real, count = measure.train_loop, 0

    def stops_in_the_third(*args, **settings):
        nonlocal count
        count += 1
        if count == 3:
            raise Terminated(signal.SIGTERM)
        return real(*args, **settings)

    monkeypatch.setattr(measure, "train_loop", stops_in_the_third)
    words = words_for(tiny, "--fields", "model.qk_norm,optim.clip=0.5", "--seeds", "1", "--out", "kept")
    assert main(words) == 143
    shown = capsys.readouterr()
    assert "the same command goes on with them" in shown.err
    assert "one pair: no verdict" in shown.out
    assert "not run yet" in shown.out
    assert main(words) == 0
    assert capsys.readouterr().err.count("loss") == 1
    assert (tmp_path / "kept" / "ablate.png").exists()


def test_a_refused_command_leaves_the_disk_as_it_was(tiny, tmp_path: Path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "ablate.png").write_bytes(b"holiday")
    before = sorted(tmp_path.rglob("*"))
    for more in (
        ["--fields", "model.qknorm"],
        ["--fields", "model.qk_norm", "--out", "mine"],
        ["--fields", "model.qk_norm", "--out", "mine/ablate.png"],
        ["--fields", "optim.schedule=cosine"],
        ["--seeds", "0"],
    ):
        assert main(words_for(tiny, *more)) == 2
        shown = capsys.readouterr().err.splitlines()
        assert [line.partition(":")[0] for line in shown] == ["error", "hint"]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_preset_with_sizes_is_settled_with_its_data_first(corpus: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    record = lambda loaded, *_, **__: iter(seen.append(loaded) or ())  # noqa: E731
    monkeypatch.setattr("flatout.front.measuring.ablate_fields", record)
    words = ["ablate", "record", "--size", "2x32", f"data.source={corpus}", "data.tokenizer=char"]
    assert main([*words, "--fields", "model.head_gat"]) == 2
    capsys.readouterr()
    assert main([*words, "--fields", "model.head_gate", "--minutes", "0"]) == 0
    assert not list(tmp_path.iterdir()), "nothing is prepared to show what is there"
    # Text that is read ten times has no value tables, so 1 is a change, and 0 is none.
    assert main([*words, "train.epochs=10", "--fields", "model.value_tables=1"]) == 0
    assert "the data is read 10.0 times" in capsys.readouterr().err
    assert main([*words, "train.epochs=10", "--fields", "model.value_tables=0"]) == 2
    assert "model.value_tables is 0 in the config already" in capsys.readouterr().err
    assert main([*words, "--fields", "model.value_tables=0"]) == 0
    config = seen[-1].config
    assert config.train.tokens < 2 * corpus.stat().st_size, "two epochs, not twenty tokens for each parameter"
