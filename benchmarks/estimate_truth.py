"""`flatout estimate` against the run it estimates: time and peak memory, over presets, micro-batches, checkpointing.

    python benchmarks/estimate_truth.py [--preset NAME ...] [--steps N] [--seconds N] >> benchmarks/estimate_truth.jsonl

Each row: what was estimated, what a run of the same config then took, and the one as a share of the other; on the error
output the shares. Both are of one process with the same data, random tokens, and the kernels of a case are warmed up by
a few steps before, so that neither pays for compiling what the other finds in a cache. `--preset shakespeare-char` has
cases for a CPU. The last line on the error output says how many cases are within a tenth.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# (preset, sequences at once, checkpointing)
CASES = [
    *(("gpt2-124m", size, how) for how in ("none", "selective", "full") for size in (8, 16, 32)),
    *(("gpt2-350m", size, how) for how in ("none", "selective", "full") for size in (4, 8, 16)),
]
CPU_CASES = [("shakespeare-char", size, how) for how in ("none", "full") for size in (4, 8, 16)]


def case_row(preset: str, micro_batch: int, checkpointing: str, steps: int, seconds: float, scratch: Path) -> dict:
    import torch

    from flatout import api
    from flatout.config.load import LoadedConfig, load_config
    from flatout.records import CheckpointRecord, EvalRecord, StepRecord
    from flatout.tuning.estimate import estimate
    from flatout.tuning.practice_data import practice_data

    def config(count: int, folder: str) -> LoadedConfig:
        words = [
            f"train.steps={count}", f"speed.micro_batch={micro_batch}", f"speed.checkpointing={checkpointing}",
            f"eval.every={steps // 2}", f"checkpoint.every={steps}", f"output.folder={scratch / folder}",
            "output.plots=false",
        ]  # fmt: skip
        if preset != "shakespeare-char":
            words += ["train.batch_tokens=131072", "eval.tokens=262144", "eval.sample_tokens=100"]
        loaded = load_config(preset, words)
        kept = scratch / f"{loaded.config.data.tokenizer}.json"
        if not kept.exists():
            data, _ = practice_data(loaded.config, scratch)
            kept.write_text(data.model_dump_json(), encoding="utf-8")
        data = loaded.config.data.model_validate_json(kept.read_text(encoding="utf-8"))
        return dataclasses.replace(loaded, config=loaded.config.model_copy(update={"data": data}))

    name = f"{preset}-{micro_batch}-{checkpointing}"
    for _ in api.train(config(3, f"{name}-warm")):
        pass
    found = estimate(config(steps, name), seconds=seconds)
    began = time.perf_counter()
    records = list(api.train(config(steps, name)))
    truth = time.perf_counter() - began
    trained = [record for record in records if isinstance(record, StepRecord)]
    peak = max(record.memory_bytes or 0 for record in trained)
    row = {
        "preset": preset,
        "micro_batch": micro_batch,
        "checkpointing": checkpointing,
        "steps": steps,
        "seconds": found.seconds.value,
        "seconds_truth": truth,
        "parts": {part.name: part.seconds.value for part in found.parts},
        "parts_truth": {
            "training": sum(record.seconds for record in trained),
            "evaluations": sum(record.seconds for record in records if isinstance(record, EvalRecord)),
            "checkpoints": sum(record.seconds for record in records if isinstance(record, CheckpointRecord)),
        },
        "peak_formula": found.peak_estimate.value,
        "peak_probe": found.peak_measured.value,
        "peak_truth": peak,
        "watts": found.watts.value,
        "time_share": (found.seconds.value or 0.0) / truth,
        "formula_share": (found.peak_estimate.value or 0.0) / peak,
        "probe_share": (found.peak_measured.value or 0.0) / peak,
        "device": found.device,
        "torch": torch.__version__,
    }
    for folder in (name, f"{name}-warm"):
        subprocess.run(["rm", "-r", str(scratch / folder)], check=False)
    return row


def main() -> None:
    from flatout.errors import UserError

    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", action="append")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0)
    words = parser.parse_args()
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    cases = [case for case in CASES + CPU_CASES if case[0] in (words.preset or [case[0] for case in CASES])]
    within, rows = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            try:
                row = case_row(*case, words.steps, words.seconds, Path(folder))
            except UserError as error:  # what does not fit here is left out, and the others go on
                print(f"left out {case}: {error}", file=sys.stderr)
                continue
            print(json.dumps({**row, "commit": commit}), flush=True)
            # On a CPU the formula knows the tensors only, and the process is most of the peak.
            memory = row["formula_share"] if case[0] != "shakespeare-char" else row["probe_share"]
            rows += 1
            within += abs(row["time_share"] - 1) <= 0.1 and abs(memory - 1) <= 0.1
            told = f"time {row['time_share']:.3f} of {row['seconds_truth']:.1f} s, memory by formula "
            told += f"{row['formula_share']:.3f}, by the probe {row['probe_share']:.3f} of "
            print(f"{case}: {told}{row['peak_truth'] / 2**30:.2f} GiB", file=sys.stderr)
    print(f"{within} of {rows} within a tenth in time and memory", file=sys.stderr)


if __name__ == "__main__":
    main()
