"""Throughput of a preset's full training step on this machine, as one JSON line.

    python benchmarks/first_light.py PRESET DATA_FOLDER STEPS COMMIT >> benchmarks/first_light.jsonl

Protocol: the real loop (loader, forward, backward, clip, fused AdamW) for STEPS steps; the first five hold compilation
and warm-up and are left out; seconds per step are the device's own, from the end of one step to the end of the next;
the row is the median. FLOPs by the convention of `flatout.model.count`.
"""

import json
import statistics
import sys
import tempfile

import flatout
from flatout.config.load import load_config
from flatout.records import EvalRecord, RunInfo, StepRecord


def main() -> None:
    preset, data, steps, commit = sys.argv[1:5]
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"data.folder={data}", f"train.steps={steps}", "optim.warmup_steps=10", "eval.tokens=65536",
            "eval.sample_tokens=0", f"output.folder={folder}/run",
        ]  # fmt: skip
        records = list(flatout.train(load_config(preset, words)))
    info = records[0]
    assert isinstance(info, RunInfo)
    taken = [record for record in records if isinstance(record, StepRecord)]
    timed = taken[5:]
    seconds = statistics.median(record.seconds for record in timed)
    rate = info.batch_tokens / seconds
    row = {
        "preset": preset,
        "commit": commit,
        "device": info.device,
        "torch": info.torch,
        "batch_tokens": info.batch_tokens,
        "micro_batch": info.micro_batch,
        "accumulation": info.accumulation,
        "features": {feature.name: feature.used for feature in info.features},
        "steps_timed": len(timed),
        "tokens_per_second": round(rate),
        "fastest": round(info.batch_tokens / min(record.seconds for record in timed)),
        "slowest": round(info.batch_tokens / max(record.seconds for record in timed)),
        "mfu": round(statistics.median(record.mfu or 0.0 for record in timed), 4),
        "peak_gib": round(max(record.memory_bytes or 0 for record in timed) / 2**30, 2),
        "first_step_seconds": round(taken[0].seconds, 1),
        "losses": [round(taken[i].loss, 4) for i in (0, len(taken) // 2, -1)],
        "val_loss": [round(record.loss, 4) for record in records if isinstance(record, EvalRecord)][-1],
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
