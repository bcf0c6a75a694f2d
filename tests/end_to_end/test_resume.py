"""An interrupted run continues bit for bit as if nothing had happened."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flatout
from flatout.checkpoints.checkpoint import Checkpoint, list_checkpoints, read_checkpoint
from flatout.checkpoints.run_folder import read_best
from flatout.cli import main
from flatout.config.facts import value_at
from flatout.config.load import LoadedConfig
from flatout.config.yaml_loader import format_value
from flatout.engine import recovery
from flatout.engine.state import Progress, capture, restore
from flatout.engine.step import LossScale
from flatout.errors import CheckpointError, ConfigError, DataError, UsageError
from flatout.front.resuming import Origin, check_resumed, check_shape
from flatout.observe.sinks import read_metrics
from flatout.records import EndRecord, NoticeRecord, RunInfo, StepRecord
from tests.hints import ways_out
from tests.set_up import set_up

RUN = [
    "model.dropout=0.1", "speed.micro_batch=2", "train.steps=40",
    "eval.every=10", "checkpoint.keep=3", "optim.schedule=cosine",
]  # fmt: skip
SHORT = ["train.steps=20", "eval.every=5"]


def stop_after(step: int) -> Callable[[], bool]:
    """Says stop once it has been asked `step` times, which is after that many steps."""
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked >= step

    return stop


def final(folder: str) -> Checkpoint:
    return read_checkpoint(list_checkpoints(Path(folder) / "checkpoints")[-1][1])


def losses(folder: str) -> list[tuple]:
    rows = read_metrics(Path(folder) / "metrics.jsonl")
    kept = ("step", "loss", "grad_norm", "learning_rate", "applied", "tokens")
    steps = [tuple(row[name] for name in kept) for row in rows if row["type"] == "step"]
    evals = [(row["step"], row["loss"], row["best"], row["reason"]) for row in rows if row["type"] == "eval"]
    epochs = [(row["step"], row["epoch"], row["mean_loss"]) for row in rows if row["type"] == "epoch"]
    return steps + evals + epochs


def assert_same_run(mine: str, reference: str) -> None:
    a, b = final(mine), final(reference)
    assert a.step == b.step
    for name in ("model", "optimizer", "run"):
        ours, theirs = getattr(a, name), getattr(b, name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
    timed = ("seconds", "epoch_seconds")
    assert {k: v for k, v in a.state.items() if k not in timed} == {k: v for k, v in b.state.items() if k not in timed}
    assert losses(mine) == losses(reference)


def interrupt_and_resume(tiny, steps: list[int], *more: str) -> None:
    list(flatout.train(tiny(*RUN, *more, "output.folder=whole")))
    for step in steps:
        folder = f"cut-{step}"
        config = tiny(*RUN, *more, f"output.folder={folder}")
        *_, end = flatout.train(config, stop=stop_after(step))
        assert isinstance(end, EndRecord)
        assert (end.reason, end.step) == ("interrupted", step)
        *_, end = flatout.train(config, resume="auto")
        assert end.reason == "finished"
        assert_same_run(folder, "whole")


def test_resume_is_bit_identical(tiny):
    interrupt_and_resume(tiny, [1, 5, 19], *SHORT)


@pytest.mark.slow
def test_resume_at_each_of_twenty_steps_is_bit_identical(tiny):
    interrupt_and_resume(tiny, list(range(1, 40, 2)))


def test_fp16s_loss_scale_goes_on_where_it_was(tiny):
    saved, resumed = set_up(tiny()), set_up(tiny())
    for run in (saved, resumed):
        run.step.loss_scale = LossScale.start(torch.device("cpu"))
    assert saved.step.loss_scale is not None
    saved.step.loss_scale.scale.fill_(2.0**11)
    saved.step.loss_scale.good_updates.fill_(1999)  # one more, and the scale doubles
    restore(resumed, capture(saved, Progress(step=1)))
    assert resumed.step.loss_scale is not None
    assert (float(resumed.step.loss_scale.scale), int(resumed.step.loss_scale.good_updates)) == (2.0**11, 1999)
    with resumed.batches(1) as loader:
        batch = next(iter(loader))
        assert resumed.step(batch.tokens, batch.targets)[4] == 2.0**11
    assert (float(resumed.step.loss_scale.scale), int(resumed.step.loss_scale.good_updates)) == (2.0**12, 0)


def test_code_between_steps_does_not_change_the_run(tiny):
    list(flatout.train(tiny(*RUN, *SHORT, "output.folder=quiet")))
    torch.manual_seed(0)
    for record in flatout.train(tiny(*RUN, *SHORT, "output.folder=noisy")):
        torch.rand(17)  # a notebook cell that draws numbers of its own
        assert not torch.are_deterministic_algorithms_enabled()
        assert record is not None
    assert_same_run("noisy", "quiet")


def test_the_global_random_state_is_left_alone(tiny):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    list(flatout.train(tiny("model.dropout=0.1", "train.steps=3")))
    assert torch.equal(torch.rand(4), expected)


def test_resume_auto_starts_when_there_is_nothing(tiny):
    first, *_, end = flatout.train(tiny("train.steps=3", "output.folder=new"), resume="auto")
    assert isinstance(first, RunInfo)
    assert first.resumed_from is None
    assert end.step == 3


def test_a_finished_run_resumes_to_nothing(tiny, capsys):
    config = tiny("train.steps=3", "output.folder=done")
    list(flatout.train(config))
    before = {path: path.read_bytes() for path in Path("done").rglob("*") if path.is_file()}
    records = list(flatout.train(config, resume="auto"))
    assert [type(record) for record in records] == [RunInfo, EndRecord]
    capsys.readouterr()
    assert main(["train", "--resume", "done", "eval.every=2"]) == 0
    said = "done is finished already, at step 3; to make it longer, "
    assert capsys.readouterr().out.startswith(said)
    after = {path: path.read_bytes() for path in Path("done").rglob("*") if path.is_file()}
    assert after == before


def test_a_longer_run_goes_on_from_a_finished_one(tiny):
    list(flatout.train(tiny("train.steps=3", "output.folder=more")))
    records = list(flatout.train(tiny("train.steps=6", "output.folder=more", "speed.micro_batch=2"), resume="auto"))
    assert [r.step for r in records if isinstance(r, StepRecord)] == [4, 5, 6]
    told = [r.message for r in records if isinstance(r, NoticeRecord)]
    assert {"train.steps was 3, is now 6", "speed.micro_batch was null, is now 2"} <= set(told)


SHARE = "optim.warmup=0.7"  # of a run of another length it is another number of steps


@pytest.mark.parametrize("more", [["optim.warmup=0"], [SHARE], [SHARE, "optim.optimizer=muon"]])
def test_a_jump_of_the_rate_is_told_with_the_rates_of_both_steps(tiny, more):
    how = ("optim.schedule=linear", *more, "output.folder=jump")
    first = list(flatout.train(tiny("train.steps=6", *how), stop=stop_after(4)))
    then = list(flatout.train(tiny("train.steps=12", *how), resume="auto"))
    [*_, last], [following, *_] = ([r for r in records if isinstance(r, StepRecord)] for records in (first, then))
    [told] = [r.message for r in then if isinstance(r, NoticeRecord) and "the schedule was over" in r.message]
    assert f"{last.learning_rate:.2e} in step 4 to {following.learning_rate:.2e} in the next" in told


def test_a_run_cannot_be_resumed_to_fewer_steps_than_it_has(tiny):
    list(flatout.train(tiny("train.steps=6", "output.folder=run")))
    before = Path("run/config.yaml").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"at step 6 already, and train\.steps=4 ends it at step 4") as refused:
        list(flatout.train(tiny("train.steps=4", "output.folder=run"), resume="auto"))
    assert refused.value.hint == "set train.steps above 6, or start a new run without --resume"
    assert Path("run/config.yaml").read_text(encoding="utf-8") == before


def test_another_optimizers_state_is_refused_by_the_settings_that_changed(tiny):
    run = set_up(tiny("optim.betas=[0.8, 0.95]"))
    with run.batches(0) as loader:
        run.take_step(next(loader))
    saved = capture(run, Progress())
    renamed = {name.replace("exp_avg", "moment"): tensor for name, tensor in saved.optimizer.items()}
    with pytest.raises(
        CheckpointError, match=r"needs exp_avg.*\(optim\.betas was \[0\.8, 0\.95\], is now \[0\.9, 0\.95\]\)"
    ) as refused:
        restore(set_up(tiny("optim.betas=[0.9, 0.95]")), dataclasses.replace(saved, optimizer=renamed))
    assert "resume with 'optim.betas=[0.8, 0.95]'" in refused.value.hint


def test_a_path_resumes_with_the_stored_config(tiny):
    config = tiny("train.steps=6", "output.folder=stored", "model.dropout=0.1")
    list(flatout.train(config, stop=stop_after(2)))
    info, *_, end = flatout.train(resume="stored")
    assert info.config["model"]["dropout"] == 0.1
    assert (info.start_step, end.step) == (2, 6)


def test_going_back_to_an_older_checkpoint_sets_later_ones_aside(tiny):
    config = tiny("train.steps=6", "checkpoint.every=2", "checkpoint.keep=5", "output.folder=back")
    list(flatout.train(config))
    before = final_weights("back", 6)
    records = list(flatout.train(config, resume="back/checkpoints/step-00000002"))
    assert [r.step for r in records if isinstance(r, StepRecord)] == [3, 4, 5, 6]
    assert torch.equal(final_weights("back", 6), before)
    assert [row["step"] for row in read_metrics(Path("back/metrics.jsonl")) if row["type"] == "step"] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def final_weights(folder: str, step: int) -> torch.Tensor:
    return read_checkpoint(Path(folder) / "checkpoints" / f"step-{step:08d}").model["embedding.weight"]


def test_another_model_or_other_data_is_refused(tiny, tmp_path: Path):
    list(flatout.train(tiny("train.steps=2", "output.folder=mine")))
    with pytest.raises(CheckpointError, match=r"model\.layers 2") as refused:
        list(flatout.train(tiny("train.steps=4", "output.folder=mine", "model.layers=3"), resume="auto"))
    assert "`flatout train --resume mine` takes all settings from the run" in refused.value.hint
    assert "add model.layers=2, or" in refused.value.hint
    other = tmp_path / "other.txt"
    other.write_text("another text altogether. " * 200, encoding="utf-8")
    config = tiny("train.steps=4", "output.folder=mine", f"data.source={other}")
    with pytest.raises(
        CheckpointError, match=r"trained with data.source=.*lines.txt, this run has data.source=.*other.txt"
    ) as refused:
        list(flatout.train(config, resume="auto"))
    assert "add data.source=" in refused.value.hint
    gone = tiny("train.steps=4", "output.folder=mine", "data.source=null", "data.folder=nowhere")
    with pytest.raises(DataError, match="nowhere") as refused:
        list(flatout.train(gone, resume="auto"))
    assert "flatout train --resume mine" in refused.value.hint
    other.unlink()
    *_, end = flatout.train(resume="mine")
    assert end.step == 2, "the command that the hint names needs no more words"


def test_what_a_refused_resume_says_to_add_is_what_the_run_had(tiny):
    """All settings that differ are counted, and those that are shown are the run's."""
    mine = tiny("train.steps=1", "output.folder=mine")
    run = set_up(mine)
    saved = dataclasses.replace(capture(run, Progress()), config=run.plan.settings.config.model_dump(mode="json"))
    words = ("layers=3", "width=48", "heads=4", "context=32", "mlp_width=40", "bias=true", "logit_cap=9.0")
    words += ("head_size=14", "residual_scale=0.3", "norm_eps=0.1", "head_gate=true")
    other = tiny("train.steps=1", "output.folder=mine", *(f"model.{word}" for word in words)).config
    with pytest.raises(CheckpointError, match="the checkpoint has model") as refused:
        check_shape(other.model_dump(), saved, Path("mine"))
    (*_, shown) = ways_out(refused.value.hint)
    assert len(shown) == 8
    assert "and 3 more, or start a new run" in refused.value.hint
    for word in shown:
        path, _, value = word.partition("=")
        assert format_value(value_at(run.plan.settings.config, path)) == value
    assert len({word.partition("=")[0] for word in shown} & {f"model.{word.partition('=')[0]}" for word in words}) == 8


