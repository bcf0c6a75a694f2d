"""Speed switches in whole runs on a CPU: the losses stay, and what really ran is told."""

import io

import pytest
import torch

import flatout
from flatout.errors import CheckpointError, HardwareError
from flatout.model.compiling import compile_counts
from flatout.observe.terminal import TerminalReader
from flatout.records import NoticeRecord, RunInfo, StepRecord
from tests.end_to_end.test_resume import stop_after
from tests.set_up import set_up


def losses(records) -> list[float]:
    return [r.loss for r in records if isinstance(r, StepRecord)]


def notices(records) -> list[str]:
    return [r.message for r in records if isinstance(r, NoticeRecord)]


PLAIN: list[float] = []  # what all switches are compared with, once it is known


@pytest.mark.parametrize(
    "words",
    [
        ["speed.attention=reference"],
        ["speed.fused_qkv=false"],
        ["speed.checkpointing=selective"],
        ["speed.checkpointing=full"],
        ["speed.loss=chunked", "speed.loss_chunk=16"],
        ["speed.loss=fused", "speed.loss_chunk=16"],
        ["speed.fused_optimizer=off"],
        ["speed.pad_vocab=1"],
        ["speed.micro_batch=1"],
    ],
)
def test_exact_switches_do_not_change_the_loss(tiny, words):
    expected = PLAIN or losses(flatout.train(tiny("train.steps=12", "output.folder=plain")))
    PLAIN[:] = expected
    got = losses(flatout.train(tiny("train.steps=12", "output.folder=switched", *words)))
    assert got == pytest.approx(expected, abs=2e-4)


def test_8bit_moments_learn_as_well(tiny):
    # width 64, so that there are tensors of 4,096 elements to quantise
    words = ["train.steps=40", "model.width=64"]
    expected = losses(flatout.train(tiny(*words, "output.folder=wide")))
    got = losses(flatout.train(tiny(*words, "output.folder=narrow", "speed.optimizer_state=8bit")))
    assert got[0] == expected[0]
    assert got != expected
    assert sum(got[-10:]) / 10 == pytest.approx(sum(expected[-10:]) / 10, abs=0.05)


def test_an_8bit_run_resumes_bit_for_bit(tiny):
    words = ["train.steps=20", "model.width=64", "speed.optimizer_state=8bit"]
    whole = losses(flatout.train(tiny(*words, "output.folder=whole")))
    config = tiny(*words, "output.folder=cut")
    first = list(flatout.train(config, stop=stop_after(9)))
    second = list(flatout.train(config, resume="auto"))
    assert losses(first) + losses(second) == whole


@pytest.mark.parametrize(("before", "after"), [("fp32", "8bit"), ("8bit", "fp32")])
def test_resuming_with_another_kind_of_moments_is_refused(tiny, before, after):
    words = ["train.steps=12", "model.width=64", "output.folder=run"]
    list(flatout.train(tiny(*words, f"speed.optimizer_state={before}"), stop=stop_after(6)))
    with pytest.raises(CheckpointError, match=r"speed\.optimizer_state was .*, is now") as refused:
        list(flatout.train(tiny(*words, f"speed.optimizer_state={after}"), resume="auto"))
    assert f"resume with speed.optimizer_state={before}" in refused.value.hint


def test_the_run_says_which_attention_kernel_sdpa_takes(tiny):
    info = next(iter(flatout.train(tiny("train.steps=1"))))
    assert isinstance(info, RunInfo)
    answers = {f.name: f for f in info.features}
    assert answers["attention"].used in ("sdpa (flash)", "sdpa (math)")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["speed.loss=plain", "speed.loss_chunk=64"], ["loss_chunk 64 became none: the plain loss takes all tokens"]),
        (["speed.micro_batch=3"], ["micro_batch 3 became 2: the largest divisor of the batch"]),
        (["speed.loader=device", "speed.workers=3"], ["workers 3 became 0: tokens already live on the device"]),
        (["speed.loss=chunked", "speed.loss_chunk=64", "speed.loader=host", "speed.workers=3"], []),
        (["speed.loss=plain", "speed.loader=device"], []),
    ],
)
def test_a_number_that_does_nothing_is_told_of(tiny, words, told):
    stream = io.StringIO()
    TerminalReader(10, stream).show(next(iter(flatout.train(tiny("train.steps=1", *words)))))
    notes = [line for line in stream.getvalue().splitlines() if line.startswith("note: speed.")]
    assert len(notes) == len(told)
    assert all(expected in note for expected, note in zip(told, notes, strict=True))


