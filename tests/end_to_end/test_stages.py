"""A run whose table has three stages: batch, length and window change, and a resume anywhere is bit-identical."""

from pathlib import Path

import pytest
import torch

import flatout
from flatout.checkpoints.checkpoint import list_checkpoints, read_checkpoint
from flatout.data.batch import Schedule, Stage
from flatout.engine.graphs import MicroBatchGraph
from flatout.engine.loop import warm_up
from flatout.engine.run import Run
from flatout.errors import ConfigError
from flatout.front import training
from flatout.model.count import flops_per_token
from flatout.records import EpochRecord, EvalRecord, RunInfo, StepRecord
from tests.set_up import set_up
from tests.unit.test_graphs import FakeRecorder

WORDS = ("train.steps=9", "model.pattern=AW", "model.window=8", "eval.every=3", "eval.tokens=64")


def staged(run, context: int):
    half = context // 2
    stages = (Stage(0, 4, half, attention_window=4), Stage(3, 8, half), Stage(6, 4, context))
    return run.replanned(schedule=Schedule(stages, context))


@pytest.fixture
def in_stages(monkeypatch: pytest.MonkeyPatch):
    def build(plan, *given, **more):
        run = Run(plan, *given, **more)
        return staged(run, run.plan.model.context)

    monkeypatch.setattr(training, "Run", build)


def losses(records) -> dict[int, float]:
    return {record.step: record.loss for record in records if isinstance(record, StepRecord)}


@pytest.mark.parametrize("documents", ["joined", "apart"])
def test_a_run_in_stages_resumes_bit_identically_at_every_edge(tiny, in_stages, documents: str):
    words = [*WORDS, f"data.documents={documents}"]
    whole = list(flatout.train(tiny(*words, "output.folder=whole")))
    context = tiny().config.model.context
    tokens = [record.tokens for record in whole if isinstance(record, StepRecord)]
    if documents == "joined":
        assert [after - before for before, after in zip([0, *tokens], tokens, strict=False)] == [
            count * context for count in (2, 2, 2, 4, 4, 4, 4, 4, 4)
        ]
    for edge in (2, 3, 4, 6) if documents == "joined" else (3, 6):
        folder = Path(f"cut{edge}")
        stops = iter([False] * (edge - 1) + [True])
        list(flatout.train(tiny(*words, f"output.folder={folder}"), stop=lambda stops=stops: next(stops)))
        rest = list(flatout.train(tiny(*words, f"output.folder={folder}"), resume="auto"))
        assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > edge}
        one, other = (
            read_checkpoint(dict(list_checkpoints(path / "checkpoints"))[9]) for path in (Path("whole"), folder)
        )
        assert all(torch.equal(one.model[name], other.model[name]) for name in one.model)


def test_epochs_are_counted_in_windows_and_evaluation_has_full_length(tiny, in_stages):
    Path("short.txt").write_text("the sly fox over the moon.\n" * 60, encoding="utf-8")
    words = ["data.source=short.txt", "train.steps=30", "model.pattern=AW", "model.window=8", "eval.every=1 epoch"]
    loaded = tiny(*words, "output.folder=run")
    run = staged(set_up(loaded), loaded.config.model.context)
    windows = run.data.facts.windows
    assert windows is not None
    records = list(flatout.train(loaded))
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [record.epoch for record in steps] == [run.plan.schedule.at(step).start / windows for step in range(1, 31)]
    assert 1 < (steps[-1].epoch or 0) < 2
    ends = [record.step for record in records if isinstance(record, EpochRecord)]
    assert ends == [run.plan.schedule.steps_until(windows)]
    assert {batch.tokens.shape[1] for batch in run.evaluation()} == {loaded.config.model.context}
    assert [record for record in records if isinstance(record, EvalRecord)]


def test_recordings_of_all_stages_live_side_by_side(tiny):
    plain, run = (staged(set_up(tiny(*WORDS, "speed.micro_batch=2")), 16) for _ in range(2))
    graph = recorded(run)
    with plain.batches(0) as left, run.batches(0) as right:
        for one, other in zip(left, right, strict=True):
            assert torch.equal(plain.take_step(one), run.take_step(other)), one.step
    assert graph.recordings.keys() == {
        ((4, 8), None, 4), ((4, 8), None, None), ((2, 16), None, None),
    }  # fmt: skip
    assert run.new_notices.take() == []


def recorded(run) -> MicroBatchGraph:
    """Gives a run recordings without a GPU."""
    graph = MicroBatchGraph(run.model, run.new_notices, FakeRecorder())
    run.step.graph, run.step.keep_gradients = graph, True
    return graph


