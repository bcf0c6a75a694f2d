"""Fine-tuning on a GPU: recorded and compiled steps of packed samples learn what plain ones learn."""

import json
from pathlib import Path

import pytest
import torch

from flatout import api
from flatout.config.load import load_config
from flatout.engine.run import Run
from flatout.records import EndRecord, EvalRecord, NoticeRecord, RunInfo, StepRecord
from tests.chat_models import write_chat_model
from tests.set_up import set_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # the compiler hides it from users
]

EXACT = ["speed.precision=fp32", "train.deterministic=true", "speed.kernels=torch"]
TORCH = ["speed.kernels=torch"]
KERNELS = ["torch", "auto"]  # auto: our own, where they know adapters


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "base", context=512)
    rows = [
        {"instruction": "What is it " * (n % 7), "input": "", "output": "Hello there, it is one. " * (1 + n % 5)}
        for n in range(60)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")


def words(*more: str) -> list[str]:
    named = ["model.init_from=base", "chat.source=rows.json", "optim.learning_rate=1e-2", "train.epochs=null"]
    quiet = ["eval.sample_tokens=4", "model.context=512", "chat.batch_samples=6"]
    return [*named, *quiet, "train.steps=24", *more]


def losses(records: list) -> list[float]:
    return [record.loss for record in records if isinstance(record, StepRecord)]


def steps_of(*more: str) -> tuple[Run, list[torch.Tensor]]:
    run = set_up(load_config("lora", words(*more)))
    with run.batches(0) as loader:
        return run, [run.step(batch.tokens, batch.targets, batch.packed).cpu() for batch in loader]


@pytest.mark.parametrize("more", [[], ["lora.dora=true"], ["speed.micro_batch=2"], ["speed.checkpointing=full"]])
def test_recorded_steps_are_exact(more):
    """With a mask in fp32 every kernel has one order of sums."""
    _, expected = steps_of(*EXACT, "speed.cuda_graphs=off", *more)
    run, reports = steps_of(*EXACT, "speed.cuda_graphs=on", *more)
    graph = run.step.graph
    assert graph is not None
    assert graph.recordings, run.new_notices.take()
    assert all(torch.equal(a, b) for a, b in zip(reports, expected, strict=True))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("more", [[], ["lora.rank=0", "optim.learning_rate=1e-3"]])
def test_recorded_steps_by_bounds_learn_the_same(kernels, more):
    results = {}
    for graphs in ("off", "on"):
        run, reports = steps_of(f"speed.kernels={kernels}", f"speed.cuda_graphs={graphs}", *more)
        results[graphs] = torch.stack(reports)[:, 0]
        assert not [message for message in run.new_notices.take() if "became off" in message]
        if graphs == "on":
            graph = run.step.graph
            assert graph is not None
            assert len(graph.recordings) >= 2
    assert results["off"][-1] < 0.7 * results["off"][0]
    torch.testing.assert_close(results["on"], results["off"], rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(results["on"][:4], results["off"][:4], rtol=3e-3, atol=3e-3)


def test_joined_rows_learn_what_padded_rows_learn():
    joined, padded = (torch.stack(steps_of(*TORCH, *more)[1])[:, 0] for more in ([], ["chat.packing=false"]))
    torch.testing.assert_close(joined[:4], padded[:4], rtol=3e-3, atol=3e-3)
    torch.testing.assert_close(joined, padded, rtol=3e-2, atol=3e-2)


def test_graphs_are_automatic_and_a_run_with_them_resumes_as_it_went(tmp_path):
    through = [*EXACT, "speed.cuda_graphs=on", "checkpoint.every=10"]
    whole = list(api.train(load_config("lora", words(*through, "output.folder=whole"))))
    cut = list(api.train(load_config("lora", words(*through, "output.folder=cut")), stop=lambda: True))
    rest = list(api.train(load_config("lora", words(*through, "output.folder=cut")), resume="auto"))
    assert losses(cut) + losses(rest) == losses(whole)
    run, _ = steps_of()
    assert run.speed.cuda_graphs


@pytest.mark.parametrize("mode", ["default", "regional"])
def test_compiled_steps_learn_the_same_and_are_compiled_once(mode):
    expected = losses(list(api.train(load_config("lora", words(*TORCH, "speed.cuda_graphs=off", "output.name=plain")))))
    more = [*TORCH, f"speed.compile={mode}", "speed.cuda_graphs=off", "output.name=compiled"]
    records = list(api.train(load_config("lora", words(*more))))
    assert isinstance(records[0], RunInfo)
    assert {feature.name: feature.used for feature in records[0].features}["compile"] == mode
    assert losses(records)[:4] == pytest.approx(expected[:4], rel=5e-3)
    assert losses(records) == pytest.approx(expected, rel=5e-2)
    assert isinstance(records[-1], EndRecord)
    assert [record for record in records if isinstance(record, EvalRecord)]
    told = [record for record in records if isinstance(record, NoticeRecord) and record.message.startswith("compile")]
    said = [(record.step, record.message) for record in told]
    assert len(told) <= 4, said  # the first shape, any shape, with and without labels to select, and evaluation