@pytest.mark.parametrize(
    "word",
    [
        "speed.attention=cudnn",
        "speed.cuda_graphs=on",
        "speed.optimizer_offload=true",
        "speed.kernels=triton",
    ],
)
def test_what_a_cpu_cannot_have_is_an_error_when_written(tiny, word):
    with pytest.raises(HardwareError, match="but") as caught:
        set_up(tiny(word))
    assert caught.value.hint.startswith(f"set {word.partition('=')[0]}=")


def without_code_generation(monkeypatch) -> None:
    """Compiles as far as counting needs it: graphs are captured and differentiated, and run by torch itself."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: real(*a, **{"backend": "aot_eager"} | k))
    torch._dynamo.reset()


HIDDEN = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler hides it from users


@HIDDEN
@pytest.mark.parametrize(("mode", "graphs"), [("default", "1 graph"), ("regional", "2 graphs")])
def test_graphs_are_counted_and_told(tiny, mode, graphs, monkeypatch):
    """Regional: one graph for all blocks, one for head and loss. Decoding compiles nothing."""
    without_code_generation(monkeypatch)
    words = ["train.steps=3", "eval.tokens=64"]
    expected = losses(flatout.train(tiny(*words, "output.folder=eager")))
    records = list(flatout.train(tiny(*words, f"speed.compile={mode}", "output.folder=compiled")))
    torch._dynamo.reset()
    assert losses(records) == pytest.approx(expected, abs=2e-4)
    told = [(r.step, r.message) for r in records if isinstance(r, NoticeRecord) and r.message.startswith("compile")]
    assert told[0] == (1, f"compile {mode}: {graphs}; no graph breaks")
    assert told[1:] == [(3, f"compile {mode}: {graphs} more; no graph breaks")], "evaluation is compiled apart"


@pytest.mark.usefixtures("bf16_products")
@HIDDEN
@pytest.mark.parametrize(
    ("mode", "graphs"), [("default", "1 graph"), pytest.param("regional", "2 graphs", marks=pytest.mark.slow)]
)
def test_the_fused_loss_is_part_of_the_graph(tiny, mode, graphs, monkeypatch):
    """The ladder's rung `loss`, as far as a CPU goes: bf16, a padded vocabulary, several chunks, no break."""
    without_code_generation(monkeypatch)
    words = ["train.steps=4", "eval.tokens=64", "speed.precision=bf16", "speed.pad_vocab=64", "speed.loss=fused"]
    words += ["model.layers=1", "speed.loss_chunk=24"]  # chunks of a micro-batch and a shorter one
    expected = losses(flatout.train(tiny(*words, "output.folder=eager")))
    records = list(flatout.train(tiny(*words, f"speed.compile={mode}", "output.folder=compiled")))
    torch._dynamo.reset()
    assert losses(records) == pytest.approx(expected, abs=5e-3)
    told = [message for message in notices(records) if message.startswith("compile")]
    assert told[0] == f"compile {mode}: {graphs}; no graph breaks"


@HIDDEN
def test_a_graph_break_is_counted_and_explained(tiny, monkeypatch):
    without_code_generation(monkeypatch)
    run = set_up(tiny("train.steps=2", "model.layers=1", "speed.compile=default"))
    real = type(run.model).hidden

    def broken(model, tokens, **more):
        torch._dynamo.graph_break()
        return real(model, tokens, **more)

    monkeypatch.setattr(type(run.model), "hidden", broken)
    with run.batches(0) as loader:
        batch = next(iter(loader))
        run.step(batch.tokens, batch.targets)
    torch._dynamo.reset()
    told = run.new_notices.take()
    assert len(told) == 1
    assert "2 graph breaks (" in told[0]
    assert run.new_notices.take() == []


@HIDDEN
@pytest.mark.slow
def test_compiled_blocks_share_one_graph_the_cache_is_used_and_both_are_told(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    words = ["train.steps=3", "model.layers=3", "speed.compile=regional", "eval.tokens=64"]
    expected = losses(flatout.train(tiny("train.steps=3", "model.layers=3", "output.folder=eager")))
    for attempt in ("cold", "warm"):
        torch._dynamo.reset()
        before = compile_counts()
        records = list(flatout.train(tiny(*words, f"output.folder={attempt}")))
        done = compile_counts().since(before)
        assert losses(records) == pytest.approx(expected, abs=2e-4)
        told = [message for message in notices(records) if message.startswith("compile")]
        assert told[0].startswith("compile regional: 2 graphs; no graph breaks"), "one block, head and loss"
        assert done.breaks == 0
        if attempt == "cold":
            assert told[0].endswith("0 of 4 pieces of code from the cache")
        else:
            assert told[0].endswith("4 of 4 pieces of code from the cache")
            assert done.built == 0, "evaluation came from the cache too"
        assert len(told) == 2, "evaluation is compiled apart, and told"
        assert "2 graphs more" in told[1]
    torch._dynamo.reset()
