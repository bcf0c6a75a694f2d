"""Speed switches in whole runs on a CUDA device: parity, what really ran, and no wait for the device."""

import gc
from pathlib import Path

import pytest
import torch

import flatout
from flatout.config.load import load_config
from flatout.engine import loop
from flatout.engine.run import Run
from flatout.model.compiling import compile_counts
from flatout.ops.attention import fa4_missing
from flatout.records import NoticeRecord, RunInfo, SampleRecord, StepRecord
from tests.end_to_end.no_waits import take_steps_without_waiting
from tests.end_to_end.test_resume import stop_after
from tests.set_up import set_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # the compiler hides it from users
]

SMALL = ["model.layers=4", "model.width=256", "model.heads=4", "model.context=128", "train.batch_tokens=4096",
         "speed.micro_batch=8", "optim.warmup=5", "eval.every=0", "eval.tokens=4096", "eval.sample_tokens=8",
         "checkpoint.every=0", "train.steps=12", "speed.device=cuda"]  # fmt: skip
EAGER = ["speed.kernels=torch", "speed.compile=off", "speed.cuda_graphs=off"]
TRITON = ["speed.kernels=triton", "speed.cuda_graphs=off"]
FP32 = ["speed.precision=fp32"]


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def train(*words: str, **more) -> list:
    return list(flatout.train(load_config(None, [*SMALL, *words]), **more))


def losses(records: list) -> list[float]:
    return [r.loss for r in records if isinstance(r, StepRecord)]


def notices(records: list) -> list[str]:
    return [r.message for r in records if isinstance(r, NoticeRecord)]


def used(records: list) -> dict[str, str]:
    info = records[0]
    assert isinstance(info, RunInfo)
    return {f.name: f.used for f in info.features}


def steps_of(*words: str, count: int = 6) -> tuple[Run, list[torch.Tensor]]:
    """Real steps without the loop around them, so that reports compare bit for bit."""
    run = set_up(load_config(None, [*SMALL, *words]))
    with run.batches(0) as loader:
        batches = [next(loader) for _ in range(count)]
        reports = [run.step(batch.tokens, batch.targets).clone() for batch in batches]
    return run, reports


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [EAGER, TRITON])
@pytest.mark.parametrize("groups", ["4", "2"])
def test_attention_backends_learn_the_same_and_can_sample(kernels, groups):
    words = [*kernels, "speed.precision=bf16", f"model.kv_heads={groups}"]
    expected = losses(train(*words, "speed.attention=reference", "output.folder=reference"))
    for backend in ("sdpa", "flash", "cudnn", "efficient"):
        records = train(*words, f"speed.attention={backend}", f"output.folder={backend}")
        assert used(records)["attention"].partition(" ")[0] == backend
        assert losses(records) == pytest.approx(expected, abs=3e-2), backend
        assert any(isinstance(r, SampleRecord) for r in records)


def test_auto_attention_is_cudnn_on_hopper_and_deterministic_runs_avoid_it():
    if torch.cuda.get_device_capability() >= (9, 0):
        with_fa4 = torch.cuda.get_device_capability() == (9, 0) and fa4_missing() is None
        assert used(train("train.steps=1"))["attention"] == ("cudnn+fa4" if with_fa4 else "cudnn")
    records = train("train.steps=2", "train.deterministic=true", "output.folder=exact")
    assert used(records)["attention"].startswith("sdpa (")


# --- compile ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "regional"])
def test_compile_modes_learn_the_same_without_breaks_and_say_so(mode):
    expected = losses(train(*EAGER, *FP32, "output.folder=eager"))
    before = compile_counts()
    records = train(f"speed.compile={mode}", *FP32, "output.folder=compiled")
    assert used(records)["compile"] == mode
    assert used(records)["kernels"] == "torch"
    assert losses(records) == pytest.approx(expected, abs=2e-3)
    assert compile_counts().since(before).breaks == 0
    told = [message for message in notices(records) if message.startswith(f"compile {mode}")]
    assert told
    assert "no graph breaks" in told[0]


@pytest.mark.parametrize("backend", ["flash", "cudnn"])
@pytest.mark.parametrize("mode", ["default", "regional"])
def test_forced_attention_under_the_compiler(backend, mode):
    words = ["speed.precision=bf16", "train.steps=6"]
    expected = losses(train(*EAGER, *words, "output.folder=eager"))
    records = train(*words, f"speed.compile={mode}", f"speed.attention={backend}", "output.folder=compiled")
    assert used(records)["attention"] == backend
    assert losses(records) == pytest.approx(expected, abs=3e-2)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "regional"])
