"""Run folders made by hand: for tests of what reads runs, without training any."""

import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from flatout import lock
from flatout.records import (
    CheckpointRecord,
    EigenstateLayer,
    EigenstateRecord,
    EndRecord,
    EvalRecord,
    Feature,
    MachineRecord,
    NoticeRecord,
    Record,
    RunInfo,
    SampleRecord,
    SpanRecord,
    StepRecord,
    record_to_json,
)

CONFIG: dict[str, Any] = {
    "model": {"family": "gpt", "layers": 12, "width": 768, "heads": 12, "norm": "rmsnorm", "positions": "rope"},
    "data": {"source": "shakespeare", "tokenizer": "gpt2", "packing": "concat"},
    "optim": {"learning_rate": 0.0006, "schedule": "cosine", "warmup": 20, "weight_decay": 0.1, "clip": 1.0},
    "train": {"steps": 200, "batch_tokens": 65536, "seed": 1337},
    "speed": {"precision": "auto", "compile": "auto"},
    "output": {"folder": None, "name": "made"},
}
FEATURES = (
    Feature(name="device", asked="auto", used="cuda", why=""),
    Feature(name="precision", asked="auto", used="bf16", why=""),
    Feature(name="attention", asked="fa4", used="cudnn", why="flash-attn-4 is not installed"),
    Feature(name="compile", asked="auto", used="off", why="our kernels need no compiler"),
    Feature(name="cuda_graphs", asked="auto", used="off", why="a micro-batch is large enough"),
)


def info_of(folder: Path, *, steps: int = 200, start_step: int = 0, **changes: Any) -> RunInfo:
    values: dict[str, Any] = {
        "flatout": "0.1.0",
        "torch": "2.11.0+cu128",
        "device": "NVIDIA H200",
        "folder": str(folder),
        "family": "gpt",
        "parameters": 123_550_464,
        "flops_per_token": 8.0e8,
        "memory_estimate_bytes": 21 * 2**30,
        "steps": steps,
        "batch_tokens": 65536,
        "micro_batch": 32,
        "accumulation": 2,
        "context": 1024,
        "vocab": 50257,
        "train_tokens": 9_036_042_404,
        "val_tokens": 4_434_606,
        "windows": 8_824_260,
        "dataset": "2bbae4f9be9406ff009ae4b0c3e4aa6f14653a5c1ffa1db3e0edb3e04f950576",
        "tokenizer": "gpt2",
        "start_step": start_step,
        "resumed_from": f"{folder}/checkpoints/step-{start_step:08d}" if start_step else None,
        "features": FEATURES,
        "config": CONFIG,
    }
    return RunInfo(**{**values, **changes})