@pytest.mark.parametrize("documents", ["joined", "apart"])
def test_stages_are_recorded_before_the_first_step_and_nothing_is_learned_from_it(tiny, documents: str):
    # Attention within a window has no dropout, so one of the two cases has windows, and the other dropout.
    more = ["model.dropout=0.1", "train.steps=9"] if documents == "joined" else [*WORDS, "data.documents=apart"]
    plain, run = (staged(set_up(tiny(*more, "speed.micro_batch=2")), 16) for _ in range(2))
    recorded(plain)
    graph = recorded(run)
    before = {name: tensor.clone() for name, tensor in run.random.tensors().items()}
    assert "3 forms of micro-batches warmed up" in (warm_up(run, 0) or "")
    assert all(torch.equal(state, before[name]) for name, state in run.random.tensors().items())
    assert len(graph.recordings) == 3
    count = graph.recorder.recordings
    with plain.batches(0) as left, run.batches(0) as right:
        for one, other in zip(left, right, strict=True):
            assert torch.equal(plain.take_step(one), run.take_step(other)), one.step
    assert documents == "apart" or graph.recorder.recordings == count, "nothing is left to be recorded"
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), run.model.parameters(), strict=True))
    assert warm_up(run, 6) is None, "the last stage is like a run without stages"


def test_a_warm_up_records_for_8_bit_scales_and_leaves_them_unknown(tiny, monkeypatch: pytest.MonkeyPatch):
    class Scales:
        scale, rounding = torch.zeros(3), False

    class Narrow:
        scales = Scales()

        def tensors(self):
            return {"fp8.scales": self.scales.scale}

        def update_scales(self) -> None:
            self.scales.scale.fill_(4.0)
            self.scales.rounding = True

        def assign(self, tensors) -> None:
            self.scales.scale.copy_(tensors["fp8.scales"])
            self.scales.rounding = bool((self.scales.scale > 0).all())

    run = staged(set_up(tiny(*WORDS)), 16)
    graph = recorded(run)
    monkeypatch.setattr(run.model, "narrow", Narrow())
    monkeypatch.setattr(run.model, "prepare", lambda: "rounding" if Narrow.scales.rounding else False)
    assert warm_up(run, 0)
    assert (Narrow.scales.rounding, Narrow.scales.scale.tolist()) == (False, [0.0] * 3)
    made = dict(graph.recordings)
    assert len(made) == 3
    with run.batches(0) as loader:
        run.take_step(next(loader))  # measures, and is not recorded
        assert graph.recordings == made
        Narrow.scales.rounding = True
        run.take_step(next(loader))
        assert graph.recordings == made, "what was recorded serves the steps that round"


