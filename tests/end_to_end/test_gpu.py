"""What only a CUDA device can show. Run with `pytest -m gpu` on one."""

import gc
from pathlib import Path

import pytest
import torch

import flatout
from flatout.checkpoints.checkpoint import read_checkpoint
from flatout.config.load import load_config
from flatout.engine import saver
from flatout.records import CheckpointRecord, EvalRecord, RunInfo, StepRecord
from tests.end_to_end.no_waits import take_steps_without_waiting
from tests.end_to_end.test_resume import stop_after
from tests.set_up import set_up

pytestmark = pytest.mark.gpu

SMALL = ["model.layers=4", "model.width=128", "model.heads=4", "model.context=128", "train.batch_tokens=4096",
         "optim.warmup=5", "eval.every=0", "eval.tokens=8192", "eval.sample_tokens=8", "checkpoint.every=0",
         "speed.device=cuda"]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, and nothing compiled or allocated left over from the test before."""
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def losses(*words: str) -> list[float]:
    return [r.loss for r in flatout.train(load_config(None, [*SMALL, *words])) if isinstance(r, StepRecord)]


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_resume_in_deterministic_mode_is_bit_identical(compiled, precision):
    words = [*SMALL, "train.steps=40", "model.dropout=0.1", "speed.micro_batch=16", "train.deterministic=true",
             f"speed.compile={compiled}", f"speed.precision={precision}"]  # fmt: skip
    whole = list(flatout.train(load_config(None, [*words, "output.folder=whole"])))
    for step in (7, 20, 33):
        config = load_config(None, [*words, f"output.folder=cut-{step}"])
        first = list(flatout.train(config, stop=stop_after(step)))
        second = list(flatout.train(config, resume="auto"))
        mine = [(r.step, r.loss, r.grad_norm) for r in first + second if isinstance(r, StepRecord)]
        assert mine == [(r.step, r.loss, r.grad_norm) for r in whole if isinstance(r, StepRecord)]
        a = read_checkpoint(Path(f"cut-{step}/checkpoints/step-00000040"))
        b = read_checkpoint(Path("whole/checkpoints/step-00000040"))
        for name in ("model", "optimizer", "run"):
            ours, theirs = getattr(a, name), getattr(b, name)
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name


@pytest.mark.parametrize("words", [["speed.precision=bf16"], ["speed.precision=fp16", "speed.compile=off"]])
def test_checkpoints_written_beside_training_are_those_of_their_step(words, monkeypatch):
    words = [*SMALL, *words, "train.steps=30", "checkpoint.every=5", "checkpoint.keep=9", "train.deterministic=true"]
    for mode, small in {"off": 2**60, "on": 0}.items():
        monkeypatch.setattr(saver, "SMALL", small)
        records = list(flatout.train(load_config(None, [*words, f"output.folder={mode}"])))
        saved = [record for record in records if isinstance(record, CheckpointRecord)]
        assert [record.step for record in saved] == [5, 10, 15, 20, 25, 30]
        assert all((record.background_seconds is not None) == (mode == "on") for record in saved)
    for place in sorted(Path("off/checkpoints").iterdir()):
        for name in ("model", "optimizer", "run"):
            other = Path("on/checkpoints", place.name, f"{name}.safetensors")
            assert other.read_bytes() == (place / f"{name}.safetensors").read_bytes(), other


def test_switches_do_not_change_the_loss():
    expected = losses("train.steps=20", "speed.precision=fp32", "speed.compile=off")
    for words in (["speed.compile=on"], ["speed.loader=host"], ["speed.micro_batch=8"], ["speed.checkpointing=full"],
                  ["speed.attention=reference"], ["speed.pad_vocab=1"], ["speed.fused_optimizer=off"]):  # fmt: skip
        start = [] if words[0].startswith("speed.compile") else ["speed.compile=off"]
        assert losses("train.steps=20", "speed.precision=fp32", *start, *words) == pytest.approx(expected, abs=2e-3), (
            words
        )
    for precision, tolerance in (("tf32", 5e-3), ("bf16", 3e-2), ("fp16", 3e-2)):
        got = losses("train.steps=20", f"speed.precision={precision}", "speed.compile=off")
        assert got == pytest.approx(expected, abs=tolerance), precision


def test_gpu_and_cpu_learn_the_same():
    gpu = losses("train.steps=10", "speed.precision=fp32", "speed.compile=off")
    assert losses("train.steps=10", "speed.device=cpu") == pytest.approx(gpu, abs=1e-3)


def test_fp16_saves_its_scale_and_resumes_with_it():
    words = [*SMALL, "train.steps=12", "speed.precision=fp16", "speed.compile=off", "output.folder=half"]
    first = list(flatout.train(load_config(None, words), stop=stop_after(6)))
    saved = read_checkpoint(Path("half/checkpoints/step-00000006")).run["scale"]
    second = list(flatout.train(load_config(None, words), resume="auto"))
    scales = [r.loss_scale for r in first + second if isinstance(r, StepRecord)]
    assert float(saved) == scales[6]
    assert all(r.applied for r in second if isinstance(r, StepRecord))


@pytest.mark.parametrize("words", [[], ["optim.ema=0.99"]])
def test_a_step_never_waits_for_the_device(words):
    run = set_up(load_config(None, [*SMALL, "train.steps=10", *words]))
    take_steps_without_waiting(run)


@pytest.mark.parametrize(("micro_batch", "checkpointing"), [(8, "none"), (32, "full")])
def test_memory_estimate_is_near_the_measured_peak(micro_batch, checkpointing):
    words = ["data.source=shakespeare", "data.folder=bpe", "train.steps=3", f"speed.micro_batch={micro_batch}",
             f"speed.checkpointing={checkpointing}", f"train.batch_tokens={2 * micro_batch * 1024}", "eval.tokens=2048",
             "eval.sample_tokens=0"]  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    records = list(flatout.train(load_config("gpt2-124m", words)))
    assert isinstance(records[0], RunInfo)
    peak = max(r.memory_bytes or 0 for r in records if isinstance(r, StepRecord))
    ratio = records[0].memory_estimate_bytes / peak
    print(f"micro_batch {micro_batch} checkpointing {checkpointing}: estimate {ratio:.3f} of {peak / 2**30:.2f} GiB")
    assert 0.85 < ratio < 1.15


def test_gpt2_learns_from_bpe_text():
    words = ["data.source=shakespeare", "train.steps=30", "speed.micro_batch=8", "train.batch_tokens=16384",
             "optim.warmup=5", "eval.tokens=8192", "eval.sample_tokens=0"]  # fmt: skip
    records = list(flatout.train(load_config("gpt2-124m", words)))
    steps = [r for r in records if isinstance(r, StepRecord)]
    assert steps[0].loss == pytest.approx(10.9, abs=0.3)
    assert [r.loss for r in records if isinstance(r, EvalRecord)][-1] < 7.0
