"""The command that a diverged run hints at: accepted as it stands, and it ends with a lower loss than the start's."""

import contextlib
import io
import itertools
import json
import random
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flatout import cli
from flatout.config.load import load_config
from flatout.engine.evaluate import evaluate
from flatout.engine.setup import setup_run
from flatout.observe.sinks import read_metrics
from flatout.tuning.settling import settled
from flatout.world import World
from tests.chat_models import write_chat_model
from tests.conftest import TINY

QUIET = ["output.plots=false", "eval.sample_tokens=0", "eval.every=0", "checkpoint.every=0", "speed.device=cpu"]
SMALL = ["model.layers=2", "model.width=32", "model.heads=2", "model.context=16", "train.batch_tokens=64"]
SHAPES = {
    "shakespeare-char": [word for word in TINY if word.startswith(("model.", "data.", "train.", "optim."))],
    "shakespeare": ["model.layers=1", *SMALL[1:], "data.tokenizer=char", "data.unknown_characters=error"],
    "gpt-124m": [*SMALL, "data.tokenizer=char", "optim.warmup_steps=2"],
    "gpt2-124m": [*SMALL, "data.tokenizer=char", "optim.warmup_steps=2"],
    "record": [*SMALL, "data.tokenizer=char"],
    "modern": [*SMALL, "data.tokenizer=char"],
}


def run(*words: str) -> tuple[int, str]:
    """The exit code of a command, and what it said on standard error."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = cli.main(list(words))
    return code, said.getvalue()


def hinted(said: str) -> list[str]:
    """The words after `flatout` of the command in the hint of a divergence."""
    hints = [line for line in said.splitlines() if line.startswith("hint:")]
    assert len(hints) == 1, said
    _, found, command = hints[0].partition(": flatout ")
    assert found, said
    return shlex.split(command)


def last_loss(folder: str | Path) -> float:
    end = read_metrics(Path(folder) / "metrics.jsonl")[-1]
    assert end["type"] == "end"
    return end["val_loss"]


@dataclass
class Case:
    """A command that is to diverge."""

    kind: str
    words: list[str]
    folder: str
    decays: bool  # rate times decay is above 1


@dataclass
class Outcome:
    case: Case
    start: float
    hints: list[str] = field(default_factory=list)
    end: float = float("nan")
    said: str = ""

    @property
    def good(self) -> bool:
        return self.end < self.start


def start_loss(case: Case) -> float:
    """The validation loss of a command's starting weights."""
    verb, *words = case.words
    loaded = load_config("lora", words) if verb == "finetune" else load_config(words[0], words[1:])
    started = setup_run(settled(loaded, None, None, None, World()))
    return evaluate(started.model, started.evaluation(), started.scope)[0]


def followed(case: Case, most: int = 20) -> Outcome | None:
    """Trains, and follows hints until a run ends; None where nothing diverges."""
    code, said = run(*case.words)
    if code == 0:
        return None
    assert code == 4, (case, said)
    outcome = Outcome(case, start_loss(case))
    while len(outcome.hints) < most:
        words = hinted(said)
        outcome.hints.append(shlex.join(words))
        code, said = run(*words)
        if code != 4:
            break
    outcome.said = said
    if code == 0:
        outcome.end = last_loss(case.folder)
    return outcome


KINDS = {
    "adamw shakespeare-char": ("shakespeare-char", "adamw"),
    "lora, base of Hugging Face": ("base", "lora"),
    "muon record": ("record", "muon"),
    "adamw gpt-124m": ("gpt-124m", "adamw"),
    "adamw whole, base of Hugging Face": ("base", "adamw"),
    "muon modern": ("modern", "muon"),
    "lora, base of ours": ("runs/own", "lora"),
    "adamw gpt2-124m": ("gpt2-124m", "adamw"),
    "muon shakespeare": ("shakespeare", "muon"),
    "muon whole, base of ours": ("runs/own", "muon"),
    "adamw record": ("record", "adamw"),
    "adamw modern": ("modern", "adamw"),
}


