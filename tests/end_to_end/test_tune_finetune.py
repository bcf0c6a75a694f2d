"""`flatout tune` on fine-tuning runs: what a micro-batch of samples is, which steps decide, that nothing is left."""

import dataclasses
import gc
import json
import shlex
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import flatout
from flatout import api
from flatout.cli import main
from flatout.config.load import LoadedConfig, load_config
from flatout.engine import step
from flatout.engine.spans import StepReport
from flatout.errors import ConfigError, DataError, HardwareError, ResourceError
from flatout.model.gpt import GPT
from flatout.records import NoticeRecord, StepRecord, TuneProgress, TuneResult, TuneRow
from flatout.resolve.switches import Speed
from flatout.tuning import measure, probe, tuner
from flatout.tuning.practice_data import PracticeSamples, practice_samples
from flatout.tuning.probe import SampleProbe
from flatout.tuning.search import Candidate, Trial
from tests.chat_models import write_chat_model
from tests.set_up import set_up
from tests.unit.test_graphs import FakeRecorder

pytestmark = pytest.mark.usefixtures("children_stay")

NEEDS_BITSANDBYTES = pytest.mark.skipif(not find_spec("bitsandbytes"), reason="needs bitsandbytes")
QUIET = ["eval.sample_tokens=0", "speed.device=cpu", "model.context=128"]
WORDS = ["model.init_from=base", "chat.source=rows.json", "train.epochs=2.0", "chat.batch_samples=6", *QUIET]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model and rows of which some are much longer than the others."""
    monkeypatch.setattr(probe, "TIMED_SECONDS", 0.005)
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "base")
    rows = [
        {"instruction": "What is it?", "input": "", "output": "It is one. " * (9 if n % 12 == 5 else 1 + n % 3)}
        for n in range(48)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    return tmp_path


@pytest.fixture(autouse=True)
def _little_to_collect() -> None:
    """Every trial collects garbage, which takes long only because of what libraries have made before."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def made(place: Path) -> Callable[..., LoadedConfig]:
    return lambda *more: load_config("lora", [*WORDS, *more])


def run(loaded: LoadedConfig, **settings) -> tuple[list[TuneRow], TuneResult]:
    *rows, result = list(api.tune(loaded, **settings))
    assert isinstance(result, TuneResult)
    assert all(isinstance(row, TuneRow) for row in rows)
    return rows, result  # pyright: ignore[reportReturnType]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


TRAINED = [
    [],
    ["lora.rank=0"],
    ["chat.packing=false", "lora.dropout=0.1"],
    pytest.param(["lora.quantize=nf4"], marks=NEEDS_BITSANDBYTES),
]


