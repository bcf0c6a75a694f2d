"""A user's own files survive us, and so does the last good checkpoint."""

import dataclasses
import gc
import itertools
import json
import math
import os
import shlex
import shutil
import weakref
from pathlib import Path

import pytest
import torch

import flatout
from flatout import cli
from flatout.checkpoints import run_folder
from flatout.checkpoints.checkpoint import (
    list_checkpoints,
    read_checkpoint,
    read_verdict,
    verify_checkpoint,
    write_checkpoint,
)
from flatout.engine import diverged, recovery, saver, saving
from flatout.errors import DivergedError, ResourceError, UsageError
from flatout.front import training
from flatout.host import THREAD_VARIABLES
from flatout.model.gpt import GPT
from flatout.observe.sinks import read_metrics
from flatout.records import CheckpointRecord, EndRecord, EvalRecord, NoticeRecord, RunInfo
from flatout.resolve import switches
from tests.conftest import TINY
from tests.disk import snapshot


def fill_with_a_users_files(folder: Path) -> None:
    """Folders and files of a user, with names that look like ours."""
    for name in ("notes.old-2024", "draft.tmp-1", "step-00000002.tmp-12345678", "adapter.old-0badcafe"):
        (folder / name).mkdir(parents=True)
        (folder / name / "thesis.txt").write_text("mine")
    (folder / "empty.tmp-7").mkdir()


# --- 1: nothing of a user's is deleted or overwritten -----------------------------------------------------------------


@pytest.mark.parametrize("folder", ["proj", "."])
@pytest.mark.parametrize("wrong", ["data.source=nope.txt", "speed.device=cuda:99"])
def test_a_refused_run_leaves_the_disk_as_it_was(tiny_words, tmp_path, folder, wrong):
    assert cli.main(["prepare", *(word for word in tiny_words if word.startswith("data."))]) == 0
    fill_with_a_users_files(tmp_path / folder)
    before = snapshot(tmp_path)
    assert cli.main(["train", *tiny_words, wrong, f"output.folder={folder}"]) in (2, 3)
    assert snapshot(tmp_path) == before


def test_a_run_beside_a_users_files_touches_none_of_them(tiny, tmp_path):
    fill_with_a_users_files(tmp_path / "proj")
    fill_with_a_users_files(tmp_path / "proj" / "checkpoints")
    before = snapshot(tmp_path)
    words = ["train.steps=6", "checkpoint.every=1", "checkpoint.keep=1", "output.folder=proj"]
    list(flatout.train(tiny(*words)))
    list(flatout.train(tiny(*words, "train.steps=8"), resume="auto"))
    after = snapshot(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert [step for step, _ in list_checkpoints(Path("proj/checkpoints"))] == [8]


def test_a_run_that_fails_after_it_was_accepted_leaves_no_folder(tiny, tmp_path, monkeypatch):
    def failing(*_):
        raise ResourceError("the disk fails", "use another")

    monkeypatch.setattr("flatout.front.training._mark_base", failing)
    with pytest.raises(ResourceError, match="the disk fails"):
        next(flatout.train(tiny("output.folder=out/new")))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "best.json"])
@pytest.mark.parametrize("resume", [None, "auto"])
def test_files_that_no_run_wrote_are_not_written_over(tiny, tmp_path, name, resume):
    (tmp_path / "proj").mkdir()
    (tmp_path / "proj" / name).write_text('{"mine": true}\n')
    before = snapshot(tmp_path / "proj")
    with pytest.raises(UsageError, match=name if resume else "already holds") as refused:
        next(flatout.train(tiny("output.folder=proj"), resume=resume))
    assert "output.folder" in refused.value.hint
    assert snapshot(tmp_path / "proj") == before


