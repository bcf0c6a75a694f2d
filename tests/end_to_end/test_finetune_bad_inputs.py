"""What can be wrong with a model, its data, its settings and its adapters: two lines each, and nothing is lost.

Every case spoils something in a folder that would train, and calls the verb. It must answer with one `error:` and one
`hint:` line and exit code 2 or 3; every file that was there is as it was, no run was begun, nothing is half written.
"""

import gzip
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flatout import api
from flatout.cli import main
from flatout.config.load import load_config
from flatout.confined import ChildLimits
from flatout.data import chat_template
from flatout.files import canonical_json
from flatout.model.seal import SEAL
from tests.chat_models import FAMILIES, write_chat_model, write_model

pytestmark = pytest.mark.usefixtures("children_stay")

QUIET = ["eval.sample_tokens=4", "speed.device=cpu", "model.context=64", "train.steps=2"]
TUNE = ["finetune", "model.init_from=base", "chat.source=rows.json", *QUIET, "train.epochs=null"]
BASE, ROWS, ADAPTER = Path("base"), Path("rows.json"), Path("adapter/adapter_config.json")


@dataclass(frozen=True)
class Case:
    """`spoil` is done first, `words` follow the usual ones or stand alone, and `says` is in the two lines."""

    says: str
    words: tuple[str, ...] = ()
    spoil: Callable[[], Any] = lambda: None
    verb: tuple[str, ...] | None = None


def change(path: Path, **values: Any) -> Callable[[], None]:
    """Other values in a JSON file; None takes a key out."""

    def spoil() -> None:
        content = {**json.loads(path.read_text(encoding="utf-8")), **values}
        kept = {name: value for name, value in content.items() if value is not None}
        path.write_text(json.dumps(kept), encoding="utf-8")

    return spoil


def write(path: str | Path, content: str | bytes) -> Callable[[], None]:
    raw = content.encode("utf-8") if isinstance(content, str) else content

    def spoil() -> None:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(raw)

    return spoil


def rows(*items: Any) -> Callable[[], None]:
    return write(ROWS, json.dumps(list(items) * (1 if len(items) > 1 else 20)))


def remove(*names: str) -> Callable[[], None]:
    def unlink() -> None:
        for name in names:
            Path(name).unlink()

    return unlink


def cut(path: str, share: float = 0.5) -> Callable[[], None]:
    def spoil() -> None:
        raw = Path(path).read_bytes()
        Path(path).write_bytes(raw[: int(len(raw) * share)])

    return spoil


def tensors(path: str, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[], None]:
    def spoil() -> None:
        content = {name: tensor.clone() for name, tensor in load_file(path).items()}
        edit(content)
        save_file(content, path)

    return spoil


def both(*steps: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        for step in steps:
            step()

    return run


def turn(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}, message]}


