"""What fine-tuning tells its user: report, doctor, notes and hints; what its files say, and who may read them."""

import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import flatout
from flatout import api
from flatout.checkpoints.base_and_adapter import stored_quantize
from flatout.cli import main
from flatout.config.load import load_config
from flatout.diagnose import check_run
from flatout.diagnose.examine import examine
from flatout.errors import CheckpointError, UserError
from flatout.files import canonical_json
from flatout.finding import Finding
from flatout.model import weights
from flatout.model.seal import SEAL
from flatout.observe.plots import results_figure
from flatout.observe.report_data import report_data
from flatout.observe.series import RunNumbers
from flatout.observe.sinks import read_history
from flatout.observe.terminal import TerminalReader
from flatout.records import EpochRecord, NoticeRecord, RunInfo, StepRecord
from tests.chat_models import write_chat_model
from tests.end_to_end import chromium

pytestmark = pytest.mark.usefixtures("children_stay")

NEEDS_BITSANDBYTES = pytest.mark.skipif(not find_spec("bitsandbytes"), reason="needs bitsandbytes")
TOKENS = torch.arange(24)[None]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "base")
    rows: list[dict[str, str]] = [
        {"instruction": f"What is {n} and one?", "output": f"It is {n + 1}."} for n in range(30)
    ]
    (tmp_path / "rows.json").write_text(json.dumps([*rows, {"instruction": "nothing"}]), encoding="utf-8")

    def make(*more: str) -> list[str]:
        length = [] if any(word.startswith("train.steps") for word in more) else ["train.steps=6"]
        named = ["model.init_from=base", "chat.source=rows.json", "optim.learning_rate=1e-2", "train.epochs=null"]
        quiet = ["eval.sample_tokens=0", "speed.device=cpu", "model.context=64"]
        place = ["output.name=lora"] if "lora.rank=0" in more else []  # as with adapters, whatever is trained
        return [*named, *quiet, *length, *place, *more]

    return make


def run(words: list[str], **more: Any) -> list[Any]:
    return list(api.train(load_config("lora", words), **more))


def notes(records: list[Any]) -> list[str]:
    return [record.message for record in records if isinstance(record, NoticeRecord)]


