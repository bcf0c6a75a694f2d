"""No dead knobs: every field of the config, switched alone, changes what is built or says why it did not."""

import hashlib
import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import flatout
from flatout.checkpoints.checkpoint import list_checkpoints, read_checkpoint
from flatout.config.facts import field_facts, value_at
from flatout.config.load import load_config
from flatout.config.optimizers import OPTIMIZERS
from flatout.config.schema import ModelConfig
from flatout.config.unused import check_used
from flatout.errors import ConfigError
from flatout.model.adapter_files import save_adapter
from flatout.model.adapter_targets import AdapterPlan
from flatout.model.adapters import attach
from flatout.model.gpt import build_model
from flatout.model.hub_folder import export_huggingface
from flatout.records import CheckpointRecord, RunInfo, SampleRecord, StepRecord
from tests.chat_models import write_chat_model
from tests.conftest import TINY
from tests.hub_folders import from_huggingface

pytestmark = pytest.mark.usefixtures("children_stay")

STREAM = ["data.source=many.jsonl", "data.tokenizer=bytes", "data.split=document"]
LONGROPE = ["model.rope_scaling=longrope", "model.rope_factors=[1, 1, 1, 2, 2, 3, 4, 9]"]
LLAMA3 = ["model.rope_scaling=llama3", "model.rope_original_context=64"]
STATES = ["model.layers=2", "model.pattern=EA", "model.states=16"]
WINDOWS = ["model.layers=2", "model.pattern=AW", "model.window=9"]
CHAT = ["model.init_from=chatty", "chat.source=rows.json", "model.context=64"]
ADAPTERS = [*CHAT, "lora.rank=4"]
TASKS = ["eval.tasks=[task.jsonl]", "data.tokenizer=bytes"]
GPT2 = ["model.family=gpt2", "model.mlp=gelu"]
MUON = ["optim.optimizer=muon"]
# One other value for each field. A list of words where a field only makes sense beside another.
OTHER: dict[str, str | list[str]] = {
    "model.family": GPT2,
    "model.layers": "3",
    "model.width": "48",
    "model.heads": "4",
    "model.kv_heads": "1",
    "model.head_size": "20",
    "model.pattern": [*WINDOWS, "model.window=5"],
    "model.window": [*WINDOWS, "model.window=5"],
    "model.states": [*STATES, "model.states=24"],
    "model.context": "32",
    "model.vocab": "100",
    "model.norm": "layernorm",
    "model.norm_place": "both",
    "model.norm_eps": "0.01",
    "model.embedding_norm": "false",
    "model.embedding_scale": "3.0",
    "model.zero_init": "false",
    "model.positions": "learned",
    "model.rope_base": "100.0",
    "model.rope_scaling": "linear",
    "model.rope_factor": ["model.rope_scaling=linear", "model.rope_factor=2.0"],
    "model.rope_low": [*LLAMA3, "model.rope_low=2.0"],
    "model.rope_high": [*LLAMA3, "model.rope_high=2.0"],
    "model.rope_original_context": [*LLAMA3, "model.rope_original_context=128"],
    "model.rope_local_base": [*WINDOWS, "model.rope_local_base=50.0"],
    "model.rope_share": "0.5",
    "model.rope_factors": [*LONGROPE, "model.rope_factors=[1, 2, 2, 2, 2, 3, 4, 9]"],
    "model.rope_gain": [*LONGROPE, "model.rope_gain=1.5"],
    "model.mlp": "relu2",
    "model.mlp_width": "40",
    "model.bias": "true",
    "model.qkv_bias": "true",
    "model.qk_norm": "false",
    "model.qk_norm_whole": "true",
    "model.score_divisor": "5",
    "model.attention_cap": "0.5",
    "model.fused_projections": "true",
    "model.residual_scale": "0.1",
    "model.logit_cap": "2.0",
    "model.first_mix": "true",
    "model.value_tables": ["model.layers=2", "model.value_tables=1"],
    "model.head_gate": "true",
    "model.bigram_rows": "50",
    "model.tied": "true",
    "model.dropout": "0.2",
    "model.init_from": [*GPT2, "model.init_from=weights"],
    "data.source": "other.txt",
    "data.folder": "shards",
    "data.tokenizer": "bytes",
    "data.unknown_characters": "replace",
    "data.format": ["data.format=jsonl", "data.source=rows.txt"],
    "data.field": ["data.field=inner.loud", "data.source=many.jsonl"],
    "data.document_start": ["data.document_start=the old", "data.tokenizer=bytes"],
    "data.invalid_utf8": ["data.invalid_utf8=replace", "data.source=bad.jsonl"],
    "data.max_documents": ["data.max_documents=20", *STREAM],
    "data.max_tokens": ["data.max_tokens=3000", *STREAM],
    "data.max_bytes": ["data.max_bytes=3000", *STREAM],
    "data.split": ["data.split=document", "data.source=many.jsonl"],
    "data.validation": "0.2",
    "data.packing": ["data.packing=best_fit", *STREAM],
    "data.documents": ["data.documents=apart", *STREAM],
    "data.streaming": ["data.streaming=true", *STREAM],
    "data.stride": "7",
    "clean.drop": ["clean.drop=[exact_duplicates, repetition]", "data.source=web.jsonl"],
    "clean.languages": ["clean.languages=[en]", "data.source=web.jsonl"],
    "chat.source": [*CHAT, "chat.source=others.json"],
    "chat.fields": [*CHAT, "chat.fields=[completion=second]"],
    "chat.template": [*CHAT, "chat.template=chatml"],
    "chat.train_on": [*CHAT, "chat.train_on=all"],
    "chat.max_tokens": [*CHAT, "chat.max_tokens=40"],
    "chat.validation": [*CHAT, "chat.validation=0.5"],
    "chat.packing": [*CHAT, "chat.packing=false"],
    "chat.batch_samples": [*CHAT, "chat.batch_samples=3"],
    "lora.rank": [*CHAT, "lora.rank=2"],
    "lora.alpha": [*ADAPTERS, "lora.alpha=3.0"],
    "lora.targets": [*ADAPTERS, "lora.targets=[q_proj]"],
    "lora.ranks": [*ADAPTERS, "lora.ranks=[q_proj=2]"],
    "lora.alphas": [*ADAPTERS, "lora.alphas=[q_proj=2]"],
    "lora.dropout": [*ADAPTERS, "lora.dropout=0.5"],
    "lora.rank_stabilised": [*ADAPTERS, "lora.rank_stabilised=true"],
    "lora.dora": [*ADAPTERS, "lora.dora=true"],
    "lora.init_from": [*ADAPTERS, "lora.init_from=adapter"],
    "lora.quantize": [*ADAPTERS, "lora.quantize=nf4"],
    "optim.optimizer": "muon",
    "optim.learning_rate": "1e-3",
    "optim.muon_rate": [*MUON, "optim.muon_rate=0.01"],
    "optim.embedding_rate": "1e-2",
    "optim.table_rate": ["model.bigram_rows=50", "optim.table_rate=1e-2"],
    "optim.table_decay": ["model.bigram_rows=50", "optim.table_decay=9.0"],
    "optim.embedding_decay": "9.0",
    "optim.head_decay": ["model.tied=false", "optim.head_decay=9.0"],
    "optim.head_rate": ["model.tied=false", "optim.head_rate=1e-2"],
    "optim.schedule": "linear",
    "optim.warmup": "1",
    "optim.min_ratio": "0.9",
    "optim.decay_fraction": ["optim.schedule=wsd", "optim.decay_fraction=0.9"],
    "optim.weight_decay": "1.0",
    "optim.betas": "[0.5, 0.5]",
    "optim.clip": "0.01",
    "optim.ema": "0.9",
    "train.steps": "7",
    "train.epochs": "0.1",
    "train.tokens": "500",
    "train.minutes": ["train.minutes=0.01", "optim.schedule=wsd"],
    "train.batch_tokens": "128",
    "train.batch_stages": "[32, 64]",
    "train.length_stages": "[8, 16]",
    "train.window_stages": [*WINDOWS, "train.window_stages=[3, 5]"],
    "train.label_smoothing": "0.1",
    "train.seed": "5",
    "train.deterministic": "true",
    "speed.device": "auto",
    "speed.precision": "bf16",
    "speed.attention": "reference",
    "speed.scan": [*STATES, "speed.scan=reference"],
    "speed.residual": "fp32",
    "speed.fp8": "[up]",
    "speed.products": "torch",
    "speed.kernels": "torch",
    "speed.fused_qkv": "false",
    "speed.compile": "off",
    "speed.cuda_graphs": "off",
    "speed.loss": "chunked",
    "speed.loss_chunk": "16",
    "speed.fused_optimizer": "off",
    "speed.optimizer_state": "8bit",
    "speed.optimizer_offload": "true",
    "speed.expandable_segments": "off",
    "speed.memory_limit": "4",
    "speed.pad_vocab": "1",
    "speed.micro_batch": "2",
    "speed.accumulation": "4",
    "speed.checkpointing": "full",
    "speed.loader": "device",
    "speed.workers": "0",
    "speed.threads": "2",
    "eval.every": "2",
    "eval.tokens": "64",
    "eval.patience": ["eval.patience=1", "eval.every=1", "optim.learning_rate=10.0"],
    "eval.sample_every": "2",
    "eval.sample_tokens": "9",
    "eval.sample_prompt": "fox",
    "checkpoint.every": "2",
    "eval.sample_temperature": "0",
    "eval.tasks": TASKS,
    "eval.tasks_every": [*TASKS, "eval.tasks_every=2"],
    "eval.tasks_rows": [*TASKS, "eval.tasks_rows=1"],
    "checkpoint.keep": ["checkpoint.keep=1", "checkpoint.every=1"],
    "output.folder": "elsewhere",
    "output.name": "another",
    "output.log_every": "3",
}
WEB_RULES = ("drop", "languages")
# What each case is compared with, where that is not the plain run.
BESIDE: dict[str, list[str]] = {
    **{name: CHAT for name in OTHER if name.startswith("chat.") or name == "lora.rank"},
    **{name: ADAPTERS for name in OTHER if name.startswith("lora.") and name != "lora.rank"},
    "model.rope_factor": ["model.rope_scaling=linear"],
    **{f"model.{name}": ["model.layers=2"] for name in ("pattern", "value_tables")},
    "model.window": WINDOWS,
    "model.rope_local_base": WINDOWS,
    "model.states": STATES,
    "speed.scan": STATES,
    **{f"model.rope_{name}": LLAMA3 for name in ("low", "high", "original_context")},
    **{f"model.rope_{name}": LONGROPE for name in ("factors", "gain")},
    "model.init_from": GPT2,
    "data.format": ["data.source=rows.txt"],
    "data.field": ["data.source=many.jsonl"],
    "data.document_start": ["data.tokenizer=bytes"],
    "data.invalid_utf8": ["data.invalid_utf8=skip", "data.source=bad.jsonl"],
    "data.split": ["data.source=many.jsonl"],
    "data.packing": STREAM,
    "data.documents": STREAM,
    "data.streaming": STREAM,
    **{f"data.{name}": STREAM for name in ("max_documents", "max_tokens", "max_bytes")},
    **{f"clean.{name}": ["data.source=web.jsonl"] for name in WEB_RULES},
    "optim.decay_fraction": ["optim.schedule=wsd"],
    "optim.muon_rate": MUON,
    "optim.table_rate": ["model.bigram_rows=50"],
    "optim.table_decay": ["model.bigram_rows=50"],
    "optim.head_rate": ["model.tied=false"],
    "optim.head_decay": ["model.tied=false"],
    "train.window_stages": WINDOWS,
    "eval.patience": ["eval.every=1", "optim.learning_rate=10.0"],
    "eval.tasks": ["data.tokenizer=bytes"],
    **{f"eval.tasks_{name}": TASKS for name in ("every", "rows")},
    "checkpoint.keep": ["checkpoint.every=1"],
}
# Read by the terminal alone, or about files beside the run: tests/end_to_end/test_cli.py counts lines and looks for
# them. And what a CPU refuses when it is written:
# tests/unit/test_features.py and tests/end_to_end/test_gpu_switches.py show it at work.
# Several ranks: tests/end_to_end/test_many.py. What adapters go by: tests/parity/test_families.py.
ELSEWHERE = {
    "model.fused_projections",
    "output.log_every",
    "output.trackers",
    "parallel.form",
    "parallel.reduce",
    "parallel.timeout",
    "speed.optimizer_offload",
    "speed.fp8",
    "speed.memory_limit",
}