def test_another_number_of_threads_is_told_with_the_setting_that_was(tiny):
    run = set_up(tiny("speed.threads=1"))
    before = capture(run, Progress())
    before.state["threads"] = 3
    told = check_resumed(run, Origin(folder=Path("run"), asked=None, unusable=(), checkpoint=before))
    (line,) = [message for message in told if "CPU threads" in message]
    assert line.startswith("the run had 3 CPU threads and now has 1: ")
    assert ways_out(line) == [["speed.threads=3"]]


def test_settings_that_were_not_typed_again_are_told_with_the_command_that_needs_none(tiny):
    list(flatout.train(tiny("train.steps=2", "output.folder=its own", "optim.learning_rate=1e-3")))
    records = flatout.train(tiny("train.steps=3", "output.folder=its own"), resume="auto")
    told = [record.message for record in records if isinstance(record, NoticeRecord)]
    assert any(message.endswith("`flatout train --resume 'its own'`") for message in told)


def test_a_folder_with_a_run_is_never_overwritten(tiny: Callable[..., LoadedConfig]):
    list(flatout.train(tiny("train.steps=2", "output.folder=taken")))
    with pytest.raises(UsageError, match="already holds a run"):
        list(flatout.train(tiny("train.steps=2", "output.folder=taken")))
    for expected in ("runs/twice", "runs/twice+2", "runs/twice+3"):
        info = next(flatout.train(tiny("train.steps=2", "output.name=twice")))
        assert info.folder == expected
        list(flatout.train(tiny("train.steps=2", f"output.folder={expected}"), resume="auto"))