def logits(model: api.LoadedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.model.logits(TOKENS)


# --- the report -------------------------------------------------------------------------------------------------------


def told(folder: str) -> tuple[dict[str, Any], dict[str, str]]:
    page = report_data([read_history(Path(folder))])["runs"][0]
    return page, {label: text for group in page["facts"] for label, text in group["rows"]}


def test_a_report_tells_base_rows_and_what_is_trained(words):
    info = run(words("lora.dropout=0.1", "lora.targets=[q_proj, v_proj]"))[0]
    assert isinstance(info, RunInfo)
    page, facts = told("runs/lora")
    assert facts["Base"] == "base"
    assert info.base is not None
    assert facts["Base's fingerprint"] == info.base[:16]
    assert info.trained_parameters is not None
    share = info.trained_parameters / (info.trained_parameters + info.parameters)
    assert facts["Trained"].startswith(f"{info.trained_parameters:,} parameters in adapters, {share:.2%} of all")
    assert facts["Adapters"] == "LoRA, rank 16, alpha 32"
    assert facts["Rows"] == "rows.json"
    assert facts["Read as"] == "alpaca"
    assert facts["Rows used"] == "30 of 31"
    assert facts["Rows not used"].startswith("1;")
    assert facts["Samples"] == "29 to train on, 1 to validate"
    assert facts["Epochs"] == "1.50"
    assert "Tokens per parameter" not in facts
    assert "tokens_per_parameter" not in {figure["key"] for figure in page["figures"]}
    assert "fine-tuned from base on 44 samples of rows.json (29 samples, 1.52 times all of it)" in page["summary"]
    assert "shakespeare" not in json.dumps({name: page[name] for name in ("summary", "facts", "figures")})


def test_accumulation_that_packed_rows_do_not_need_is_told(words):
    def about(*more: str) -> list[str]:
        records = run(words("train.steps=1", "model.context=256", *more))
        return [note for note in notes(records) if "speed.accumulation" in note]

    (told,) = about("speed.accumulation=4", "output.folder=runs/packed")
    assert told.startswith("speed.accumulation is 4, but a step has one micro-batch: its samples share rows")
    assert about("speed.accumulation=4", "chat.packing=false", "output.folder=runs/apart") == []
    assert about("speed.micro_batch=1", "output.folder=runs/small") == []


def test_a_report_of_all_weights_says_so(words):
    info = run(words("lora.rank=0", "train.steps=2"))[0]
    _, facts = told("runs/lora")
    assert facts["Trained"] == f"all {info.parameters:,} parameters"
    assert "Adapters" not in facts


def test_an_interrupted_run_is_resumed_by_its_folder(words, capsys):
    run(words(), stop=lambda: True)
    assert main(["finetune", "--resume", "runs/lora"]) == 0
    assert "finished at step 6" in capsys.readouterr().out


def test_a_record_of_before_makes_a_report_without_what_it_did_not_say(words):
    run(words("train.steps=1"))
    path = Path("runs/lora/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for name in ("base", "samples"):
            line.pop(name, None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = told("runs/lora")[1]
    assert facts["Rows"] == "rows.json"
    assert "Rows used" not in facts
    assert "Base's fingerprint" not in facts


def test_trained_parameters_stand_in_the_banner_and_above_the_plots(words, capsys):
    assert main(["finetune", *words("train.steps=1")]) == 0
    assert "42.3k frozen and 18.7k trained parameters" in capsys.readouterr().out
    figure = results_figure(RunNumbers(read_history(Path("runs/lora"))))
    header = " ".join(text.get_text() for text in figure.texts)
    assert "42.3k frozen and 18.7k trained parameters" in header
    assert "271 tokens per step" in header


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_shows_it_in_a_browser(words, tmp_path, width, capsys):
    program = chromium.find()
    if program is None:
        pytest.skip("no Chromium on this machine")
    run(words("train.steps=2"))
    assert main(["report", "runs/lora"]) == 0
    browser = chromium.Browser(program, tmp_path / "profile")
    try:
        browser.open((tmp_path / "runs/lora/report.html").as_uri(), width=width)
        shown = browser.run("document.querySelector('#what').innerText")
        assert "30 of 31" in shown
        assert "LoRA, rank 16" in shown
        assert "flatout finetune CONFIG" in browser.run("document.querySelector('#reproduce').innerText")
        assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert browser.complaints() == []
    finally:
        browser.close()
    capsys.readouterr()


# --- adapters beside a base in 4 bits ---------------------------------------------------------------------------------


@NEEDS_BITSANDBYTES
def test_an_adapter_folder_knows_that_its_base_was_in_4_bits(words):
    said = notes(run(words("lora.quantize=nf4")))
    assert any("in 4 bits (NF4)" in message and "for PEFT and vLLM" in message for message in said)
    whole, apart = api.load_model("runs/lora", device="cpu"), api.load_model("runs/lora/adapter", device="cpu")
    assert apart.quantize == "nf4"
    expected = logits(whole)
    assert torch.equal(logits(apart), expected)
    heard: list[str] = []
    api.export(apart, "again", adapter=True, notice=heard.append)
    assert any("in 4 bits" in message for message in heard)
    assert torch.equal(logits(api.load_model("again", device="cpu")), expected)
    for place, out in (("runs/lora", "one"), ("runs/lora/adapter", "other")):
        api.merge(place, out, dtype="fp32")
    assert Path("one/model.safetensors").read_bytes() == Path("other/model.safetensors").read_bytes()
    # As earlier versions wrote them: facts alone.
    facts = json.loads(Path("runs/lora/adapter", SEAL).read_text())["facts"]
    Path("runs/lora/adapter", SEAL).write_bytes(canonical_json(facts | {"quantize": "none"}))
    assert not torch.equal(logits(api.load_model("runs/lora/adapter", device="cpu")), expected)


@NEEDS_BITSANDBYTES
def test_peft_takes_a_folder_with_our_facts(words):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    run(words("lora.quantize=nf4"))
    loaded = api.load_model("runs/lora", device="cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, "runs/lora/adapter")
    Path("plain").mkdir()
    for path in Path("runs/lora/adapter").iterdir():
        if path.name != SEAL:
            (Path("plain") / path.name).write_bytes(path.read_bytes())
    plain = api.load_model("plain", device="cpu", base="base")  # as PEFT wrote it: on the base as it is
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, logits(plain), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(plain), logits(loaded), rtol=1e-3, atol=1e-3)


def test_a_quantization_that_is_not_known_is_refused(words):
    run(words("train.steps=1"))
    facts = {"base": None, "quantize": "nf3", "step": 1}
    Path("runs/lora/adapter", SEAL).write_bytes(canonical_json(facts))
    with pytest.raises(CheckpointError, match="nf3"):
        stored_quantize(Path("runs/lora/adapter"))
    assert main(["chat", "runs/lora/adapter", "--message", "Hi"]) == 3


@NEEDS_BITSANDBYTES
def test_going_on_from_an_adapter_with_a_base_in_other_bits_is_told(words):
    run(words("train.steps=1", "lora.quantize=nf4"))
    told = notes(run(words("train.steps=1", "lora.init_from=runs/lora", "output.name=on")))
    assert any("lora.quantize=nf4, and here it is none" in message for message in told)
    same = words("train.steps=1", "lora.init_from=runs/lora", "lora.quantize=nf4", "output.name=same")
    assert not any("lora.init_from" in message for message in notes(run(same)))


# --- steps ------------------------------------------------------------------------------------------------------------


def test_more_samples_in_a_step_than_there_are_is_told_and_counted_truly(words):
    records = run(words("chat.batch_samples=100", "train.steps=2"))
    info = records[0]
    assert info.batch_samples == 29
    assert any("chat.batch_samples is 100 and there are 29 samples" in message for message in notes(records))
    assert "2 steps on 29 samples teach a model little: set train.steps=100" in notes(records)
    epochs = [record for record in records if isinstance(record, EpochRecord)]
    assert len(epochs) == 2
    for epoch in epochs:
        assert epoch.windows_per_second * epoch.seconds == pytest.approx(29)
    tokens = [record.tokens for record in records if isinstance(record, StepRecord)]
    assert tokens[1] == 2 * tokens[0]


def test_a_last_batch_that_is_not_full_counts_what_it_holds(words):
    info, *records = run(words("train.steps=4"))
    epoch = next(record for record in records if isinstance(record, EpochRecord))
    stream = io.StringIO()
    reader = TerminalReader(log_every=1, stream=stream)
    for record in (info, epoch):
        reader.show(record)
    assert "samples/s" in stream.getvalue()
    assert epoch.windows_per_second * epoch.seconds == pytest.approx(29)  # 8, 8, 8 and 5


def test_a_warm_up_longer_than_the_run_is_told_in_a_sentence(words):
    records = run(words("optim.warmup=100"))
    (sentence,) = [message for message in notes(records) if "warmup" in message]
    assert "is 100 and the run has 6 steps, so the warm-up is cut to 6" in sentence
    rates = [record.learning_rate for record in records if isinstance(record, StepRecord)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(1e-2)
    assert not any("warmup" in message for message in notes(run(words("optim.warmup=6", "output.name=fits"))))


def test_a_run_that_is_made_longer_has_the_schedule_of_its_length_and_says_so(words):
    run(words("optim.warmup=2", "output.folder=runs/long"))
    longer = words("optim.warmup=2", "output.folder=runs/long", "train.steps=12")
    records = run(longer, resume="auto")
    assert any("over 6 steps and is now over 12" in message and "1.00e-03" in message for message in notes(records))
    rates = [record.learning_rate for record in records if isinstance(record, StepRecord)]
    whole = run([*longer, "output.folder=runs/whole"])
    assert rates == [record.learning_rate for record in whole if isinstance(record, StepRecord)][6:]
    assert not any("schedule" in message for message in notes(run(longer, resume="auto")))


def test_another_place_of_the_base_is_told(words):
    run(words("train.steps=1", "output.folder=runs/moved"))
    Path("base").rename("there")
    more = words("train.steps=2", "output.folder=runs/moved", "model.init_from=there", "lora.rank=16")
    assert "model.init_from was base, is now there" in notes(run(more, resume="auto"))


# --- the doctor -------------------------------------------------------------------------------------------------------


def visit(words: list[str]) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine("lora", words, quick=True)}


def test_the_doctor_looks_at_a_fine_tuning_config(words, capsys):
    found = visit(words())
    assert found["base"].status == "ok"
    assert "llama" in found["base"].found
    assert found["template"].status == "ok"
    assert "30 rows, read as alpaca" in found["rows"].found
    assert found["rows not used"].status == "warn"
    assert "of 1,085 tokens are learned" in found["samples"].found
    assert found["steps"].found == "6 steps on 29 samples teach a model little: set train.steps=100"
    assert "rank 16 on down_proj" in found["trained"].found
    assert found["a step"].status == "ok"
    assert found["warm-up"].status == "warn"
    assert not any(finding.unchecked for finding in found.values())
    assert not Path("data").exists()  # it leaves nothing behind
    assert main(["doctor", "lora", *words("optim.warmup=1"), "--quick"]) == 0
    assert "the rest" not in capsys.readouterr().out


def test_the_doctor_tells_what_a_template_does_to_rows(words):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "one", "reasoning_content": "two"}]
    rows = [*([{"messages": turns}] * 3), {"messages": [*turns, *turns[:1], {"role": "assistant", "content": ""}]}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = visit(words("chat.source=rows.jsonl"))
    assert (found["reasoning left out"].status, found["empty answers"].status) == ("warn", "note")
    assert found["reasoning left out"].found.startswith("samples: 4 turns whose reasoning the template leaves out; ")
    assert "contents left out" not in found


DOCTORED = {
    "refused": (["chat.source=nowhere.jsonl"], "data", "there is no source nowhere.jsonl", 3),
    "base": (["model.init_from=rows.json"], "data", "is a file", 3),
    "lora.targets": (["lora.targets=[q_proj, nose]"], "config", "nose", 2),
    "model.layers": (["model.layers=9"], "config", "model.layers is set", 2),
    "model.context": (["model.context=257"], "config", "model.context is 257, but base has 256 positions", 2),
    "train.batch_tokens": (["train.batch_tokens=128"], "config", "train.batch_tokens is set", 2),
    "run folder": (["output.folder=rows.json"], "config", "is a file", 2),
}


@pytest.mark.parametrize("name", DOCTORED)
def test_the_doctor_finds(words, name, capsys):
    more, area, text, code = DOCTORED[name]
    finding = visit(words(*more))[name]
    assert (finding.status, finding.area) == ("bad", area)
    assert text in finding.found
    assert main(["doctor", "lora", *words(*more), "--quick"]) == code
    assert "all fine" not in capsys.readouterr().out


def test_the_doctor_warns_of_batches_and_lengths(words):
    found = visit(words("chat.batch_samples=64", "model.context=36", "lora.rank=17"))
    assert found["rank"].found.startswith("lora.rank 17 is more than the smaller side of k_proj (16), v_proj (16): ")
    assert "there are 29 samples" in found["batch"].found
    assert "samples cut to the context" in found["truncated"].found
    assert "raise model.context" in found["truncated"].advice
    assert "raise chat.max_tokens" in visit(words("chat.max_tokens=36"))["truncated"].advice


def test_the_doctor_looks_at_rate_evaluation_and_saving(words):
    found = visit(words())
    assert found["learning rate"].status == "ok"
    assert "about 0.01 is usual for adapters on 0.0423M parameters" in found["learning rate"].found
    assert found["saving"].found == "checkpoint.every 100 is never reached in 6 steps: only the end is saved"
    assert "checkpoint.every=1" in found["saving"].advice
    assert found["steps"].found.endswith("teach a model little: set train.steps=100")
    late = visit(words("eval.every=20"))["evaluation"]
    assert late.found == "eval.every 20 is never reached in 6 steps: only the end is evaluated"
    short = visit(words("train.steps=null", "train.epochs=1", "eval.every=1", "chat.batch_samples=1"))
    assert short["steps"].found.endswith("set train.epochs=4, which makes 116")
    often = short["evaluation"]
    held, fewer = often.found.partition(" times ")[2].split()[0], often.advice.partition("eval.tokens=")[2]
    assert int(fewer.split(",")[0]) < int(held), "a larger value would change nothing"
    better = visit(words("optim.learning_rate=2e-4", "checkpoint.every=3", "eval.every=3"))
    assert (better["learning rate"].status, better["saving"].status) == ("warn", "ok")
    assert better["steps"].found.endswith(" parameters"), "what makes it learn is named there, too"
    assert "2 times" in better["evaluation"].found
    whole = visit(words("lora.rank=0", "optim.learning_rate=2e-5"))["learning rate"]
    assert (whole.status, whole.found) == ("ok", "2e-05; about 2e-05 is usual for all weights of a trained model")


def test_a_save_interval_of_the_preset_that_is_never_reached_is_told(words):
    assert any("checkpoint.every 100 is never reached in 6 steps" in note for note in notes(run(words())))


def test_the_doctor_says_nothing_of_a_type_that_is_not_stated(words):
    path = Path("base/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": None, "torch_dtype": None}))
    assert visit(words())["base"].found.endswith(" parameters")


