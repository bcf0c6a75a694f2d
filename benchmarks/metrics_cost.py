"""What seeing a run costs: the same steps with everything that is logged, and with nothing, in turns.

    python benchmarks/metrics_cost.py [CONFIG] [A.B=C ...] [--steps N] [--turns N] >> benchmarks/metrics_cost.jsonl

`bare` is the training step and its loader alone: no records, no files, no reader. `full` is the loop of `flatout train`
with every record in metrics.jsonl, TensorBoard's files, a line on the terminal for every step, the card's state once a
second, and the panel of `--view` fed and drawn. Both are timed on the device's clock from the end of one step to the
end of the next, so a device that waits for the host shows. A row has the mean and the median of each turn; the last row
is the difference of the means over all turns. On a CUDA device some steps of `full` also run under torch's profiler,
which says how often the host waited for the device there, by the name of the call.
"""

import argparse
import collections
import contextlib
import io
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from flatout import api
from flatout.config.load import LoadedConfig, load_config
from flatout.device import detect_device
from flatout.observe.live.console import TerminalReader
from flatout.observe.live.state import ViewState
from flatout.observe.live.view import panel
from flatout.records import StepRecord
from flatout.tuning.measure import Steps, borrowed_run
from flatout.tuning.practice_data import practice_data

WARMUP = 8
PROFILED = 12
WAITING = ("Synchronize", "cudaMemcpy ", "cudaMemcpy\n")  # cudaMemcpyAsync is not among them
PANEL_EVERY = 2  # steps; the view draws four times a second


def bare(loaded: LoadedConfig, steps: int) -> list[float]:
    with borrowed_run(loaded) as run, Steps(run) as stepping:
        stepping.take(WARMUP)
        return [report.seconds for report in stepping.take(steps)]


def full(loaded: LoadedConfig, steps: int, folder: Path, *, profiled: bool) -> tuple[list[float], dict[str, int]]:
    """(seconds of the steps after the warm-up and before the profiled ones, waits by call)."""
    output = io.StringIO()
    reader, state = TerminalReader(1, output), ViewState()
    config = loaded.config.model_copy(
        update={
            "output": loaded.config.output.model_copy(update={"folder": str(folder), "trackers": ["tensorboard"]}),
        }
    )
    seconds: list[float] = []
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profile = torch.profiler.profile(activities=kinds) if profiled else None
    with contextlib.closing(api.train(LoadedConfig(config, loaded.sources))) as records:
        for record in records:
            reader.show(record)
            state.add(record)
            if not isinstance(record, StepRecord):
                continue
            if record.step % PANEL_EVERY == 0:
                panel(state, 120, 30)
            if WARMUP < record.step <= WARMUP + steps:
                seconds.append(record.seconds)
            if profile is not None and record.step == WARMUP + steps:
                profile.start()
            if profile is not None and record.step == WARMUP + steps + PROFILED:
                profile.stop()
                break
            if profile is None and record.step == WARMUP + steps:
                break
    waits: collections.Counter[str] = collections.Counter()
    for event in () if profile is None else profile.events() or ():
        if any(word in f"{event.name} " for word in WAITING):
            waits[event.name] += 1
    return seconds, dict(waits)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", default="gpt2-124m")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    parsed = parser.parse_args()
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    total = WARMUP + parsed.steps + PROFILED + 8
    quiet = [
        "eval.every=0",
        "eval.sample_every=0",
        "checkpoint.every=0",
        f"train.steps={total}",
        "optim.warmup=4",
    ]
    words = [*parsed.words, *quiet]
    device = detect_device()
    facts = {"config": parsed.config, "words": parsed.words, "commit": commit, "device": device.name}
    facts["torch"] = torch.__version__
    seconds: dict[str, list[float]] = {"bare": [], "full": []}
    waits: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        data, described = practice_data(load_config(parsed.config, words), Path(scratch))
        prepared = load_config(parsed.config, words)
        loaded = LoadedConfig(prepared.config.model_copy(update={"data": data}), prepared.sources)
        for turn, kind in itertools.product(range(parsed.turns), seconds):
            if kind == "bare":
                found = bare(loaded, parsed.steps)
            else:
                last = turn == parsed.turns - 1 and device.kind == "cuda"
                found, waits = full(loaded, parsed.steps, Path(scratch) / f"run{turn}", profiled=last)
            seconds[kind] += found
            row = {"type": kind, "turn": turn, "steps": len(found), "mean_ms": 1000 * statistics.fmean(found)}
            row["median_ms"] = 1000 * statistics.median(found)
            print(json.dumps({**row, "data": described, **facts}), flush=True)
    means = {kind: statistics.fmean(values) for kind, values in seconds.items()}
    cost = means["full"] / means["bare"] - 1
    row = {"type": "cost", "share": cost, "waits": waits, "profiled_steps": PROFILED if device.kind == "cuda" else 0}
    print(json.dumps({**row, **facts}), flush=True)
    print(
        f"full logging costs {100 * cost:.2f}% of a step; waits in {row['profiled_steps']} steps: {waits}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
