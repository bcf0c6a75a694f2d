"""The command that a diverged run hints at: accepted as it stands, and it ends with a lower loss than the start's."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import random
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import flatout
from flatout import cli
from flatout.checkpoints.checkpoint import Verdict, read_checkpoint, read_verdict, write_checkpoint, write_verdict
from flatout.config.load import LoadedConfig, load_config
from flatout.engine import diverged
from flatout.engine.evaluate import evaluate
from flatout.errors import ResourceError
from flatout.model.gpt import GPT
from flatout.observe.sinks import read_metrics
from tests.chat_models import write_chat_model
from tests.conftest import TINY
from tests.set_up import set_up

pytestmark = pytest.mark.usefixtures("children_stay")
QUIET = ["eval.sample_tokens=0", "eval.every=0", "checkpoint.every=0", "speed.device=cpu"]
SMALL = ["model.layers=2", "model.width=32", "model.heads=2", "model.context=16", "train.batch_tokens=64"]
SHAPES = {
    "shakespeare-char": [word for word in TINY if word.startswith(("model.", "data.", "train.", "optim."))],
    "shakespeare": ["model.layers=1", *SMALL[1:], "data.tokenizer=char", "data.unknown_characters=error"],
    "gpt-124m": [*SMALL, "data.tokenizer=char", "optim.warmup=2"],
    "gpt2-124m": [*SMALL, "data.tokenizer=char", "optim.warmup=2"],
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
    before: list[str] = field(default_factory=list)  # one that trains first, at usual rates


@dataclass
class Outcome:
    case: Case
    start: float
    hints: list[str] = field(default_factory=list)
    end: float = float("nan")
    said: str = ""


def start_loss(case: Case) -> float:
    """The validation loss of a command's starting weights."""
    verb, *words = case.before or case.words
    loaded = load_config("lora", words) if verb == "finetune" else load_config(words[0], words[1:])
    started = set_up(loaded)
    return evaluate(started.model, started.evaluation(), started.scope)[0]


def followed(case: Case, most: int = 20) -> Outcome | None:
    """Trains, and follows hints until a run ends; None where nothing diverges."""
    if case.before:
        code, said = run(*case.before)
        assert code == 0, (case, said)
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
    """Commands of a kind with settings at random, most of which diverge. Every other run has learned before."""
    draw = random.Random(f"{kind} {seed}")
    for number in itertools.count():
        (target, optimizer), choose = KINDS[kind], draw.choice
        tunes, folder = target in ("base", "runs/own"), f"{kind} {seed}-{number}"
        shape = [
            f"train.seed={draw.randrange(1000)}",
            f"output.folder={folder}",
            *([] if optimizer == "lora" else choose([["optim.ema=0.9"], [], [], []])),
            *(["model.qk_norm=false"] if target in ("shakespeare-char", "gpt-124m") and choose([True, False]) else []),
            *(["optim.optimizer=adamw"] if optimizer == "adamw" and target in ("record", "modern") else []),
        ]
        if tunes:
            rank = choose([2, 8]) if optimizer == "lora" else 0
            named = [f"model.init_from={target}", "chat.source=rows.json", "chat.batch_samples=4", f"lora.rank={rank}"]
            shape = ["finetune", *QUIET, *named, *(["optim.optimizer=muon"] if optimizer == "muon" else []), *shape]
        else:
            shape = ["train", target, *QUIET, *SHAPES[target], f"data.source={corpus}", "eval.tokens=512", *shape]
        rate, decay = choose([3.0, 10.0, 30.0, 100.0, 100.0]), choose([1.0, 10.0, 10.0])
        field = "muon_rate" if optimizer == "muon" else "learning_rate"
        wild = [
            f"optim.clip={choose([0, 0, 1, 1e6])}",
            f"optim.warmup={choose([0, 0, 5, 12])}",
            f"optim.schedule={choose(['constant', 'cosine', 'wsd'])}",
            f"speed.precision={choose(['fp32', 'fp32', 'fp32', 'fp32', 'bf16'])}",
            f"checkpoint.every={choose([0, 1, 2, 3, 5, 8])}",
            f"checkpoint.keep={choose([1, 2, 3])}",
            f"eval.every={choose([0, 0, 2, 4])}",
        ]
        # Two ways to overflow: a decay that makes weights larger, and a second moment without memory, which divides by
        # gradients of zero.
        if choose([True, False]):
            role = choose(["embedding", "head", "plain"])
            if target not in ("record", "modern") or role == "plain":
                wild += [f"optim.{field}={rate}", f"optim.weight_decay={decay}"]
                shape += ["optim.optimizer=muon"] if optimizer == "muon" else []  # NorMuon decays cautiously
            else:
                wild += [f"optim.{role}_rate={rate}", f"optim.{role}_decay={decay}"]
        else:
            rate, decay = choose([0.3, 1.0, 10.0, 100.0]), 0.0
            wild += ["optim.betas=[0.9, 0.0]", "optim.weight_decay=0", f"optim.learning_rate={rate}"]
            wild += [f"optim.{role}_rate={rate}" for role in ("embedding", "head") if target in ("record", "modern")]
        if number % 2:
            learned = [*shape, "train.steps=10", "checkpoint.every=5", "checkpoint.keep=2"]
            again = [shape[0], "--resume", folder, *wild, "train.steps=36"]
            yield Case(kind, again, folder, rate * decay > 1, learned)
        else:
            yield Case(kind, [*shape, *wild, "train.steps=26"], folder, rate * decay > 1)


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