@pytest.mark.parametrize("name", ["run.lock", "config.yaml", "metrics.jsonl", "best.json", "checkpoints", "adapter"])
def test_a_run_writes_through_no_link(tiny, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    fill_with_a_users_files(outside)
    (outside / "file").write_text("mine")
    (tmp_path / "proj").mkdir()
    target = outside if name in ("checkpoints", "adapter") else outside / "file"
    (tmp_path / "proj" / name).symlink_to(target)
    before = snapshot(tmp_path)
    with pytest.raises(UsageError):
        next(flatout.train(tiny("output.folder=proj"), resume="auto"))
    after = snapshot(tmp_path)
    assert {path: what for path, what in after.items() if not path.startswith("data")} == before


def test_the_run_folder_itself_may_be_a_link(tiny, tmp_path):
    (tmp_path / "big-disk").mkdir()
    (tmp_path / "proj").symlink_to(tmp_path / "big-disk")
    list(flatout.train(tiny("train.steps=2", "output.folder=proj/run")))
    assert (tmp_path / "big-disk" / "run" / "checkpoints" / "step-00000002").is_dir()


def test_a_lock_with_somebodys_text_is_not_written_to(tiny, tmp_path):
    for name, text in (("mine", "do not lose this\n"), ("empty", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.lock").write_text(text)
        assert cli.main(["train", "data.source=nope.txt", f"output.folder={name}"]) == 3
        assert (tmp_path / name / "run.lock").read_text() == text
        list(flatout.train(tiny("train.steps=1", f"output.folder={name}")))
        assert (tmp_path / name / "run.lock").read_text() == text


def test_folders_with_the_names_of_checkpoints_stay_where_they_are(tiny, tmp_path):
    list(flatout.train(tiny("train.steps=2", "output.folder=run")))
    mine = tmp_path / "run" / "checkpoints" / "step-00000009"
    mine.mkdir()
    (mine / "manifest.json").write_text("mine")
    before = snapshot(tmp_path)
    assert flatout.load_model("run").step == 2, "it is not taken for one"
    with pytest.raises(UsageError, match="step-00000009"):
        next(flatout.train(tiny("train.steps=3", "output.folder=run"), resume="auto"))
    assert snapshot(tmp_path) == before


def test_a_damaged_pointer_to_the_best_chooses_no_other_weights(tiny, tmp_path, monkeypatch):
    """The verdicts say which checkpoint is the best."""
    losses = iter([5.0, 3.0, 4.0, 4.5])
    monkeypatch.setattr(recovery, "evaluate", lambda *_: (next(losses), 1))
    saving = ["checkpoint.every=4", "checkpoint.keep=9"]
    list(flatout.train(tiny("train.steps=4", "eval.every=1", *saving, "output.folder=run")))
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    pointer = tmp_path / "run" / "best.json"
    whole = pointer.read_bytes()
    assert flatout.load_model("run").step == 2
    flipped = whole.replace(b'"step": 2', b'"step": 4')
    assert flipped != whole
    unsealed = [b'{"loss": 1.0, "step": 4}', b'{"step": 1e999}', b'{"step": "4"}', b'{"step": 1' + b"0" * 5000 + b"}"]
    for content in (flipped, *unsealed, b"[" * 100_000, b"{}", b'{"step": []}', b"\x00", b""):
        pointer.write_bytes(content)
        assert flatout.load_model("run").step == 2, content[:40]
    pointer.write_bytes(whole)
    for step in (1, 2, 4):  # a verdict that is lost
        verdict = tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / "verdict.json"
        kept = verdict.read_bytes()
        verdict.write_bytes(kept[:-3])
        assert flatout.load_model("run").step == 2
        verdict.write_bytes(kept)


def test_a_run_without_a_best_step_leaves_no_older_pointer_to_one(tmp_path):
    saving.write_best(tmp_path, None, None)
    assert not (tmp_path / "best.json").exists()
    (tmp_path / "best.json").write_bytes(b'{"step": 4, "loss": 1.0}')  # without a seal
    saving.write_best(tmp_path, None, None)
    assert json.loads((tmp_path / "best.json").read_bytes())["step"] is None


def test_setting_aside_takes_no_name_that_is_taken(tiny, tmp_path):
    list(flatout.train(tiny("train.steps=4", "checkpoint.every=2", "output.folder=run")))
    places = tmp_path / "run" / "checkpoints"
    (places / "step-00000004.superseded").symlink_to(tmp_path / "nowhere")
    list(flatout.train(tiny("train.steps=3", "output.folder=run"), resume="run/checkpoints/step-00000002"))
    assert (places / "step-00000004.superseded").is_symlink()
    assert (places / "step-00000004.superseded-2").is_dir()


def test_a_disk_without_locks_is_told_as_such(tiny, tmp_path, monkeypatch: pytest.MonkeyPatch):
    def fails(_handle: int) -> bool:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(run_folder, "_try_lock", fails)
    with pytest.raises(ResourceError, match="cannot be locked") as refused:
        next(flatout.train(tiny("output.folder=proj")))
    assert "local disk" in refused.value.hint
    assert not (tmp_path / "proj").exists()


# --- 2: divergence, and evaluations that fail -------------------------------------------------------------------------


def finite_checkpoints(run: str) -> list[int]:
    found = list_checkpoints(Path(run) / "checkpoints")
    return [step for step, path in found if (verdict := read_verdict(path)) is not None and verdict.finite]


def hinted(error: DivergedError) -> list[str]:
    """The words of the command that the hint names."""
    words = shlex.split(error.hint.partition("learning rate: ")[2])
    assert words[0] == "flatout", error.hint
    return words[1:]


def diverge(tiny, *words: str) -> DivergedError | None:
    wild = ["optim.warmup=0", "optim.schedule=constant", "model.qk_norm=false", "train.steps=30"]
    try:
        list(flatout.train(tiny(*wild, "output.folder=wild", *words)))
    except DivergedError as error:
        return error
    return None


def test_divergence_keeps_a_good_checkpoint_and_the_hint_trains_on(tiny, capsys):
    error = diverge(tiny, "optim.learning_rate=100", "optim.clip=0", "checkpoint.every=2", "checkpoint.keep=1")
    assert error is not None
    assert error.exit_code == 4
    assert finite_checkpoints("wild")
    assert cli.main(hinted(error)) == 0, capsys.readouterr().err
    rows = [row for row in read_metrics(Path("wild/metrics.jsonl")) if row["type"] == "step"]
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert all(row["applied"] for row in rows)


def test_the_hint_keeps_what_was_changed_since_the_checkpoint(tiny, capsys):
    list(flatout.train(tiny("train.steps=4", "output.folder=run")))
    wild = ["optim.learning_rate=100", "optim.clip=0", "optim.weight_decay=10", "train.steps=40", "eval.tokens=256"]
    with pytest.raises(DivergedError) as caught:
        list(flatout.train(tiny(*wild, "output.folder=run"), resume="run"))
    assert "eval.tokens=256" in caught.value.hint
    assert cli.main(hinted(caught.value)) == 0, capsys.readouterr().err
    end = read_metrics(Path("run/metrics.jsonl"))[-1]
    assert (end["type"], end["step"]) == ("end", 40)


@pytest.mark.parametrize("name", ["run.lock", "config.yaml", "metrics.jsonl", "best.json", "checkpoints"])
def test_a_pipe_in_the_place_of_a_runs_file_is_refused(tiny, tmp_path, name):
    (tmp_path / "proj").mkdir()
    os.mkfifo(tmp_path / "proj" / name)
    with pytest.raises(UsageError, match=name):
        next(flatout.train(tiny("output.folder=proj"), resume="auto"))


def test_a_pipe_in_the_place_of_a_verdict_counts_as_none(tiny):
    list(flatout.train(tiny("train.steps=2", "output.folder=run")))
    verdict = Path("run/checkpoints/step-00000002/verdict.json")
    verdict.unlink()
    os.mkfifo(verdict)
    assert flatout.load_model("run").step == 2


def test_a_run_that_diverges_before_its_first_save_goes_on_from_its_start(tiny, capsys):
    words = ["optim.learning_rate=100", "optim.clip=0", "checkpoint.every=0", "eval.every=0"]
    error = diverge(tiny, *words)
    assert error is not None
    start = read_checkpoint(Path("wild/checkpoints/step-00000000"))
    still = ["optim.learning_rate=1e-50", "model.qk_norm=false"]
    list(flatout.train(tiny("output.folder=still", "train.steps=1", *still)))
    fresh = read_checkpoint(Path("still/checkpoints/step-00000001"))
    assert all(torch.equal(start.model[name], fresh.model[name]) for name in fresh.model), "the weights of the seed"
    assert cli.main(hinted(error)) == 0, capsys.readouterr().err


def poison(monkeypatch: pytest.MonkeyPatch, passes: set[int]) -> None:
    real, calls = GPT.forward, itertools.count(1)

    def poisoned(self: GPT, *args) -> torch.Tensor:
        bad = self.training and next(calls) in passes
        return real(self, *args) * (math.nan if bad else 1.0)

    monkeypatch.setattr(GPT, "forward", poisoned)


def test_nothing_is_saved_while_bad_steps_are_counted(tiny, monkeypatch):
    poison(monkeypatch, {4, 6})
    words = ["train.steps=9", "checkpoint.every=2", "checkpoint.keep=9", "eval.every=2", "output.folder=run"]
    records = list(flatout.train(tiny(*words)))
    saved = [record.step for record in records if isinstance(record, CheckpointRecord)]
    assert saved == [2, 5, 7, 8, 9], "the saves of steps 4 and 6 come with the next good step"
    assert all(read_checkpoint(path).state["bad_steps"] == 0 for _, path in list_checkpoints(Path("run/checkpoints")))


def test_a_stop_waits_until_no_bad_steps_are_counted(tiny, monkeypatch):
    poison(monkeypatch, {4})
    asked = itertools.count(1)
    run = flatout.train(tiny("train.steps=9", "output.folder=run"), stop=lambda: next(asked) >= 4)
    end = list(run)[-1]
    assert (end.reason, end.step) == ("interrupted", 5)
    assert finite_checkpoints("run") == [5]


def test_a_checkpoint_that_is_not_finite_is_told_and_passed_over(tiny, monkeypatch):
    words = ["train.steps=6", "checkpoint.every=2", "checkpoint.keep=1", "output.folder=run"]
    real = saving.quick_loss

    def found(run, size):
        return (math.nan, size, []) if int(run.step.updates) == 4 else real(run, size)

    monkeypatch.setattr(saving, "quick_loss", found)
    records = []
    for record in flatout.train(tiny(*words)):
        records.append(record)
        if isinstance(record, CheckpointRecord) and record.step == 4:
            assert [step for step, _ in list_checkpoints(Path("run/checkpoints"))] == [2, 4]
            assert flatout.load_model("run").step == 2
            break
    told = [record.message for record in records if isinstance(record, NoticeRecord)]
    assert any("step 4 has validation loss nan" in message for message in told)
    again = list(flatout.train(tiny(*words), resume="auto"))
    assert "diverged and was set aside" in again[0].message
    assert again[1].start_step == 2
    assert finite_checkpoints("run") == [6]


@pytest.fixture
def beside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether checkpoints are written beside training."""
    if request.param:
        monkeypatch.setattr(saver, "SMALL", 0)
    return request.param


@pytest.mark.parametrize("beside", [False, True], indirect=True)
def test_an_evaluation_that_fails_costs_nothing(tiny, monkeypatch, beside):
    words = ["train.steps=8", "checkpoint.every=4", "eval.every=4", "output.folder=run"]

    def fails(*_args):
        raise ValueError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "evaluate", fails)
        with pytest.raises(ValueError, match="planted"):
            list(flatout.train(tiny(*words)))
    verify_checkpoint(Path("run/checkpoints/step-00000004"))
    assert read_verdict(Path("run/checkpoints/step-00000004")) is None
    list(flatout.train(tiny(*words), resume="auto"))
    list(flatout.train(tiny(*words, "output.folder=reference")))
    assert evaluations("run") == evaluations("reference")
    assert_same_end("run", "reference", 8)


def evaluations(run: str) -> list[tuple]:
    """What a run recorded at its boundaries, in order, without seconds."""
    return [
        (row["type"], row["step"], row.get("loss"), row.get("best"), row.get("reason"), row.get("text"))
        for row in read_metrics(Path(run) / "metrics.jsonl")
        if row["type"] in ("eval", "checkpoint", "sample", "epoch")
    ]


def assert_same_end(mine: str, theirs: str, step: int) -> None:
    name = f"checkpoints/step-{step:08d}"
    ours, expected = read_checkpoint(Path(mine) / name), read_checkpoint(Path(theirs) / name)
    for part in ("model", "optimizer", "run"):
        found = getattr(ours, part)
        assert all(torch.equal(found[key], value) for key, value in getattr(expected, part).items()), part
    for key in ("step", "tokens", "val_loss", "best_loss", "best_step", "worse_evaluations"):
        assert ours.state[key] == expected.state[key], key
    a, b = read_verdict(Path(mine) / name), read_verdict(Path(theirs) / name)
    assert a == b
    assert a is not None


class Killed(BaseException):
    pass


@pytest.mark.grid
@pytest.mark.parametrize("beside", [False, True], indirect=True)
@pytest.mark.parametrize(
    "where", ["write_verdict", "write_json_atomically", "keep_newest", "generate_tokens", "evaluate"]
)
def test_a_kill_at_a_boundary_neither_repeats_nor_skips_an_evaluation(tiny, monkeypatch, where, beside):
    words = ["train.steps=6", "checkpoint.every=2", "eval.every=2", "eval.sample_every=2", "eval.patience=3"]
    list(flatout.train(tiny(*words, "output.folder=reference")))
    for nth in (1, 2):
        with monkeypatch.context() as patch:
            room = recovery if where == "evaluate" else saving
            real, calls = getattr(room, where), itertools.count(1)

            def dies(*args, real=real, calls=calls, nth=nth, **options):
                if next(calls) == nth:
                    raise Killed
                return real(*args, **options)

            patch.setattr(room, where, dies)
            with pytest.raises(Killed):
                list(flatout.train(tiny(*words, f"output.folder=run{nth}")))
        list(flatout.train(tiny(*words, f"output.folder=run{nth}"), resume="auto"))
        assert evaluations(f"run{nth}") == evaluations("reference"), (where, nth)
        assert_same_end(f"run{nth}", "reference", 6)
        assert len(list_checkpoints(Path(f"run{nth}/checkpoints"))) <= 3


@pytest.mark.parametrize("beside", [False, True], indirect=True)
def test_a_kill_before_the_verdict_on_a_best_checkpoint_loses_no_record(tiny, monkeypatch, beside):
    """It is saved after its evaluation, which is not made again."""
    words = ["train.steps=6", "checkpoint.every=5", "eval.every=2", "eval.sample_every=2"]
    list(flatout.train(tiny(*words, "output.folder=reference")))

    def dies(*_args):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_verdict", dies)
        with pytest.raises(Killed):
            list(flatout.train(tiny(*words, "output.folder=run")))
    assert read_checkpoint(Path("run/checkpoints/step-00000002")).step == 2
    list(flatout.train(tiny(*words, "output.folder=run"), resume="auto"))
    mine, theirs = evaluations("run"), evaluations("reference")
    if beside:  # checkpoints are told of when they are written
        mine, theirs = sorted(mine, key=str), sorted(theirs, key=str)
    assert mine == theirs
    assert_same_end("run", "reference", 6)


def test_a_diverged_run_is_let_go_of_before_it_is_built_again(tiny, monkeypatch):
    alive: list[bool] = []
    real, models = diverged.Run, []

    def build(*args, **options):
        run = real(*args, **options)
        models.append(weakref.ref(run.model))
        return run

    def build_again(*args, **options):
        gc.collect()
        alive.append(models[0]() is not None)
        return real(*args, **options)

    monkeypatch.setattr(training, "Run", build)
    monkeypatch.setattr(diverged, "Run", build_again)
    assert diverge(tiny, "optim.learning_rate=100", "optim.clip=0", "checkpoint.every=0", "eval.every=0") is not None
    assert alive == [False], "on a GPU, there may be no room for both"


def test_a_divergence_is_told_also_where_its_start_cannot_be_saved(tiny, monkeypatch):
    def full(*_args):
        raise ResourceError("could not write the checkpoint: No space left on device", "free some space")

    monkeypatch.setattr(diverged, "write_checkpoint", full)
    error = diverge(tiny, "optim.learning_rate=100", "optim.clip=0", "checkpoint.every=0", "eval.every=0")
    assert error is not None
    assert "non-finite" in error.message
    assert "optim.learning_rate=0.001" in error.hint


def test_saving_on_demand_goes_on_with_the_same_run(tiny):
    asked = itertools.count(1)
    words = ["train.steps=6", "checkpoint.keep=5"]
    records = list(flatout.train(tiny(*words, "output.folder=run"), save=lambda: next(asked) == 3))
    assert [record.step for record in records if isinstance(record, CheckpointRecord)] == [3, 6]
    list(flatout.train(tiny(*words, "output.folder=reference")))
    assert_same_end("run", "reference", 6)


def test_checkpoints_written_before_verdicts_existed_go_on(tiny):
    """They were written after their evaluation: nothing is evaluated twice."""
    words = ["train.steps=6", "checkpoint.every=3", "eval.every=3", "output.folder=run"]
    old = Path("run/checkpoints/step-00000003")
    run = flatout.train(tiny(*words))
    for record in run:
        if isinstance(record, CheckpointRecord):
            break
    run.close()
    (old / "verdict.json").unlink()
    state = read_checkpoint(old).state
    del state["due"]
    from tests.unit.test_checkpoint import reseal

    reseal(old, "state", state)
    records = list(flatout.train(tiny(*words), resume="auto"))
    assert [record.step for record in records if isinstance(record, EvalRecord)] == [6]


# --- 3: several processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_processes_that_cannot_find_each_other_are_refused(tiny_words, tmp_path, monkeypatch, capsys, size):
    before = snapshot(tmp_path)
    monkeypatch.setenv(size, "2")
    assert cli.main(["train", *tiny_words]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == ["error", "hint"]
    assert "2 processes" in said[0]
    assert f"unset {size}" in said[1]
    with pytest.raises(UsageError, match="2 processes"):
        next(flatout.train())
    assert snapshot(tmp_path) == before


def test_a_verb_that_works_alone_is_refused_by_one_of_several(monkeypatch, capsys):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["bench"]) == 2
    assert "2 processes were started, and `flatout bench` works in one" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err == ""


def test_one_process_under_a_launcher_trains(tiny, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    *_, last = flatout.train(tiny("train.steps=1"))
    assert isinstance(last, EndRecord)
    assert (last.step, last.reason) == (1, "finished")


# --- 11: threads ------------------------------------------------------------------------------------------------------


def test_another_number_of_threads_is_told(tiny):
    list(flatout.train(tiny("train.steps=2", "output.folder=run")))
    path = Path("run/checkpoints/step-00000002")
    from tests.unit.test_checkpoint import reseal

    reseal(path, "state", {**read_checkpoint(path).state, "threads": 77})
    told = [r.message for r in flatout.train(tiny("train.steps=3"), resume="run") if isinstance(r, NoticeRecord)]
    assert any("77 CPU threads" in message and "speed.threads=77" in message for message in told)


def test_a_resume_keeps_the_number_of_threads(tiny, monkeypatch):
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(switches, "whole_cores", lambda: 2)
    monkeypatch.setattr(switches, "usable_cores", lambda: 2.0)
    list(flatout.train(tiny("train.steps=2", "output.folder=run", "speed.threads=2")))
    assert read_checkpoint(Path("run/checkpoints/step-00000002")).state["threads"] == 2
    first, *_ = [r for r in flatout.train(tiny("train.steps=3"), resume="run") if isinstance(r, RunInfo)]
    (threads,) = [feature for feature in first.features if feature.name == "threads"]
    assert (threads.asked, threads.used, threads.why) == ("auto", "2", "as before the resume")
    assert read_checkpoint(Path("run/checkpoints/step-00000003")).state["threads"] == 2


def test_a_state_that_no_run_wrote_is_refused_by_name(tiny, capsys):
    list(flatout.train(tiny("train.steps=2", "output.folder=run")))
    path = Path("run/checkpoints/step-00000002")
    from tests.unit.test_checkpoint import reseal

    state = read_checkpoint(path).state
    for name, value in [
        ("dataset", None),
        ("vocab", None),
        ("vocab", -1),
        ("vocab", 0),
        ("vocab", 10**9),
        ("vocab", 10**400),
        ("vocab", "65"),
        ("stops", 7),
        ("template", "plain"),
        ("described", [1]),
        ("step", -1),
    ]:
        reseal(path, "state", {**state, name: value})
        assert cli.main(["generate", "run", "--tokens", "2"]) == 3, (name, value)
        said = capsys.readouterr().err.splitlines()
        assert [line.partition(":")[0] for line in said] == ["error", "hint"]
        assert (name if value != 10**9 else "weight") in said[0]
    for name, value in [("tokens", None), ("seconds", 10**400), ("epoch_loss", "x")]:
        reseal(path, "state", {**state, name: value})
        assert cli.main(["train", "--resume", "run", "train.steps=3"]) == 3, (name, value)
        assert name in capsys.readouterr().err


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_model_without_probabilities_is_refused_and_costs_a_run_its_sample_only(tiny, capsys, monkeypatch, value):
    list(flatout.train(tiny("train.steps=2", "output.folder=run")))
    place = Path("run/checkpoints")
    checkpoint = read_checkpoint(place / "step-00000002")
    model = {name: torch.full_like(tensor, value) for name, tensor in checkpoint.model.items()}
    shutil.rmtree(place / "step-00000002")
    write_checkpoint(place, dataclasses.replace(checkpoint, model=model))
    for temperature in ("0", "0.8"):
        capsys.readouterr()
        assert cli.main(["generate", "run", "--tokens", "2", "--temperature", temperature]) == 3
        said = capsys.readouterr().err.splitlines()
        assert [line.partition(":")[0] for line in said] == ["error", "hint"]
        assert "logits are not finite" in said[0]
    real = GPT.logits
    monkeypatch.setattr(GPT, "logits", lambda *args, **options: real(*args, **options) * value)
    records = list(flatout.train(tiny("train.steps=2", "output.folder=other")))
    assert any("there is no sample" in record.message for record in records if isinstance(record, NoticeRecord))
    assert isinstance(records[-1], EndRecord)


@pytest.fixture
def tiny_words(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [*TINY, f"data.source={corpus}", "train.steps=2"]
