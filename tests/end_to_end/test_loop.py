"""What a run does, seen through its records and files."""

import functools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flatout
from flatout.checkpoints.checkpoint import list_checkpoints
from flatout.config.load import load_config
from flatout.config.schema import ModelConfig
from flatout.data import pack
from flatout.data.tokenizer import CharTokenizer
from flatout.device import Device, detect_device
from flatout.engine import recovery, saving
from flatout.engine.state import Progress, capture
from flatout.errors import DataError, DivergedError, DoesNotFitError, HardwareError, ResourceError, UserError
from flatout.model.count import estimate_memory
from flatout.model.execution import Execution
from flatout.model.gpt import GPT
from flatout.observe.sinks import read_metrics
from flatout.records import (
    CheckpointRecord,
    EndRecord,
    EpochRecord,
    EvalRecord,
    NoticeRecord,
    RunInfo,
    SampleRecord,
    StepRecord,
)
from flatout.resolve import fit_check
from flatout.resolve.memory import checkpoint_size
from flatout.resolve.opening import DataSource
from tests.conftest import TINY
from tests.set_up import set_up


def of(records: list, kind: type) -> list:
    return [record for record in records if isinstance(record, kind)]


def test_intervals_that_are_never_reached_are_told(tiny):
    def told(*words: str) -> str:
        notices = set_up(tiny("train.steps=6", *words)).notices
        return " ".join(notice for notice in notices if "reached" in notice)

    assert told("eval.every=50") == "eval.every 50 is never reached in 6 steps: only the end is evaluated"
    assert "only the end is saved" in told("checkpoint.every=50")
    assert "only the end and each best so far are saved" in told("checkpoint.every=50", "eval.every=3")
    words = [f"data.source={tiny().config.data.source}", "train.steps=6", *TINY]
    preset = load_config("shakespeare-char", [word for word in words if ".every=" not in word])
    assert preset.config.checkpoint.steps > 6
    (saving,) = [notice for notice in set_up(preset).notices if "reached" in notice]
    assert saving.startswith("checkpoint.every 350 is never reached in 6 steps"), (
        "a preset's; of its eval.every nothing"
    )


def test_it_learns_and_says_so(tiny):
    records = list(flatout.train(tiny("train.steps=120", "eval.every=60", "optim.learning_rate=1e-2")))
    assert isinstance(records[0], RunInfo)
    assert isinstance(records[-1], EndRecord)
    steps, evals = of(records, StepRecord), of(records, EvalRecord)
    assert [record.step for record in steps] == list(range(1, 121))
    assert steps[0].loss == pytest.approx(math.log(records[0].vocab), abs=0.2)
    assert evals[-1].loss < evals[0].loss < 1.0
    assert evals[-1].perplexity == pytest.approx(math.exp(evals[-1].loss))
    assert evals[-1].bits_per_byte == pytest.approx(evals[-1].loss / math.log(2), rel=0.01), (
        "a byte is a character here"
    )
    assert of(records, SampleRecord)[-1].text
    assert read_metrics(Path(records[0].folder) / "metrics.jsonl")[-1]["type"] == "end"


SWITCHES = [
    "speed.micro_batch=1",
    "speed.accumulation=2",
    "speed.loader=device",
    "speed.workers=0",
    "speed.workers=3",
    "speed.checkpointing=full",
    "speed.attention=reference",
    "speed.pad_vocab=1",
    "speed.fused_optimizer=off",
]


def test_loss_and_weights_do_not_depend_on_micro_batch_loader_or_workers(tiny):
    def run(*words: str) -> list[float]:
        return [r.loss for r in of(list(flatout.train(tiny("train.steps=4", *words))), StepRecord)]

    expected = run()
    for word in SWITCHES:
        assert run(word) == pytest.approx(expected, rel=2e-5), word