def step_of(step: int, *, steps: int = 200, chance: random.Random | None = None, **changes: Any) -> StepRecord:
    """A step as a run of that length may have it: a loss that falls, a rate that rises and falls, some noise."""
    noise = (chance or random.Random(step)).gauss(0.0, 1.0)
    seconds = 0.12 * (1 + 0.02 * abs(noise)) + (38.0 if step == 1 else 0.0)
    warm = min(1.0, step / max(1, steps // 20))
    rate = 6e-4 * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    loss = 2.9 + 8.0 * math.exp(-6.0 * step / (step + steps / 8)) + 0.05 * noise
    values: dict[str, Any] = {
        "step": step,
        "epoch": step * 64 / 8_824_260,
        "loss": loss,
        "learning_rate": rate,
        "grad_norm": 0.4 + 3.0 / (1 + step / 20) + 0.05 * abs(noise),
        "applied": True,
        "tokens": step * 65536,
        "seconds": seconds,
        "tokens_per_second": 65536 / seconds,
        "mfu": 65536 / seconds * 8.0e8 / 989e12,
        "memory_bytes": int((20.5 if step < 3 else 20.9) * 2**30),
        "loss_scale": None,
        "micro_batch": 32,
        "parameter_norm": 180.0 + 40.0 * step / steps if step % 10 == 0 or step == 1 else None,
        "data_seconds": 0.0006 * (1 + abs(noise)),
        "reserved_bytes": int(22.8 * 2**30),
    }
    return StepRecord(**{**values, **changes})


def eval_of(step: int, loss: float, *, best: bool = True) -> EvalRecord:
    return EvalRecord(
        step=step,
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=loss / math.log(2) / 4.4,
        tokens=524288,
        seconds=1.9,
        best=best,
        reason="step",
    )


def machine_of(step: int, elapsed: float, *, throttled: str = "") -> MachineRecord:
    wave = math.sin(step / 7)
    return MachineRecord(
        step=step,
        elapsed=elapsed,
        utilisation=0.97 + 0.02 * wave,
        memory_bytes=int(24.5 * 2**30),
        memory_total_bytes=140 * 2**30,
        power_watts=610 + 40 * wave,
        power_limit_watts=700.0,
        temperature=61 + 4 * wave,
        clock_mhz=1755.0 if throttled else 1980.0,
        throttled=throttled,
    )


def eigenstates_of(step: int, *, layers: tuple[int, ...] = (1, 3), context: int = 1024) -> EigenstateRecord:
    """States spread from 4 tokens to the context at first; with every step the deeper layers learn to look further."""

    def layer_of(number: int, depth: float) -> EigenstateLayer:
        grown = (1 + step / 50) ** (2 * depth - 0.8)
        horizon = {name: 4.0 * (context / 4) ** share * grown for name, share in _SHARES.items()}
        return EigenstateLayer(
            layer=number,
            states=128,
            magnitude={name: math.exp(-1 / value) for name, value in horizon.items()},
            horizon=horizon,
            period={name: 2.0 / max(1.0 - share, 0.001) * (1 + 0.2 * depth) for name, share in _SHARES.items()},
            beyond=min(1.0, max(0.0, 0.02 * (grown - 1))),
        )

    parts = enumerate(layers)
    return EigenstateRecord(
        step=step,
        context=context,
        layers=tuple(layer_of(number, place / max(1, len(layers) - 1)) for place, number in parts),
    )


_SHARES = {"min": 0.0, "10%": 0.1, "50%": 0.5, "90%": 0.9, "max": 1.0}


def spans_of(step: int, steps: int) -> SpanRecord:
    seconds = {"wait": 0.002, "data": 0.001, "forward": 0.035, "backward": 0.071, "optimizer": 0.009}
    return SpanRecord(
        step=step,
        steps=steps,
        seconds={**{name: value * steps for name, value in seconds.items()}, "evaluation": 1.9, "checkpoint": 0.8},
        calls={**dict.fromkeys(seconds, steps), "evaluation": 1, "checkpoint": 1},
    )


def training(
    folder: Path,
    first: int,
    last: int,
    *,
    steps: int,
    every: int,
    change: Callable[[StepRecord], StepRecord] | None = None,
) -> Iterator[Record]:
    """The records of the steps from `first` to `last`, and of what comes between them."""
    chance = random.Random(first)
    for step in range(first, last + 1):
        record = step_of(step, steps=steps, chance=chance)
        yield record if change is None else change(record)
        if step % max(1, every // 5) == 0:
            yield machine_of(step, 0.12 * step)
        if step % every == 0 or step == steps:
            yield eval_of(step, 2.95 + 8.0 * math.exp(-6.0 * step / (step + steps / 8)))
            yield SampleRecord(step=step, prompt="\n", text=f"Once upon a time there was step {step}.\nIt was good.")
            path = f"{folder}/checkpoints/step-{step:08d}"
            yield CheckpointRecord(step=step, path=path, bytes=1_483_000_000, seconds=0.8, best=True)
            yield spans_of(step, every)


def end_of(folder: Path, step: int, reason: str = "finished") -> EndRecord:
    path = f"{folder}/checkpoints/step-{step:08d}"
    return EndRecord(
        step=step, reason=reason, seconds=0.12 * step, val_loss=3.0, best_loss=3.0, best_step=step, checkpoint=path
    )


def notice_of(step: int, message: str) -> NoticeRecord:
    return NoticeRecord(step=step, message=message)


def write_run(folder: Path, records: Iterator[Record] | list[Record]) -> Path:
    """A run folder that holds these records, and nothing that says that a process works there."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(record_to_json(record) + "\n" for record in records)
    sign_lock(folder)
    return folder


def sign_lock(folder: Path, pid: int = 999_999_999, host: str = "nowhere") -> None:
    """Adds the line to the run's lock that this process of this host would write there."""
    handle = os.open(folder / lock.LOCK, os.O_RDWR | os.O_CREAT)
    with mock.patch("os.getpid", return_value=pid), mock.patch("socket.gethostname", return_value=host):
        lock.sign(handle)
    os.close(handle)


def eigenstate_run(
    folder: Path, *, steps: int = 200, every: int = 50, layers: tuple[int, ...] = (1, 3), context: int = 1024
) -> Path:
    """A finished run of a model that has eigenstate blocks."""
    records: list[Record] = [
        info_of(folder, steps=steps, context=context),
        eigenstates_of(0, layers=layers, context=context),
    ]
    for record in training(folder, 1, steps, steps=steps, every=every):
        records.append(record)
        if isinstance(record, EvalRecord):
            records.append(eigenstates_of(record.step, layers=layers, context=context))
    return write_run(folder, [*records, end_of(folder, steps)])


def finished_run(folder: Path, *, steps: int = 200, every: int = 50, **info: Any) -> Path:
    body = training(folder, 1, steps, steps=steps, every=every)
    return write_run(folder, [info_of(folder, steps=steps, **info), *body, end_of(folder, steps)])