def test_the_doctor_does_not_read_a_large_source(words, monkeypatch):
    monkeypatch.setattr(check_run, "_READ_WHOLE", 100)
    found = visit(words())
    assert "1 file, 0.0 MB" in found["chat.source"].found
    assert found["the rest"].unchecked
    assert "steps" not in found


def test_the_doctor_does_not_fetch_a_base_and_does_not_call_it_fine(words, capsys):
    more = words("model.init_from=somebody/model", "optim.warmup=1")
    found = visit(more)
    assert found["base"].status == "warn"
    assert found["chat.source"].status == "ok"
    assert found["the rest"].unchecked
    assert main(["doctor", "lora", *more, "--quick"]) == 0
    assert "not everything was checked" in capsys.readouterr().out


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.skipif(os.name == "nt", reason="modes are those of POSIX")
@pytest.mark.parametrize("number", [0o022, 0o077, 0o002])
def test_weights_follow_the_umask_like_any_file(words, mask, number):
    mask(number)
    run(words("train.steps=1"))
    api.merge("runs/lora", "merged")
    written = [*Path("runs").rglob("*.safetensors"), *Path("data").rglob("*.safetensors"), *Path("merged").glob("*.s*")]
    assert {path.name for path in written} >= {
        *("model.safetensors", "optimizer.safetensors", "adapter_model.safetensors", "samples.safetensors")
    }
    for path in written:
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~number, path