def signature(words: list[str]) -> Any:
    """Everything a run builds and says, times left out."""
    shutil.rmtree("runs", ignore_errors=True)
    lengths = ("train.steps", "train.epochs", "train.tokens", "train.minutes")
    length = [] if any(word.startswith(lengths) for word in words) else ["train.steps=5"]
    short = ["model.layers=1", "optim.warmup=2", "eval.tokens=128", "eval.sample_tokens=4"]
    base = [*TINY, "data.source=text.txt", *short, *length]
    if any(word.startswith("chat.") for word in words):  # the shape is the model's own
        base = [word for word in base if not word.startswith(("model.", "data.", "train.batch_tokens"))]
    records = list(flatout.train(load_config("shakespeare-char", [*base, *words])))
    info = records[0]
    assert isinstance(info, RunInfo)
    kept = list_checkpoints(Path(info.folder) / "checkpoints")
    last = read_checkpoint(kept[-1][1])
    weights = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in last.model.items()}
    return {
        "weights": weights,
        "features": info.features,
        "folder": info.folder,
        "data": (info.dataset, Path("shards").exists(), info.config["data"]["folder"]),
        "deterministic": info.config["train"]["deterministic"],
        "losses": [(r.loss, r.learning_rate, r.grad_norm) for r in records if isinstance(r, StepRecord)],
        "samples": [(r.prompt, r.text) for r in records if isinstance(r, SampleRecord)],
        "kinds": [
            (type(r).__name__, getattr(r, "step", None), getattr(r, "tokens", None), getattr(r, "rows", None))
            for r in records
        ],
        "kept": [step for step, _ in kept],
        "beside": [r.background_seconds is not None for r in records if isinstance(r, CheckpointRecord)],
    }


