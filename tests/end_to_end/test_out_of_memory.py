"""A device that runs out of memory: on with smaller micro-batches, the same loss, and a word about it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flatout
from flatout.config.load import load_config
from flatout.config.schema import micro_batch_of
from flatout.device import detect_device, is_out_of_memory, limit_memory, memory_limit
from flatout.errors import ResourceError
from flatout.model.gpt import GPT
from flatout.observe.sinks import read_metrics
from flatout.optim.adamw import AdamW
from flatout.optim.optimizers import Optimizers
from flatout.records import EvalRecord, NoticeRecord, StepRecord
from flatout.resolve.memory import memory_of
from tests.hints import ways_out
from tests.set_up import set_up

WORDS = ("train.steps=6", "train.batch_tokens=192", "eval.sample_tokens=0", "eval.every=3")  # 12 sequences a step
CPU_WORDS = "[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"


def small_device(monkeypatch: pytest.MonkeyPatch, *, train: int = 99, evaluate: int = 99, after: int = 0) -> None:
    """Makes a forward pass fail where it has more sequences than the limit; the first `after` ones are let through.

    The real work comes first, so that a failed pass has drawn its random numbers and left gradients behind.
    """
    real, calls = GPT.forward, 0

    def forward(self: GPT, tokens_BT, *more):
        nonlocal calls
        calls += 1
        result = real(self, tokens_BT, *more)
        if calls > after and tokens_BT.shape[0] > (train if self.training else evaluate):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of ...")
        return result

    monkeypatch.setattr(GPT, "forward", forward)


def losses(records: list) -> list[float]:
    return [record.loss for record in records if isinstance(record, StepRecord | EvalRecord)]


def notices(records: list) -> list[str]:
    return [r.message for r in records if isinstance(r, NoticeRecord) and "out of memory" in r.message]


def test_the_micro_batch_is_halved_and_the_loss_stays(tiny, monkeypatch: pytest.MonkeyPatch):
    expected = losses(list(flatout.train(tiny(*WORDS))))
    small_device(monkeypatch, train=4, after=2)
    records = list(flatout.train(tiny(*WORDS, "output.folder=run")))
    assert losses(records) == pytest.approx(expected, rel=2e-5)
    sizes = [record.micro_batch for record in records if isinstance(record, StepRecord)]
    assert sizes == [12, 12, 3, 3, 3, 3], "12 does not fit from the third step on, 6 neither, 4 is no divisor after 6"
    told = notices(records)
    assert len(told) == 2
    assert "micro-batches of 6 instead of 12, 2 per step" in told[0]
    assert "micro-batches of 3 instead of 6, 4 per step" in told[1]
    assert "tried to allocate 2.00 gib" in told[0]
    for notice, size in zip(told, (6, 3), strict=True):
        (way,) = ways_out(notice)
        assert micro_batch_of(tiny(*WORDS, *way).config)[0] == size
    rows = read_metrics(Path("run") / "metrics.jsonl")
    assert [row["micro_batch"] for row in rows if row["type"] == "step"] == sizes
    assert rows[0]["config"]["speed"]["micro_batch"] is None, "the config stays as it was written"


@pytest.mark.parametrize("fused", ["on", "off"])
def test_nothing_of_a_failed_step_is_left(tiny, monkeypatch: pytest.MonkeyPatch, fused: str):
    # With dropout a run depends on every draw, so it equals the other one bit for bit only if all was put back.
    words = (*WORDS, "model.dropout=0.2", f"speed.fused_optimizer={fused}")
    expected = list(flatout.train(tiny(*words, "speed.micro_batch=2")))
    small_device(monkeypatch, train=2)
    disturbed = list(flatout.train(tiny(*words, "speed.micro_batch=4")))
    assert len(notices(disturbed)) == 1
    assert losses(disturbed) == losses(expected)
    assert [r.grad_norm for r in disturbed if isinstance(r, StepRecord)] == [
        r.grad_norm for r in expected if isinstance(r, StepRecord)
    ]


def test_failing_in_the_middle_of_a_batch_drops_the_gradients_so_far(tiny, monkeypatch: pytest.MonkeyPatch):
    expected = losses(list(flatout.train(tiny(*WORDS, "speed.micro_batch=2"))))
    small_device(monkeypatch, train=2, after=2)  # two of the first step's three micro-batches pass
    disturbed = list(flatout.train(tiny(*WORDS, "speed.micro_batch=4")))
    assert len(notices(disturbed)) == 1
    assert losses(disturbed) == losses(list(flatout.train(tiny(*WORDS, "speed.micro_batch=2")))) == expected


@pytest.mark.parametrize("fused", ["on", "off"])
def test_failing_while_the_moments_are_made_leaves_none(tiny, monkeypatch: pytest.MonkeyPatch, fused: str):
    words = (*WORDS, f"speed.fused_optimizer={fused}")
    expected = losses(list(flatout.train(tiny(*words, "speed.micro_batch=6"))))
    real, calls = torch.zeros_like, 0

    def zeros_like(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 7:  # in the middle of the first group
            raise RuntimeError(CPU_WORDS)
        return real(*args, **kwargs)

    create_state = Optimizers.create_state

    def failing(optimizer):
        monkeypatch.setattr(torch, "zeros_like", zeros_like)
        try:
            create_state(optimizer)
        finally:
            monkeypatch.setattr(torch, "zeros_like", real)

    monkeypatch.setattr(Optimizers, "create_state", failing)
    disturbed = list(flatout.train(tiny(*words)))
    assert calls > 7
    assert len([r for r in disturbed if isinstance(r, NoticeRecord) and "can't allocate" in r.message]) == 1
    assert losses(disturbed) == expected


def test_moments_are_those_adamw_would_make(tiny):
    for fused in ("on", "off"):
        run = set_up(tiny(f"speed.fused_optimizer={fused}"))
        run.step.optimizer.create_state()
        mine = run.step.optimizer.tensors()
        torchs = torch.optim.AdamW(
            run.model.parameters(), fused=fused == "on", foreach=False if fused == "off" else None
        )
        for parameter in run.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torchs.step()
        for name, parameter in run.model.named_parameters():
            theirs = {f"{name}.{key}": value for key, value in torchs.state[parameter].items()}
            assert {key: (value.dtype, value.shape, value.device) for key, value in theirs.items()} == {
                key: (mine[key].dtype, mine[key].shape, mine[key].device) for key in mine if key.startswith(f"{name}.")
            }


def test_failing_inside_an_update_ends_the_run(tiny, monkeypatch: pytest.MonkeyPatch):
    real, calls = AdamW.update, 0

    def update(self, divisor, finite):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return real(self, divisor, finite)

    monkeypatch.setattr(AdamW, "update", update)
    with pytest.raises(ResourceError, match="out of device memory: CUDA out of memory"):
        list(flatout.train(tiny(*WORDS)))


def test_a_single_sequence_that_does_not_fit_ends_the_run(tiny, monkeypatch: pytest.MonkeyPatch):
    small_device(monkeypatch, train=0)
    records, error = [], None
    try:
        for record in flatout.train(tiny(*WORDS)):
            records.append(record)  # noqa: PERF402 - what came before the error counts
    except ResourceError as caught:
        error = caught
    assert error is not None
    assert error.exit_code == 5
    assert "flatout tune" in error.hint
    assert len(notices(records)) == 3, "12, 6, 3 and then 1"


def test_evaluation_gets_along_with_less(tiny, monkeypatch: pytest.MonkeyPatch):
    expected = losses(list(flatout.train(tiny(*WORDS))))
    with monkeypatch.context() as patch:
        small_device(patch, evaluate=4)
        records = list(flatout.train(tiny(*WORDS)))
    assert losses(records) == pytest.approx(expected, rel=1e-6)
    told = notices(records)
    assert len(told) == 2, "12 and 6 do not fit; the second evaluation knows it"
    assert "evaluating 3 sequences at once instead of 6" in told[1]
    assert {record.micro_batch for record in records if isinstance(record, StepRecord)} == {12}
    small_device(monkeypatch, evaluate=0)
    with pytest.raises(ResourceError):
        list(flatout.train(tiny(*WORDS, "output.folder=none")))


def test_other_errors_are_not_taken_for_it(tiny, monkeypatch: pytest.MonkeyPatch):
    def forward(*_: object):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(GPT, "forward", forward)
    with pytest.raises(RuntimeError, match="mat1"):
        list(flatout.train(tiny(*WORDS)))


def test_words_that_mean_it():
    assert is_out_of_memory(RuntimeError(CPU_WORDS))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("out of resource: shared memory"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_limit_is_the_memory_that_counts():
    card = detect_device("cpu")
    assert limit_memory(card, 4.0) is card, "a CPU has no limit, and resolve_speed says so"


# --- on a GPU ---------------------------------------------------------------------------------------------------------

GPU_WORDS = ["data.source=shakespeare", "train.steps=4", "train.batch_tokens=131072", "eval.tokens=8192",
             "eval.sample_tokens=0", "optim.warmup=2", "speed.compile=off", "checkpoint.every=0"]  # fmt: skip


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list]:
    monkeypatch.chdir(tmp_path)
    torch.cuda.empty_cache()
    return lambda *words: list(flatout.train(load_config("gpt2-124m", [*GPU_WORDS, *words])))


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_memory_limit_that_does_not_fit_the_micro_batch(on_gpu, kernels: str):
    words = [f"speed.kernels={kernels}", "speed.micro_batch=64", "speed.precision=bf16"]
    run = set_up(load_config("gpt2-124m", [*GPU_WORDS, *words]))
    need = memory_of(run.plan.settings.config, run.model.vocab, run.speed).total
    limit = need / 1.145 / 2**30  # refused beyond 1.15 times the limit; here it is tried, and fails
    del run
    expected = losses(on_gpu(*words))
    fraction = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.empty_cache()
    records = on_gpu(*words, f"speed.memory_limit={limit:.3f}")
    assert torch.cuda.get_per_process_memory_fraction() == fraction
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert notices(records)
    assert steps[-1].micro_batch in (16, 32)
    assert max(record.memory_bytes or 0 for record in steps) <= limit * 2**30
    assert losses(records) == pytest.approx(expected, abs=0.02)


@pytest.mark.gpu
def test_a_step_far_beyond_the_limit_is_refused(on_gpu):
    with pytest.raises(ResourceError, match=r"by speed\.memory_limit"):
        on_gpu("speed.micro_batch=64", "speed.memory_limit=2")


@pytest.mark.gpu
def test_the_limit_holds_inside_and_is_put_back():
    device = limit_memory(detect_device("cuda"), 1.0)
    before = torch.cuda.get_per_process_memory_fraction(device.torch_device)
    torch.cuda.empty_cache()
    with memory_limit(device), pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * 2**30, dtype=torch.uint8, device=device.torch_device)
    assert torch.cuda.get_per_process_memory_fraction(device.torch_device) == before
    assert torch.empty(2 * 2**30, dtype=torch.uint8, device=device.torch_device).numel()
