"""What each mixer remembers over a distance: eight symbols, noise, and the eight symbols again, as JSON lines.

    python benchmarks/recall.py COMMIT [MIXER ...] [--distances N ...] [--steps N] >> benchmarks/recall.jsonl

A sequence is noise, with eight symbols of 64 somewhere in it. At its end stands a mark, and the eight are to be told
again in their order; nothing else counts in the loss. Each symbol lies DISTANCE tokens before the place where it is to
be told. In training distances are drawn, evenly in their logarithm, from 16 to the one that is asked for, so that there
is something to learn from early on; all tests are at the full distance, on sequences that nobody has trained on.
Noise and symbols have tokens of their own: a mixer may learn to let noise pass, and need not be told when to.

Everybody has four blocks of width 256, the same data, batch, rate and steps. `accuracy` is the share of the symbols
that are told, 1/64 by guessing. `solved` is 0.99 or more in one of the tests, which come ten times in a run; a run
that has solved it stops. A row with `solved: false` says what was not learned in these steps, not what never could be.
"""

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import torch
from torch import Tensor

from flatout.config.load import load_config
from flatout.config.schema import ModelConfig, RunConfig
from flatout.device import detect_device, use_expandable_segments
from flatout.engine.features import Speed, resolve_speed
from flatout.engine.setup import device_scope
from flatout.engine.step import TrainStep
from flatout.model.gpt import GPT, build_model
from flatout.ops.reference import IGNORED
from flatout.optim.optimizers import build_optimizer
from flatout.optim.schedule import rate_factors

SYMBOLS, NOISE, TOLD = 64, 64, 8
MARK, VOCAB = SYMBOLS + NOISE, SYMBOLS + NOISE + 1
NEAREST = 16
DISTANCES = (128, 1024, 8192, 30_000)
SOLVED, TESTS, TESTED = 0.99, 10, 64
WINDOW = 256

MIXERS: dict[str, dict[str, Any]] = {
    "attention": {"pattern": "A"},
    "windows": {"pattern": "W", "window": WINDOW},
    "windows and attention": {"pattern": "WWWA", "window": WINDOW},
    "eigenstates": {"pattern": "E", "states": 256},
    "eigenstates, modulated": {"pattern": "E", "states": 256, "modulation": 1.0, "convolution": 4},
    "eigenstates and attention": {"pattern": "EEEA", "states": 256},
    "eigenstates and windows": {"pattern": "EW", "states": 256, "window": WINDOW},
}


@dataclasses.dataclass
class Task:
    """Sequences of one length, drawn on the device."""

    distance: int
    generator: torch.Generator

    @property
    def length(self) -> int:
        return self.distance + TOLD

    def draw(self, count: int, *, farthest: bool) -> tuple[Tensor, Tensor]:
        """(tokens, targets), [count, length] each."""
        device = self.generator.device
        how: dict[str, Any] = {"generator": self.generator, "device": device}
        tokens = torch.randint(SYMBOLS, SYMBOLS + NOISE, (count, self.length), **how)
        symbols = torch.randint(0, SYMBOLS, (count, TOLD), **how)
        lowest = torch.tensor(float(min(NEAREST, self.distance)), device=device).log()
        share = torch.ones(count, device=device) if farthest else torch.rand(count, **how)
        highest = torch.tensor(float(self.distance), device=device).log()
        distance = (lowest + share * (highest - lowest)).exp().round().long().clamp(max=self.distance)
        places = torch.arange(TOLD, device=device)
        tokens.scatter_(1, self.length - TOLD - distance[:, None] + places, symbols)
        tokens[:, -TOLD] = MARK
        tokens[:, 1 - TOLD :] = symbols[:, :-1]
        targets = torch.full_like(tokens, IGNORED)
        targets[:, -TOLD:] = symbols
        return tokens, targets