Q = "model.layers.0.self_attn.q_proj.weight"
LORA_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
SETTINGS = BASE / "tokenizer_config.json"
LONG = {"instruction": "What is it? " * 30, "output": "It is two."}
GOOD = {"instruction": "What is one?", "output": "one"}
MODEL_CASES = {
    "no model": Case("no model to start from", ("model.init_from=null",)),
    "no such folder": Case("there is no folder", ("model.init_from=nowhere",)),
    "a file as a model": Case("is a file", ("model.init_from=rows.json",)),
    "an empty folder": Case("holds no model", ("model.init_from=empty",), lambda: Path("empty").mkdir()),
    "an adapter as a model": Case("lora.init_from", ("model.init_from=adapter",)),
    "a hub name without a network": Case("nobody/nothing", ("model.init_from=nobody/nothing",)),
    "remote code": Case("not supported", (), change(BASE / "config.json", model_type="mine", auto_map={"A": "x.y"})),
    "an unknown type": Case("bert", (), change(BASE / "config.json", model_type="bert")),
    "a quantised model": Case("quantised", (), change(BASE / "config.json", quantization_config={"bits": 4})),
    "a classifier": Case(
        "Sequence", (), change(BASE / "config.json", architectures=["LlamaForSequenceClassification"])
    ),
    "a missing key": Case("hidden_size is missing", (), change(BASE / "config.json", hidden_size=None)),
    "a wrong value": Case("hidden_size", (), change(BASE / "config.json", hidden_size="wide")),
    "a torn config": Case("config.json", (), cut("base/config.json")),
    "a config that is a list": Case("no JSON object", (), write("base/config.json", "[]")),
    "yarn": Case("yarn", (), change(BASE / "config.json", rope_scaling={"rope_type": "yarn", "factor": 2.0})),
    "more context than positions": Case("command line: model.context is 512, but base has 256", ("model.context=512",)),
    "no weights": Case("no model.safetensors", (), remove("base/model.safetensors")),
    "weights that run code": Case(
        "can run code", (), both(remove("base/model.safetensors"), write("base/pytorch_model.bin", b"x"))
    ),
    "torn weights": Case("cannot be read as safetensors", (), cut("base/model.safetensors")),
    "a pointer of LFS": Case("git lfs pull", (), write("base/model.safetensors", b"version https://git-lfs\n")),
    "a missing tensor": Case("has no tensor", (), tensors("base/model.safetensors", lambda t: t.pop(Q))),
    "one tensor too many": Case(
        "which a llama model", (), tensors("base/model.safetensors", lambda t: t.update(more=torch.ones(2)))
    ),
    "another shape": Case("shape", (), tensors("base/model.safetensors", lambda t: t.update({Q: torch.ones(3, 3)}))),
    "NaN in the weights": Case("not finite", (), tensors("base/model.safetensors", lambda t: t[Q].fill_(torch.nan))),
    "an index without its file": Case(
        "missing",
        (),
        both(
            remove("base/model.safetensors"),
            write("base/model.safetensors.index.json", json.dumps({"weight_map": {Q: "a.safetensors"}})),
        ),
    ),
    "no tokenizer": Case("no tokenizer.json", (), remove("base/tokenizer.json")),
    "a torn tokenizer": Case("tokenizer.json", (), cut("base/tokenizer.json")),
    "a tokenizer of another model": Case("do not belong together", (), change(BASE / "config.json", vocab_size=100)),
    "a special token that is not there": Case("eos_token", (), change(SETTINGS, eos_token="<|gone|>")),
    "no template": Case("set chat.template", (), change(SETTINGS, chat_template=None)),
    "a template that is no Jinja": Case("no Jinja template", (), change(SETTINGS, chat_template="{% for %}")),
    "a template that leaves its sandbox": Case(
        "sandbox", (), change(SETTINGS, chat_template="{{ messages.__class__.__mro__ }}")
    ),
    "a template that refuses": Case(
        "no, thanks", (), change(SETTINGS, chat_template="{{ raise_exception('no, thanks') }}")
    ),
    "a template that is a number": Case("chat_template", (), change(SETTINGS, chat_template=7)),
    "a template that writes nothing": Case("nothing", (), change(SETTINGS, chat_template="{{ '' }}")),
    "no such template": Case("mine.jinja", ("chat.template=mine.jinja",)),
    "a template by almost its name": Case("did you mean 'chatml'", ("chat.template=chatmll",)),
    "a template not in UTF-8": Case("UTF-8", ("chat.template=mine.jinja",), write("mine.jinja", b"\xff\xfe")),
    "chatml without its tokens": Case(
        "<|im_start|>",
        ("model.init_from=llama", "chat.template=chatml"),
        lambda: write_chat_model(Path("llama"), "llama3"),
    ),
    "a folder without weights": Case(
        "holds no model", ("model.init_from=words",), lambda: write_model(Path("words"), FAMILIES["qwen"])
    ),
}
DATA_CASES = {
    "no such file": Case("check chat.source", ("chat.source=nothing.json",)),
    "an empty file": Case("rows.json", (), write(ROWS, b"")),
    "an empty list": Case("no rows", (), write(ROWS, b"[]")),
    "truncated JSON": Case("the file ends too early", (), cut("rows.json")),
    "a cut last line": Case(
        "the file ends too early",
        ("chat.source=a.jsonl",),
        write("a.jsonl", (json.dumps(GOOD) + "\n") * 9 + json.dumps(GOOD)[:-4]),
    ),
    "a number": Case("rows.json", (), write(ROWS, b"7")),
    "rows of text": Case("fit no format", (), rows("Hello", "Hi")),
    "lines that are no JSON": Case("cannot be used", ("chat.source=a.jsonl",), write("a.jsonl", "{]\n" * 9)),
    "a third of the rows bad": Case("10 of 30 rows", (), rows(*[GOOD] * 20, *[{"instruction": "x", "output": 3}] * 10)),
    "wrong columns": Case("chat.fields", (), rows({"ask": "a", "reply": "b"})),
    "an unknown role": Case("tool, user hint: rename the role in the file", (), rows(turn(role="robot", content="Hi"))),
    "no role": Case("fit no format", (), rows(turn(content="Hi"))),
    "content that is a number": Case("content", (), rows(turn(role="assistant", content=7))),
    "nobody answers": Case("no assistant turn", (), rows(turn(role="user", content="Hi"))),
    "only empty answers": Case("empty", (), rows({"instruction": "x", "output": ""})),
    "not UTF-8": Case("rows.json", (), write(ROWS, b'[{"instruction": "\xff", "output": "b"}]')),
    "text for pretraining": Case("flatout train", ("chat.source=a.txt",), write("a.txt", "Hello")),
    "a picture": Case("check chat.source", ("chat.source=a.png",), write("a.png", b"\x89PNG\r\n\x1a\n\x00")),
    "a broken archive": Case(
        "a.jsonl.gz", ("chat.source=a.jsonl.gz",), write("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:40])
    ),
    "a broken table": Case("a.parquet", ("chat.source=a.parquet",), write("a.parquet", b"PAR1junkPAR1")),
    "a table without its columns": Case("chat.fields", ("chat.source=a.csv",), write("a.csv", "x,y\n1,2\n")),
    "an empty table": Case("no rows", ("chat.source=a.csv",), write("a.csv", "prompt,completion\n")),
    "an empty folder of rows": Case("some", ("chat.source=some",), lambda: Path("some").mkdir()),
    "one row": Case("fewer than two", (), write(ROWS, json.dumps([GOOD]))),
    "one row many times": Case("fewer than two", (), rows(GOOD)),
    "samples longer than the context": Case("raise model.context", (), rows(LONG)),
    "samples longer than their own limit": Case("raise chat.max_tokens,", ("chat.max_tokens=3",)),
    "nothing held out": Case("held out", ("chat.validation=0.0",)),
    "everything held out": Case("chat.validation", ("chat.validation=1.0",)),
    "no file to evaluate on": Case("check chat.validation", ("chat.validation=gone.json",)),
    "an empty file to evaluate on": Case("no rows", ("chat.validation=v.json",), write("v.json", "[]")),
    "columns of another format": Case("prompt", ("chat.fields=[prompt=prompt]",)),
    "a format": Case("write chat.fields=", ("chat.format=openai",)),
    "a field without a column": Case("chat.fields", ("chat.fields=[prompt]",)),
    "a field that no format has": Case("chat.fields", ("chat.fields=[answr=output]",)),
    "a column that is not there": Case("gone", ("chat.fields=[output=gone]",)),
    "turns without a template": Case(
        "set chat.template to model, chatml, plain or a file;",
        ("chat.template=none",),
        rows(turn(role="assistant", content="Hi")),
    ),
    "a folder of other things": Case("data.folder", ("data.folder=keep",), write("keep/letter.txt", "Dear all")),
    "a file in place of the samples": Case("data.folder", ("data.folder=rows.json",)),
}
SETTING_CASES = {
    "a shape of one's own": Case("model.layers", ("model.layers=3",)),
    "a tokenizer of one's own": Case("data.tokenizer is set", ("data.tokenizer=gpt2",)),
    "plain text besides": Case("set chat.source instead", ("data.source=rows.json",)),
    "a stride": Case("data.stride is set", ("data.stride=4",)),
    "rules for documents": Case("clean.drop is set", ("clean.drop=[quality]",)),
    "tokens of a step": Case("chat.batch_samples", ("train.batch_tokens=4096",)),
    "a prompt for samples": Case("eval.sample_prompt is set", ("eval.sample_prompt=Once",)),
    "adapters' settings without adapters": Case("lora.rank is 0", ("lora.rank=0", "lora.alpha=3.0")),
    "chat settings without chat": Case(
        "there is no chat.source", verb=("train", "train.steps=1", "speed.device=cpu", "chat.batch_samples=3")
    ),
    "a misspelt section": Case("chat", ("chatt.source=rows.json",)),
    "a misspelt field": Case("train_on", ("chat.train_onn=all",)),
    "tokens as a length": Case("steps or epochs", ("train.steps=null", "train.tokens=1000")),
    "no length": Case("exactly one", ("train.steps=null",)),
    "dropout in the model": Case("lora.dropout", ("model.dropout=0.1",)),
    "a stream": Case("plain text", ("data.streaming=true",)),
    "micro-batches that do not fit": Case("speed.accumulation", ("speed.accumulation=3",)),
    "a negative rank": Case("lora.rank", ("lora.rank=-1",)),
    "no alpha": Case("lora.alpha", ("lora.alpha=0.0",)),
    "a target that is not there": Case("lora.targets: there is no projection w_proj", ("lora.targets=[w_proj]",)),
    "the head as a target": Case("lora.targets: lm_head cannot have an adapter", ("lora.targets=[lm_head]",)),
    "no target": Case("lora.targets: an adapter needs", ("lora.targets=[]",)),
    "kernels that a CPU has not": Case("speed.kernels", ("speed.kernels=triton",)),
    "a card that is not there": Case("speed.device", ("speed.device=cuda:9",)),
    "fp16 on a CPU": Case("fp16", ("speed.precision=fp16",)),
    "an unknown preset": Case("nope", verb=("finetune", "nope")),
    "a config that fine-tunes nothing": Case("nothing to fine-tune on", verb=("finetune", "shakespeare-char")),
    "resuming nothing": Case("not a folder", verb=("finetune", "--resume", "runs/nowhere")),
}
FROM = ("lora.init_from=adapter",)
ADAPTER_CASES = {
    "no such adapter": Case("there is no folder nowhere", ("lora.init_from=nowhere",)),
    "a model as an adapter": Case("holds no adapter", ("lora.init_from=base",)),
    "a broken description": Case("adapter_config.json", FROM, cut("adapter/adapter_config.json")),
    "a broken adapter": Case("cannot be read as safetensors", FROM, cut("adapter/adapter_model.safetensors")),
    "no tensors": Case("does not exist", FROM, remove("adapter/adapter_model.safetensors")),
    "an adapter that runs code": Case(
        "can run code",
        FROM,
        both(remove("adapter/adapter_model.safetensors"), write("adapter/adapter_model.bin", b"x")),
    ),
    "an adapter of another kind": Case("peft_type", FROM, change(ADAPTER, peft_type="IA3")),
    "whole modules besides": Case("modules_to_save", FROM, change(ADAPTER, modules_to_save=["score"])),
    "another rank than it has": Case("lora.rank", (*FROM, "lora.rank=9")),
    "other targets than it has": Case("lora.targets", (*FROM, "lora.targets=[q_proj]")),
    "an adapter to go on from without one": Case("lora.init_from", (*FROM, "lora.rank=0")),
    "ranks that its file has not": Case("has shape", FROM, change(ADAPTER, rank_pattern={"q_proj": 2})),
    "other ranks than it has": Case("lora.ranks", (*FROM, "lora.ranks=[q_proj=2]")),
    "NaN in the adapter": Case(
        "not finite", FROM, tensors("adapter/adapter_model.safetensors", lambda t: t[LORA_A].fill_(torch.nan))
    ),
    "an adapter of another shape": Case(
        "shape", FROM, tensors("adapter/adapter_model.safetensors", lambda t: t.update({LORA_A: torch.ones(4, 7)}))
    ),
    "a missing adapter": Case(
        "has no tensor", FROM, tensors("adapter/adapter_model.safetensors", lambda t: t.pop(LORA_A))
    ),
    "an adapter of another base": Case(
        "other weights", FROM, lambda: (shutil.rmtree("base"), write_chat_model(BASE, seed=2))
    ),
}
SAY = ("--message", "Hello")
AFTER_CASES = {
    "chat with nothing": Case("not a folder", verb=("chat", "nowhere", *SAY)),
    "chat with an empty folder": Case("holds no checkpoint", (), lambda: Path("e").mkdir(), ("chat", "e", *SAY)),
    "chat without its base": Case("put base back", (), lambda: BASE.rename("moved"), ("chat", "done", *SAY)),
    "chat on another base": Case(
        "other weights", (), lambda: (shutil.rmtree("base"), write_chat_model(BASE, seed=2)), ("chat", "done", *SAY)
    ),
    "chat on a base of another shape": Case(
        "config.json", (), change(BASE / "config.json", rms_norm_eps=1e-3), ("chat", "done", *SAY)
    ),
    "chat with a torn checkpoint": Case(
        "damaged", (), lambda: cut(str(next(Path("done").rglob("step-*/model.safetensors"))))(), ("chat", "done", *SAY)
    ),
    "chat by a broken template": Case(
        "Jinja", (), change(SETTINGS, chat_template="{% for %}"), ("chat", "base", *SAY)
    ),
    "chat by a template that refuses": Case(
        "no, thanks", (), change(SETTINGS, chat_template="{{ raise_exception('no, thanks') }}"), ("chat", "base", *SAY)
    ),
    "an adapter that names no base": Case(
        "--base", (), change(ADAPTER, base_model_name_or_path=None), ("chat", "adapter", *SAY)
    ),
    "an adapter whose base is gone": Case(
        "--base", (), change(ADAPTER, base_model_name_or_path="gone"), ("chat", "adapter", *SAY)
    ),
    "a base that is none": Case("there is no folder", verb=("chat", "adapter", "--base", "gone", *SAY)),
    "a base for what needs none": Case("--base is for adapters", verb=("chat", "base", "--base", "base", *SAY)),
    "a base with adapters of its own": Case(
        "or name the model under its adapters: base", verb=("chat", "adapter", "--base", "done", *SAY)
    ),
    "the last of an adapter": Case("--last is for runs", verb=("chat", "adapter", "--last", *SAY)),
    "merging the last of an adapter": Case("--last is for runs", verb=("export", "adapter", "out", "--last")),
    "the last of a model": Case("--last is for runs", verb=("export", "base", "out", "--last")),
    "no tokens to say": Case("--tokens", verb=("chat", "done", "--tokens", "0", *SAY)),
    "too hot": Case("--temperature", verb=("chat", "done", "--temperature", "-1", *SAY)),
    "merging into a full folder": Case("not empty", verb=("export", "done", "base")),
    "merging into a file": Case("not empty", verb=("export", "done", "rows.json")),
    "merging into 8 bits": Case("--dtype", verb=("export", "done", "out", "--dtype", "int8")),
    "merging without a place": Case("folder", verb=("export", "done")),
    "exporting adapters of none": Case("no adapters to export", verb=("export", "base", "out", "--adapter")),
    "exporting adapters in 8 bits": Case("--dtype", verb=("export", "done", "out", "--dtype", "int8")),
    "resuming on other rows": Case(
        "trained on other data than", (), rows(*[{"instruction": f"a {n}", "output": "b"} for n in range(20)]),
        (*TUNE, "output.folder=done", "--resume", "auto"),
    ),
    "resuming with another alpha": Case(
        "lora.alpha", verb=(*TUNE, "output.folder=done", "lora.rank=4", "train.steps=4", "--resume", "auto")
    ),
    "resuming with another rank": Case(
        "lora.rank",
        verb=(*TUNE, "output.folder=done", "lora.rank=2", "lora.alpha=8.0", "train.steps=4", "--resume", "auto"),
    ),
    "resuming a run that is over": Case(
        "train.steps", verb=(*TUNE, "output.folder=done", "train.steps=1", "--resume", "auto")
    ),
    "a run where one is already": Case("already holds a run", verb=(*TUNE, "output.folder=done")),
    "a run in the root of a disk": Case("output.folder=/ is the root of a disk", verb=(*TUNE, "output.folder=/")),
}  # fmt: skip
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE_CASES = {
    "a template that takes for ever": Case("of processor time", spoil=change(SETTINGS, chat_template=LOOPS)),
    "a template that takes all memory": Case(
        "of memory", spoil=change(SETTINGS, chat_template="{{ messages[0].role * 10 ** 10 }}")
    ),
    "an adapter of a terabyte": Case("whole number from 1 to", FROM, change(ADAPTER, r=10**12)),
    "a model with code of its own": Case(
        "take auto_map out of the file", spoil=change(BASE / "config.json", auto_map={"AutoModel": "a.B"})
    ),
    "a tokenizer with code of its own": Case(
        "take auto_map out of the file", spoil=change(SETTINGS, auto_map={"AutoTokenizer": ["a.B", None]})
    ),
    "a description nested deeply": Case("nested more than", spoil=write(BASE / "config.json", "[" * 9999 + "]" * 9999)),
    "a tokenizer nested deeply": Case("nested more than", spoil=write(SETTINGS, '{"a":' * 300 + "1" + "}" * 300)),
}
CASES = {**MODEL_CASES, **DATA_CASES, **SETTING_CASES, **ADAPTER_CASES, **AFTER_CASES, **HOSTILE_CASES}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, children_stay: Callable[[], None]) -> Path:
    """A model, rows that train, an adapter and a finished run."""
    place = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        write_chat_model(BASE)
        many = [{"instruction": f"What is {n} and one?", "output": f"It is {n + 1}."} for n in range(20)]
        ROWS.write_text(json.dumps(many), encoding="utf-8")
        words = [*TUNE[1:], "lora.rank=4", "lora.alpha=8.0", "output.folder=done"]
        list(api.train(load_config("lora", words)))
        api.export("done", "adapter", adapter=True)
        change(ADAPTER, base_model_name_or_path="base")()
        seal = Path("adapter", SEAL)  # as earlier versions wrote it, without hashes: the cases change what it names
        seal.write_bytes(canonical_json(json.loads(seal.read_bytes())["facts"]))
        shutil.rmtree("data")
    children_stay()  # the limits on memory of the next ones are smaller
    return place