def test_the_fused_loss_under_the_compiler(mode):
    """Rungs `loss`, `without-triton` and `compile-...` of the ladder: torch's operations alone, several chunks."""
    words = ["speed.precision=bf16", "speed.kernels=torch", "speed.pad_vocab=64", "speed.loss=fused"]
    words += ["speed.loss_chunk=384"]  # two whole chunks and a shorter one in a micro-batch of 1,024 tokens
    expected = losses(train(*EAGER, *words, "output.folder=eager"))
    before = compile_counts()
    records = train(*words, f"speed.compile={mode}", "output.folder=compiled")
    assert {name: used(records)[name] for name in ("compile", "loss", "kernels")} == {
        "compile": mode, "loss": "fused", "kernels": "torch",
    }  # fmt: skip
    assert compile_counts().since(before).breaks == 0
    assert losses(records) == pytest.approx(expected, abs=3e-2)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_the_fused_loss_compiled_and_recorded(precision):
    words = [f"speed.precision={precision}", "speed.kernels=torch", "speed.loss=fused", "speed.loss_chunk=384"]
    expected = losses(train(*EAGER, *words, "output.folder=eager"))
    records = train(*words, "speed.compile=default", "speed.cuda_graphs=on", "output.folder=recorded")
    assert (used(records)["compile"], used(records)["cuda_graphs"]) == ("default", "on")
    assert not [message for message in notices(records) if "became off" in message]
    assert losses(records) == pytest.approx(expected, abs=2e-3 if precision == "fp32" else 3e-2)


def test_a_second_run_reuses_the_compile_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    for folder in ("cold", "warm"):
        torch._dynamo.reset()
        records = train("speed.compile=default", "train.steps=2", f"output.folder={folder}")
    told = next(message for message in notices(records) if message.startswith("compile"))
    assert "2 of 2 pieces of code from the cache" in told


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_checkpointing_under_the_compiler(checkpointing):
    expected = losses(train(*EAGER, *FP32, "output.folder=eager"))
    records = train("speed.compile=default", f"speed.checkpointing={checkpointing}", *FP32, "output.folder=compiled")
    assert losses(records) == pytest.approx(expected, abs=2e-3)


# --- CUDA graphs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [EAGER[:2], TRITON[:1]])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_graphs_give_the_same_numbers_exactly(kernels, checkpointing):
    words = [*kernels, *FP32, f"speed.checkpointing={checkpointing}", "train.deterministic=true"]
    _, expected = steps_of(*words, "speed.cuda_graphs=off")
    run, reports = steps_of(*words, "speed.cuda_graphs=on")
    graph = run.step.graph
    assert graph is not None
    assert len(graph.recordings) == 1, run.new_notices.take()
    assert all(torch.equal(a, b) for a, b in zip(reports, expected, strict=True))


@pytest.mark.parametrize("kernels", [EAGER[:2], TRITON[:1]])
def test_stages_are_recorded_before_the_first_step_and_learn_the_same(kernels, monkeypatch: pytest.MonkeyPatch):
    words = [*kernels, *FP32, "train.deterministic=true", "speed.cuda_graphs=on", "model.pattern=WA", "model.window=96"]
    words += ["train.batch_stages=[2048,4096]", "train.length_stages=[64,128]", "train.window_stages=[32,64]"]
    warmed = train(*words, "output.folder=warmed")
    told = [message for message in notices(warmed) if "warmed up" in message]
    assert [message.split(" in ")[0] for message in told] == ["stages: 2 forms of micro-batches warmed up"]
    assert not [message for message in notices(warmed) if "cuda_graphs became off" in message]
    monkeypatch.setattr(loop, "warm_up", lambda *_: None)
    assert losses(train(*words, "output.folder=cold")) == losses(warmed)


def test_the_peak_of_a_recorded_run_counts_what_the_recording_holds():
    wide = ["model.width=512", "model.heads=8", "model.layers=6", "model.context=512", "train.batch_tokens=16384"]
    run, _ = steps_of(*TRITON[:1], *wide, "speed.cuda_graphs=on", "speed.micro_batch=16")
    graph = run.step.graph
    assert graph is not None
    gc.collect()
    torch.cuda.empty_cache()
    assert graph.held_bytes > 0
    assert (run.peak_memory_bytes() or 0) >= 0.9 * torch.cuda.memory_reserved()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_graphs_follow_the_weights_under_autocast(precision):
    """A cast of the weights recorded as a constant would leave the loss where it was."""
    words = [f"speed.precision={precision}", "train.steps=40", *EAGER[:2]]
    expected = losses(train(*words, "speed.cuda_graphs=off", "output.folder=plain"))
    records = train(*words, "speed.cuda_graphs=on", "output.folder=graphs")
    assert losses(records) == pytest.approx(expected, abs=3e-2)
    assert not [message for message in notices(records) if "cuda_graphs became off" in message]


