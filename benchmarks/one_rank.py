"""What the machinery of several processes costs one: plain, data parallel and FSDP2 with one rank each, in turns.

    python benchmarks/one_rank.py [--turns N] [--steps N] [--kinds KIND ...] [--small] [A.B=C ...]

The 350M preset, a step of 32 x 1,024 tokens in one micro-batch; every turn of every kind is a process of its own. Data
parallel really reduces over NCCL. FSDP2 casts, gathers and deals out all the same; where there is one rank alone, torch
copies instead of sending. A row has tokens per second (the median step, on the device's clock) and the most memory that
torch held; the last rows have each kind's median over its turns, as a share of `plain`.
`--small` is a tiny model over gloo on the CPU, to try this file out.
"""

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

KINDS = ("plain", "data", "fsdp")
WARMUP = 10
LARGE = ["gpt2-350m", "train.batch_tokens=32768", "speed.micro_batch=32"]
SMALL = ["shakespeare-char", "model.layers=2", "model.width=64", "model.heads=2", "model.context=32"]
SMALL += ["train.batch_tokens=256", "speed.device=cpu"]


def steps_of(settings: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Trains in this process; what a step took after the warm-up."""
    from flatout import api
    from flatout.config.schema import RunConfig
    from flatout.records import RunInfo, StepRecord

    values = json.loads(settings.read_text(encoding="utf-8"))
    values["output"] |= {"folder": str(folder)}
    config = RunConfig.model_validate(values)
    found: list[StepRecord] = []
    used: dict[str, str] = {}
    with contextlib.closing(api.train(config)) as records:
        for record in records:
            if isinstance(record, RunInfo):
                names = ("parallel", "kernels", "attention", "precision", "cuda_graphs")
                used = {feature.name: feature.used for feature in record.features if feature.name in names}
            if isinstance(record, StepRecord):
                found.append(record)
                if record.step == WARMUP + steps:
                    break
    taken = found[WARMUP:]
    rate = config.train.batch_tokens / statistics.median(record.seconds for record in taken)
    most = max(record.memory_bytes or 0 for record in taken)
    return {"tokens_per_second": round(rate), "memory_bytes": most, "loss": taken[-1].loss, "used": used}


def in_a_process(kind: str, settings: Path, folder: Path, steps: int) -> dict[str, Any]:
    environment = dict(os.environ)
    if kind != "plain":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "one-rank"}
    command = [sys.executable, __file__, "--child", str(settings), str(folder), "--steps", str(steps)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(words: list[str], turns: int, steps: int, kinds: list[str]) -> None:
    import torch

    from flatout.config.load import load_config
    from flatout.device import detect_device
    from flatout.tuning.practice_data import practice_data

    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    preset, *rest = words
    quiet = ["eval.every=0", "eval.sample_every=0", "checkpoint.every=0", f"train.steps={WARMUP + steps + 8}"]
    loaded = load_config(preset, [*rest, *quiet])
    facts = {"config": preset, "words": rest, "commit": commit, "torch": torch.__version__}
    facts["device"] = detect_device(loaded.config.speed.device).name
    rates: dict[str, list[int]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as scratch:
        values = loaded.config.model_dump() | {"data": practice_data(loaded, Path(scratch))[0].model_dump()}
        for turn, kind in itertools.product(range(turns), kinds):
            values["parallel"]["form"] = "auto" if kind == "plain" else kind
            settings = Path(scratch) / f"{kind}-{turn}.json"
            settings.write_text(json.dumps(values), encoding="utf-8")
            row = in_a_process(kind, settings, Path(scratch) / f"run-{kind}-{turn}", steps)
            rates[kind].append(row["tokens_per_second"])
            print(json.dumps({"type": kind, "turn": turn, **row, **facts}), flush=True)
    plain = statistics.median(rates["plain"])
    for kind in kinds:
        rate = statistics.median(rates[kind])
        row = {"type": "summary", "kind": kind, "tokens_per_second": rate, "share_of_plain": round(rate / plain, 4)}
        print(json.dumps({**row, "turns": turns, "steps": steps, **facts}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.child:
        settings, folder = parsed.child
        print(json.dumps(steps_of(settings, folder, parsed.steps)))
    else:
        measured([*(SMALL if parsed.small else LARGE), *parsed.words], parsed.turns, parsed.steps, parsed.kinds)


if __name__ == "__main__":
    main()