@pytest.fixture
def deny(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a file unreadable; for root, who may read all, as it looks to others."""

    def denied(path: Path) -> None:
        if os.geteuid() != 0:
            path.chmod(0)
            return
        opened, low, safe = Path.open, os.open, weights.safe_open

        def refuse(place: Path) -> None:
            if place.name == path.name and place.parent.name == path.parent.name:
                raise PermissionError(13, "Permission denied", str(place))

        def open_path(self: Path, *arguments: Any, **more: Any) -> Any:
            refuse(self)
            return opened(self, *arguments, **more)

        def open_low(place: Any, *arguments: Any, **more: Any) -> int:
            refuse(Path(os.fsdecode(place)))
            return low(place, *arguments, **more)

        def open_safetensors(place: Any, **more: Any) -> Any:
            if Path(place).name == path.name and Path(place).parent.name == path.parent.name:
                raise FileNotFoundError(f"No such file or directory: {place}")  # as the library says it
            return safe(place, **more)

        monkeypatch.setattr(Path, "open", open_path)
        monkeypatch.setattr(os, "open", open_low)
        monkeypatch.setattr(weights, "safe_open", open_safetensors)

    return denied


SAVED = "runs/lora/checkpoints/step-00000001"
UNREADABLE = {
    "weights of a base": ("base/model.safetensors", ["finetune"]),
    "its config": ("base/config.json", ["finetune"]),
    "weights to chat with": ("base/model.safetensors", ["chat", "base", "--message", "Hi"]),
    "a checkpoint": (f"{SAVED}/model.safetensors", ["chat", "runs/lora", "--message", "Hi"]),
    "a checkpoint to resume": (f"{SAVED}/model.safetensors", ["finetune", "--resume", "runs/lora"]),
    "an adapter": ("runs/lora/adapter/adapter_model.safetensors", ["export", "runs/lora/adapter", "out"]),
    "its description": ("runs/lora/adapter/adapter_config.json", ["chat", "runs/lora/adapter", "--message", "Hi"]),
}  # fmt: skip


@pytest.mark.skipif(os.name == "nt", reason="rights are those of POSIX")
@pytest.mark.parametrize("what", UNREADABLE)
def test_what_may_not_be_read_is_told_with_what_to_check(words, deny, what, capsys):
    path, verb = UNREADABLE[what]
    if path.startswith("runs"):
        run(words("train.steps=1"))
    deny(Path(path))
    assert main(verb if len(verb) > 1 else [*verb, *words("train.steps=1")]) == 3
    error, hint = capsys.readouterr().err.strip().splitlines()[-2:]
    assert f"{path} cannot be read: Permission denied" in error
    assert hint == "hint: check that it is there and that you may read it"
    assert Path(SAVED).exists() == path.startswith("runs")  # not set aside as damaged


def test_a_denied_file_that_nobody_thought_of_is_no_traceback(words, monkeypatch, capsys):
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", "somewhere/deep")

    monkeypatch.setattr(flatout, "load_model", refuse)
    assert main(["chat", "base", "--message", "Hi"]) == 3
    error, hint = capsys.readouterr().err.strip().splitlines()
    assert error == "error: somewhere/deep: Permission denied"
    assert hint.startswith("hint: check who may read")


# --- hints ------------------------------------------------------------------------------------------------------------

HINTS = {
    "no config": (["finetune"], "data/conversations.jsonl", "finetune model.init_from=FOLDER-OR-HUB-NAME chat.source="),
    "no rows to go on with": (["finetune", "--resume", "auto"], "nothing was named", "finetune --resume runs/lora"),
    "no rows": (["finetune", "model.init_from=base"], "nothing was named", "model.init_from=base chat.source="),
    "rows for a config": (["finetune", "rows.json"], "rows.json is data", "chat.source=rows.json"),
    "rows in lines": (["finetune", "rows.jsonl"], "rows.jsonl is data", "chat.source=rows.jsonl"),
    "text to train on": (["train", "text.txt"], "text.txt is data", "data.source=text.txt"),
    "compressed rows": (["finetune", "./rows.jsonl.gz"], "is data", "chat.source="),
    "a model for a config": (["finetune", "base/"], "is a folder", "model.init_from=FOLDER"),
    "no network": (["finetune", "chat.source=rows.json"], "could not be fetched", "model.init_from=FOLDER"),
    "adapters as bf16": (["export", "runs/lora", "out", "--adapter", "--dtype", "bf16"], "always written", "--dtype"),
}  # fmt: skip


@pytest.mark.parametrize("name", HINTS)
def test_hints_say_what_to_write(words, name, capsys):
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    Path("rows.jsonl.gz").write_bytes(b"\x1f\x8b")
    Path("text.txt").write_text("some text\n")
    call, error, hint = HINTS[name]
    if call[0] == "export" or "--resume" in call:
        run(words("train.steps=1"))
    assert main(call) in (2, 3)
    lines = capsys.readouterr().err.strip().splitlines()[-2:]
    assert error in lines[0]
    assert hint in lines[1]


def test_a_config_in_json_is_still_a_config(tmp_path):
    (tmp_path / "settings.json").write_text('{"preset": "lora", "train": {"steps": 3}}')
    assert load_config(tmp_path / "settings.json").config.train.steps == 3


@pytest.mark.parametrize("place", ["rows.json", "rows.json/run"])
def test_a_file_in_the_place_of_the_runs_folder_is_told(words, place, capsys):
    assert main(["finetune", *words(f"output.folder={place}")]) == 2
    error, hint = capsys.readouterr().err.strip().splitlines()[-2:]
    assert "cannot be the run's folder" in error
    assert hint == "hint: set output.folder to a new folder"


def test_export_and_merge_write_the_same_by_default(words, capsys):
    run(words("train.steps=2"))
    assert main(["export", "runs/lora", "exported"]) == 0
    assert main(["export", "runs/lora", "merged"]) == 0
    assert Path("exported/model.safetensors").read_bytes() == Path("merged/model.safetensors").read_bytes()
    assert "bf16" in capsys.readouterr().out
    api.export("base", "copy")
    assert json.loads(Path("copy/config.json").read_text())["torch_dtype"] == "float32"
    with pytest.raises(UserError, match="cannot be written"):
        api.export("base", "other", dtype="fp8")