def state_of(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("name", CASES)
def test_two_lines_and_nothing_is_lost(name, good, tmp_path, monkeypatch, capsys):
    case, here = CASES[name], tmp_path / "here"
    monkeypatch.setattr(chat_template.child(), "limits", ChildLimits(seconds=0.1, memory=2**28))
    shutil.copytree(good, here)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    case.spoil()
    before = state_of(here)
    code = main(list(case.verb or (*TUNE, *case.words)))
    lines = capsys.readouterr().err.strip().splitlines()
    assert code in (2, 3), lines
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]
    assert case.says in " ".join(lines)
    assert "Traceback" not in " ".join(lines)
    after = state_of(here)
    assert {path: digest for path, digest in after.items() if path in before} == before
    new = [path for path in after.keys() - before.keys() if not path.startswith("data/")]
    assert new == []
    assert not [path for path in here.rglob("*") if re.search(r"\.(tmp|old)-\d+$", path.name)]
    assert not list(Path("runs").glob("*"))
    assert not Path("out").exists()


def test_there_are_enough_of_them():
    assert len(CASES) >= 60


def test_the_folder_would_train_if_nothing_were_wrong(good, tmp_path, monkeypatch, capsys):
    shutil.copytree(good, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    assert main([*TUNE, *FROM]) == 0
    assert main(["chat", "adapter", *SAY, "--tokens", "2"]) == 0
    assert (
        main([*TUNE, "output.folder=done", "train.steps=3", "lora.rank=4", "lora.alpha=8.0", "--resume", "auto"]) == 0
    )
    assert main(["finetune", "done/config.yaml", "output.folder=null", "output.name=again"]) == 0