def test_a_second_process_is_refused(tiny):
    run = flatout.train(tiny("train.steps=2", "output.folder=locked"))
    next(run)
    with pytest.raises(UsageError, match="in use by another process"):
        next(flatout.train(tiny("train.steps=2", "output.folder=locked"), resume="auto"))
    with pytest.raises(CheckpointError, match=rf"being trained \(pid {os.getpid()} on .*\) and has no checkpoint yet"):
        next(flatout.train(resume="locked"))
    with pytest.raises(UsageError, match="in use by another process") as refused:
        next(flatout.train(tiny("train.steps=2"), resume="locked"))
    assert "output.folder" not in refused.value.hint, "it does not move a run that is resumed by its path"
    run.close()
    list(flatout.train(tiny("train.steps=2", "output.folder=locked"), resume="auto"))
    for word in ("output.folder=other", "output.name=other"):
        with pytest.raises(UsageError, match=f"{word} is not the run that is resumed, locked") as refused:
            next(flatout.train(flatout.stored_config("locked", [word]), resume="locked"))
        assert "model.init_from=locked" in refused.value.hint


def test_a_dead_run_without_a_checkpoint_is_not_said_to_be_running(tiny, tmp_path: Path):
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead/run.lock").write_bytes(b"run of flatout, held by pid 999999 on oldhost\n")
    for config in (tiny("train.steps=2"), None):  # with a config, the lock is held while checkpoints are looked for
        with pytest.raises(CheckpointError, match="dead holds no checkpoint"):
            next(flatout.train(config, resume=tmp_path / "dead"))