def test_the_hint_of_a_diverged_run_is_a_command_that_learns(bases: Path):
    """Of each kind one; the campaign below has many."""
    tunes = ["finetune", *QUIET, "chat.source=rows.json", "chat.batch_samples=4"]
    tunes += ["optim.learning_rate=100", "optim.weight_decay=10", "optim.warmup=0", "train.steps=18"]
    adapters = [*tunes, "model.init_from=base", "lora.rank=4"]
    weights = [*tunes, "model.init_from=runs/own", "lora.rank=0"]
    learns = ["train", "record", *QUIET, *SHAPES["record"], f"data.source={bases}", "eval.tokens=512"]
    learns += ["train.steps=6", "output.folder=sized"]
    wild = ["train", "--resume", "sized", "optim.head_rate=100", "optim.head_decay=10", "train.steps=30"]
    for case in (
        Case("adapters", [*adapters, "output.folder=adapters"], "adapters", decays=True),
        Case("weights", [*weights, "output.folder=weights"], "weights", decays=True),
        Case("sized", wild, "sized", decays=True, before=learns),
    ):
        outcome = followed(case)
        assert outcome is not None, f"{case.kind} did not diverge"
        assert outcome.end < outcome.start, outcome
        assert ("step-00000006" in outcome.hints[0]) == bool(case.before), "what was learned before is kept"


def counted(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The outcomes of a campaign by kind, in lines."""
    for kind in sorted({outcome.case.kind for outcome in outcomes}):
        of_kind = [outcome for outcome in outcomes if outcome.case.kind == kind]
        good = sum(outcome.end < outcome.start for outcome in of_kind)
        hints = Counter(len(outcome.hints) for outcome in of_kind)
        places = Counter("start" if "step-00000000" in outcome.hints[-1] else "later" for outcome in of_kind)
        decays = sum(outcome.case.decays for outcome in of_kind)
        yield f"{kind}: {good} of {len(of_kind)}; {decays} with decay; hints {dict(hints)}; from {dict(places)}"


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.slow
def test_a_hundred_diverging_runs(bases: Path):
    """Each hinted command ends with a loss below that of the start. `pytest -s` shows the counts."""
    draws, outcomes = {kind: drawn(kind, 2, bases) for kind in KINDS}, []
    for kind in itertools.islice(itertools.cycle(KINDS), 108):
        outcome = next(filter(None, map(followed, draws[kind])))
        print("" if outcome.end < outcome.start else "WORSE", outcome, flush=True)
        outcomes.append(outcome)
    print(*counted(outcomes), sep="\n")
    assert all(outcome.end < outcome.start for outcome in outcomes)
    assert sum(outcome.case.words[0] == "finetune" for outcome in outcomes) >= 30
    assert sum(outcome.case.decays for outcome in outcomes) >= 20


# --- which checkpoint -------------------------------------------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every training step has the loss NaN."""
    real = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, *args: real(self, *args) * (math.nan if self.training else 1.0))