def drawn(kind: str, seed: int, corpus: Path) -> Iterator[Case]:
    """Commands of a kind with settings at random, most of which diverge."""
    draw = random.Random(f"{kind} {seed}")
    for number in itertools.count():
        (target, optimizer), choose = KINDS[kind], draw.choice
        folder = f"{kind} {seed}-{number}"
        rate, decay = choose([3.0, 10.0, 30.0, 100.0, 100.0]), choose([0.0, 0.1, 1.0, 10.0])
        field = "muon_rate" if optimizer == "muon" else "learning_rate"
        words = [
            f"optim.{field}={rate}",
            f"optim.weight_decay={decay}",
            f"optim.clip={choose([0, 0, 1, 1e6])}",
            f"optim.warmup_steps={choose([0, 0, 5, 12, 30])}",
            f"optim.schedule={choose(['constant', 'cosine', 'wsd'])}",
            f"speed.precision={choose(['fp32', 'fp32', 'fp32', 'bf16'])}",
            f"train.steps={choose([24, 40])}",
            f"train.seed={draw.randrange(1000)}",
            f"checkpoint.every={choose([0, 1, 2, 3, 5, 8])}",
            f"checkpoint.keep={choose([1, 2, 3])}",
            f"checkpoint.best={choose(['true', 'false'])}",
            f"eval.every={choose([0, 0, 2, 4])}",
            f"output.folder={folder}",
        ]
        if target in ("base", "runs/own"):
            own = [f"model.init_from={target}", "chat.source=rows.json", "chat.batch_samples=4"]
            own += [f"lora.rank={choose([2, 8])}"] if optimizer == "lora" else ["lora.rank=0"]
            own += ["optim.optimizer=muon"] if optimizer == "muon" else []
            yield Case(kind, ["finetune", *QUIET, *own, *words], folder, rate * decay > 1)
            continue
        words += choose([["optim.ema=0.9"], [], [], []])
        if target in ("record", "modern"):  # norms and a cap keep them finite unless weights themselves overflow
            role = choose(["embedding", "head", "cautious"])
            many = ["optim.cautious=false"] if role == "cautious" else [f"optim.{role}_rate={rate}", f"optim.{role}_decay={decay}"]
            words += ["optim.optimizer=adamw"] * (optimizer == "adamw") + many * (optimizer == "muon" or role != "cautious")
        elif target != "gpt2-124m":
            words += choose([["model.qk_norm=false"], []])
        own = [target, *QUIET, *SHAPES[target], f"data.source={corpus}", "eval.tokens=512"]
        yield Case(kind, ["train", *own, *words], folder, rate * decay > 1)


@pytest.fixture
def bases(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of Hugging Face's form and a run of ours to fine-tune, and rows."""
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "base")
    rows = [{"instruction": f"What is {n} and one?", "input": "", "output": f"It is {n + 1}."} for n in range(30)]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    words = [*TINY, "model.context=64", "data.tokenizer=bytes", f"data.source={corpus}"]
    code, said = run("train", "shakespeare-char", *words, "train.steps=8", "output.folder=runs/own")
    assert code == 0, said
    return corpus


@pytest.mark.usefixtures("bf16_products", "children_stay")
@pytest.mark.slow
def test_a_hundred_diverging_runs(bases: Path):
    import os, time
    wanted = int(os.environ.get("WANTED", "100"))
    out = open(os.environ.get("OUTF", "/tmp/b-camp.txt"), "a")
    seed = int(os.environ.get("SEED", "2"))
    only = os.environ.get("ONLY", "")
    draws = {kind: drawn(kind, seed, bases) for kind in KINDS if only in kind}
    seen = 0
    for kind in itertools.cycle(draws):
        for case in draws[kind]:
            t = time.time()
            o = followed(case)
            if o is None:
                print("no", case.kind, f"{time.time()-t:.1f}s", shlex.join(case.words), file=out, flush=True)
            else:
                seen += 1
                print("GOOD" if o.good else "BAD", case.kind, case.decays, f"{o.start:.4f} -> {o.end:.4f} hints {len(o.hints)} {time.time()-t:.1f}s", shlex.join(case.words), o.hints, *([] if o.good else [o.said]), sep=" | ", file=out, flush=True)
                break
        if seen >= wanted:
            break