def test_a_run_that_stopped_early_stays_stopped_until_given_more_patience(tiny, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recovery, "evaluate", lambda *_: (3.0, 1))
    words = ["train.steps=60", "eval.every=2", "output.folder=early"]
    *_, end = flatout.train(tiny(*words, "eval.patience=2"))
    assert (end.reason, end.step) == ("early_stop", 6)
    *_, end = flatout.train(tiny(*words, "eval.patience=2"), resume="auto")
    assert (end.reason, end.step) == ("early_stop", 6)
    *_, end = flatout.train(tiny(*words, "eval.patience=5"), resume="auto")
    assert (end.reason, end.step) == ("early_stop", 12)


def test_patience_counts_from_the_evaluation_that_a_run_was_stopped_at(tiny, monkeypatch: pytest.MonkeyPatch):
    found = iter([5.0, 3.0, 4.0, 4.0, 4.0])
    monkeypatch.setattr(recovery, "evaluate", lambda *_: (next(found), 1))
    config = tiny("train.steps=10", "eval.every=2", "eval.patience=2", "checkpoint.every=2", "output.folder=waits")
    list(flatout.train(config, stop=stop_after(4)))
    *_, end = flatout.train(config, resume="auto")
    assert (end.reason, end.step) == ("early_stop", 8)