def test_epoch_ends_are_reported_and_evaluated(tiny):
    records = list(flatout.train(tiny("train.epochs=2", "eval.every=1 epoch", "train.batch_tokens=512")))
    info, epochs = records[0], of(records, EpochRecord)
    assert [epoch.epoch for epoch in epochs] == [1, 2]
    assert info.windows is not None
    assert epochs[0].step == math.ceil(info.windows * info.context / info.batch_tokens)
    assert epochs[0].mean_loss == pytest.approx(
        sum(r.loss for r in of(records, StepRecord)[: epochs[0].step]) / epochs[0].step
    )
    assert [record.step for record in of(records, EvalRecord)] == [epoch.step for epoch in epochs]
    for before, epoch in zip((0, epochs[0].step), epochs, strict=True):
        tokens = (epoch.step - before) * info.batch_tokens
        assert epoch.tokens_per_second * epoch.seconds == pytest.approx(tokens)
        assert epoch.windows_per_second * epoch.seconds == pytest.approx(tokens / info.context)


def test_checkpoints_at_the_ends_of_every_second_epoch(tiny):
    words = ("train.epochs=3", "train.batch_tokens=2048", "eval.every=0")
    records = list(flatout.train(tiny(*words, "checkpoint.every=2 epochs", "eval.sample_tokens=0")))
    ends = [epoch.step for epoch in of(records, EpochRecord)]
    assert [record.step for record in of(records, CheckpointRecord)] == [ends[1], ends[2]]


def test_a_warm_up_in_epochs_or_as_a_share_ends_where_it_says(tiny):
    words = ("train.epochs=2", "train.batch_tokens=1024", "optim.schedule=constant", "eval.sample_tokens=0")
    for warmup in ("1 epoch", "0.5"):
        records = list(flatout.train(tiny(*words, f"optim.warmup={warmup}")))
        rates = [record.learning_rate for record in of(records, StepRecord)]
        end = of(records, EpochRecord)[0].step if "epoch" in warmup else round(0.5 * len(rates))
        assert rates == sorted(rates)
        assert rates[end - 2] < rates[end - 1] == rates[-1], warmup


def test_samples_are_greedy_at_temperature_0(tiny, monkeypatch):
    seen = []
    plain = saving.generate_tokens
    monkeypatch.setattr(
        saving, "generate_tokens", lambda *a, **how: seen.append(how["sampling"].temperature) or plain(*a, **how)
    )
    list(flatout.train(tiny("train.steps=1", "eval.sample_tokens=3", "eval.sample_temperature=0")))
    assert seen == [0.0]


@pytest.mark.parametrize("mode", ["default", "regional"])
def test_a_compiler_that_fails_in_the_first_step_is_left_out(tiny, monkeypatch, mode):
    def fails(*_: object) -> None:
        raise ValueError("no such luck")

    real = torch.compile
    trial = "<lambda>"  # by which it is found out whether there is a compiler at all
    compiled = lambda f, **how: f if f.__name__ == trial else real(f, backend=fails, dynamic=False)  # noqa: E731
    monkeypatch.setattr(torch, "compile", compiled)
    words = ("train.steps=2", "eval.sample_tokens=3", "model.dropout=0.1")
    plain = list(flatout.train(tiny(*words, "speed.compile=off")))
    records = list(flatout.train(tiny(*words, f"speed.compile={mode}", "output.name=other")))
    told = [record.message for record in of(records, NoticeRecord) if "compile became off" in record.message]
    assert len(told) == 1
    assert "no such luck" in told[0]
    assert [step.loss for step in of(records, StepRecord)] == [step.loss for step in of(plain, StepRecord)]