def test_a_warm_up_without_memory_leaves_it_to_the_step(tiny, monkeypatch: pytest.MonkeyPatch):
    run = staged(set_up(tiny(*WORDS)), 16)
    recorded(run)

    def lacking(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(run.step, "forward_backward", lacking)
    assert warm_up(run, 0) == "the warm-up of stages ended early: CUDA out of memory. Tried to allocate 2 GiB"
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_the_window_of_a_pass_changes_what_is_seen(tiny):
    run = set_up(tiny("model.pattern=AW", "model.window=8", "model.zero_init=false"))
    with run.batches(0) as loader:
        batch = next(loader)
    with torch.no_grad():
        found = [run.model(batch.tokens, batch.targets, window=window).item() for window in (None, 2, None)]
    assert found[0] == found[2] != found[1]


def test_another_batch_size_after_a_resume_goes_on_where_reading_stopped(tiny):
    words = ["train.steps=6", "output.folder=run", "checkpoint.every=3"]
    list(flatout.train(tiny(*words, "train.batch_tokens=128"), stop=iter([False, False, True, True]).__next__))
    records = list(flatout.train(tiny(*words, "train.batch_tokens=256"), resume="auto"))
    context = tiny().config.model.context
    first = next(record for record in records if isinstance(record, StepRecord))
    info = records[next(index for index, record in enumerate(records) if hasattr(record, "windows"))]
    assert first.epoch == (3 * 128 + 256) / context / info.windows


def test_epochs_end_where_they_end_whatever_the_batch_size_was(tiny):
    words = ["train.steps=null", "train.epochs=1", "output.folder=run"]
    stopping = iter([False] * 4 + [True]).__next__
    begun = list(flatout.train(tiny(*words, "train.batch_tokens=128"), stop=stopping))
    records = list(flatout.train(tiny(*words, "train.batch_tokens=256"), resume="auto"))
    context = tiny().config.model.context
    windows = next(record.windows for record in begun if isinstance(record, RunInfo))
    left = -(-(windows - 5 * 128 // context) // (256 // context))
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [record.step for record in steps] == list(range(6, 6 + left))
    before, last = (record.epoch for record in steps[-2:])
    assert before is not None
    assert last is not None
    assert before < 1 <= last
    assert [record.epoch for record in records if isinstance(record, EpochRecord)] == [1]
    assert steps[-1].learning_rate < 0.2 * max(record.learning_rate for record in steps), "the schedule ends there, too"
    with pytest.raises(ConfigError, match=r"at step \d+ already, and train.epochs=0.5 ends it at step") as refused:
        list(flatout.train(tiny(*words, "train.epochs=0.5", "train.batch_tokens=256"), resume="auto"))
    assert "raise train.epochs" in refused.value.hint


STAGES = ("train.batch_tokens=64", "train.batch_stages=[32, 64, 96]", "train.length_stages=[8, 8, 16]",
          "train.window_stages=[4, 6, 8]", "model.pattern=AW", "model.window=8", "optim.warmup=2")  # fmt: skip


@pytest.mark.parametrize("length", ["train.steps=11", "train.tokens=576", "train.epochs=0.02"])
def test_a_config_asks_for_stages_of_equal_tokens(tiny, length: str):
    words = [*STAGES, "train.steps=null", length, "optim.schedule=constant", "output.folder=run"]
    whole = list(flatout.train(tiny(*words)))
    info, steps = whole[0], [record for record in whole if isinstance(record, StepRecord)]
    tokens = [after.tokens - before for before, after in zip([0, *(s.tokens for s in steps)], steps, strict=False)]
    assert tokens == sorted(tokens)
    shares = [sum(size for size in tokens if size == kind) for kind in (32, 64, 96)]
    assert max(shares) - min(shares) < 96
    assert info.steps * info.batch_tokens == pytest.approx(sum(tokens), rel=0.02)
    peak = tiny().config.optim.learning_rate
    assert [record.learning_rate for record in steps[2:]] == pytest.approx(
        [peak * (size / 64) ** 0.5 for size in tokens[2:]]
    )
    middle = tokens.index(64) + 1
    stops = iter([False] * (middle - 1) + [True])
    words[words.index("output.folder=run")] = "output.folder=cut"
    list(flatout.train(tiny(*words), stop=lambda: next(stops)))
    rest = list(flatout.train(tiny(*words), resume="auto"))
    assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > middle}


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["train.batch_stages=[40]"], "train.batch_stages has 40, which is not a multiple of model.context 16", "32"),
        (["train.length_stages=[5, 16]"], "train.length_stages has 5, which does not divide model.context 16", "4"),
        (["train.batch_stages=[32, 64]", "train.length_stages=[8]"], "batch_stages 2, length_stages 1", "one entry"),
        (["train.batch_stages=[32, 64]", "speed.accumulation=2"], "speed.accumulation", "speed.micro_batch"),
        (["train.window_stages=[2, 4]"], "train.window_stages is set, but no block", "model.pattern=WWWA"),
    ],
)
def test_stages_that_mean_nothing_are_refused(tiny, words, message: str, hint: str):
    with pytest.raises(ConfigError) as refused:
        list(flatout.train(tiny(*words)))
    assert message in refused.value.message
    assert hint in refused.value.hint
    assert not Path("runs").exists()


def test_micro_batches_divide_the_steps_of_all_stages(tiny):
    run = set_up(tiny("train.batch_stages=[64, 96]", "speed.micro_batch=4"))
    assert (run.speed.micro_batch, run.speed.accumulation) == (2, 3)


def test_a_stage_that_attends_to_less_counts_fewer_flops(tiny):
    run = set_up(tiny(*STAGES, "train.steps=11"))
    model, vocab = run.plan.model, run.model.vocab
    narrow = model.model_copy(update={"window": 4})
    assert run.flops_at(1) == flops_per_token(narrow, vocab, 8)
    assert run.flops_at(11) == run.plan.flops_per_token == flops_per_token(model, vocab)  # window 8, whole context


def test_what_measures_steps_takes_the_last_stage(tiny):
    found = flatout.estimate(tiny(*STAGES, "train.steps=11"), probe=False)
    assert (found.batch_tokens, found.steps.value) == (96, 6)
    assert any("as in the last one, with 96 tokens" in note for note in found.notes)