def test_going_back_twice_keeps_everything_and_points_to_the_right_best(tiny):
    saving = ["checkpoint.every=6", "checkpoint.keep=9"]
    config = tiny("train.steps=6", "eval.every=2", *saving, "output.folder=twice")
    list(flatout.train(config))
    for count in (1, 2):
        run = flatout.train(config, resume="twice/checkpoints/step-00000002")
        first = next(run)
        while not isinstance(first, RunInfo):
            first = next(run)
        assert read_best(Path("twice")) == 2, "a later best belongs to a future that is gone"
        list(run)
        assert len(list(Path("twice/checkpoints").glob("step-00000004.superseded*"))) == count
    assert read_best(Path("twice")) == 6


def test_a_refused_request_moves_nothing(tiny):
    list(flatout.train(tiny("train.steps=6", "checkpoint.every=2", "checkpoint.keep=9", "output.folder=still")))
    with pytest.raises(CheckpointError, match=r"model\.layers"):
        list(flatout.train(tiny("model.layers=3", "train.steps=6"), resume="still/checkpoints/step-00000002"))
    assert [step for step, _ in list_checkpoints(Path("still/checkpoints"))] == [2, 4, 6]


def test_a_damaged_checkpoint_is_not_set_aside_by_a_resume_that_is_refused(tiny):
    config = ["train.steps=4", "checkpoint.every=2", "output.folder=torn"]
    list(flatout.train(tiny(*config)))
    (Path("torn/checkpoints/step-00000004") / "state.json").write_text("{}")
    before = sorted(Path("torn").rglob("*"))
    with pytest.raises(ConfigError, match="at step 2 already"):
        list(flatout.train(tiny(*config, "train.steps=1"), resume="auto"))
    with pytest.raises(CheckpointError) as refused:
        list(flatout.train(tiny(*config, "model.layers=3"), resume="auto"))
    assert "--resume torn/checkpoints/step-00000002` takes all settings" in refused.value.hint, "not the damaged one"
    assert sorted(Path("torn").rglob("*")) == before
    told = next(flatout.train(tiny(*config), resume="auto"))
    assert "step 4 is damaged and was set aside as step-00000004.damaged" in told.message


def test_a_run_without_a_good_checkpoint_is_never_started_over(tiny):
    config = tiny("train.steps=4", "output.folder=lost")
    list(flatout.train(config))
    (Path("lost/checkpoints/step-00000004") / "state.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="no good checkpoint is left"):
            list(flatout.train(config, resume="auto"))


def test_a_failed_start_leaves_no_run_behind(tiny):
    list(flatout.train(tiny("train.steps=2", "output.name=named")))
    with pytest.raises(DataError):
        list(flatout.train(tiny("data.source=missing.txt", "output.name=named")))
    assert [path.name for path in Path("runs").iterdir()] == ["named"]
    info = next(flatout.train(tiny("train.steps=4", "output.name=named"), resume="auto"))
    assert info.message.startswith("train.steps was 2")


def test_a_resumed_run_does_not_need_the_weights_it_started_from(tiny):
    shape = ["model.family=gpt2", "model.mlp=gelu", "train.steps=4"]
    list(flatout.train(tiny(*shape, "output.folder=first")))
    flatout.export("first", "weights")
    config = tiny(*shape, "model.init_from=weights", "output.folder=second")
    list(flatout.train(config, stop=stop_after(2)))
    shutil.rmtree("weights")
    *_, end = flatout.train(config, resume="auto")
    assert end.step == 4
