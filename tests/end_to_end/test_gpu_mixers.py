"""Whole models of every mixer on a CUDA device, in bf16 and our kernels, as tests/unit/test_mixers.py on a CPU."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import flatout
from flatout.config.load import load_config
from flatout.config.schema import ModelConfig
from flatout.model.compiling import compile_counts
from flatout.model.execution import Execution
from flatout.model.gpt import GPT, build_model
from flatout.ops.documents import lay_out
from flatout.records import StepRecord
from tests.end_to_end.no_waits import take_steps_without_waiting
from tests.set_up import set_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # the compiler hides it from users
]

VOCAB = 211
SHAPE = {"layers": 3, "width": 256, "heads": 2, "window": 128, "states": 64, "positions": "rope"}
MODELS = {
    "A": {"pattern": "A"},
    "W": {"pattern": "W"},
    "E": {"pattern": "E"},
    "WEA": {"pattern": "WEA"},
    "EWA": {"pattern": "EWA"},
}
KERNELS = Execution(
    kernels="triton",
    scan="triton",
    attention="flash",
    document_attention="flash",
    loss="fused",
    residual="bf16",
    pad_vocab=64,
)
every_model = pytest.mark.parametrize("model_name", MODELS)


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def built(model_name: str, context: int, execution: Execution = KERNELS, **more) -> GPT:
    config = ModelConfig(**{**SHAPE, **MODELS[model_name], "context": context, **more})
    return build_model(config, VOCAB, seed=1, execution=execution).cuda()


def tokens(batch: int, length: int, seed: int = 3) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed)).cuda()


def in_bf16() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16)


def apart(mine: Tensor, theirs: Tensor) -> float:
    """Root mean square of the difference over that of the expected."""
    return float((mine.double() - theirs.double()).square().mean().sqrt() / theirs.double().square().mean().sqrt())


@every_model
def test_a_token_sees_nothing_after_it(model_name):
    model, row = built(model_name, 700).eval(), tokens(1, 700)
    with torch.no_grad(), in_bf16():
        before = model.logits(row)
        for place in (0, 300, 699):
            other = row.clone()
            other[:, place] = (other[:, place] + 1) % VOCAB
            changed = (model.logits(other) != before).any(dim=-1)[0]
            assert not changed[:place].any(), "what comes later is seen"
            # Bits of bf16 are few: of something far away none may change.
            assert changed[place], "a token does not see itself"
            assert changed[place : place + 100].double().mean() > 0.3, "what came before is not seen"


@pytest.mark.parametrize("model_name", ["E", "WEA", "EWA"])
def test_the_chunk_changes_nothing(model_name):
    how = Execution(scan="triton")
    model, row = built(model_name, 2048, how), tokens(1, 2048)
    with torch.no_grad():
        expected = built(model_name, 2048, Execution()).logits(row)
        for chunk in (16, 32, 64, 128, 256, 512):
            for mixer in model.eigenstates:
                mixer.chunk = chunk
            assert apart(model.logits(row), expected) < 1e-3


@every_model
@pytest.mark.parametrize("prompt", [1, 100, 777])
def test_a_prompt_and_then_tokens_equal_one_pass(model_name, prompt):
    model, row = built(model_name, 1000, Execution(scan="triton")).eval(), tokens(2, 1000)
    with torch.inference_mode():
        whole, cache = model.logits(row), model.empty_cache(2)
        pieces = [model.logits(row[:, :prompt], cache)]
        pieces += [model.logits(row[:, place : place + 1], cache) for place in range(prompt, prompt + 40)]
        pieces.append(model.logits(row[:, prompt + 40 : prompt + 200], cache))
    assert apart(torch.cat(pieces, dim=1), whole[:, : prompt + 200]) < 1e-3


@every_model
def test_documents_are_as_if_alone(model_name):
    lengths = [1, 250, 449]
    layout = lay_out(np.repeat(np.arange(3, dtype=np.int32), lengths)[None], None, torch.device("cuda"))
    model, row = built(model_name, 700).eval(), tokens(1, 700)
    with torch.no_grad(), in_bf16():
        packed = model.logits(row, layout=layout)
        alone = torch.cat([model.logits(part) for part in row.split(lengths, dim=1)], dim=1)
        assert apart(packed, alone) < 2e-2
        other = row.clone()
        other[:, 1:251] = (other[:, 1:251] + 1) % VOCAB
        moved = (model.logits(other, layout=layout) != packed).any(dim=-1)[0]
    assert moved[1:251].all()
    assert int(moved.sum()) == 250, "to the last bit, in all other documents"


@every_model
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_gradients_are_those_of_the_plain_form(model_name, checkpointing):
    how = Execution(**{**vars(KERNELS), "checkpointing": checkpointing})
    model, exact = built(model_name, 1024, how), built(model_name, 1024, Execution(scan="reference", attention="sdpa"))
    row, targets = tokens(2, 1024), tokens(2, 1024, seed=5)
    with in_bf16():
        loss = model(row, targets)
    loss.backward()
    expected = exact(row, targets)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=5e-3)
    for (name, mine), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None, name
        assert theirs.grad is not None, name
        assert apart(mine.grad, theirs.grad) < 1e-1, name


@every_model
def test_32768_tokens_in_bf16(model_name):
    model, exact = built(model_name, 32768), built(model_name, 32768, Execution())
    row = tokens(1, 32768)
    with torch.no_grad():
        expected = exact.logits(row)
        with in_bf16():
            found = model.logits(row)
    assert apart(found, expected) < 3e-2
    assert apart(found[:, -1000:], expected[:, -1000:]) < 3e-2, "no drift towards the end"


# --- whole runs ------------------------------------------------------------------------------------------------------

SMALL = ["model.layers=3", "model.width=256", "model.heads=2", "model.context=256", "train.batch_tokens=4096",
         "model.pattern=EWA", "model.window=64", "model.states=64", "speed.micro_batch=8", "optim.warmup=5",
         "eval.every=0", "eval.tokens=4096", "eval.sample_tokens=8", "checkpoint.every=0", "train.steps=12",
         "speed.device=cuda"]  # fmt: skip
EAGER = ["speed.kernels=torch", "speed.compile=off", "speed.cuda_graphs=off"]


def losses(*words: str) -> list[float]:
    records = flatout.train(load_config(None, [*SMALL, *words]))
    return [record.loss for record in records if isinstance(record, StepRecord)]


def test_switches_learn_the_same():
    expected = losses(*EAGER, "speed.precision=fp32", "speed.scan=chunked", "output.folder=plain")
    ways = {
        "scan": [*EAGER, "speed.precision=fp32", "speed.scan=triton"],
        "kernels": ["speed.precision=bf16", "speed.cuda_graphs=off"],
        "graphs": ["speed.precision=bf16", "speed.cuda_graphs=on"],
        "full": ["speed.precision=bf16", "speed.checkpointing=full", "speed.cuda_graphs=on"],
        "fp8": ["speed.precision=bf16", "speed.fp8=[qkv, out, up, down]"],
        "torch": [*EAGER, "speed.precision=bf16", "speed.loss=chunked"],
    }
    for name, words in ways.items():
        if name == "fp8" and torch.cuda.get_device_capability() < (8, 9):
            continue
        found = losses(*words, f"output.folder={name}")
        assert found == pytest.approx(expected, abs=2e-3 if "fp32" in str(words) else 5e-2), name


@pytest.mark.parametrize("mode", ["default", "regional", "reduce-overhead"])
@pytest.mark.parametrize("scan", ["triton", "chunked"])
def test_compiled_code_learns_the_same_without_breaks(mode, scan):
    words = ["speed.precision=fp32", f"speed.scan={scan}"]
    expected = losses(*EAGER, *words, "output.folder=eager")
    before = compile_counts()
    found = losses("speed.kernels=torch", f"speed.compile={mode}", *words, "output.folder=compiled")
    assert found == pytest.approx(expected, abs=2e-3)
    assert compile_counts().since(before).breaks == 0


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_steps_never_wait_for_the_device(graphs):
    run = set_up(load_config(None, [*SMALL, f"speed.cuda_graphs={graphs}", "speed.loader=device"]))
    take_steps_without_waiting(run)
    assert (run.step.graph is not None) == (graphs == "on")


def test_documents_apart_train_on_a_gpu():
    text = Path("many.jsonl")
    text.write_text("\n".join(f'{{"text": "{"so it goes, " * (n % 40 + 1)}"}}' for n in range(4000)), encoding="utf-8")
    words = ["data.source=many.jsonl", "data.tokenizer=bytes", "data.split=document", "data.documents=apart"]
    expected = losses(*words, *EAGER, "speed.precision=fp32", "output.folder=plain")
    found = losses(*words, "speed.precision=bf16", "output.folder=kernels")
    assert found == pytest.approx(expected, abs=5e-2)