@pytest.fixture(scope="module")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fields")
    text = corpus.read_text(encoding="utf-8")
    (path / "text.txt").write_text(text, encoding="utf-8")
    (path / "other.txt").write_text(text.swapcase(), encoding="utf-8")
    lines = text.splitlines()
    texts = [f"{i}: " + "\n".join(lines[i : i + 3 + i % 4]) for i in range(0, len(lines), 5)]
    documents = [json.dumps({"text": text, "inner": {"loud": text.upper()}}) for text in texts]
    (path / "many.jsonl").write_text("\n".join(documents), encoding="utf-8")
    (path / "rows.txt").write_text("\n".join(documents), encoding="utf-8")
    (path / "bad.jsonl").write_bytes(b'{"text": "bad \xff byte"}\n' * 9 + "\n".join(documents).encode("utf-8"))
    web = [json.dumps({"text": text}) for text in web_texts()]
    (path / "web.jsonl").write_text("\n".join(web), encoding="utf-8")
    write_chat_model(path / "chatty")
    pairs = [(f"What is {number} and {number + 1}?", f"It is {2 * number + 1}.") for number in range(40)]
    rows = [{"prompt": ask, "completion": say, "second": say[::-1], "text": f"{ask} {say}"} for ask, say in pairs]
    rows[7]["completion"] *= 20  # longer than the context
    (path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    clozes = [json.dumps({"context": "the old", "continuation": word}) for word in ("fox", "cow")]
    (path / "task.jsonl").write_text("\n".join(clozes), encoding="utf-8")
    (path / "others.json").write_text(json.dumps(rows[::-2]), encoding="utf-8")
    adapters = attach(from_huggingface(path / "chatty"), AdapterPlan(rank=4, alpha=8.0), seed=5)
    save_adapter(adapters, path / "adapter")
    return path


# Without one of these, which OTHER has beside it, a field would be read by nothing.
NEEDED = (
    "optim.optimizer=muon",
    "model.pattern=",
    "chat.source=",
    "lora.rank=",
    "model.tied=false",
    "train.batch_stages=",
    "model.rope_scaling=",
)


def test_a_field_is_refused_without_what_it_is_for():
    tried = 0
    for field, words in OTHER.items():
        needs = [word for word in words if word.startswith(NEEDED)] if isinstance(words, list) else []
        if not needs or any(word.startswith(f"{field}=") for word in NEEDED):
            continue
        tried += 1
        with pytest.raises(ConfigError) as caught:
            check_used(load_config(PLAIN, [own_word(field)]))
        assert field in caught.value.message or field == "lora.quantize", caught.value
    assert tried > 25


def own_word(field: str) -> str:
    """The word of OTHER that sets a field, without those that it goes with."""
    other = OTHER[field]
    return f"{field}={other}" if isinstance(other, str) else [w for w in other if w.startswith(f"{field}=")][-1]


def test_every_optimizer_learns_otherwise(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    found = [signature([f"optim.optimizer={name}"])["weights"] for name in OPTIMIZERS]
    assert all(one != other for one, other in itertools.combinations(found, 2))


PLAIN = {"model": {"layers": 2, "width": 32, "heads": 2, "context": 16}, "train": {"steps": 1, "batch_tokens": 64}}
# Bounded by the width in every model, and read by attention alone.
HEADS = "model.heads"


@pytest.mark.parametrize("kind", ["A", "W", "E"])
def test_a_field_of_the_model_that_is_accepted_changes_it(kind: str):
    """Of models with one kind of block, another value of any field is refused, or makes another model."""
    pattern = [f"model.pattern={kind}", *{"W": ["model.window=9"], "E": ["model.states=8"]}.get(kind, [])]
    plain = load_config(PLAIN, pattern).config
    before, accepted = built(plain.model), 0
    for field in (name for name in OTHER if name.startswith("model.")):
        own = own_word(field)
        try:
            check_used(loaded := load_config(PLAIN, [*pattern, own]))
        except ConfigError:
            continue
        same = value_at(loaded.config, field) == value_at(plain, field)
        if same or field in ELSEWHERE or field in ("model.init_from", "model.pattern"):
            continue
        accepted += 1
        assert built(loaded.config.model) != before or (kind, field) == ("E", HEADS), f"{own} changes nothing"
    assert accepted > 15


def built(config: ModelConfig) -> tuple[Any, ...]:
    """The shapes and sums of a model's weights, and its loss in training."""
    model = build_model(config, config.vocab or 60, seed=1)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    sums = [weight.double().abs().sum().item() for weight in model.state_dict().values()]
    with torch.no_grad():
        for weight in model.parameters():  # some begin as zeros, behind which nothing shows
            weight.add_(torch.linspace(-0.3, 0.3, weight.numel()).view_as(weight))
    torch.manual_seed(0)
    tokens = (torch.arange(2 * config.context) * 7 % 50).view(2, -1)
    return shapes, sums, model.train()(tokens, tokens.roll(-1, 1)).item()


def web_texts() -> list[str]:
    """Prose in two languages, and some of what each rule drops."""
    nouns = ["river", "letter", "garden", "teacher", "window", "harbour", "village", "machine", "forest", "market"]
    verbs = ["follows", "remembers", "crosses", "repairs", "watches", "describes", "opens", "visits", "forgets"]
    manners = ["slowly", "often", "never", "quietly", "twice", "gladly", "rarely", "today", "together", "again"]
    links = ["and that the", "while a", "with the", "to be of a", "because the", "before a", "after that, the"]

    def sentence(seed: int) -> str:
        choose = random.Random(seed)
        clauses = [f"{choose.choice(nouns)} {choose.choice(manners)} {choose.choice(verbs)}" for _ in range(3)]
        return f"The {clauses[0]} {choose.choice(links)} {clauses[1]} {choose.choice(links)} {clauses[2]} it."

    prose = [" ".join(sentence(11 * number + line) for line in range(8)) for number in range(30)]
    german = "Der Garten hinter dem Haus ist im Herbst am schönsten, wenn alle Blätter fallen und keiner kommt. " * 4
    repeats = "the same words come again and again and again in this text. " * 30
    symbols = "# ... # $$$ ### @@ !!! " * 40
    return [*prose, german, german + "Ende.", repeats, symbols, prose[3], prose[4] + " One more word."]


BASE: dict[tuple[str, ...], Any] = {}


@pytest.mark.parametrize("field", sorted(field_facts()))
def test_field_matters(field: str, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    monkeypatch.chdir(folder)
    if field == "speed.precision":
        request.getfixturevalue("bf16_products")
    if field in ELSEWHERE:
        return
    if field == "lora.quantize":
        pytest.importorskip("bitsandbytes")
    if field == "model.init_from" and not Path("weights").exists():
        words = [*TINY, "model.layers=1", "data.source=text.txt", "train.steps=2", *GPT2, "train.seed=9"]
        list(flatout.train(load_config(None, words)))
        export_huggingface(flatout.load_model().model, Path("weights"))
    beside = BESIDE.get(field, [])
    if tuple(beside) not in BASE:
        BASE[tuple(beside)] = signature(beside)
    assert field in OTHER, f"give {field} another value in OTHER, or list it in ELSEWHERE with the test that shows it"
    other = OTHER[field]
    shutil.rmtree("shards", ignore_errors=True)
    if field.startswith(("data.", "clean.", "chat.")):
        shutil.rmtree("data", ignore_errors=True)
    changed = signature(other if isinstance(other, list) else [f"{field}={other}"])
    if field.startswith(("data.", "clean.", "chat.")):
        shutil.rmtree("data", ignore_errors=True)
    assert changed != BASE[tuple(beside)], f"{field} changes nothing"
