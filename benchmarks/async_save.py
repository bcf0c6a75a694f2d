"""What saving costs: the same training with saves beside it, with saves that it waits for, and with none, in turns.

    python benchmarks/async_save.py [CONFIG] [A.B=C ...] [--steps N] [--every N] [--turns N] [--modes none on]

Every turn is one run of `flatout.train` with the loss on one micro-batch as the verdict and no other evaluation. Saves
come in the middle of each interval, so that the steps that are timed hold all of every save: copy, boundary, verdict,
older checkpoints removed. They are timed by the host's clock, from the report of one step to that of another. A row is
a turn, with the seconds of each save that training stood still, and how long it was written beside it. The first save,
in which the memory is taken and pinned, comes in the warm-up and is told apart as `first_save_seconds`. The last row
has the shares of time lost: one minus the time without saves over the time with them, of the medians over all turns.
`same` is whether the last checkpoints of both ways hold the same tensors; on a GPU set train.deterministic=true for it.

For the requirement: gpt2-350m train.batch_tokens=131072 --steps 400 --every 100.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from flatout import api
from flatout.config.load import LoadedConfig, load_config
from flatout.device import detect_device, free_memory
from flatout.engine import saver
from flatout.records import CheckpointRecord, NoticeRecord, StepRecord
from flatout.tuning.practice_data import practice_data

WARMUP = 8  # steps, the last of which is saved
MODES = ("none", "on", "off")


def turn(loaded: LoadedConfig, mode: str, steps: int, every: int, folder: Path) -> dict[str, Any]:
    """Trains once and returns a row."""
    saver.SMALL = 0 if mode == "on" else sys.maxsize  # bytes
    saving = {"every": 0, "keep": 2}
    update = {
        "output": loaded.config.output.model_copy(update={"folder": str(folder)}),
        "checkpoint": loaded.config.checkpoint.model_copy(update=saving),
    }
    config = LoadedConfig(loaded.config.model_copy(update=update), loaded.sources)
    times: dict[int, float] = {}
    saved: list[CheckpointRecord] = []
    notices: list[str] = []
    asked = itertools.count(1 - WARMUP)

    def save() -> bool:
        """Asked after every step."""
        step = next(asked)
        return step == 0 or (mode != "none" and step > 0 and step % every == every // 2)

    with contextlib.closing(api.train(config, save=save)) as records:
        for record in records:
            if isinstance(record, StepRecord):
                times[record.step - WARMUP] = time.perf_counter()
            elif isinstance(record, CheckpointRecord):
                saved.append(record)
            elif isinstance(record, NoticeRecord):
                notices.append(record.message)
            if steps in times:
                break
    newest = max((folder / "checkpoints").glob("step-*"))
    return {
        "type": mode, "steps": steps - 1, "every": every, "seconds": times[steps] - times[1],
        "first_save_seconds": saved[0].seconds, "bytes": saved[0].bytes, "notices": notices,
        "stood_still": [record.seconds for record in saved[1:]],
        "background": [record.background_seconds for record in saved[1:]],
        "hashes": [_hash(newest / f"{name}.safetensors") for name in ("model", "optimizer", "run")],
    }  # fmt: skip


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", default="gpt2-350m")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--folder", help="where checkpoints are written; else a temporary folder")
    parsed = parser.parse_args()
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    quiet = ["eval.every=0", "eval.sample_every=0", "eval.sample_tokens=0"]
    words = [*parsed.words, *quiet, f"train.steps={WARMUP + parsed.steps + 1}", "optim.warmup=4"]
    device = detect_device()
    facts = {"config": parsed.config, "words": parsed.words, "commit": commit, "device": device.name}
    facts["torch"] = torch.__version__
    modes: list[str] = list(parsed.modes)
    rows: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory(dir=parsed.folder) as scratch:
        data, described = practice_data(load_config(parsed.config, words), Path(scratch))
        prepared = load_config(parsed.config, words)
        loaded = LoadedConfig(prepared.config.model_copy(update={"data": data}), prepared.sources)
        for number, mode in itertools.product(range(parsed.turns), modes):
            place = Path(scratch) / f"{mode}{number}"
            rows[mode].append(turn(loaded, mode, parsed.steps, parsed.every, place))
            shutil.rmtree(place)
            free_memory(device.torch_device)
            print(json.dumps({**rows[mode][-1], "turn": number, "data": described, **facts}), flush=True)
    seconds = {mode: statistics.median(row["seconds"] for row in rows[mode]) for mode in modes}
    lost = {mode: 1 - seconds["none"] / seconds[mode] for mode in modes if mode != "none"}
    same = len({str(row["hashes"]) for mode in lost for row in rows[mode]}) == 1
    row = {"type": "cost", "lost": lost, "same": same, "seconds": seconds}
    print(json.dumps({**row, **facts}), flush=True)
    told = ", ".join(f"{mode}: {100 * share:.2f}%" for mode, share in lost.items())
    print(f"time lost to saving every {parsed.every} steps: {told}; the same tensors: {same}", file=sys.stderr)


if __name__ == "__main__":
    main()
