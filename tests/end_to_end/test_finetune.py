"""Fine-tuning from the command to the merged model, on a small chat model with drawn weights."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from flatout import api
from flatout.checkpoints.checkpoint import list_checkpoints, read_checkpoint
from flatout.cli import main
from flatout.config.load import load_config
from flatout.engine.graphs import MicroBatchGraph
from flatout.engine.recovery import attempt_step, use_less_memory
from flatout.errors import UserError
from flatout.model.gpt import GPT
from flatout.records import EndRecord, EvalRecord, NoticeRecord, RunInfo, StepRecord
from flatout.resolve.opening import open_sample_data
from tests.chat_models import write_chat_model
from tests.set_up import set_up
from tests.unit.test_graphs import FakeRecorder

pytestmark = pytest.mark.usefixtures("children_stay")

NEEDS_BITSANDBYTES = pytest.mark.skipif(not find_spec("bitsandbytes"), reason="needs bitsandbytes")
QUIET = ["eval.sample_tokens=4", "speed.device=cpu", "model.context=64"]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "base")
    rows = [{"instruction": f"What is {n} and one?", "input": "", "output": f"It is {n + 1}."} for n in range(30)]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")

    def make(*more: str) -> list[str]:
        named = ["model.init_from=base", "chat.source=rows.json", "optim.learning_rate=1e-2", "train.epochs=2.0"]
        return [*named, *QUIET, *more]

    return make


def losses(records: list) -> list[float]:
    return [record.loss for record in records if isinstance(record, StepRecord)]


def test_a_run_learns_says_what_it_learns_from_and_saves_adapters_alone(words):
    records = list(api.train(load_config("lora", words())))
    info = records[0]
    assert isinstance(info, RunInfo)
    assert info.batch_samples == 8
    assert info.trained_parameters is not None
    assert info.trained_parameters < info.parameters
    said = [record.message for record in records if isinstance(record, NoticeRecord)]
    assert any("tokens are learned" in message for message in said)
    evaluations = [record.loss for record in records if isinstance(record, EvalRecord)]
    assert losses(records)[-1] < 0.8 * losses(records)[0]
    assert evaluations[-1] < losses(records)[0]
    assert isinstance(records[-1], EndRecord)
    saved = read_checkpoint(list_checkpoints(Path(info.folder) / "checkpoints")[-1][1])
    assert all("lora_" in name for name in saved.model)
    assert sum(tensor.numel() for tensor in saved.model.values()) == info.trained_parameters


def test_what_is_learned_is_shown_before_the_first_step(words, capsys):
    assert main(["finetune", *words("train.steps=1", "train.epochs=null")]) == 0
    said = capsys.readouterr().out
    assert said.index("\u27e6It is ") < said.index("step 1/1")
    assert "<|im_end|>\u27e7" in said
    assert "What is" in said[: said.index("\u27e6")]


def test_the_base_is_never_changed(words):
    before = {name: tensor.clone() for name, tensor in api.load_model("base", device="cpu").model.named_parameters()}
    folder = next(iter(api.train(load_config("lora", words("train.steps=3", "train.epochs=null"))))).folder
    list(api.train(load_config("lora", words("output.name=again"))))
    adapted = api.load_model("runs/again", device="cpu")
    assert adapted.adapters is not None
    for name, tensor in before.items():
        assert torch.equal(dict(adapted.model.named_parameters())[name], tensor), name
    assert folder


RESUMED = [
    ["lora.dropout=0.2"],
    ["lora.rank=0"],
    ["lora.dora=true", "chat.packing=false"],
    ["optim.weight_decay=0.1", "lora.dora=true"],
    pytest.param(["lora.quantize=nf4"], marks=NEEDS_BITSANDBYTES),
]


@pytest.mark.parametrize("more", RESUMED)
def test_resume_is_bit_identical(words, more):
    through = words("train.steps=7", "train.epochs=null", *more)
    whole = list(api.train(load_config("lora", [*through, "output.folder=runs/whole"])))
    steps = 0

    def stop() -> bool:
        nonlocal steps
        steps += 1
        return steps == 3

    first = list(api.train(load_config("lora", [*through, "output.folder=runs/cut"]), stop=stop))
    rest = list(api.train(load_config("lora", [*through, "output.folder=runs/cut"]), resume="auto"))
    assert losses(first)[:3] + losses(rest) == losses(whole)
    ends = [read_checkpoint(list_checkpoints(Path(f"runs/{name}/checkpoints"))[-1][1]) for name in ("whole", "cut")]
    for name, tensor in ends[0].model.items():
        assert torch.equal(tensor, ends[1].model[name]), name
    tokens = [record.tokens for record in [*first, *rest] if isinstance(record, StepRecord)]
    assert tokens == [record.tokens for record in whole if isinstance(record, StepRecord)]


def test_packing_and_micro_batches_do_not_change_the_loss(words):
    runs = {}
    for name, more in {
        "packed": ["speed.micro_batch=8"],
        "one by one": ["speed.micro_batch=1"],
        "padded": ["chat.packing=false", "speed.micro_batch=8"],
        "padded one by one": ["chat.packing=false", "speed.micro_batch=1"],
    }.items():
        config = load_config("lora", words("train.steps=5", "train.epochs=null", f"output.name=run{len(runs)}", *more))
        runs[name] = losses(list(api.train(config)))
    for name, values in runs.items():
        assert values == pytest.approx(runs["packed"], rel=2e-5), name


def test_rows_joined_to_one_do_not_change_the_loss(words, monkeypatch):
    """As on a GPU, where attention goes by bounds; here the mask does for one long row, too."""
    expected = losses(list(api.train(load_config("lora", words("output.name=rows", "speed.micro_batch=2")))))
    monkeypatch.setattr("flatout.resolve.case.BY_BOUNDS", ("sdpa",))
    for size in (8, 2):
        records = list(api.train(load_config("lora", words(f"output.name=joined{size}", f"speed.micro_batch={size}"))))
        assert losses(records) == pytest.approx(expected, rel=5e-5)
        said = [record.message for record in records if isinstance(record, NoticeRecord)]
        assert any("is padding, in" in message for message in said)


def test_out_of_memory_recordings_are_given_up_before_the_run(words, monkeypatch):
    """A single row cannot be halved, but graphs hold memory of their own."""
    loaded = load_config("lora", words("chat.batch_samples=1"))
    expected, run = set_up(loaded), set_up(loaded)
    run.step.graph = MicroBatchGraph(run.model, run.new_notices, FakeRecorder(), run.adapters)
    real, failures = GPT.forward, iter([True])

    def forward(self, *values):
        loss = real(self, *values)
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss

    with expected.batches(0) as loader:
        batch = next(loader)
        right = attempt_step(expected, batch)
        monkeypatch.setattr(GPT, "forward", forward)
        told = attempt_step(run, batch)
        assert isinstance(told, str)
        assert "continuing without CUDA graphs" in use_less_memory(run, batch, told)
        report = attempt_step(run, batch)
    assert isinstance(report, torch.Tensor)
    assert torch.equal(report, right)
    failures = iter([True])
    with pytest.raises(UserError, match="out of device memory"):
        attempt_step(run, batch)


def test_out_of_memory_beside_recordings_leaves_the_micro_batch_as_it_is(words, monkeypatch):
    """A shape that comes for the first time needs its memory beside that of the recordings."""
    run = set_up(load_config("lora", words("speed.micro_batch=2", "chat.packing=false")))
    graph = run.step.graph = MicroBatchGraph(run.model, run.new_notices, FakeRecorder(), run.adapters)
    with run.batches(0) as loader:
        batch = next(loader)
        assert isinstance(attempt_step(run, batch), torch.Tensor)
        assert graph.recordings
        for told in (
            "cuda_graphs became off: no room: continuing without",
            "no room: continuing with micro-batches of 1",
        ):
            assert use_less_memory(run, batch, "no room").startswith(told)
            assert isinstance(attempt_step(run, batch), torch.Tensor)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler hides it from users
@pytest.mark.parametrize("mode", ["default", "regional"])
def test_samples_are_compiled_once_for_all_their_shapes(words, mode):
    texts = [{"text": f"{n} " + "What is it " * (n % 11)} for n in range(60)]
    Path("mixed.json").write_text(json.dumps(texts), encoding="utf-8")
    more = ("chat.source=mixed.json", "chat.batch_samples=5", "train.epochs=1.0", "model.context=256")
    expected = losses(list(api.train(load_config("lora", words("output.name=plain", *more)))))
    records = list(api.train(load_config("lora", words(f"speed.compile={mode}", "output.name=compiled", *more))))
    assert losses(records) == pytest.approx(expected, rel=1e-4)
    told = [r for r in records if isinstance(r, NoticeRecord) and r.message.startswith("compile")]
    assert told
    assert all(record.step <= 3 or record.step == len(expected) for record in told), [r.message for r in told]


def test_chat_and_merge_after_a_run(words, capsys):
    assert main(["finetune", *words("train.epochs=12.0")]) == 0
    assert main(["chat", "runs/lora", "--message", "What is 5 and one?", "--temperature", "0", "--tokens", "9"]) == 0
    answer = capsys.readouterr().out.splitlines()[-1]
    assert answer.startswith("It is")
    assert main(["export", "runs/lora", "merged", "--dtype", "fp32", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert any("100.0% of it survived" in note for note in told["notes"])
    assert main(["chat", "merged", "--message", "What is 5 and one?", "--temperature", "0", "--tokens", "9"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == answer
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained("merged")
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        ours = api.load_model("runs/lora", device="cpu").model.logits(tokens)
        torch.testing.assert_close(theirs(tokens).logits, ours, rtol=1e-4, atol=1e-5)


def test_the_samples_of_a_run_are_those_of_its_template(words):
    _, data = open_sample_data(load_config("lora", words()).config, None)
    ids, labelled = data.train.sample(0)
    learned = data.tokenizer.decode(ids[labelled])
    assert learned.startswith("It is ")
    assert learned.endswith("<|im_end|>")
    assert data.tokenizer.decode(data.prompt("")).endswith("<|im_start|>assistant\n")


@NEEDS_BITSANDBYTES
def test_beside_4_bits_a_run_learns_evaluates_and_merges(words, tmp_path):
    records = list(api.train(load_config("lora", words("lora.quantize=nf4"))))
    info = records[0]
    assert isinstance(info, RunInfo)
    plain = next(iter(api.train(load_config("lora", words("output.name=plain")))))
    assert isinstance(plain, RunInfo)
    assert info.memory_estimate_bytes < plain.memory_estimate_bytes
    assert losses(records)[-1] < 0.8 * losses(records)[0]
    saved = read_checkpoint(list_checkpoints(Path(info.folder) / "checkpoints")[-1][1])
    assert all("lora_" in name for name in saved.model)
    # Whoever loads the run later gets the base as it was beside the adapters.
    evaluations = [record.loss for record in records if isinstance(record, EvalRecord)]
    assert api.evaluate(info.folder).loss == pytest.approx(min(evaluations), rel=1e-4)
    report = api.merge(api.load_model(info.folder, device="cpu"), tmp_path / "merged", dtype="fp32")
    assert report.report.kept == pytest.approx(1.0, abs=1e-3)


BAD = {
    "4-bit weights without adapters": (["lora.rank=0", "lora.quantize=nf4"], "cannot be trained"),
    "4-bit weights compiled": (["lora.quantize=nf4", "speed.compile=default"], "4-bit weights"),
    "no model": (["model.init_from=null"], "no model to start from"),
    "no such model": (["model.init_from=nowhere"], "there is no folder"),
    "no such file": (["chat.source=nothing.json"], "nothing.json"),
    "a shape of one's own": (["model.layers=3"], "the model is that of base"),
    "tokens as a length": (["train.epochs=null", "train.tokens=1000"], "steps or epochs"),
    "a column that is not there": (["chat.fields=[prompt=ask]"], "ask"),
    "a field without a column": (["chat.fields=[prompt]"], "chat.fields"),
    "a template that is not there": (["chat.template=mine.jinja"], "mine.jinja"),
    "a target that is not there": (["lora.targets=[w_proj]"], "w_proj"),
    "a model without a template": (["model.init_from=mute"], "no chat template"),
    "nothing held out": (["chat.validation=0.0"], "held out"),
    "micro-batches that do not fit": (["speed.accumulation=3"], "speed.accumulation"),
    "kernels that are not for a CPU": (["speed.kernels=triton"], "CUDA"),
    "a stream": (["data.streaming=true", "data.source=rows.json"], "plain text"),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_told_in_two_lines(case, words, capsys):
    more, expected = BAD[case]
    mute = write_chat_model(Path("mute"))
    settings = json.loads((mute / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("chat_template")
    (mute / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    code = main(["finetune", *words(*more)])
    lines = capsys.readouterr().err.splitlines()
    assert code in (2, 3), lines
    assert [line.split(":")[0] for line in lines[-2:]] == ["error", "hint"]
    assert expected in " ".join(lines[-2:])
    assert not Path("runs/lora/checkpoints").exists()


def test_finetune_needs_something_to_fine_tune_on(words, capsys):
    assert main(["finetune", "shakespeare-char"]) == 2
    assert "nothing to fine-tune on" in capsys.readouterr().err


def test_adapters_need_the_model_they_were_trained_on(words):
    list(api.train(load_config("lora", words("train.steps=2", "train.epochs=null"))))
    Path("base").rename("moved")
    with pytest.raises(UserError, match="base"):
        api.load_model("runs/lora", device="cpu")


@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_context_that_is_no_multiple_of_row_lengths(words, packing):
    texts = [{"text": f"{n} " + ("Hello" if n % 2 else "What is it " * 12)} for n in range(20)]
    Path("mixed.json").write_text(json.dumps(texts), encoding="utf-8")
    more = ("chat.source=mixed.json", "model.context=40", f"chat.packing={packing}", "train.epochs=1.0")
    assert isinstance(list(api.train(load_config("lora", words(*more))))[-1], EndRecord)


def test_eval_measures_what_the_run_measured_and_merged_adapters_are_gone(words, tmp_path):
    records = list(api.train(load_config("lora", words())))
    folder = records[0].folder
    last = [record for record in records if isinstance(record, EvalRecord)][-1]
    measured = api.evaluate(folder)
    assert measured.tokens == last.tokens
    assert measured.loss == pytest.approx(min(r.loss for r in records if isinstance(r, EvalRecord)), rel=1e-5)
    model = api.load_model(folder, device="cpu")
    api.merge(model, tmp_path / "one")
    with pytest.raises(UserError, match="no adapters"):
        api.merge(model, tmp_path / "two")


@pytest.mark.parametrize("verb", ["prepare", "estimate --gpus 8"])
def test_verbs_for_pretraining_say_so(words, verb, capsys):
    assert main([*verb.split(), "lora", *words()]) == 2
    said = capsys.readouterr().err
    assert "is for pretraining" in said
    assert len(said.strip().splitlines()) == 2


def test_dropout_in_the_model_is_refused_with_the_config(words):
    with pytest.raises(UserError, match="no dropout"):
        load_config("lora", words("model.dropout=0.1"))


def test_what_was_taught_without_a_template_is_asked_without_one(words):
    Path("pairs.json").write_text(json.dumps([{"prompt": f"one {n}", "completion": " two"} for n in range(9)]))
    more = ("chat.source=pairs.json", "chat.template=none", "train.steps=1", "train.epochs=null")
    info, *_ = api.train(load_config("lora", words(*more)))
    assert isinstance(info, RunInfo)
    assert api.chat_prompt(api.load_model(info.folder, device="cpu"), "one 1") == "one 1"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more", [[], ["chat.packing=false"], ["speed.checkpointing=full"], ["speed.micro_batch=4"]], ids=str
)
def test_on_a_gpu_our_kernels_learn_what_torch_learns(more, words):
    """The whole run: losses, evaluations and what is said of the switches. Weights are drawn, so noise stays small."""
    seen = []
    for kernels in ("triton", "torch"):
        named = ["speed.device=cuda", f"speed.kernels={kernels}", f"output.name={kernels}", "optim.learning_rate=2e-3"]
        seen.append(list(api.train(load_config("lora", words(*named, *more)))))
    for mine, theirs in zip(*(losses(records) for records in seen), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-2)
    last = [[record.loss for record in records if isinstance(record, EvalRecord)][-1] for records in seen]
    assert last[0] == pytest.approx(last[1], rel=2e-2)
    info = seen[0][0]
    assert isinstance(info, RunInfo)
    used = {feature.name: feature.used for feature in info.features}
    assert used["kernels"] == "triton"
    assert used["document_attention"] in ("flash", "fa4")
