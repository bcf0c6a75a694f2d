"""What each mixer remembers over a distance: eight symbols, something else, and the eight symbols again, as JSON lines.

    python lab/recall.py COMMIT [MIXER ...] [--task TASK] [--distances N ...] [--steps N] \\
        >> lab/recall.jsonl

Somewhere in a sequence stand a mark and eight different symbols of 64. At its end the mark stands again, and the eight
are to be told in their order; nothing else counts in the loss. Each lies DISTANCE tokens before the place where it is
to be told. There are two tasks:

- copy: the mark is the first token, and one blank token fills the sequence, so that distances are always the same. This
  is the memory task that recurrent networks are tried on.
- recall: the mark is anywhere in noise of 64 other tokens. In training distances are drawn, evenly in their logarithm,
  from 16 to the one that is asked for; tests are at the full distance. Where the symbols are must be found.

A mixer has one model of four blocks of width 256 for a task, which learns one distance after the other, so that far is
learned by who knows near; what it has not learned in the steps it has, it is not asked at a greater distance. Everybody
has the same data, batch, rate and most steps for each distance; where `--seconds` ended one, `steps` says when.
`accuracy` is the share of symbols told in sequences that nobody has trained on, 1/64 by guessing. `solved` is 0.99 or
more in one of the tests, which come twenty times in a distance's steps; then the next distance follows. A row with
`solved: false` says what was not learned in these steps, not what never could be.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flatout.config.load import load_config
from flatout.config.schema import ModelConfig, RunConfig
from flatout.config.source import IN_PYTHON
from flatout.device import Scope, detect_device, use_expandable_segments
from flatout.engine.setup import all_weights
from flatout.engine.step import TrainStep
from flatout.model.gpt import GPT, build_model
from flatout.ops.reference import IGNORED
from flatout.optim.optimizers import Optimizers
from flatout.optim.rules import rules_of
from flatout.resolve.switches import resolve_speed

SYMBOLS, NOISE, TOLD = 64, 64, 8
BLANK, MARK, VOCAB = SYMBOLS, SYMBOLS + NOISE, SYMBOLS + NOISE + 1
NEAREST = 16
DISTANCES = (128, 1024, 8192, 30_000)
SOLVED, TESTS, TESTED = 0.99, 20, 64
WINDOW = 256

MIXERS: dict[str, dict[str, Any]] = {
    "attention": {"pattern": "A"},
    "windows": {"pattern": "W", "window": WINDOW},
    "windows and attention": {"pattern": "WWWA", "window": WINDOW},
    "eigenstates": {"pattern": "E", "states": 256},
    "eigenstates and attention": {"pattern": "EEEA", "states": 256},
    "eigenstates and windows": {"pattern": "EW", "states": 256, "window": WINDOW},
}


@dataclasses.dataclass
class Task:
    """Sequences of one length, drawn on the device."""

    name: str
    distance: int
    generator: torch.Generator

    @property
    def length(self) -> int:
        return self.distance + TOLD + 1

    def draw(self, count: int, *, farthest: bool) -> tuple[Tensor, Tensor]:
        """(tokens, targets), [count, length] each."""
        device = self.generator.device
        how: dict[str, Any] = {"generator": self.generator, "device": device}
        told = torch.rand((count, SYMBOLS), **how).argsort(dim=1)[:, :TOLD]
        if self.name == "copy":
            tokens = torch.full((count, self.length), BLANK, device=device)
            begin = torch.zeros((count, 1), dtype=torch.long, device=device)
        else:
            tokens = torch.randint(SYMBOLS, SYMBOLS + NOISE, (count, self.length), **how)
            begin = (self.distance - self._distances(count, farthest, how))[:, None]
        marked = torch.cat([torch.full((count, 1), MARK, device=device), told], dim=1)
        tokens.scatter_(1, begin + torch.arange(TOLD + 1, device=device), marked)
        tokens[:, -TOLD:] = marked[:, :-1]
        targets = torch.full_like(tokens, IGNORED)
        targets[:, -TOLD:] = told
        return tokens, targets

    def _distances(self, count: int, farthest: bool, how: dict[str, Any]) -> Tensor:
        nearest = math.log(min(NEAREST, self.distance))
        share = torch.ones(count, device=how["device"]) if farthest else torch.rand(count, **how)
        drawn = (nearest + share * (math.log(self.distance) - nearest)).exp()
        return drawn.round().long().clamp(max=self.distance)


def config_of(mixer: str, asked: argparse.Namespace) -> RunConfig:
    plan = ["train.steps=1000", "optim.learning_rate=1e-3", "optim.warmup=50"]
    plan += ["optim.schedule=constant", "optim.weight_decay=0.0", "speed.cuda_graphs=off"]
    config = load_config("shakespeare-char", [*plan, *asked.words]).config
    context = max(asked.distances) + TOLD + 1
    shape = {"layers": 4, "width": 256, "heads": 4, "context": context, "dropout": 0.0, **MIXERS[mixer]}
    shape |= {"family": "gpt", "rope_base": 500_000.0}
    # The longest sequence is a batch of its own as far as the config goes; how many are taken is said to the step.
    train = config.train.model_copy(update={"batch_tokens": context})
    return config.model_copy(update={"model": ModelConfig(**shape), "train": train})


@torch.no_grad()
def accuracy(model: GPT, step: TrainStep, task: Task, sequences: int) -> float:
    model.eval()
    right = seen = 0
    while seen < TESTED * TOLD:
        tokens, targets = task.draw(sequences, farthest=True)
        with step.active():
            hidden = model.hidden(tokens)[:, -TOLD:]
            logits = model.head(hidden, model.embedding.weight, model.execution)
        right += int((logits.argmax(-1) == targets[:, -TOLD:]).sum())
        seen += targets[:, -TOLD:].numel()
    model.train()
    return right / seen


def learned(model: GPT, step: TrainStep, distance: int, asked: argparse.Namespace) -> dict[str, Any]:
    device, steps = model.embedding.weight.device, asked.steps
    task = Task(asked.task, distance, torch.Generator(device).manual_seed(0))
    test = Task(asked.task, distance, torch.Generator(device).manual_seed(1))
    sequences = max(4, asked.tokens // task.length)
    step.micro_batch = sequences
    began, history, loss, taken = time.perf_counter(), [], None, 0
    every = max(1, steps // TESTS)
    while taken < steps and time.perf_counter() - began < asked.seconds and not (history and history[-1] >= SOLVED):
        for _ in range(min(every, steps - taken)):
            loss = step(*task.draw(sequences, farthest=False))[0]
            taken += 1
        history.append(round(accuracy(model, step, test, min(sequences, TESTED)), 4))
        print(f"{distance}: step {taken}, {history[-1]:.3f} right", file=sys.stderr, flush=True)
    assert loss is not None
    return {
        "sequences": sequences,
        "steps": taken,
        "solved": history[-1] >= SOLVED,
        "accuracy": history[-1],
        "history": history,
        "loss": round(float(loss), 4),
        "seconds": round(time.perf_counter() - began, 1),
    }


def rows_of(mixer: str, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config, device = config_of(mixer, asked), detect_device()
    optim, steps = config.optim, asked.steps * len(asked.distances)
    speed = resolve_speed(config, device, None, lambda _: IN_PYTHON, vocab=VOCAB)
    use_expandable_segments(device.torch_device, on=speed.expandable_segments)
    model = build_model(config.model, VOCAB, seed=0, execution=speed.execution).to(device.torch_device)
    step = TrainStep(
        model,
        Optimizers(rules_of(optim, steps, fused=speed.fused_optimizer), all_weights(model).updated),
        clip=optim.clip,
        micro_batch=1,
        scope=Scope(device, speed.precision, False, speed.threads),
    )
    used = {feature.name: feature.used for feature in speed.features}
    facts = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    facts |= {name: used[name] for name in ("precision", "kernels", "attention", "scan")}
    for distance in sorted(asked.distances):
        print(f"{asked.task}, {mixer}", file=sys.stderr)
        row = {"distance": distance, **learned(model, step, distance, asked), **facts}
        yield row
        if not row["solved"]:
            return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("commit")
    parser.add_argument("mixers", nargs="*", metavar="MIXER")
    parser.add_argument("--task", choices=("copy", "recall"), default="recall")
    parser.add_argument("--distances", nargs="+", type=int, default=list(DISTANCES))
    parser.add_argument("--steps", type=int, default=1000, help="at most, for each distance")
    parser.add_argument("--seconds", type=float, default=math.inf, help="at most, for each distance")
    parser.add_argument("--tokens", type=int, default=131_072, help="in a step; four sequences at least")
    parser.add_argument("--words", nargs="*", default=[], help="settings, as speed.kernels=torch")
    asked = parser.parse_intermixed_args()
    if unknown := set(asked.mixers) - set(MIXERS):
        parser.error(f"no mixer {sorted(unknown)}; there are: {', '.join(MIXERS)}")
    for mixer in asked.mixers or MIXERS:
        facts = {"task": asked.task, "mixer": mixer, "commit": asked.commit, "torch": torch.__version__}
        facts["device"] = detect_device().name
        try:
            for row in rows_of(mixer, asked):
                print(json.dumps({**facts, **row}), flush=True)
        except Exception as error:  # noqa: BLE001 - the other mixers still have something to say
            print(json.dumps({**facts, "error": f"{type(error).__name__}: {error}"[:300]}), flush=True)


if __name__ == "__main__":
    main()