def test_graphs_are_automatic_for_small_models_and_recorded_anew_for_another_micro_batch():
    run, _ = steps_of(*TRITON[:1], count=3)
    assert run.speed.cuda_graphs
    graph = run.step.graph
    assert graph is not None
    first = list(graph.recordings.values())
    assert len(first) == 1
    run.step.use_micro_batch(4)
    with run.batches(3) as loader:
        for _ in range(2):
            batch = next(loader)
            run.step(batch.tokens, batch.targets)
    assert len(graph.recordings) == 1
    assert list(graph.recordings.values()) != first
    assert run.new_notices.take() == []


@pytest.mark.parametrize(
    "words",
    [
        ["speed.cuda_graphs=on"],
        ["speed.optimizer_state=8bit", "speed.cuda_graphs=off"],
        ["speed.attention=cudnn", "speed.cuda_graphs=off"],
        ["speed.attention=flash", "speed.kernels=torch", "speed.compile=off", "speed.cuda_graphs=off"],
        ["speed.compile=regional"],
    ],
)
def test_a_step_never_waits_for_the_device(words):
    run = set_up(load_config(None, [*SMALL, *words]))
    take_steps_without_waiting(run)


# --- optimizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_optimizer_on_the_host_learns_the_same(precision):
    words = [f"speed.precision={precision}", *EAGER]
    expected = losses(train(*words, "output.folder=device"))
    records = train(*words, "speed.optimizer_offload=true", "output.folder=host")
    assert losses(records) == pytest.approx(expected, abs=1e-3 if precision == "fp32" else 3e-2)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_8bit_moments_learn_as_well_and_take_a_quarter(precision):
    adamw = ["optim.optimizer=adamw", "optim.learning_rate=1e-3"]
    words = [*adamw, f"speed.precision={precision}", "train.steps=60"]
    expected = losses(train(*words, "output.folder=wide"))
    records = train(*words, "speed.optimizer_state=8bit", "output.folder=narrow")
    assert sum(losses(records)[-10:]) / 10 == pytest.approx(sum(expected[-10:]) / 10, abs=0.05)
    run, _ = steps_of(*adamw, "speed.optimizer_state=8bit", count=1)
    bytes_held = sum(value.nbytes for value in run.step.optimizer.tensors().values())
    weights = sum(p.numel() for p in run.model.parameters())
    assert bytes_held < 2.2 * weights


@pytest.mark.parametrize("word", ["speed.optimizer_state=8bit", "speed.optimizer_offload=true"])
def test_their_state_is_saved_and_resumed_bit_for_bit(word):
    words = [word, "train.deterministic=true", *FP32, "train.steps=14"]
    whole = losses(train(*words, "output.folder=whole"))
    first = train(*words, "output.folder=cut", stop=stop_after(6))
    second = list(flatout.train(load_config(None, [*SMALL, *words, "output.folder=cut"]), resume="auto"))
    assert losses(first) + losses(second) == whole


# --- activations ------------------------------------------------------------------------------------------------------

WIDE = [
    "model.layers=12",
    "model.context=1024",
    "train.batch_tokens=16384",
    "speed.micro_batch=16",
    "train.steps=4",
    "eval.tokens=2048",
]


@pytest.mark.parametrize("kernels", [EAGER, TRITON])
def test_checkpointing_learns_the_same_with_less_memory(kernels):
    peaks, results = {}, {}
    for what in ("none", "selective", "full"):
        gc.collect()
        torch.cuda.empty_cache()
        words = [*WIDE, *kernels, f"speed.checkpointing={what}", "speed.precision=bf16", "speed.loss=fused"]
        records = train(*words, f"output.folder={what}")
        results[what] = losses(records)
        peaks[what] = max(r.memory_bytes or 0 for r in records if isinstance(r, StepRecord))
    for what in ("selective", "full"):
        assert results[what] == pytest.approx(results["none"], abs=2e-2)
    assert peaks["full"] < peaks["selective"] < peaks["none"], peaks