@pytest.mark.parametrize("more", TRAINED)
def test_it_finds_a_micro_batch_that_trains_and_leaves_nothing_behind(made, place: Path, more: list[str]):
    before, state = files(place), torch.get_rng_state()
    heard: list[TuneProgress] = []
    rows, result = run(made(*more), progress=heard.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert files(place) == before, "not even samples are written"
    assert "making the samples of rows.json" in heard[0].text
    assert "made for the occasion, since there are none in data/rows-samples" in result.data
    assert all(row.status == "fits" and row.tokens_per_second and row.milliseconds for row in rows)
    assert all(row.estimate_bytes > 0 for row in rows)
    assert result.confirmed
    assert result.batch_samples == 6
    (place / "tuned.yaml").write_text(result.fragment, encoding="utf-8")
    tuned = load_config("tuned.yaml")
    assert tuned.config.chat == made(*more).config.chat
    assert tuned.config.lora == made(*more).config.lora
    steps = [record for record in flatout.train(tuned) if isinstance(record, StepRecord)]
    assert {record.micro_batch for record in steps} == {result.chosen.micro_batch}


def test_sizes_go_up_to_the_rows_of_the_fullest_step(made):
    rows, _ = run(made("chat.packing=false"), exhaustive=True)
    assert [(row.micro_batch, row.accumulation) for row in rows] == [(1, 6), (2, 3), (3, 2), (6, 1)]
    rows, result = run(made(), exhaustive=True)
    most = max(row.micro_batch for row in rows)
    assert 1 < most < 6, "six samples never fill six rows"
    assert next(row.accumulation for row in rows if row.micro_batch == most) == 1
    assert f"6 samples, {result.chosen.micro_batch} rows at once" in result.fragment


def test_what_the_batch_is_and_what_is_learned_do_not_change(made):
    def losses(*more: str) -> list[float]:
        records = flatout.train(made("train.steps=4", "train.epochs=null", *more))
        return [record.loss for record in records if isinstance(record, StepRecord)]

    _, result = run(made("speed.micro_batch=1"))
    assert losses("output.name=tuned", *result.words) == pytest.approx(losses("output.name=plain"), rel=2e-5)


def test_samples_that_are_there_are_used_and_others_left_alone(made, place: Path):
    set_up(made())
    before = files(place / "data")
    _, result = run(made(), seconds=0.001)
    assert result.data == "the samples in data/rows-samples"
    _, result = run(made("chat.train_on=all"), seconds=0.001)
    assert "cannot be used as they are: settings changed" in result.data
    assert files(place / "data") == before
    (place / "data" / "rows-samples" / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(DataError, match="not one of samples"):
        run(made())


def small_device(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A device that has room for so many tokens of a micro-batch."""
    real = GPT.forward

    def forward(self: GPT, tokens_BT, *more):
        if tokens_BT.numel() > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, tokens_BT, *more)

    monkeypatch.setattr(GPT, "forward", forward)


def largest(loaded: LoadedConfig, micro_batch: int) -> list[int]:
    """Tokens of the largest micro-batch of each step of the run."""
    with set_up(loaded).batches(0) as loader:
        return [
            max(batch.packed.part(rows, torch.device("cpu"))[0].numel() for rows in batch.packed.cuts(micro_batch))
            for batch in loader
            if batch.packed is not None
        ]


def test_the_fullest_step_of_the_whole_run_decides_what_fits(made, monkeypatch: pytest.MonkeyPatch):
    sizes = largest(made("chat.packing=false"), 3)
    assert min(sizes) < max(sizes), "steps differ, or there would be nothing to see"
    small_device(monkeypatch, max(sizes) - 1)
    rows, result = run(made("chat.packing=false"), exhaustive=True)
    assert [row.status for row in rows] == ["fits", "fits", "out_of_memory"], "3 fits in most steps, and 6 is not tried"
    assert "out of memory" in rows[-1].reason
    assert rows[-1].tokens_per_second is None
    records = list(flatout.train(made("chat.packing=false", *result.words, "eval.tokens=64")))
    assert not [record for record in records if isinstance(record, NoticeRecord) and "out of memory" in record.message]
    small_device(monkeypatch, 0)
    with pytest.raises(ResourceError, match="nothing that was tried fits cpu") as caught:
        run(made())
    assert "lora.quantize=nf4" in caught.value.hint


def every_step_takes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """By the clock of the probe, whatever else this machine has to do."""
    real = measure.Steps.take

    def take(self: measure.Steps, count: int) -> list[StepReport]:
        return [dataclasses.replace(report, seconds=seconds) for report in real(self, count)]

    monkeypatch.setattr(measure.Steps, "take", take)


def test_every_setting_is_timed_on_the_same_steps_after_the_fullest(made, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe, "TIMED_SECONDS", 0.2)
    every_step_takes(monkeypatch, 0.15)
    seen: list[tuple[int, tuple[int, ...]]] = []
    real = measure.Steps.__init__

    def init(self, run, **settings):
        seen.append((run.step.micro_batch, run.plan.schedule.chosen))
        real(self, run, **settings)

    monkeypatch.setattr(measure.Steps, "__init__", init)
    rows, _ = run(made("chat.packing=false"), exhaustive=True)
    timed = [chosen for _, chosen in seen[1::2]]
    assert len(set(timed)) == 1
    assert len(timed[0]) == 2, "the fewest that show how fast it is"
    assert {size for size, _ in seen} == {row.micro_batch for row in rows}


@pytest.mark.parametrize("timed", [0.2, 1e-6])
def test_shapes_are_recorded_before_they_are_timed(made, place: Path, monkeypatch: pytest.MonkeyPatch, timed: float):
    """Also where the fullest steps alone are timed, since any other would take too long."""
    monkeypatch.setattr(probe, "TIMED_SECONDS", timed)
    every_step_takes(monkeypatch, 0.15)
    monkeypatch.setattr(probe.Probe, "_held_by_graphs", lambda *_: 0)
    recorders: list[FakeRecorder] = []

    def recorder(_: object) -> FakeRecorder:
        recorders.append(FakeRecorder())
        return recorders[-1]

    class Recorded(SampleProbe):
        def resolve(self, settings: LoadedConfig) -> Speed:
            return dataclasses.replace(super().resolve(settings), cuda_graphs=True)

        def _rate(self, chosen, reports):
            before = made_so_far[-1]
            assert recorders[-1].recordings == before > 0, "nothing was recorded while the clock ran"
            return super()._rate(chosen, reports)

    made_so_far: list[int] = []
    real = measure.Steps.take

    def take(self, count: int):
        made_so_far.append(recorders[-1].recordings)
        return real(self, count)

    monkeypatch.setattr(step, "Recorder", recorder)
    monkeypatch.setattr(measure.Steps, "take", take)
    loaded = made()
    one = Recorded(loaded, practice_samples(loaded, place / "scratch", lambda _: None), None)
    rows = list(tuner._Tuning(loaded, one, "", None, lambda _: None).run(True))
    one.close()
    assert all(row.cuda_graphs for row in rows if isinstance(row, TuneRow))


def test_tokens_are_counted_as_a_run_counts_them(made, place: Path):
    practice = practice_samples(made("train.steps=5", "train.epochs=null"), place / "scratch", lambda _: None)
    with set_up(made()).batches(0) as loader:
        counts = [batch.count for batch in loader]
    assert [practice.tokens(step) for step in range(len(counts))] == counts
    assert max(practice.fullest) < 5, "steps that the run has"
    assert practice.spread(3) == tuple(sorted(set(practice.spread(3))))


def test_a_run_of_ours_and_an_adapter_to_go_on_from(made, place: Path):
    list(flatout.train(made("train.steps=1", "train.epochs=null", "output.name=first")))
    _, result = run(made("lora.init_from=runs/first/adapter"), seconds=0.001)
    assert "init_from: runs/first/adapter" in result.fragment
    list(flatout.train(made("lora.rank=0", "train.steps=1", "train.epochs=null", "output.name=whole")))
    _, result = run(made("model.init_from=runs/whole", "chat.template=model"), seconds=0.001)
    assert "init_from: runs/whole" in result.fragment


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("speed.kernels=triton", HardwareError),
        ("speed.optimizer_offload=true", HardwareError),
        ("model.layers=3", ConfigError),
        ("train.batch_tokens=4096", ConfigError),
        ("chat.source=nowhere.json", Exception),
    ],
)
def test_what_fine_tuning_refuses_is_refused_in_the_same_words(made, word: str, kind: type[Exception]):
    with pytest.raises(kind) as tuning:
        run(made(word))
    with pytest.raises(kind) as training:
        list(flatout.train(made(word)))
    assert str(tuning.value) == str(training.value)


def test_what_was_written_is_kept_and_a_cap_needs_a_card(made):
    rows, result = run(made("speed.micro_batch=2", "speed.checkpointing=full", "speed.loss=chunked"))
    assert {(row.checkpointing, row.loss) for row in rows} == {("full", "chunked")}
    assert max(row.micro_batch for row in rows) <= 2
    assert "kept as written: micro_batch at most 2, checkpointing full, loss chunked" in result.ended
    with pytest.raises(HardwareError, match="CUDA device only"):
        run(made(), memory=4.0)
    with pytest.raises(ConfigError, match="tune chooses micro-batch and accumulation"):
        run(made("speed.accumulation=2"))


def test_the_verb_takes_the_words_of_finetune_and_prints_them(place: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["tune", *WORDS, "--seconds", "1"]) == 0
    shown = capsys.readouterr()
    assert "preset: lora" in shown.out
    assert "chose micro-batch" in shown.out
    assert "of whole steps" in shown.out
    assert "shorter steps" not in shown.out
    line = next(line for line in shown.out.splitlines() if line.startswith("train with: "))
    words = shlex.split(line.removeprefix("train with: flatout "))
    assert words[0] == "finetune"
    assert main([*words, "train.steps=1", "train.epochs=null"]) == 0
    capsys.readouterr()
    assert main(["tune", "lora", *WORDS, "--seconds", "1", "--out", "tuned.yaml"]) == 0
    assert "train with: flatout finetune tuned.yaml" in capsys.readouterr().out


# --- a card that is not here ------------------------------------------------------------------------------------------


class Card(SampleProbe):
    """Estimates as they are, on a card with `capacity` bytes on which they hold; speed is made up."""

    def __init__(self, loaded: LoadedConfig, practice: PracticeSamples, capacity: int) -> None:
        super().__init__(loaded, practice, None)
        self.here, self.room = self.device, capacity

    def resolve(self, settings: LoadedConfig) -> Speed:
        self.device = self.here  # what is built and estimated is a CPU's run
        try:
            return super().resolve(settings)
        finally:
            self.device = dataclasses.replace(self.here, torch_device=torch.device("cuda", 0), name="a card")

    def capacity(self) -> int | None:
        return self.room

    def attempt(self, candidate: Candidate):
        peak = self.estimate(candidate)
        if peak > self.room:
            return Trial(candidate=candidate, status="out_of_memory", reason="out of memory"), None, False
        cost = {"none": 1.0, "selective": 0.97, "full": 0.75}[candidate.checkpointing]
        rate = 1e5 * cost * candidate.micro_batch / (candidate.micro_batch + 2)
        timing = probe.Timing(self.batch_tokens / rate, peak)
        return Trial(candidate=candidate, status="fits", tokens_per_second=rate, peak_bytes=peak), timing, False

    def confirm(self, candidate: Candidate, seconds: float):
        return self.attempt(candidate)[1]


def on_card(loaded: LoadedConfig, place: Path, capacity: int) -> tuple[list[TuneRow], TuneResult]:
    card = Card(loaded, practice_samples(loaded, place / "scratch", lambda _: None), capacity)
    *rows, result = list(tuner._Tuning(loaded, card, "made up", None, lambda _: None).run(False))
    card.close()
    assert isinstance(result, TuneResult)
    return rows, result  # pyright: ignore[reportReturnType]


def test_estimates_are_those_of_a_run_and_less_memory_means_other_settings(made, place: Path):
    loaded = made("chat.packing=false", "train.epochs=1.0")
    rows, result = on_card(loaded, place, 2**40)
    assert (result.chosen.micro_batch, result.chosen.checkpointing) == (6, "none")
    assert {row.loss for row in rows} == {"plain", "fused", "chunked"}
    own = set_up(made("chat.packing=false", "train.epochs=1.0", *result.words)).plan.memory.total
    assert own <= result.chosen.estimate_bytes <= 1.1 * own
    less = [on_card(loaded, place, int(share * own))[1].chosen for share in (0.8, 0.5)]
    for row, share in zip(less, (0.8, 0.5), strict=True):
        assert (row.peak_bytes or 0) <= 0.92 * share * own
        assert (row.micro_batch, row.checkpointing) != (6, "none")
    with pytest.raises(ResourceError, match="nothing that was tried fits a card"):
        on_card(loaded, place, own // 100)


def test_a_run_that_is_released_holds_no_memory_whoever_holds_the_run(made):
    run = set_up(made())
    assert run.adapters is not None
    for layer in run.adapters.layers.values():  # as our kernels ask for it
        layer.join(torch.float32)
    joined = [layer.joined for layer in run.adapters.layers.values()]
    kept = [weakref.ref(one.buffer) for one in joined if one is not None]
    kept.append(weakref.ref(run.adapters.flat.grad))
    assert len(kept) > 2
    del joined
    measure.release(run)
    assert [ref() for ref in kept] == [None] * len(kept)
    assert sum(parameter.numel() for parameter in run.model.parameters()) == 0
    assert run.adapters.flat.numel() == 0


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadedConfig]:
    """About 100 million weights, and samples of up to some two thousand tokens."""
    monkeypatch.setattr(probe, "TIMED_SECONDS", 0.2)
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "base", layers=8, width=1024, heads=16, kv_heads=4, context=2048)
    answers = ["Hello there, it is one. " * (20 + 17 * n % 150) for n in range(200)]
    rows = [{"instruction": "What is it " * (n % 7), "input": "", "output": text} for n, text in enumerate(answers)]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    words = ["model.init_from=base", "chat.source=rows.json", "model.context=2048", "chat.batch_samples=32"]
    words += ["train.epochs=2.0", "eval.sample_tokens=0"]
    torch.cuda.empty_cache()
    return lambda *more: load_config("lora", [*words, *more])


def held_by_tensors() -> int:
    """Bytes on the card without cuBLAS's workspaces, which stay once a product has been made."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("memory", "more"),
    [
        (1.5, []),
        (3.0, []),
        (3.0, ["lora.rank=0", "optim.learning_rate=1e-5"]),
        (3.0, ["speed.kernels=torch"]),
        (3.0, ["speed.cuda_graphs=on"]),
        pytest.param(1.5, ["lora.quantize=nf4"], marks=NEEDS_BITSANDBYTES),
    ],
)
def test_under_a_cap_the_choice_fits_every_step_of_the_run(large, memory: float, more: list[str]):
    state, fraction = torch.cuda.get_rng_state(), torch.cuda.get_per_process_memory_fraction()
    before = held_by_tensors()
    rows, result = run(large(*more), memory=memory)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.get_per_process_memory_fraction() == fraction
    # Less than the weights. Workspaces of another thread may be left, of which torch keeps 32 MiB for every stream.
    assert held_by_tensors() - before < 2**27 + 2**23, "nothing is left on the card but workspaces of libraries"
    assert result.capacity_bytes == pytest.approx(memory * 2**30)
    assert 0 < (result.chosen.peak_bytes or 0) <= 0.93 * memory * 2**30
    assert "memory_limit" not in result.fragment
    assert len({row.loss for row in rows}) > 1
    records = list(flatout.train(large(*more, *result.words, f"speed.memory_limit={memory}")))
    # A run may have more shapes than were tried, and gives up recording them before it gives up anything else.
    said = [r.message for r in records if isinstance(r, NoticeRecord) and not r.message.startswith("cuda_graphs")]
    assert not [message for message in said if "out of memory" in message]
    assert {r.micro_batch for r in records if isinstance(r, StepRecord)} == {result.chosen.micro_batch}


@pytest.mark.gpu
def test_with_room_the_whole_step_is_taken_at_once(large):
    rows, result = run(large())
    assert result.chosen.checkpointing == "none"
    assert result.confirmed
    tried = {(row.micro_batch, row.checkpointing, row.loss) for row in rows if row.status == "fits"}
    assert (result.chosen.micro_batch, result.chosen.checkpointing, result.chosen.loss) in tried
    steps = [r for r in flatout.train(large(*result.words)) if isinstance(r, StepRecord)]
    assert {r.micro_batch for r in steps} == {result.chosen.micro_batch}