@pytest.fixture
def saved(tiny: Callable[..., LoadedConfig]) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    list(flatout.train(tiny("train.steps=4", "checkpoint.every=2", "checkpoint.keep=9", "output.folder=run")))
    return Path("run/checkpoints")


# Of queries and keys, which are normed: the loss stays as it was. Of the head: it is worse than that of the start.
RUINED = {"weights": ("blocks.0.attention.qkv.weight", slice(64), 1e4), "loss": ("head.weight", slice(None), -4.0)}


@pytest.mark.parametrize("what", RUINED)
def test_a_checkpoint_with_ruined_weights_or_a_worse_loss_than_the_start_is_not_resumed_from(saved, monkeypatch, what):
    newest = saved / "step-00000004"
    checkpoint, verdict = read_checkpoint(newest), read_verdict(newest)
    assert verdict is not None
    name, rows, factor = RUINED[what]
    ruined = checkpoint.model[name].clone()
    ruined[rows] *= factor
    shutil.rmtree(newest)
    write_checkpoint(saved, dataclasses.replace(checkpoint, model={**checkpoint.model, name: ruined}))
    write_verdict(newest, verdict)
    with monkeypatch.context() as patch:
        poison(patch)
        code, said = run("train", "--resume", "run", "train.steps=9")
    assert code == 4
    assert "step-00000002" in hinted(said)[2]
    code, said = run(*hinted(said))
    assert code == 0, said


def test_a_hint_names_no_setting_that_the_run_does_not_read(corpus: Path, tmp_path: Path, monkeypatch):
    """A size gives the head a rate of its own, which a tied head does not have."""
    monkeypatch.chdir(tmp_path)
    words = ["train", "record", *QUIET, *SHAPES["record"], f"data.source={corpus}", "eval.tokens=512"]
    with monkeypatch.context() as patch:
        poison(patch)
        code, said = run(*words, "model.tied=true", "train.steps=4", "output.folder=run")
    assert code == 4, said
    code, said = run(*hinted(said))
    assert code == 0, said


def test_where_the_start_cannot_be_built_the_losses_on_record_decide(saved, monkeypatch):
    """Of a run on many GPUs one process may not have the memory for it."""

    def too_large(*_args, **_options):
        raise ResourceError("a step needs 80 GiB", "use more GPUs")

    poison(monkeypatch)
    monkeypatch.setattr(diverged, "Run", too_large)
    code, said = run("train", "--resume", "run", "train.steps=9")
    assert (code, Path(hinted(said)[2]).name) == (4, "step-00000004")
    for step in (2, 4):
        write_verdict(saved / f"step-{step:08d}", Verdict(loss=99.0, progress={}))
    code, said = run("train", "--resume", "run", "train.steps=9")
    assert code == 4
    assert "hint: start again with optim.learning_rate=0.0004 (a step needs 80 GiB)" in said


def test_hints_go_further_back_and_come_to_an_end(saved, monkeypatch):
    """A run that diverges whatever its rate."""
    poison(monkeypatch)
    code, said = run("train", "--resume", str(saved.parent), "train.steps=9")
    commands: list[list[str]] = []
    while ": flatout " in said:
        assert code == 4
        commands.append(hinted(said))
        assert len(commands) < 12
        code, said = run(*commands[-1])
    assert [Path(command[2]).name[-1] for command in commands] == ["4", "2", *["0"] * (len(commands) - 2)]
    assert len({tuple(command) for command in commands}) == len(commands)
    rates = [float(word.partition("=")[2]) for command in commands for word in command if "learning_rate" in word]
    assert min(rates) == pytest.approx(1e-6)
    assert "optim.clip=0.1" in commands[-1]
    assert "not the cause" in said