@pytest.mark.parametrize(("mode", "minutes"), [("default", False), ("regional", True)])
def test_a_compiler_that_fails_in_evaluation_is_left_out(tiny, monkeypatch, mode, minutes):
    """A signal to the whole process group ends the compilers, too: then the run stops as it was asked to."""

    def fails(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        if torch.is_grad_enabled():
            return graph
        failed.append(True)
        raise ValueError("no such luck")

    failed: list[bool] = []
    real = torch.compile
    compiled = lambda f, **how: f if f.__name__ == "<lambda>" else real(f, backend=fails, dynamic=False)  # noqa: E731
    monkeypatch.setattr(torch, "compile", compiled)
    words = ["model.layers=1", "eval.sample_tokens=0", "eval.every=2", "checkpoint.every=0"]
    if minutes:  # evaluation is timed before the first step
        words += ["train.minutes=0.01", "optim.schedule=wsd", "optim.decay_fraction=0.6"]
    words += [] if minutes else ["train.steps=9"]
    records = list(flatout.train(tiny(*words, f"speed.compile={mode}"), stop=lambda: bool(failed) and not minutes))
    told = [record.message for record in of(records, NoticeRecord) if "compile became off" in record.message]
    assert len(told) == 1
    assert "no such luck" in told[0]
    end = records[-1]
    assert end.checkpoint is not None
    assert end.reason == ("finished" if minutes else "interrupted")
    if not minutes:
        assert end.step == 3
        plain = list(flatout.train(tiny(*words, "speed.compile=off", "output.name=plain")))
        for kind in (StepRecord, EvalRecord):
            expected = [record.loss for record in of(plain, kind) if record.step <= 3]
            assert [record.loss for record in of(records, kind)] == pytest.approx(expected, abs=1e-6)


def test_samples_come_where_nothing_else_is_due(tiny):
    words = ("train.steps=5", "eval.every=0", "checkpoint.every=0", "eval.sample_every=2", "eval.sample_tokens=3")
    records = list(flatout.train(tiny(*words)))
    assert [record.step for record in of(records, SampleRecord)] == [2, 4, 5]


def test_early_stopping_keeps_the_best(tiny, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recovery, "evaluate", lambda *_: (3.0, 1))
    records = list(flatout.train(tiny("train.steps=400", "eval.every=2", "eval.patience=3", "checkpoint.keep=1")))
    assert records[-1].reason == "early_stop"
    assert len(of(records, EvalRecord)) == 4, "the first one counts; an equal loss is no improvement"
    best = records[-1].best_step
    kept = [step for step, _ in list_checkpoints(Path(records[0].folder) / "checkpoints")]
    assert set(kept) == {best, records[-1].step}
    assert json.loads((Path(records[0].folder) / "best.json").read_text())["step"] == best


@pytest.mark.parametrize(("words", "saved"), [([], [6]), (["eval.patience=9"], [2, 4, 6])])
def test_without_an_interval_only_the_end_is_saved_unless_the_run_may_stop_early(tiny, monkeypatch, words, saved):
    found = iter([3.0, 2.0, 1.0])
    monkeypatch.setattr(recovery, "evaluate", lambda *_: (next(found), 1))
    records = list(flatout.train(tiny("train.steps=6", "eval.every=2", "checkpoint.every=0", *words)))
    assert [record.step for record in of(records, CheckpointRecord)] == saved


def test_checkpoints_follow_the_plan(tiny):
    records = list(flatout.train(tiny("train.steps=10", "checkpoint.every=3", "checkpoint.keep=2")))
    assert [record.step for record in of(records, CheckpointRecord)] == [3, 6, 9, 10]
    assert [step for step, _ in list_checkpoints(Path(records[0].folder) / "checkpoints")] == [9, 10]


def test_three_bad_steps_in_a_row_end_the_run_before_harm(tiny, monkeypatch: pytest.MonkeyPatch):
    real, calls = GPT.forward, 0

    def poisoned(self: GPT, *args) -> torch.Tensor:
        nonlocal calls
        calls += self.training
        return real(self, *args) * (float("nan") if calls in (3, 6, 7, 8) and self.training else 1.0)

    monkeypatch.setattr(GPT, "forward", poisoned)
    records = []
    run = flatout.train(tiny("train.steps=20", "checkpoint.every=5", "output.folder=bad"))
    with pytest.raises(DivergedError, match=r"step 8: batch 7 of seed 1337") as caught:
        records.extend(run)
    assert caught.value.exit_code == 4
    assert [r.step for r in of(records, StepRecord) if not r.applied] == [3, 6, 7, 8]
    assert len(of(records, NoticeRecord)) >= 4
    rows = [row for row in read_metrics(Path("bad/metrics.jsonl")) if row["type"] == "step"]
    assert [row["loss"] for row in rows if not row["applied"]] == ["nan"] * 4, "a NaN is shown, never filtered away"
    assert [step for step, _ in list_checkpoints(Path("bad/checkpoints"))] == [5]


def test_a_switch_the_user_wrote_is_refused_where_it_cannot_work(tiny):
    with pytest.raises(HardwareError, match=r"speed\.precision is fp16"):
        next(flatout.train(tiny("speed.precision=fp16")))
    if not torch.cuda.is_available():
        with pytest.raises(HardwareError, match="no CUDA device"):
            next(flatout.train(tiny("speed.device=cuda")))


def test_a_switch_from_a_preset_falls_back_with_a_reason(tiny):
    loaded = tiny("train.steps=1", "speed.precision=fp16")
    as_preset = {**loaded.sources, "speed.precision": loaded.sources["speed.attention"]}
    info = next(flatout.train(type(loaded)(loaded.config, as_preset)))
    feature = {f.name: f for f in info.features}["precision"]
    assert (feature.asked, feature.used) == ("fp16", "fp32")
    assert feature.why


@pytest.mark.usefixtures("bf16_products")
def test_training_goes_on_in_bf16_on_a_cpu(tiny):
    plain = of(list(flatout.train(tiny("train.steps=8"))), StepRecord)
    half = of(list(flatout.train(tiny("train.steps=8", "speed.precision=bf16"))), StepRecord)
    assert [r.loss for r in half] == pytest.approx([r.loss for r in plain], abs=0.05)


def test_label_smoothing_is_for_training_only(tiny):
    plain = list(flatout.train(tiny("train.steps=1", "optim.learning_rate=1e-9")))
    smooth = list(flatout.train(tiny("train.steps=1", "optim.learning_rate=1e-9", "train.label_smoothing=0.3")))
    assert of(plain, EvalRecord)[0].loss == pytest.approx(of(smooth, EvalRecord)[0].loss, abs=1e-6)
    assert of(plain, StepRecord)[0].loss != of(smooth, StepRecord)[0].loss


def test_shards_of_other_settings_are_not_trained_on(tiny):
    next(flatout.train(tiny("data.folder=shards", "output.folder=a")))
    with pytest.raises(DataError, match="was prepared with tokenizer 'char', the config says 'bytes'"):
        next(flatout.train(tiny("data.folder=shards", "data.tokenizer=bytes", "output.folder=b")))


def test_shards_of_a_text_that_has_changed_are_not_trained_on(tiny, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("a text that will grow. " * 100, encoding="utf-8")
    next(flatout.train(tiny(f"data.source={text}", "output.folder=a")))
    text.write_text("a text that has grown. " * 120, encoding="utf-8")
    with pytest.raises(DataError, match=r"from 2,300 bytes of text, .* now has 2,760"):
        next(flatout.train(tiny(f"data.source={text}", "output.folder=b")))
    text.unlink()
    next(flatout.train(tiny(f"data.source={text}", "output.folder=c")))


def test_a_text_that_is_too_short_leaves_no_shards_behind(tiny, tmp_path: Path):
    text = tmp_path / "short.txt"
    text.write_text("too short", encoding="utf-8")
    with pytest.raises(DataError, match="needs at least"):
        next(flatout.train(tiny(f"data.source={text}", "data.folder=new/shards", "output.folder=a")))
    assert not Path("new").exists()
    Path("empty").mkdir()
    Path("link").symlink_to("empty")
    for folder in ("empty", "link"):
        with pytest.raises(DataError, match="needs at least"):
            next(flatout.train(tiny(f"data.source={text}", f"data.folder={folder}", "output.folder=a")))
        assert not list(Path("empty").iterdir())
    assert Path("link").is_symlink()
    words = [f"data.source={text}", "data.tokenizer=char", "data.folder=new/shards", "output.folder=a"]
    for more in ([], ["train.minutes=0.1"]):  # whose size is settled with the data at hand
        with pytest.raises(DataError, match="needs at least"):
            next(flatout.train(load_config("record", [*words, *more])))
        assert not Path("new").exists()
    flatout.prepare(tiny(f"data.source={text}", "data.folder=kept"))
    with pytest.raises(DataError, match="needs at least"):
        next(flatout.train(tiny(f"data.source={text}", "data.folder=kept", "output.folder=a")))
    assert Path("kept/manifest.json").exists(), "it was there before"


def test_a_dataset_without_a_broken_record_stays_and_is_trained_on_when_asked_again(tiny, tmp_path: Path):
    rows = [json.dumps({"text": "the old fox over the moon. " * 20}) for _ in range(40)]
    Path("rows.jsonl").write_text("\n".join([*rows, '{"text": ']), encoding="utf-8")
    plain = tiny(f"data.source={tmp_path}/rows.jsonl", "data.folder=a", "output.folder=run-a", "train.steps=1")
    words = [f"data.source={tmp_path}/rows.jsonl", "data.folder=b", "data.tokenizer=char", "output.folder=run-b"]
    sized = load_config("modern", [*words, "model.context=64", "train.steps=1", "eval.tokens=512"], size="2x32")
    for folder, config in (("a", plain), ("b", sized)):
        with pytest.raises(DataError, match="1 of 41 records could not be used"):
            list(flatout.train(config))
        assert Path(folder, "problems.jsonl").exists()
        assert of(list(flatout.train(config)), EvalRecord)


def test_a_short_context_is_enough_for_a_size_that_is_chosen(tiny, tmp_path: Path):
    text = tmp_path / "short.txt"
    text.write_text("the old fox over the moon. " * 9, encoding="utf-8")
    tiny()
    words = [f"data.source={text}", "data.tokenizer=char", "train.minutes=0.1", "model.context=64"]
    assert DataSource(load_config("record", words), detect_device("cpu")).known().unique == 218


def test_init_from_starts_at_the_given_weights(tiny, tmp_path: Path):
    shape = ["model.family=gpt2", "model.mlp=gelu"]
    records = list(flatout.train(tiny(*shape, "train.steps=30", "optim.learning_rate=1e-2", "output.folder=first")))
    flatout.export("first", "exported")
    loss = of(records, EvalRecord)[-1].loss
    again = list(flatout.train(tiny(*shape, "train.steps=1", "model.init_from=exported", "optim.learning_rate=1e-9")))
    assert of(again, EvalRecord)[-1].loss == pytest.approx(loss, abs=1e-4)
    with pytest.raises(UserError, match="layers, width, heads"):
        next(flatout.train(tiny(*shape, "model.layers=3", "model.init_from=exported")))


def test_api_evaluate_equals_the_runs_own_evaluation(tiny):
    records = list(flatout.train(tiny("train.steps=20", "output.folder=run")))
    result = flatout.evaluate("run", tokens=512)
    assert result.loss == pytest.approx(of(records, EvalRecord)[-1].loss, abs=1e-5)
    assert flatout.evaluate("run").tokens > 512


def test_api_generates_text_in_pieces_that_join(tiny):
    list(flatout.train(tiny("train.steps=20", "output.folder=run")))
    model = flatout.load_model("run")
    pieces = list(flatout.generate(model, "the ", tokens=30, seed=4))
    assert len(pieces) > 1
    assert "".join(pieces) == "".join(flatout.generate("run", "the ", tokens=30, seed=4))
    with pytest.raises(DataError, match="Q"):
        list(flatout.generate(model, "Q"))


def test_a_nan_evaluation_is_never_the_best(tiny, monkeypatch: pytest.MonkeyPatch):
    real, calls = recovery.evaluate, 0

    def first_is_nan(*args) -> tuple[float, int]:
        nonlocal calls
        calls += 1
        loss, tokens = real(*args)
        return (math.nan if calls == 1 else loss), tokens

    monkeypatch.setattr(recovery, "evaluate", first_is_nan)
    evals = of(list(flatout.train(tiny("train.steps=6", "eval.every=2"))), EvalRecord)
    assert [record.best for record in evals] == [False, True, True]


def test_a_step_that_cannot_fit_is_refused_before_it_is_tried():
    # What one of the guides recommends for a card with 24 GB.
    model = ModelConfig(layers=24, width=1024, heads=16, context=512)
    need = estimate_memory(model, 50257, micro_batch=256, half=True, compiled=True, execution=Execution())
    card = Device(torch_device=torch.device("cuda", 0), name="a card", memory_bytes=24 * 2**30, capability=(8, 9))
    with pytest.raises(DoesNotFitError, match="GiB, a card has 24") as refused:
        fit_check.check_fits(need, card)
    assert refused.value.exit_code == 5
    fit_check.check_fits(
        estimate_memory(model, 50257, micro_batch=8, half=True, compiled=True, execution=Execution()), card
    )


def test_a_run_whose_checkpoints_cannot_lie_on_the_disk_is_refused(tiny, monkeypatch: pytest.MonkeyPatch):
    """Those that are kept, the best one, and the one that is being written."""
    run = set_up(tiny())
    one = checkpoint_size(run.trained.count, run.plan.model, run.plan.optim, run.speed)
    for free, refused in ((5 * one - 1, True), (5 * one, False)):
        monkeypatch.setattr(fit_check.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        records = flatout.train(tiny("checkpoint.keep=3", "output.folder=run", "train.steps=1"))
        if refused:
            with pytest.raises(ResourceError, match="free, 5 checkpoints need"):
                next(iter(records))
            assert not Path("run").exists()
        else:
            next(iter(records))


@pytest.mark.parametrize(
    ("more", "share"),
    [
        (["speed.micro_batch=4"], 4),
        ([], 4),
        (["speed.accumulation=1"], 4),
        (["speed.micro_batch=2", "speed.accumulation=2"], 2),
    ],
)
def test_what_is_said_to_fit_does(tiny, more: list[str], share: int, monkeypatch: pytest.MonkeyPatch):
    words = ["model.context=512", "train.batch_tokens=2048", *more]
    run = set_up(tiny(*words))
    begun, memory = capture(run, Progress()), run.plan.memory.total // share
    small = Device(torch_device=torch.device("cpu"), name="a small card", memory_bytes=memory, capability=None)
    monkeypatch.setattr("flatout.resolve.resolve.detect_device", lambda asked, local: small)
    with pytest.raises(DoesNotFitError, match="a small card has") as refused:
        set_up(tiny(*words))
    ways = re.findall(r"(?:fits: |or )(\S+=[^(]+) \(", refused.value.hint)
    assert len(ways) == 2
    assert ways[1].startswith("model.context=")
    for way in ways:
        needs = set_up(tiny(*words, *way.split())).plan.memory.total
        assert needs <= fit_check.ROOM * memory, "with room to spare"
        assert f"{way} (about {needs / 2**20:.0f} MiB)" in refused.value.hint
    with pytest.raises(DoesNotFitError) as refused:
        set_up(tiny(*words), resumed=begun)
    assert "model.context" not in refused.value.hint, "a run that goes on keeps its context"


def test_evaluating_on_data_that_has_changed_is_refused(tiny, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("one thing after another. " * 200, encoding="utf-8")
    config = tiny(f"data.source={text}", "data.tokenizer=bytes", "train.steps=2", "output.folder=run")
    list(flatout.train(config))
    text.write_text("another thing after one. " * 200, encoding="utf-8")
    flatout.prepare(config, overwrite=True)
    with pytest.raises(DataError, match="no longer what"):
        flatout.evaluate("run")
    assert flatout.evaluate("run", data="data/text-bytes").loss > 0


def test_a_validation_split_without_a_target_is_told_before_training(tiny, tmp_path: Path, monkeypatch):
    """With a tokenizer that ends no document: an end of text would be the target."""
    monkeypatch.setattr(pack, "CharTokenizer", functools.partial(CharTokenizer, ends=False))
    text = tmp_path / "text.txt"
    text.write_text("abcdefghij" * 20, encoding="utf-8")
    with pytest.raises(DataError, match="val split"):
        next(flatout.train(tiny(f"data.source={text}", "data.validation=0.005")))