def config_of(mixer: str, length: int, steps: int, words: list[str]) -> RunConfig:
    plan = [f"train.steps={steps}", "optim.learning_rate=1e-3", f"optim.warmup_steps={max(1, steps // 10)}"]
    plan += ["optim.weight_decay=0.0", "speed.cuda_graphs=off"]
    config = load_config("shakespeare-char", [*plan, *words]).config
    shape = {"layers": 4, "width": 256, "heads": 4, "context": length, "dropout": 0.0, **MIXERS[mixer]}
    return config.model_copy(update={"model": ModelConfig(family="gpt", rope_base=500_000.0, **shape)})


def built(config: RunConfig, steps: int, sequences: int) -> tuple[GPT, TrainStep, Speed]:
    device = detect_device(config.speed.device)
    speed = resolve_speed(config, device, None, lambda _: "", vocab=VOCAB)
    use_expandable_segments(device.torch_device, on=speed.expandable_segments)
    model = build_model(config.model, VOCAB, seed=0, execution=speed.execution).to(device.torch_device)
    step = TrainStep(
        model,
        build_optimizer(model, config.optim, fused=speed.fused_optimizer),
        rates=[factor * config.optim.learning_rate for factor in rate_factors(config.optim, steps)],
        clip=config.optim.clip,
        micro_batch=sequences,
        scope=lambda: device_scope(speed, deterministic=False),
    )
    return model, step, speed


@torch.no_grad()
def accuracy(model: GPT, step: TrainStep, task: Task, sequences: int) -> float:
    model.eval()
    right = seen = 0
    while seen < TESTED * TOLD:
        tokens, targets = task.draw(sequences, farthest=True)
        with step.scope():
            hidden = model.hidden(tokens)[:, -TOLD:]
            logits = hidden.float() @ model.head_weight.float().t()
        right += int((logits.argmax(-1) == targets[:, -TOLD:]).sum())
        seen += targets[:, -TOLD:].numel()
    model.train()
    return right / seen


def learned(mixer: str, distance: int, steps: int, batch_tokens: int, words: list[str]) -> dict[str, Any]:
    config = config_of(mixer, distance + TOLD, steps, words)
    device = detect_device(config.speed.device).torch_device
    task = Task(distance, torch.Generator(device).manual_seed(0))
    test = Task(distance, torch.Generator(device).manual_seed(1))
    sequences = max(4, batch_tokens // task.length)
    model, step, speed = built(config, steps, sequences)
    began, history, loss, taken = time.perf_counter(), [], None, 0
    every = max(1, steps // TESTS)
    while taken < steps and not (history and history[-1] >= SOLVED):
        for _ in range(min(every, steps - taken)):
            loss = step(*task.draw(sequences, farthest=False))[0]
            taken += 1
        history.append(round(accuracy(model, step, test, min(sequences, TESTED)), 4))
        print(f"{mixer}, {distance}: step {taken}, {history[-1]:.3f} right", file=sys.stderr, flush=True)
    assert loss is not None
    used = {feature.name: feature.used for feature in speed.features}
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "sequences": sequences,
        "steps": taken,
        "solved": history[-1] >= SOLVED,
        "accuracy": history[-1],
        "history": history,
        "loss": round(float(loss), 4),
        "seconds": round(time.perf_counter() - began, 1),
        "features": {name: used[name] for name in ("precision", "kernels", "attention", "scan") if name in used},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("commit")
    parser.add_argument("mixers", nargs="*", metavar="MIXER")
    parser.add_argument("--distances", nargs="+", type=int, default=list(DISTANCES))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=131_072, help="in a step; four sequences at least")
    parser.add_argument("--words", nargs="*", default=[], help="settings, as speed.kernels=torch")
    asked = parser.parse_intermixed_args()
    if unknown := set(asked.mixers) - set(MIXERS):
        parser.error(f"no mixer {sorted(unknown)}; there are: {', '.join(MIXERS)}")
    for mixer in asked.mixers or MIXERS:
        for distance in asked.distances:
            row: dict[str, Any] = {"mixer": mixer, "distance": distance, "commit": asked.commit}
            row |= {"torch": torch.__version__, "device": detect_device().name}
            try:
                row |= learned(mixer, distance, asked.steps, asked.tokens, asked.words)
            except Exception as error:  # noqa: BLE001 - the other mixers still have something to say
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
